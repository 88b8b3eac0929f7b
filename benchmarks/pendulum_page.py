"""The page, the tables and the picture of the study of the pendulum."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.cli.tables import grid
from cme_dask.models.plots import PALETTE, STYLE

Result = dict[str, Any]

_FRAMES = 12


def pendulum_tables(result: Result) -> Iterator[Any]:
    """Paths, policies and large tables."""
    yield grid("Paths", *_path_rows(result), "Distances (16) and losses over those of the dense.")
    yield ""
    yield grid("Policies, 200 examples", *_policy_rows(result), "")
    yield ""
    yield grid("From a store", *_large_rows(result), "")


def _path_rows(result: Result) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head = ("penalty", "coefs", "points of x", "of y", "distance", "refitted", "Cholesky", "loss")
    dense = result["dense"]["loss"]
    rows: list[tuple[str, ...]] = []
    for penalty, path in result["paths"].items():
        ratios = result["verdicts"]["distance_over_cholesky"][penalty]["same rows"]["ratios"]
        last = len(path["solutions"]) - 1
        for i in sorted({0, last // 2, last}):
            each = path["solutions"][i]
            rows.append(
                (
                    penalty if i == 0 else "",
                    f"{each['coefs']:,}",
                    str(each["points_x"]),
                    str(each["points_y"]),
                    f"{each['distance']:.3f}",
                    f"{each['refitted']:.3f}",
                    f"{each['distance'] / ratios[i]:.3f}",
                    f"{each['loss'] / dense:.2f}",
                )
            )
    return head, rows


def _policy_rows(result: Result) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head = ("model", "points of x", "balanced", "return", "iterations", "answers", "an iteration")
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(policy["name"] for policy in result["policies"]):
        each = [policy for policy in result["policies"] if policy["name"] == name]
        points = sorted({p["points_x"] for p in each if "points_x" in p})
        rows.append(
            (
                name,
                _span(points) if points else "",
                _span(sorted({p["balanced"] for p in each})),
                f"{np.mean([p['return'] for p in each]):.2f}",
                _span(sorted({p["iterations"] for p in each})),
                f"{1e3 * np.median([p['answer_seconds'] for p in each]):.0f} ms",
                f"{1e3 * np.median([p['iteration_seconds'] for p in each]):.0f} ms",
            )
        )
    return head, rows


def _large_rows(result: Result) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    head = ("rows", "model", "points of x", "fit", "passes", "balanced", "return", "query")
    large = result["large"]
    rows: list[tuple[str, ...]] = []
    for each in [*large["sizes"], *large["policies"]]:
        times = each.get("query_us", {})
        refit = each["name"] == "sparse, refitted"
        query = large["sizes"][-1]["query_us"]["sparse"] if refit else times.get("pivots")
        rows.append(
            (
                f"{each['rows']:,}",
                each["name"],
                str(each["points_x"]),
                f"{each['fit_seconds']:.1f} s",
                str(each["passes"]),
                str(each["balanced"]),
                f"{each['return']:.2f}",
                "" if query is None else f"{query:.2g} µs",
            )
        )
    return head, rows


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def pendulum_page(result: Result) -> str:
    """The page of the study in Markdown: every number in it comes from one run."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    settings, large, verdicts = result["settings"], result["large"], result["verdicts"]
    machine, nearer = result["machine"], result["verdicts"]["distance_over_cholesky"]
    yield "# The pendulum in numbers"
    yield ""
    yield (
        "The experiment of Grünewälder et al. (2012), section 5.1: an embedding learns dynamics "
        f"of a pendulum from {settings['examples']} transitions, and policy iteration with it "
        "learns to swing the pendulum up and to balance it. This page, its picture and "
        "`pendulum.json` are the output of `python3 run study pendulum --out docs --overwrite`, "
        f"which took {result['seconds'] / 60:.0f} minutes on {machine['cores']} cores "
        f"({machine['processor']}). Kernels and ridge are given."
    )
    yield ""
    yield "![Errors against sparsity, query times, and frames of the learnt policy](pendulum.png)"
    yield from _table("Error against sparsity", *_path_rows(result))
    yield ""
    dense = result["dense"]
    yield (
        f"The dense embedding has {dense['coefs']:,} coefficients; one pass gives its answers to "
        f"{dense['library']:.0e}. Distances (16) and losses on {settings['test']:,} fresh "
        "transitions are relative to it; every solution has a relative duality gap of at most "
        f"{max(s['gap'] for p in result['paths'].values() for s in p['solutions']):.0e}. "
        "*Refitted*: the best coefficients on the points that were chosen, which undoes the "
        "shrinkage of the penalty. *Cholesky*: the best coefficients on as many pairs of pivots of "
        "x, at equal numbers of coefficients. Solutions nearer to the dense embedding than it: "
        + ", ".join(
            f"{penalty} {each['same rows']['nearer']} of {len(each['same rows']['ratios'])}"
            for penalty, each in nearer.items()
        )
        + ". With all outputs for each pivot, as in the paper: "
        + ", ".join(
            f"{penalty} {each['all outputs']['nearer']}" for penalty, each in nearer.items()
        )
        + "."
    )
    yield from _table("Swing-up and balance", *_policy_rows(result))
    yield ""
    yield (
        f"{settings['success']} {settings['starts']} starts, {settings['seeds']} tables of "
        "examples. The dynamics have no noise, and so each model is used through its mean: values "
        "live on a grid of 48 angles and 41 velocities, and are interpolated at E[Y | x] for 11 "
        "torques. The aim was 95 starts of 100 with a fifth of the points of x: the sparse policy "
        f"reached it on {verdicts['met']['sparse']} of {settings['seeds']} tables, refitted on "
        f"{verdicts['met']['sparse, refitted']}. The sparse embedding itself is shrunk by its "
        "penalty, the more the fewer its points."
    )
    yield from _table(f"{max(settings['rows']):,} transitions from a store", *_large_rows(result))
    yield ""
    equal = [name for name, same in large["equal"].items() if same]
    unequal = [name for name, same in large["equal"].items() if not same]
    yield (
        f"Peak memory of the process: {large['peak_bytes'] / 1e6:,.0f} MB. The model is bit-equal "
        f"on {' and '.join(equal) or 'no other scheduler'}"
        + (f", not on {' and '.join(unequal)}" if unequal else "")
        + ". A query with the kernel functions of all rows takes "
        + ", ".join(
            f"{each['query_us']['all rows']:,.0f} µs at {each['rows']:,} rows"
            for each in large["sizes"]
        )
        + "."
    )
    yield ""


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
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 6.4), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(2.2, 1.0))
        above, below = parts
        axes = above.subplots(1, 3)
        dense = result["dense"]
        for ax, key, scale, title in (
            (axes[0], "distance", 1.0, "distance to the dense embedding"),
            (axes[1], "loss", dense["loss"], "test loss over that of the dense"),
        ):
            for (penalty, each), colour in zip(result["paths"].items(), PALETTE, strict=False):
                at = [100 * s["coefs"] / dense["coefs"] for s in each["solutions"]]
                values = [s[key] / scale for s in each["solutions"]]
                ax.plot(at, values, "o-", color=colour, ms=3.5, lw=1.2, label=penalty)
            for (name, curve), line in zip(result["cholesky"].items(), (":", "--"), strict=True):
                at = [100 * point["coefs"] / dense["coefs"] for point in curve]
                values = [point[key] / scale for point in curve]
                label = f"incomplete Cholesky, {name}"
                ax.plot(at, values, line, color="#555555", lw=1.3, label=label)
            ax.set(xscale="log", title=title, xlabel="coefficients that are not zero (%)")
        axes[0].set_xlim(left=0.05)
        axes[1].set_xlim(left=0.05)
        axes[1].set_yscale("log")
        axes[0].legend(fontsize=7.5, loc="lower left")
        _query_panel(axes[2], result["large"]["sizes"])
        _strip(below, result["run"])
        figure.savefig(path, format="png", dpi=120)


def _query_panel(ax: Any, sizes: Sequence[Result]) -> None:
    rows = [each["rows"] for each in sizes]
    for name, colour in (("all rows", PALETTE[1]), ("pivots", PALETTE[0])):
        times = [each["query_us"][name] for each in sizes]
        ax.plot(rows, times, "o-", color=colour, ms=3.5, label=name)
    least = sizes[-1]["query_us"]["sparse"]
    ax.plot(rows, [least] * len(rows), "--", color=PALETTE[2], label="sparse, refitted")
    ax.set(xscale="log", yscale="log", title="a query, µs", xlabel="transitions")
    ax.legend(fontsize=7.5)


def _strip(figure: Any, run: Result) -> None:
    """Frames of a run: the pendulum, and an arc as long as the torque."""
    states, torques = np.array(run["states"]), np.array(run["torques"])
    last = min(len(states) - 1, int(np.flatnonzero(np.abs(states[:, 0]) > 0.1)[-1]) + 3)
    frames = np.unique(np.linspace(0, last, _FRAMES).astype(int))
    axes = figure.subplots(1, len(frames))
    figure.suptitle(
        "the policy of the sparse embedding, refitted (arc: torque)",
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
