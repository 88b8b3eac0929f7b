"""Tables and the picture of a bench, made from its JSON form."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.coverage import LEVEL
from benchmarks.programs import CLOSED
from benchmarks.sparse import OURS
from cme_dask.cli.tables import facts, format_bytes, grid
from cme_dask.display import number
from cme_dask.models.plots import picture

# Tables of a bench, made from its JSON form


Result = dict[str, Any]

_TITLES = {
    "fmca": "A whole fit of one variable beside FMCA, at equal trace error over all rows",
    "pass": "A whole joint fit from a store beside the bare pass",
    "random": "Randomly pivoted Cholesky beside its references",
    "ridge": "Conditional means beside Nystroem features and ridge regression",
    "crossval": "Conditional mean embeddings from a store: the ridge chosen on folds, or given",
    "sweep": "Fits of one variable, one thing changed at a time",
    "ingest": "A CSV file into a sample store, beside pyarrow's streaming read of it",
    "small": "Fits of small tables without arguments, and the seconds aimed at",
    "tuning": "A fit without arguments, beside its pass and one with its kernels given",
    "coverage": "Intervals of conditional expectations, beside the truth",
    "queries": "Questions to a saved model, in a process without Dask",
    "cluster": "A joint fit from a store: threads, workers of a cluster, independent processes",
    "large": "Rows many times larger than the workers' memory",
    "multiclass": "Twenty classes with a learned kernel, beside gradient boosting in memory",
    "sizing": "Passes on real workers, on workers that wait, and simulated",
    "memory": "Peak memory of fits, predicted and measured, and limits around it",
    "device": "Fits whose sums are computed on a GPU, beside the same on the host",
    "programs": "Certified programs, the closed form and the paper's form, and couplings",
    "sparse": "Sparse embeddings beside Clarabel on the same problem",
}
_GIGA = 1e9
_RATES = {
    "gemm_one": ("float64 products, one core", "GF/s"),
    "gemm_all": ("float64 products, all cores: a thread each", "GF/s"),
    "gemm_blas_threads": ("float64 products, all cores: threads of BLAS", "GF/s"),
    "gemm32_one": ("float32 products, one core", "GF/s"),
    "gemm32_all": ("float32 products, all cores: a thread each", "GF/s"),
    "exp_one": ("exponentials, one core", "G/s"),
    "exp_all": ("exponentials, all cores", "G/s"),
    "memory_one": ("memory, one core", "GB/s"),
    "memory_all": ("memory, all cores", "GB/s"),
}


def measurement_line(run: Result) -> str:
    """What one run found, in a few words."""
    if "missing" in run:
        return f"none, {run['missing']}"
    words = [f"{run['seconds']:.3g} s"]
    if "ranks" in run:
        words.append("rank " + " + ".join(map(str, run["ranks"])))
    if "trace_error" in run:
        words.append(f"trace error {run['trace_error']:.2e}")
    if "log_loss" in run:
        words.append(f"log loss {run['log_loss']:.4f}, at least {run['least_log_loss']:.4f}")
    if "kkt_residual" in run:
        words.append(f"{run['status']}, KKT residual {run['kkt_residual']:.1e}")
    if "rows" in run and "bytes_read" in run:
        words.append(f"{run['rows'] / run['seconds']:,.0f} rows/s")
        words.append(f"{run['bytes_read'] / run['seconds'] / 1e6:,.0f} MB/s")
    if "predicted" in run:
        words.append(f"{format_bytes(run['predicted'])} predicted")
        words.append(f"{format_bytes(run['measured'])} measured")
    if "outcome" in run:
        words.append(run["outcome"])
    if "gpu" in run:
        words.append(f"{run['gpu']}, {run['to_device'] / _GIGA:.3g} GB/s to it")
    if run.get("device_bytes"):
        words.append(
            f"pass {run['pass_seconds']:.3g} s, {format_bytes(run['device_bytes'])} of the GPU"
        )
    if "gemm_all" in run:
        words.append(f"{run['gemm_all'] / _GIGA:.3g} GF/s")
    return ", ".join(words)


def bench_tables(result: Result) -> Iterator[Any]:
    """All tables of a bench."""
    yield _machine(result)
    cases = groupby(result["measurements"].items(), lambda item: item[0].partition("/")[0])
    for case, values in cases:
        if case == "machine":
            yield ""
            yield _rates(dict(values)["machine/rates"])
            continue
        yield ""
        table = _TABLES.get(case, _measurements)
        yield table(_TITLES[case], list(values))
    if result["ratios"]:
        yield ""
        yield _ratios(result["ratios"])
    if result["files"]:
        yield ""
        yield facts("Done", [("files", ", ".join(result["files"]))])


def _machine(result: Result) -> Any:
    machine = result["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v is not None)
    settings = result["settings"]
    lines = [
        ("processor", f"{machine['processor']}, {machine['cores']} cores"),
        ("memory", format_bytes(machine["memory_bytes"])),
        ("system", machine["system"]),
        ("BLAS", ", ".join(machine["blas"])),
        ("versions", f"Python {machine['python']}, {versions}"),
        ("threads", str(settings["workers"])),
        ("repeats", f"{settings['repeats']}, rivals in turns, each in a fresh process"),
        ("took", f"{result['seconds']:.0f} s"),
    ]
    return facts("Machine", lines)


def _rates(measurement: Result) -> Any:
    rates = measurement["runs"][0]["rates"]
    rows = [
        (label, f"{median(v) / _GIGA:.3g}", f"{min(v) / _GIGA:.3g}", f"{max(v) / _GIGA:.3g}", unit)
        for name, (label, unit) in _RATES.items()
        for v in (rates[name],)
    ]
    return grid("Rates", ("", "median", "least", "most", "unit"), rows)


def _measurements(title: str, measurements: list[tuple[str, Result]]) -> Any:
    rows = []
    for key, measurement in measurements:
        name = key.partition("/")[2]
        runs = measurement["runs"]
        if not runs:
            rows.append((name, "none", *[""] * 6))
            continue
        run = runs[-1]
        seconds = (f"{measurement[key]:.3g}" for key in ("median", "least", "most"))
        rows.append(
            (
                name,
                *([""] * 3 if "gemm_all" in run else seconds),
                " + ".join(map(str, run.get("ranks", []))),
                _error(run),
                _bytes(max((r.get("peak_bytes") or 0 for r in runs), default=0)),
                _read(run),
            )
        )
    head = ("seconds", "median", "least", "most", "rank", "error", "peak memory", "read, rate")
    return grid(title, head, rows, _caption(measurements))


def _programs(title: str, measurements: list[tuple[str, Result]]) -> Any:
    rows = []
    for key, measurement in measurements:
        _, unknowns, solver = key.split("/")
        name = f"{unknowns.removesuffix(' unknowns')}, {solver}"
        runs = measurement["runs"]
        if not runs:
            rows.append((name, "none", *[""] * 5))
            continue
        run = runs[-1]
        rows.append(
            (
                name,
                f"{measurement['median']:.3g}",
                run["status"],
                f"{run['iterations']:,}" if run["iterations"] else "",
                f"{run['kkt_residual']:.1e}",
                f"{run['objective']:.8f}",
                f"{run['oracle_error']:.3e}",
            )
        )
    head = ("unknowns", "seconds", "status", "iterations", "KKT", "objective", "error (43)")
    caption = (
        "The paper's form has other constraints than the closed form, and another optimum. Status "
        "is the solver's word; the KKT residual is ours, of its solution with its multipliers."
    )
    return grid(title, head, rows, caption)


def _coverage(title: str, measurements: list[tuple[str, Result]]) -> Any:
    rows = []
    for key, measurement in measurements:
        _, sample, chosen = key.split("/")
        (run,) = measurement["runs"]
        shares = (f"{100 * run[name]:.0f} %" for name in ("two", "t", "lowest", "variance"))
        rows.append((sample, chosen, *shares, f"{run['bias']:.2g}"))
    head = ("sample", "kernels", "2 errors", "interval", "worst", "mean", "bias / std")
    caption = (
        f"Truth within 2 standard errors, within the {100 * LEVEL:.0f} % interval, and the same at "
        "the worst point; mean of all estimates within the interval; bias over standard deviation."
    )
    return grid(title, head, rows, caption, text_columns=2)


def _memory(title: str, measurements: list[tuple[str, Result]]) -> Any:
    rows = []
    for key, measurement in measurements:
        (run,), job = measurement["runs"], measurement["job"]
        name, shape = key.partition("/")[2], job["shape"]
        if job["job"] == "LimitedFit":
            asked = format_bytes(job["limit"])
            rows.append((name, "", *[""] * 3, asked, run["outcome"], "", "", run["due"]))
            continue
        peak = max(run["steps"], key=run["steps"].get)
        where = shape["scheduler"]
        rows.append(
            (
                name,
                f"{shape['rows']:,}",
                " + ".join(map(str, shape["columns"])),
                " + ".join(map(str, run["ranks"])),
                where if where == "threads" else f"{shape['workers']} {where}",
                format_bytes(run["predicted"]),
                format_bytes(run["measured"]),
                f"{run['measured'] / run['predicted']:.2f}",
                f"{run['place']}, {run['phase']}",
                peak,
            )
        )
    head = ("shape", "rows", "columns", "rank", "where", "predicted", "measured", "ratio")
    caption = (
        "Step: in which the client's own peak was. Of limits: bytes, what became of the fit, and "
        "what is due."
    )
    return grid(title, (*head, "predicted for", "step"), rows, caption)


_TABLES = {"programs": _programs, "coverage": _coverage, "memory": _memory}


def _error(run: Result) -> str:
    error = run.get("trace_error", run.get("held_out_error"))
    return "" if error is None else f"{error:.2e}"


def _bytes(count: float) -> str:
    return format_bytes(count) if count else ""


def _read(run: Result) -> str:
    if "gemm_all" in run:
        return f"{run['gemm_all'] / _GIGA:.3g} GF/s"
    if run.get("read_rate"):
        return f"{run['read_rate'] / _GIGA:.2g} GB/s"
    passes = f" in {run['passes']} passes" if run.get("passes", 1) > 1 else ""
    return _bytes(run.get("bytes_read") or 0) + passes


def _caption(measurements: list[tuple[str, Result]]) -> str:
    """How the fits spent their time, and what was not measured."""
    spent, missing = [], {}
    for key, measurement in measurements:
        runs = measurement["runs"]
        _, setting, *who = key.split("/", 2)
        if not runs:
            missing[who[0]] = measurement["missing"]
        elif who == ["fit"] and "pivot_seconds" in runs[0]:
            parts = (
                f"{part} {median(r[f'{part}_seconds'] for r in runs):.3g}"
                for part in ("sample", "pivot", "pass", "rest")
            )
            spent.append(f"{setting}: {', '.join(parts)} s")
    lines = ["Parts of the fit: " + "; ".join(spent)] if spent else []
    return "\n".join([*lines, *(f"{who}: {why}" for who, why in missing.items())])


def _ratios(ratios: list[Result]) -> Any:
    rows = []
    for ratio in ratios:
        label = ratio["group"].replace("/", ", ")
        if ratio["value"] is None:
            rows.append((label, ratio["name"], "none", *[""] * 3))
            continue
        rows.append(
            (
                label,
                ratio["name"],
                *(number(float(ratio[key]), 3) for key in ("value", "least", "most")),
                _aim(ratio),
            )
        )
    caption = "Of medians; least and most over the repeats, which rivals take in turns."
    head = ("", "", "ratio", "least", "most", "aim")
    return grid("Ratios", head, rows, caption, text_columns=2)


def _aim(ratio: Result) -> str:
    for key, sign in (("at_least", ">="), ("at_most", "<=")):
        if ratio[key] is not None:
            value = ratio["value"]
            met = value >= ratio[key] if key == "at_least" else value <= ratio[key]
            return f"{sign} {ratio[key]:g}: {'met' if met else 'missed'}"
    return ""


# The picture of a bench: seconds of everything measured, a panel per case


Row = tuple[str, Result]

_TITLES_PICTURE = {
    "fmca": "Pivoted Cholesky of {rows} rows, equal trace error",
    "pass": "Joint distribution of {rows} stored rows",
    "random": "Random pivots, {rows} rows",
    "ridge": "Conditional mean, {rows} rows",
    "crossval": "Ridges on folds, {rows} stored rows",
    "sweep": "One thing changed at a time, around {rows} rows",
    "ingest": "CSV file of {rows} rows into a store",
    "small": "Small tables, from {rows} rows on",
    "tuning": "Learned kernels, {rows} rows",
    "coverage": "Intervals, {rows} rows",
    "queries": "Questions at {rows} points",
    "cluster": "Joint fit of {rows} stored rows on a cluster",
    "large": "{rows} rows on workers of 1 GB",
    "multiclass": "Twenty classes, {rows} rows",
    "sizing": "Pass of {rows} stored rows, real and simulated",
    "programs": "Programs of a sample of {rows} rows",
    "sparse": "Sparse embeddings",
    "memory": "Fits of up to {rows} rows",
    "device": "Joint fit of {rows} rows, GPU and host",
}
_OURS, _BARE, _LIMIT, _OTHERS = "#1f5fa8", "#3a8f5c", "#222222", "#c8552b"
_LEGEND = (
    (_OURS, "o", "cme_dask"),
    (_BARE, "D", "bare pass, bare kernel blocks"),
    (_LIMIT, "|", "limits: arithmetic at the measured rates, reading"),
    (_OTHERS, "s", "others"),
)
_BARE_JOBS = {"Bare", "KernelBlocks"}
_RIVALS = {"ArrowRead", "BoostingFit", "Fmca", "Reference"}
_BY_METHOD = {"ConditionalMean": "ours", "SolveProgram": CLOSED, "SolveSparse": OURS}
"""Jobs that are ours or a rival's, with the method or solver that is ours."""

_LINE = 0.27  # inches per row
_PANEL = 0.95  # and for what is around them
_WIDE = 10.0  # inches that hold the whole legend in one line


def bench_picture(result: Result, path: Path) -> None:
    """Draw medians, from least to most, on logarithmic axes.

    Parameters
    ----------
    result
        JSON form of a bench.
    path
        PNG file to write.
    """
    panels = _panels(result)
    columns: list[list[str]] = [[], []]
    heights = [0.0, 0.0]
    for case, rows in panels.items():
        shorter = heights.index(min(heights))
        columns[shorter].append(case)
        heights[shorter] += _LINE * len(rows) + _PANEL
    columns = [cases for cases in columns if cases]
    with picture(path, 6.4 * max(len(columns), 1), max(heights) + 0.8) as figure:
        figure.suptitle(_heading(result), x=0.01, ha="left", fontsize=10.5)
        parts = figure.subfigures(1, max(len(columns), 1), squeeze=False)[0]
        for part, cases in zip(parts, columns, strict=False):
            room = [_LINE * len(panels[case]) + _PANEL for case in cases]
            room.append(max(max(heights) - sum(room), 1e-3))  # so that rows are equally high
            *axes, rest = part.subplots(len(room), 1, height_ratios=room)
            rest.set_axis_off()
            for ax, case in zip(axes, cases, strict=True):
                _panel(ax, panels[case], _ratios_picture(result, case))
                rows = result["settings"]["sizes"][case]["rows"]
                title = _TITLES_PICTURE[case].format(rows=number(rows))
                ax.set_title(title, loc="right")  # above long labels
        _legend(figure)


def _heading(result: Result) -> str:
    machine, settings = result["machine"], result["settings"]
    return (
        f"{machine['processor']}, {settings['workers']} threads; seconds, median of "
        f"{settings['repeats']} (line: least to most)"
    )


def _panels(result: Result) -> dict[str, list[Row]]:
    """Per case, rows from top to bottom; a setting that several rows share has a row of its own."""
    timed = [
        (key, values)
        for key, values in result["measurements"].items()
        if values.get("median")
        and not key.startswith("machine/")
        and "gemm_all" not in values["runs"][0]
    ]
    panels: dict[str, list[Row]] = {}
    for case, group in groupby(timed, lambda item: item[0].split("/")[0]):
        rows: list[Row] = []
        setting = None
        for key, values in group:
            _, here, *who = key.split("/", 2)
            if who and here != setting:
                setting = here
                rows.append((here, {}))
            rows.append((who[0] if who else here, values))
        panels[case] = rows
    return panels


def _ratios_picture(result: Result, case: str) -> dict[str, str]:
    """The first ratio of each setting of a case."""
    texts: dict[str, str] = {}
    for ratio in result["ratios"]:
        here, _, setting = ratio["group"].partition("/")
        if here == case and ratio["value"] is not None:
            texts.setdefault(setting, f"{ratio['name']} = {ratio['value']:.3g}")
    return texts


def _panel(ax: Any, rows: list[Row], ratios: dict[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for i, (label, result) in enumerate(rows):
        if not result:
            at = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 9}
            ax.annotate(ratios.get(label, ""), (0.01, i), fontweight="bold", **at)
            continue
        color, marker = _look(label, result)
        ax.plot([result["least"], result["most"]], [i, i], color=color, lw=2.0, alpha=0.5)
        size = 11 if marker == "|" else 6
        ax.plot(result["median"], i, marker, color=color, markersize=size, markeredgewidth=1.6)
        ax.annotate(
            f"{result['median']:.3g}",
            (result["most"], i),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color="#444444",
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    low, high = (
        f(result[k] for _, result in rows if result) for f, k in ((min, "least"), (max, "most"))
    )
    ax.set_xlim(min(low, high / 9) / 1.5, high * 2.5)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks(range(len(rows)), [label for label, _ in rows])
    for tick, (_, result) in zip(ax.get_yticklabels(), rows, strict=True):
        if not result:
            tick.set_fontweight("bold")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", which="major")


def _look(label: str, measurement: Result) -> tuple[str, str]:
    """Colour and marker of a row."""
    if label in ("limit", "reading alone"):
        return _LIMIT, "|"
    job = measurement["job"]
    if isinstance(job, list):  # processes side by side
        return _OURS, "o"
    kind = job["job"]
    if kind in _BARE_JOBS:
        return _BARE, "D"
    way = job.get("solver", job.get("method"))
    rival = kind in _RIVALS or (kind in _BY_METHOD and way != _BY_METHOD[kind])
    return (_OTHERS, "s") if rival else (_OURS, "o")


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, marker=marker, ls="", markeredgewidth=1.6, label=label)
        for color, marker, label in _LEGEND
    ]
    columns = len(handles) if figure.get_figwidth() > _WIDE else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
