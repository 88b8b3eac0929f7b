"""Results, laws and scores as tables for people."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cme_dask.display import is_noted, number, rank_text, with_error
from cme_dask.errors import printable, without_secrets

# Results as tables for people. Every function takes the JSON form of a result


Result = dict[str, Any]

_ROWS = ("read", "kept", "dropped")
_MANY = 40  # columns, which are then not all listed
_NARROWEST = 100  # columns, where the output is no terminal


def show(result: Result, tables: Iterable[RenderableType], as_json: bool) -> None:
    """Print a result to stdout: its JSON form as one line, or its tables."""
    if as_json:
        print(without_secrets(json.dumps(result, allow_nan=False)))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, _NARROWEST))
    for table in tables:
        console.print(table)
    sys.stdout.flush()


def format_bytes(count: float) -> str:
    """Bytes in the words of ``dask.utils.format_bytes``, which a query must not import."""
    for prefix, exponent in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("kiB", 10)):
        if count >= 0.9 * 2**exponent:
            return f"{count / 2**exponent:.2f} {prefix}"
    return f"{count} B"


def cell(text: str, style: str = "") -> Text:
    """A text of a table, in which names of others are no commands to the terminal."""
    return Text(printable(without_secrets(text)), style=style)


def facts(title: str, lines: Sequence[tuple[str, str]]) -> RenderableType:
    """Labels and texts in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(cell(label), cell(text))
    return _titled(title, table, "")


def grid(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    *,
    text_columns: int = 1,
) -> RenderableType:
    """A table with texts in the first columns and numbers in the others."""
    table = Table(box=None, header_style="cyan", pad_edge=False, padding=(0, 2, 0, 0))
    rows = list(rows)
    for i, (label, *column) in enumerate(zip(head, *rows, strict=True)):
        # Long labels may wrap, numbers must not.
        is_text = i < text_columns
        width = None if is_text else max(map(len, column), default=0)
        table.add_column(cell(label), justify="left" if is_text else "right", min_width=width)
    for row in rows:
        table.add_row(*map(cell, row))
    return _titled(title, table, caption)


def _titled(title: str, table: Table, caption: str) -> RenderableType:
    parts: list[RenderableType] = [cell(title, "bold"), _indented(table)]
    if caption:
        parts.append(_indented(cell(caption, "dim")))
    return Group(*parts)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _short(text: str) -> str:
    """A text whose long decimal fractions are cut to 4 significant digits."""
    return re.sub(r"\d+\.\d{5,}(e[-+]\d+)?", lambda match: f"{float(match[0]):.4g}", text)


def ingest_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask ingest``."""
    lines = [("files", number(result["files"]))]
    lines += [(f"rows {what}", number(result[f"rows_{what}"])) for what in _ROWS]
    if result["rows_resumed"]:
        lines.append(("rows resumed", number(result["rows_resumed"])))
    stored = {column["from"] for column in result["columns"]}
    # Weights, groups and times, with their missing values alone.
    others = [
        (name, number(count), "", "", "", "")
        for name, count in result["missing"].items()
        if name not in stored
    ]
    columns = [_ingested(column, result["units"]) for column in result["columns"]]
    head = ("", "missing", "mean", "deviation", "smallest kept", "largest kept")
    return [facts(result["store"], lines), "", grid("Columns", head, [*columns, *others])]


def _ingested(column: Result, units: dict[str, str]) -> tuple[str, ...]:
    """A line of the columns of an ingest; of labels the commonest and the rarest one."""
    name = f"{column['variable']}: {with_unit(column['name'], units)}"
    if "labels" not in column:
        keys = ("mean", "std", "min", "max")
        cells = ("" if column[key] is None else number(column[key]) for key in keys)
        return name, number(column["missing"]), *cells
    ordered = sorted(zip(column["counts"], column["labels"], strict=True))
    ends = [f"{label} ({number(count)})" for count, label in (*ordered[:1], *ordered[-1:])]
    ends = ends or ["", ""]  # no row has a label
    return name, number(column["missing"]), f"{len(ordered)} labels", "", *ends


def fit_tables(result: Result) -> list[RenderableType]:
    """Of a fit: bases, pass, memory, held-out errors."""
    bases = [
        (
            f"basis of {name}",
            f"{', '.join(v['columns'])}: {_size(v)}, {_short(v['kernel'])}",
        )
        for name, v in result["variables"].items()
    ]
    lines = [
        *bases,
        (
            "pass",
            f"{result['passes']} over {number(result['rows'])} rows; that of the moments in "
            f"{number(result['strips'])} strips, {number(result['tasks'])} tasks: "
            f"{result['pass_seconds']:.3g} s, {result['pass_rows_per_second']:,.0f} rows/s",
        ),
        ("time", _fit_time(result)),
        ("arithmetic", result["arithmetic"]),
        ("peak memory", memory_line(result["memory"])),
        *result.get("summary", []),
    ]
    if "constraint" in result:
        solved = f"{result['status']}, KKT residual {result['kkt_residual']:.1e}"
        below = f"mass below zero {result['negative_mass']:.2g}"
        lines.append(("constraint", f"{result['constraint']}: {solved}, {below}"))
    lines += calibration_lines(result.get("calibration"))
    return [facts(result["model"], lines), *held_out_tables(result["held_out"])]


def calibration_lines(calibration: Result | None) -> list[tuple[str, str]]:
    """Whether the laws were calibrated, and what that gains."""
    if calibration is None:
        return []
    gain = with_error(calibration["gain"], calibration["std"])
    done = "calibrated" if calibration["kept"] else "not calibrated"
    return [
        ("laws", f"{done}: gain in held-out log density {gain}, {number(calibration['rows'])} rows")
    ]


def _size(variable: Result) -> str:
    if variable["trace_error"] is None:
        return f"{variable['rank']} landmarks"
    size = rank_text(variable["ranks"], variable["functions"])
    most = " at most" if len(variable["ranks"]) > 1 else ""
    return f"{size}, trace error {variable['trace_error']:.2e}{most}"


def _fit_time(result: Result) -> str:
    """Wall time of a whole fit, and its rows per second."""
    return f"{result['seconds']:.3g} s in all, {result['rows_per_second']:,.0f} rows/s"


def memory_line(memory: Result) -> str:
    """Predicted and measured peak memory."""
    return (
        f"predicted {format_bytes(memory['predicted'])} in {memory['phase']} ({memory['place']}, "
        f"limit {format_bytes(memory['limit'])}), measured {format_bytes(memory['measured'])} "
        f"({memory['measure']})"
    )


def plan_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask fit --dry-run``."""
    moments, memory = result["pass"], result["memory"]
    lines = [
        (
            f"basis of {v['name']}",
            f"{', '.join(v['columns'])}: {_planned_ranks(v['ranks'])}, {v['pivots']} pivots, "
            f"{_short(v['kernel'])}",
        )
        for v in result["variables"]
    ]
    lines += [
        ("arithmetic", result["arithmetic"]),
        (
            "passes",
            f"{result['passes']} over {number(result['rows'])} rows, reading "
            f"{format_bytes(moments['bytes_read'])}, {number(moments['strips'])} strips in "
            f"{number(moments['tasks'])} tasks on {moments['workers']} workers "
            f"({result['scheduler']})",
        ),
        (
            "peak memory",
            f"{format_bytes(memory['predicted'])} in {memory['phase']} ({memory['place']}, limit "
            f"{format_bytes(memory['limit'])})",
        ),
    ]
    if result["location"] is not None:
        lines.append(("residuals", f"from {result['location']}, in the same pass"))
    if result["residual"]:
        lines.append(("residuals", _second_pass(result)))
    if result["rounds"] is None:
        enough = all(v["enough"] for v in result["variables"])
        lines.append(
            (
                "rounds",
                f"each at most as long as the pass, {result['pass_seconds']:.3g} s at these ranks, "
                "which are those of sampled pivots; how many is not known before"
                if enough
                else "the row sample does not reach the tolerance: rounds over all rows add "
                "pivots, how many is not known before, so ranks, passes, seconds and memory are "
                "lower bounds",
            )
        )
    seconds = [(name, f"{value:.3g}") for name, value in result["parts"].items()]
    total = result["seconds"]
    caption = (
        f"Before the pass as measured now; the pass, {result['pass_seconds']:.3g} s or "
        f"{result['pass_rows_per_second']:,.0f} rows/s, from three strips of it on each worker; "
        "the solution from one eigendecomposition, or from one on the row sample if it iterates."
    )
    return [
        facts(f"{result['store']} (plan of a fit)", lines),
        "",
        grid("Seconds", ("", "seconds"), [*seconds, ("in all", f"{total:.3g}")], caption),
    ]


def _planned_ranks(ranks: Sequence[int]) -> str:
    """Ranks of a basis in a plan, a number for each finalist of a search."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks))
    return f"{len(ranks)} finalists of rank {listed} ({sum(ranks)} pivots together)"


def feature_fit_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask features``."""
    lines = [
        ("columns", ", ".join(result["columns"])),
        ("features", f"{result['rank']}, {result['basis']} basis, {_short(result['kernel'])}"),
        ("trace error", f"{result['trace_error']:.2e} over all rows"),
        ("pass", pass_line(result, "pass_")),
        ("time", _fit_time(result)),
        ("peak memory", memory_line(result["memory"])),
    ]
    return [facts(result["model"], lines)]


def transform_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask transform``."""
    lines = [
        (
            "features",
            f"{number(result['rows'])} x {number(result['rank'])} {result['dtype']} in chunks of "
            f"{number(result['chunk_rows'])} rows, {format_bytes(result['bytes'])} on disk",
        ),
        ("pass", pass_line(result)),
        ("peak memory", memory_line(result["memory"])),
    ]
    return [facts(result["out"], lines)]


def pass_line(result: Result, prefix: str = "") -> str:
    """Extent, time and speed of a pass, whose seconds have this prefix in the result."""
    seconds, speed = result[f"{prefix}seconds"], result[f"{prefix}rows_per_second"]
    return (
        f"{result['passes']} over {number(result['rows'])} rows, {number(result['tasks'])} tasks: "
        f"{seconds:.3g} s, {speed:,.0f} rows/s"
    )


def held_out_tables(held_out: dict[str, dict[str, dict[str, float]]]) -> list[RenderableType]:
    """Held-out squared errors given x, and given y if there are functions of x."""
    parts: list[RenderableType] = []
    for given, functions in held_out.items():
        rows = [
            (name, number(v["error"]), number(v["baseline"]), f"{100 * v['skill']:.1f} %")
            for name, v in functions.items()
        ]
        title = f"Held-out mean squared error given {given} (of an event: its Brier score)"
        if rows:
            parts += ["", grid(title, ("", "error", "unconditional", "skill"), rows)]
    return parts


def expectation_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask expect``."""
    given, units = result["given"], result["units"]
    head = [with_unit(name, units) for name in (*result["columns"], *result["functions"])]
    stds = result["std"] or [[None] * len(result["functions"])] * len(result["values"])
    rows = [
        (*map(_text, point), *map(with_error, values, std))
        for point, values, std in zip(result["points"], result["values"], stds, strict=True)
    ]
    other = "y" if given == "x" else "x"
    caption = ""
    if result["std"]:
        caption = (
            "± one standard error by the jackknife over the folds of rows; a 95 % interval is "
            f"{result['interval']:.2f} of them on each side, for the variance alone: it leaves out "
            "the bias of smoothing"
        )
    return [grid(f"E[f({other}) | {given}]", head, rows, caption)]


def store_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask info`` on a sample store."""
    lines = [(name, _columns(v)) for name, v in result["columns"].items()]
    size = result["bytes"]
    lines += [
        ("weights", "yes" if result["weights"] else "no"),
        (
            "rows",
            f"{number(result['rows'])} in {number(result['chunks'])} chunks of "
            f"{number(result['chunk_rows'])}",
        ),
        ("row sample", _row_sample(result)),
        *_origin(result["features"]),
        ("on disk", "unknown (URL)" if size is None else format_bytes(size)),
        ("format", f"schema {result['schema_version']}, Zarr {result['zarr_format']}"),
    ]
    return [facts(f"{result['path']} (sample)", lines)]


def _columns(described: Result) -> str:
    """Names with units; of many the first and the last."""
    names = [with_unit(name, described["units"]) for name in described["names"]]
    return ", ".join(names if len(names) <= _MANY else [*names[:2], "...", names[-1]])


def _row_sample(result: Result) -> str:
    seed = result["seed"]
    return f"{number(result['row_sample'])} rows" + ("" if seed is None else f", seed {seed}")


def _origin(features: Result | None) -> list[tuple[str, str]]:
    """Of features: their source."""
    if features is None:
        return []
    made_from = f"{', '.join(features['columns'])} of {features['source']}"
    kind = f"{features['basis']} basis, {_short(features['kernel'])}"
    return [("x is", f"features of {made_from}: {kind}, trace error {features['trace_error']:.2e}")]


def model_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask info`` on a model."""
    size = result["bytes"]
    lines = [(label, _short(text)) for label, text in result["summary"]]
    lines += [
        ("fitted on", result["fitted_on"]),
        ("on disk", "unknown (URL)" if size is None else format_bytes(size)),
        ("format", f"schema {result['schema_version']}, Zarr {result['zarr_format']}"),
    ]
    return [
        facts(f"{result['path']} ({result['type']})", lines),
        *held_out_tables(result.get("held_out", {})),
    ]


def point_tables(result: Result) -> list[RenderableType]:
    """Of a job's stated points: the laws, what happened where as much was predicted, near rows."""
    near, level = result["neighbours"], 100.0 * result["level"]
    rows = []
    for point in result["points"]:
        for i, (name, v) in enumerate(point["functions"].items()):
            held_out, interval = v["held_out"], v["interval"]
            seen = None if held_out is None else held_out["seen"]
            mean = f"{v['mean']:.3f}" if v["event"] else number(v["mean"], 3)
            rows.append(
                (
                    point["name"] if i == 0 else "",
                    f"P({name})" if v["event"] else f"mean {with_unit(name, result['units'])}",
                    mean,
                    "" if interval is None else " to ".join(number(e, 3) for e in interval),
                    "none" if seen is None else with_error(seen["value"], seen["std"]),
                    _near_rows(point, v, near["k"]),
                    f"{point['effective_support']:.3f}" if i == 0 else "",
                )
            )
    units = result["fold_by"]
    folds = (
        "Folds are random rows: standard errors do not see autocorrelation."
        if units == "rows"
        else f"Folds are by {units}."
    )
    caption = (
        "Laws given x. Held out: mean over the held-out rows whose prediction is in the same one "
        f"of ten bins. Near rows: the {number(near['k'])} nearest in standardised x with the same "
        f"labels, or all of these if they are fewer, where they are within {near['near']:g} "
        f"standard deviation (else the distance of the farthest). ± one standard error. {folds}"
    )
    head = ("point", "", "law", f"{level:g} % interval", "held out", "near rows", "support")
    return ["", grid("Conditional laws", head, rows, caption, text_columns=2)]


def _near_rows(point: Result, value: Result, k: int) -> str:
    """The mean over the rows near a point and how many they are, or why there is none."""
    rows = point["nearest_rows"]
    if not rows:
        return "none with its labels"
    few = f", {number(rows)} row{'s' * (rows > 1)}" if rows < k else ""
    if not point["near"]:
        return f"none ({point['farthest']:.2g} sd{few})"
    return f"{with_error(value['nearest_mean'], value['nearest_std'])}{few}"


def with_unit(name: str, units: dict[str, str]) -> str:
    """A name with its unit, if it has one."""
    return f"{name} [{units[name]}]" if name in units else name


def _second_pass(result: dict[str, Any]) -> str:
    """The second pass of a plan, of a location model."""
    least, most = result["residual_seconds"]
    if least == most:
        return f"one more pass and solution, {least:.3g} s: the row sample advises them"
    unknown = (
        f"one more search and pass, {least:.3g} to {most:.3g} s at ranks like those above: its own "
        "are not known before"
    )
    if result["residual"] == "auto":
        return f"{unknown}, and nothing where the first pass shows that it does not pay"
    return unknown


# Answers of conditional laws as tables


_WIDE = 8  # columns, which are then listed below each other


def answer_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask predict`` at points: a table for each point, or one for all."""
    other = "y" if result["given"] == "x" else "x"
    title = f"{result['subject'].capitalize()} of {other} given {result['given']}"
    columns, answers = result["columns"], result["answers"]
    names = [with_unit(name, result["units"]) for name in columns]
    pairs = list(zip(result["points"], result["values"], strict=True))
    if len(columns) + len(answers) <= _WIDE:
        rows = [(*map(_text, point), *map(_answer, values)) for point, values in pairs]
        return [grid(title, [*names, *answers], rows)]
    head = [f"{i + 1}" for i in range(len(pairs))]
    lines = [(name, *(_text(point[j]) for point, _ in pairs)) for j, name in enumerate(names)]
    means = [(name, *(_answer(values[j]) for _, values in pairs)) for j, name in enumerate(answers)]
    return [grid(title, ["", *head], [*lines, *means])]


def file_answer_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask predict`` from CSV to CSV."""
    lines = [("rows", number(result["rows"])), ("answers", ", ".join(result["answers"]))]
    return [facts(result["out"], lines)]


def store_answer_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask predict`` on a store."""
    lines = [
        *((name, " x ".join(map(number, shape))) for name, shape in result["arrays"].items()),
        ("chunks", f"{number(result['chunk_rows'])} rows, {format_bytes(result['bytes'])} on disk"),
        ("pass", pass_line(result)),
        ("peak memory", memory_line(result["memory"])),
    ]
    return [facts(result["out"], lines)]


def _answer(value: float | None) -> str:
    return "unbounded" if value is None else number(value)


def _text(value: Any) -> str:
    if value is None:
        return "missing"
    return value if isinstance(value, str) else number(value)


# Scores as a table


def score_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask score``."""
    seen = "" if result["unseen"] else ", which the fit may have seen"
    part = "all rows" if result["held_out"] is None else f"held out: {result['held_out']}"
    lines = [
        ("rows", f"{number(result['rows'])} of {result['store']}, {part}{seen}"),
        ("errors", f"jackknife over folds by {result['fold_by']}"),
    ]
    if result["crps"] is not None:
        lines.append(("CRPS", _score_text(result["crps"])))
    for name in ("energy_score", "log_score"):
        if result[name] is not None:
            lines.append((name.replace("_", " "), _score_text(result[name])))
    lines += coverage_lines(result["coverage"], result["interval_mass"])
    lines += law_lines(result)
    lines += label_lines(result["labels"])
    rows = [
        (
            name,
            number(scores["mean"]),
            _score_text(scores["mse"]),
            _score_text(scores["r2"]),
            "Brier skill" if scores["event"] else "R^2",
        )
        for name, scores in result["scores"].items()
    ]
    head = ("", "mean", "mean square error", "skill", "which is")
    values = [facts(result["model"], lines)]
    return [*values, "", grid("Scores", head, rows)] if rows else values


def coverage_lines(coverage: Result | None, mass: Result | None) -> list[tuple[str, str]]:
    """A line on how many rows lie within the intervals of the laws, in per cent.

    Where the laws give these another mass than their level, since y takes few values, it tells
    what the share should be.
    """
    if coverage is None:
        return []
    each = []
    for name, result in coverage["columns"].items():
        value, std = (None if v is None else 100.0 * v for v in (result["value"], result["std"]))
        each.append(f"{name} {'none' if value is None else with_error(value, std)} %")
        due = None if mass is None else mass["columns"][name]["value"]
        if due is not None and is_noted(due, coverage["level"]):
            each[-1] += f" (the laws say {100.0 * due:.1f} %)"
    return [(f"within the {100.0 * coverage['level']:g} % interval", ", ".join(each))]


def law_lines(result: Result) -> list[tuple[str, str]]:
    """Lines of the widths and scores of intervals, of quantiles and of calibration, by column."""
    lines: list[tuple[str, dict[str, Result]]] = []
    for key, text in (("width", "width"), ("interval_score", "score")):
        if result[key] is not None:
            level = 100.0 * result[key]["level"]
            lines.append((f"{text} of the {level:g} % interval", result[key]["columns"]))
    losses = result["pinball"] or {}
    for i, level in enumerate(loss["level"] for loss in next(iter(losses.values()), [])):
        each = {name: of_levels[i] for name, of_levels in losses.items()}
        lines.append((f"pinball loss at {level:g}", each))
    if result["calibration_error"] is not None:
        lines.append(("calibration error", result["calibration_error"]))
    return [
        (text, ", ".join(f"{name} {_score_text(score)}" for name, score in each.items()))
        for text, each in lines
    ]


def label_lines(labels: Result, whose: str = "") -> list[tuple[str, str]]:
    """A line of the scores of each column of labels."""
    return [
        (
            f"labels of {name}{whose}",
            ", ".join(f"{key.replace('_', ' ')} {_score_text(each[key])}" for key in each),
        )
        for name, each in labels.items()
    ]


def _score_text(estimate: Result) -> str:
    if estimate["value"] is None:
        return "none"
    return with_error(estimate["value"], estimate["std"])
