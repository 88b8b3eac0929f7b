"""The page, the tables and the picture of the study of the pendulum."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.cli.tables import grid
from cme_dask.models.plots import PALETTE, picture

Result = dict[str, Any]

CURVES = "all outputs", "same rows"
"""Incomplete Cholesky as in the paper, and on pairs of pivots."""

_FRAMES = 12


def pendulum_tables(result: Result) -> Iterator[Any]:
    """Paths, policies and large tables."""
    yield grid("Paths", *_path_rows(result), "Distances and losses are relative to the dense.")
    yield ""
    examples = f"Policies, {result['settings']['examples']} examples"
    yield grid(examples, *_policy_rows(result), "", text_columns=2)
    yield ""
    yield grid("From a store", *_large_rows(result), "")


def _path_rows(result: Result) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head = (
        *("penalty", "gamma", "coefs", "points of x", "of y", "distance", "relaxed"),
        *("Cholesky", "with pairs", "loss", "relaxed loss"),
    )
    dense = result["dense"]["loss"]
    rows: list[tuple[str, ...]] = []
    for penalty, path in result["paths"].items():
        ratios = result["verdicts"]["distance_over_cholesky"][penalty]["relaxed"]
        # All of the path of l1, which figure 1 shows, and three solutions of the others.
        last = len(path) - 1
        for i in range(last + 1) if penalty == "l1" else sorted({0, last // 2, last}):
            each = path[i]
            cholesky = (each["relaxed"]["distance"] / ratios[name][i] for name in CURVES)
            rows.append(
                (
                    penalty if i == 0 else "",
                    f"{each['share']:.2g}",
                    f"{each['coefs']:,}",
                    str(each["points_x"]),
                    str(each["points_y"]),
                    f"{each['penalised']['distance']:.3f}",
                    f"{each['relaxed']['distance']:.3f}",
                    *(f"{value:.3f}" for value in cholesky),
                    f"{each['penalised']['loss'] / dense:.2f}",
                    f"{each['relaxed']['loss'] / dense:.2f}",
                )
            )
    return head, rows


def _policy_rows(result: Result) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head = (
        *("model", "table", "points of x", "balanced", "return", "iterations", "answers"),
        "iteration",
    )
    rows: list[tuple[str, ...]] = []
    before = ""
    for each in sorted(result["policies"], key=lambda policy: _order(result, policy["name"])):
        rows.append(
            (
                "" if each["name"] == before else each["name"],
                str(each["seed"] + 1) if "points_x" in each else "",
                str(each.get("points_x", "")),
                str(each["balanced"]),
                f"{each['return']:.2f}",
                str(each["iterations"]),
                f"{1e3 * each['answer_seconds']:.0f} ms",
                f"{1e3 * each['iteration_seconds']:.0f} ms",
            )
        )
        before = each["name"]
    return head, rows


def _order(result: Result, name: str) -> int:
    return [policy["name"] for policy in result["policies"]].index(name)


def _large_rows(result: Result) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head = ("rows", "model", "points of x", "fit", "passes", "balanced", "return", "query")
    large = result["large"]
    rows: list[tuple[str, ...]] = []
    for each in [*large["sizes"], *large["policies"]]:
        rows.append(
            (
                f"{each['rows']:,}",
                each["name"],
                str(each["points_x"]),
                f"{each['fit_seconds']:.1f} s",
                str(each["passes"]),
                str(each["balanced"]),
                f"{each['return']:.2f}",
                f"{each['query_us']['pivots']:.2g} µs",
            )
        )
    return head, rows


def pendulum_page(result: Result) -> str:
    """The page of the study in Markdown: every number in it comes from one run."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    settings, machine = result["settings"], result["machine"]
    yield "# The pendulum in numbers"
    yield ""
    yield (
        "The experiment of Grünewälder et al. (2012), section 5.1: a conditional mean embedding "
        f"learns the dynamics of a pendulum from {settings['examples']} transitions, and policy "
        "iteration uses it to swing the pendulum up and to balance it. Inputs are the sine and "
        "cosine of the angle, the angular velocity and the torque; outputs are sine, cosine and "
        "velocity 0.2 s later. `python3 run study pendulum --out docs --overwrite` writes this "
        f"page, its picture and `pendulum.json`. This run took {_duration(result['seconds'])} on "
        f"{machine['cores']} cores ({machine['processor']})."
    )
    yield ""
    yield "![Errors against sparsity, query times, and frames of the learnt policy](pendulum.png)"
    yield ""
    yield (
        "The job `pipelines/pendulum.toml` fits such an embedding to a file of transitions, see "
        "[job files](embeddings.md#in-a-job-file)."
    )
    yield from _table("Error against sparsity", *_path_rows(result))
    yield ""
    yield from _paths_text(result)
    yield from _table("Swing-up and balance", *_policy_rows(result))
    yield ""
    yield from _policies_text(result)
    yield from _table(f"{max(settings['rows']):,} transitions from a store", *_large_rows(result))
    yield ""
    yield from _large_text(result)


def _paths_text(result: Result) -> Iterator[str]:
    settings, dense, paths = result["settings"], result["dense"], result["paths"]
    yield (
        f"The dense embedding has {dense['coefs']:,} coefficients, one for each pair of examples. "
        "Each row is a `SparseEmbedding` for one weight of the penalty, on the first table of "
        "examples. The columns:"
    )
    yield ""
    yield "- *gamma*: the weight of the penalty, as a share of `gamma_max`, which leaves no point."
    yield (
        "- *coefs*, *points of x*, *of y*: the coefficients that are not zero, and the examples "
        "whose inputs and outputs they use."
    )
    yield (
        "- *distance*: the distance (16) to the dense embedding in the reproducing kernel Hilbert "
        "space, relative to the norm of the dense embedding; *relaxed*: the same with `relax=True`."
    )
    yield (
        "- *Cholesky*: the distance of incomplete Cholesky at as many coefficients, interpolated, "
        "as in the paper: m pivots of x, each with all outputs. *With pairs* is a stronger "
        "competitor: m pivots of x with the outputs of the same m examples. Both have the "
        "coefficients that are nearest to the dense embedding."
    )
    yield (
        f"- *loss*: the squared error on {settings['test']:,} new transitions in the space of the "
        "kernel of y, over that of the dense embedding; *relaxed loss*: the same with `relax=True`."
    )
    yield ""
    ratios = result["verdicts"]["distance_over_cholesky"]
    gap = max(each["gap"] for path in paths.values() for each in path)
    yield (
        "How many embeddings of each path are nearer to the dense one than incomplete Cholesky as "
        "in the paper, without and with `relax=True`: "
        + "; ".join(
            f"{penalty} {_nearer(each['penalised'], CURVES[0])} and "
            f"{_nearer(each['relaxed'], CURVES[0])}"
            for penalty, each in ratios.items()
        )
        + ". Than with pairs: "
        + "; ".join(
            f"{penalty} {_nearer(each['penalised'], CURVES[1])} and "
            f"{_nearer(each['relaxed'], CURVES[1])}"
            for penalty, each in ratios.items()
        )
        + ". The paper's figure shows l1. The other penalties choose points, not single "
        "coefficients, and keep all pairs of their points: they need more coefficients, but fewer "
        "points, and the points of x decide what a query costs. The fits of this study accept a "
        f"larger `gap` than the default: theirs are at most {gap:.0e}. With all examples as "
        "pivots, `ConditionalMeanEmbedding` differs from the dense formula by "
        f"{dense['library']:.0e}."
    )


def _nearer(ratios: dict[str, list[float]], name: str) -> str:
    return f"{sum(ratio < 1.0 for ratio in ratios[name])} of {len(ratios[name])}"


def _policies_text(result: Result) -> Iterator[str]:
    settings, met = result["settings"], result["verdicts"]["met"]
    seeds, share = settings["seeds"], settings["share"]
    yield (
        f"{settings['success']} *Balanced* counts the successes of {settings['starts']} starts, "
        "and *return* is the mean sum of rewards. *Iterations* counts the improvements of the "
        "policy until none is left. *Answers* is the time that the model takes to predict the next "
        "state for all states of the grid and all torques; *iteration* is the time of one "
        "improvement."
    )
    yield ""
    yield (
        "The sparse embedding has the penalty rows and `relax=True`, with the smallest gamma of "
        f"its path that leaves at most {share:.0%} of the points of x. The aim, stated before the "
        f"runs, is {settings['aim']:.0%} of the starts. The sparse embedding reaches it on "
        f"{met['sparse']} of {seeds} tables, and without `relax=True` on "
        f"{met['sparse, not relaxed']}: a penalty that leaves so few points also shrinks the "
        "predicted states towards zero, and relaxing undoes that. Incomplete Cholesky has as many "
        "points of x, and its coefficients are fitted to all examples. Kernels, ridge, grid and "
        "discount were chosen on tables 1 and 2 and then fixed; the tables from 3 on are fresh."
    )
    yield ""
    yield (
        "The dynamics have no noise, so that policies use the mean of a model alone. The values of "
        "a policy live on a grid of 48 angles and 41 velocities, and are interpolated at E[Y | x] "
        "for 11 torques."
    )


def _large_text(result: Result) -> Iterator[str]:
    settings, large = result["settings"], result["large"]
    equal = [name for name, same in large["equal"].items() if same]
    unequal = [name for name, same in large["equal"].items() if not same]
    yield (
        "Each fit reads its store once. *Pivots* is `ConditionalMeanEmbedding` on "
        f"{settings['pivots']} pivots with the ridge {settings['large_reg']:g} "
        f"({settings['reg']:g} above), and *sparse* keeps at most {settings['share']:.0%} of "
        "these. *Fit* is the wall time of the whole fit, on one thread; "
        "*query* is the time of E[Y | x] per point. The peak memory of the process is "
        f"{large['peak_bytes'] / 1e6:,.0f} MB. On {' and '.join(equal) or 'no other scheduler'} "
        "the model of the largest table is bit-equal"
        + (f", on {' and '.join(unequal)} it is not" if unequal else "")
        + ". A query with a kernel function for each row would take "
        + ", ".join(
            f"{round(each['query_us']['all rows'], 1):,} µs at {each['rows']:,} rows"
            for each in large["sizes"]
        )
        + f" ({_points(large['sizes'])})."
    )
    yield ""


def _points(sizes: Sequence[Result]) -> str:
    """How many points the queries are asked at once, on which their time per point depends."""
    every, pivots = (
        [f"{size['query_points'][name]:,}" for size in sizes] for name in ("all rows", "pivots")
    )
    if len({*every, *pivots}) == 1:
        return f"all queries are measured at {every[0]} points at once"
    return (
        f"measured at {', '.join(every)} points at once, on pivots at "
        f"{', '.join(dict.fromkeys(pivots))}: a few points at once take longer per point than many"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from ("", f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for row in rows:
        yield f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |")


def pendulum_picture(result: Result, path: Path) -> None:
    """Draw figure 1 of the paper, times of queries, and frames of the learnt policy.

    Parameters
    ----------
    result
        JSON form of the study.
    path
        PNG file to write.
    """
    with picture(path, 11.5, 6.4, dpi=120) as figure:
        parts: Any = figure.subfigures(2, 1, height_ratios=(2.2, 1.0))
        above, below = parts
        axes = above.subplots(1, 3)
        dense = result["dense"]
        for ax, key, scale, title in (
            (axes[0], "distance", 1.0, "distance to the dense embedding"),
            (axes[1], "loss", dense["loss"], "test loss over that of the dense"),
        ):
            for (penalty, solutions), colour in zip(result["paths"].items(), PALETTE, strict=False):
                at = [100 * each["coefs"] / dense["coefs"] for each in solutions]
                for kind, line in (("penalised", "o-"), ("relaxed", "o--")):
                    values = [each[kind][key] / scale for each in solutions]
                    label = penalty + (", relaxed" if kind == "relaxed" else "")
                    ax.plot(at, values, line, color=colour, ms=3, lw=1.1, label=label)
            for name, line in zip(CURVES, ("-", ":"), strict=True):
                curve = result["cholesky"][name]
                at = [100 * point["coefs"] / dense["coefs"] for point in curve]
                values = [point[key] / scale for point in curve]
                label = f"incomplete Cholesky, {name}"
                ax.plot(at, values, line, color="#555555", lw=1.3, label=label)
            ax.set(xscale="log", title=title, xlabel="coefficients that are not zero (%)")
        axes[0].set_xlim(left=0.05)
        axes[1].set_xlim(left=0.05)
        axes[1].set_yscale("log")
        axes[0].legend(fontsize=6.5, loc="lower left")
        _query_panel(axes[2], result["large"]["sizes"])
        _strip(below, result["run"])


def _query_panel(ax: Any, sizes: Sequence[Result]) -> None:
    rows = [each["rows"] for each in sizes]
    for name, colour in (("all rows", PALETTE[1]), ("pivots", PALETTE[0])):
        times = [each["query_us"][name] for each in sizes]
        ax.plot(rows, times, "o-", color=colour, ms=3.5, label=name)
    least = sizes[-1]["query_us"]["sparse"]
    ax.plot(rows, [least] * len(rows), "--", color=PALETTE[2], label="sparse")
    ax.set(xscale="log", yscale="log", title="a query, µs", xlabel="transitions")
    ax.legend(fontsize=7.5)


def _strip(figure: Any, run: Result) -> None:
    """Frames of a run: the pendulum, and an arc as long as the torque."""
    states, torques = np.array(run["states"]), np.array(run["torques"])
    last = min(len(states) - 1, int(np.flatnonzero(np.abs(states[:, 0]) > 0.1)[-1]) + 3)
    frames = np.unique(np.linspace(0, last, _FRAMES).astype(int))
    axes = figure.subplots(1, len(frames))
    figure.suptitle(
        "the policy of the sparse embedding (arc: torque)",
        x=0.01,
        ha="left",
        fontsize=11.5,
    )
    for ax, i in zip(axes, frames, strict=True):
        angle = states[i, 0]
        ax.plot([0, np.sin(angle)], [0, np.cos(angle)], "-", color="#333333", lw=2.2)
        ax.plot([np.sin(angle)], [np.cos(angle)], "o", color=PALETTE[0], ms=9)
        arc = np.linspace(0.0, torques[i] / 5.0 * np.pi / 2, 20)
        ax.plot(0.45 * np.sin(arc), 0.45 * np.cos(arc), "-", color=PALETTE[1], lw=1.8)
        ax.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
        ax.set_title(f"{i * run['step']:.1f} s", fontsize=8.5, loc="center")
        ax.axis("off")
