"""Queries of a saved model: at points given as text, for CSV files and for whole stores."""

import csv
import io
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cme_dask.cli.values import separated
from cme_dask.config import NULL_VALUES
from cme_dask.data.atomic import Kind, check_output, disk_errors, writing
from cme_dask.data.columns import Columns
from cme_dask.errors import DataError
from cme_dask.models import load, only
from cme_dask.models.embedding import LinearEmbedding
from cme_dask.models.joint import JointModel
from cme_dask.models.logistic import LogisticModel
from cme_dask.models.points import query_points
from cme_dask.models.query import EmbeddingQuery, LawQuery, Query

# Conditional expectations of a saved model at points given as text; needs no Dask


Array = Any

_LONGEST_HEADER = 1 << 20
_CONVERSION = re.compile(r"CSV column #(\d+): Row #(\d+): .* invalid value '(.*)'", re.DOTALL)


def load_conditional(path: str) -> JointModel | LinearEmbedding:
    """The model of Y given X in a file; StoreError or DataError if there is none."""
    model = load(path)
    if isinstance(model, LogisticModel):
        raise DataError(
            f"{path} holds a LogisticModel, a JointModel or an embedding was expected: ask this "
            "model in Python, cme_dask.load(...).predict_proba(X), or fit with --estimator "
            "classifier"
        )
    return model if isinstance(model, LinearEmbedding) else only(JointModel, model, path)


def answer(
    model: str,
    given: Sequence[str],
    points: Path | None,
    functions: Sequence[str],
    *,
    reverse: bool = False,
    std: bool = True,
) -> dict[str, Any]:
    """JSON form of E[f(y) | x], or E[f(x) | y], at some points.

    Parameters
    ----------
    model
        Path or URL.
    given
        Points as ``COLUMN=NUMBER,...``; of categorical columns with labels.
    points
        CSV file of further points.
    functions
        Columns of numbers, or events; default all that were declared.
    reverse
        E[f(x) | y].
    std
        With standard errors, if the model has folds; sparse embeddings have none.

    Raises
    ------
    DataError
        On unknown names, missing columns, values that are no numbers, or an embedding in reverse.
    StoreError
        If the model is unusable.
    """
    law: Any = load_conditional(model)
    is_joint = isinstance(law, JointModel)
    if reverse and not is_joint:
        raise DataError("an embedding answers y given x alone: leave --reverse out")
    key, variable, other = ("y", law.y, law.x) if reverse else ("x", law.x, law.y)
    names = variable.columns.given.names
    array = parse_points(variable.columns, given, points)
    labelled = other.columns.categories
    answers: Any = variable.answers if is_joint else getattr(law, "answers", None)
    declared = other.columns.names if answers is None else answers.names
    events = {} if is_joint else getattr(law, "label_events", {})
    every = [events.get(name, name) for name in declared if name not in labelled]
    shown = list(functions) or list(dict.fromkeys(every))
    where: dict[str, Any] = {"Y" if reverse else "X": array}
    errors: Array | None = None
    if std and answers is not None and len(answers.fold_constant) > 1:
        values, errors = law.expect(shown, **where, return_std=True)
    else:
        values = law.expect(shown, **where)
    return {
        "model": model,
        "given": key,
        "columns": list(names),
        "points": plain_points(array),
        "functions": shown,
        "values": values.tolist(),
        "std": None if errors is None else errors.tolist(),
        "interval": None if errors is None else answers.factor(0.95),
        "units": variable.columns.units | other.columns.units,
    }


def plain_points(points: Array) -> list[list[Any]]:
    """Points as JSON values, missing ones as None."""
    return [[None if value != value else value for value in row] for row in points.tolist()]


def parse_points(columns: Columns, given: Sequence[str], points: Path | None) -> Array:
    """Points of a command, shape (n, d): those given as text, then those of a CSV file.

    With categorical columns the array is one of objects, labels and numbers.

    Raises
    ------
    DataError
        If there are none, or as of :func:`read_points`.
    """
    if not given and points is None:
        raise DataError("give at least one point: --given COLUMN=NUMBER,... or --points FILE.csv")
    fills = () if columns.imputation is None else (*columns.imputation.fills,)
    columns = columns.given
    names, labelled = columns.names, set(columns.categories)
    rows = [_parse(text, names, labelled, fills) for text in given]
    array = np.array(rows, dtype=object if labelled else np.float64).reshape(-1, len(names))
    if points is None:
        return array
    return np.concatenate([array, read_points(points, names, labelled, fills)])


def _parse(
    text: str, names: Sequence[str], labelled: Collection[str], fills: Collection[str]
) -> list[float | str | None]:
    """A point from ``COLUMN=NUMBER,...``, with text in columns of labels.

    Nothing after the equals sign is a missing value, in columns where these are filled in. Parts
    with commas are quoted.
    """
    pairs: list[tuple[str, str, str]] = []
    with suppress(ValueError):
        pairs = [part.partition("=") for part in separated(text)]
    if not pairs or any(not equals for _, equals, _ in pairs):
        raise DataError(
            f"--given takes COLUMN=NUMBER,... (parts with commas in double quotes), got {text!r}"
        )
    values = {name.strip(): value for name, _, value in pairs}
    place = f"--given {text!r}"
    if len(values) < len(pairs):
        raise DataError(f"{place} names a column twice: give one value for each")
    _check(list(values), names, place)
    absent = {name for name in fills if not values[name].strip()}
    return [
        (None if name in labelled else np.nan)
        if name in absent
        else (values[name].strip() if name in labelled else _number(values[name], name, place))
        for name in names
    ]


def read_points(
    path: Path,
    names: Sequence[str],
    labelled: Collection[str] = (),
    fills: Collection[str] = (),
) -> Array:
    """Points from the columns of these names of a CSV file, shape (n, d); others are left unread.

    Columns of labels are text; with them the array is one of objects. Values of the columns
    ``fills`` may be missing.

    Raises
    ------
    DataError
        If the file is missing or no CSV file, lacks a column, or has values that are not finite
        numbers. Rows in messages count the header as row 1 and skip empty lines.
    """
    # Imported here, since points on the command line need no pyarrow.
    import pyarrow as pa
    from pyarrow import csv as pacsv

    try:
        data = path.read_bytes()
        header = _header(data)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    except csv.Error as error:
        raise DataError(f"{path} is no CSV file: {error}") from error
    selected = [name for name in header if name in names]
    _check(selected, names, str(path))
    if len(selected) > len(names):
        twice = [name for name in names if selected.count(name) > 1]
        raise DataError(f"the header of {path} has {', '.join(map(repr, twice))} more than once")
    try:
        table = pacsv.read_csv(
            pa.BufferReader(data),
            pacsv.ReadOptions(use_threads=False),  # only then do messages name the row
            pacsv.ParseOptions(newlines_in_values=True),
            pacsv.ConvertOptions(
                include_columns=list(names),
                column_types={n: pa.string() if n in labelled else pa.float64() for n in names},
                null_values=list(NULL_VALUES),
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowException as error:
        match = _CONVERSION.search(str(error))
        if match is None:
            raise DataError(f"{path} is no CSV file of points: {error}") from error
        raise _not_finite(header[int(match[1])], f"row {match[2]} of {path}", match[3]) from error
    if not len(table):
        raise DataError(f"{path} holds no points")
    numeric = [name for name in names if name not in labelled]
    numbers = np.column_stack([np.empty((len(table), 0)), *map(table.column, numeric)])
    may_lack = np.array([name in fills for name in numeric], dtype=bool)
    bad = np.argwhere(~np.isfinite(numbers) & ~(np.isnan(numbers) & may_lack))
    if len(bad):
        row, column = bad[0]
        if np.isnan(numbers[row, column]):
            raise DataError(
                f"row {row + 2} of {path}: {numeric[column]} is missing: leave out this point, or "
                "give it a number; a model that was fitted with --missing impute fills in columns "
                "that lacked values in the fit"
            )
        raise _not_finite(numeric[column], f"row {row + 2} of {path}", numbers[row, column])
    if not labelled:
        return numbers
    points = np.empty((len(table), len(names)), dtype=object)
    for j, name in enumerate(names):
        points[:, j] = table.column(name).to_numpy()
        if name in fills and name in labelled:
            points[:, j] = [label or None for label in points[:, j]]
    return points


def _header(data: bytes) -> list[str]:
    # Other columns may have any encoding, hence "replace".
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", errors="replace", newline="")
    return next(filter(None, csv.reader(text)), [])


def _check(given: Sequence[str], names: Sequence[str], place: str) -> None:
    unknown = [name for name in given if name not in names]
    lacking = [name for name in names if name not in given]
    for problem, which in (("unknown", unknown), ("lacks", lacking)):
        if which:
            raise DataError(
                f"{place}: {problem} column {', '.join(map(repr, which))}: "
                f"the model's are {', '.join(map(repr, names))}"
            )


def _number(text: str, name: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise _not_finite(name, place, text)
    return value


def _not_finite(name: str, place: str, value: object) -> DataError:
    shown = repr(value) if isinstance(value, str) else f"{value:g}"
    return DataError(f"{place}: {name} must be a finite number, got {shown}")


# ``cme-dask predict``: answers of laws and embeddings at points, files or whole stores


Result = dict[str, Any]


def query_of(
    model: str,
    *,
    reverse: bool,
    answers: Sequence[str],
    levels: Sequence[float],
    events: Sequence[str],
    interval: float | None,
    conformal: bool,
) -> Query:
    """The query of a saved model.

    Raises
    ------
    DataError
        On unknown answers or events, levels out of range, a model without laws, or one without
        the conformity scores that are asked for.
    StoreError
        If the model is unusable.
    """
    fitted = load_conditional(model)
    kind: Any = LawQuery if isinstance(fitted, JointModel) else EmbeddingQuery
    texts = tuple(answers), tuple(levels), tuple(events)
    query: Query = kind(fitted, reverse, *texts, interval, conformal)
    return query


def predict_points(query: Query, model: str, given: Sequence[str], points: Path | None) -> Result:
    """JSON form of the answers at some points."""
    array = parse_points(query.given.columns, given, points)
    values = query.flat(query_points(array, query.given, "the points"))
    return {
        "model": model,
        "subject": query.subject,
        "given": "y" if query.reverse else "x",
        "columns": list(query.given.columns.given.names),
        "points": plain_points(array),
        "answers": list(query.labels),
        # Ends of intervals that the rows can't tell are infinite, which JSON has no number for.
        "values": [[v if np.isfinite(v) else None for v in row] for row in values.tolist()],
        "units": query.given.columns.units | query.answered.columns.units,
    }


def _is_table(path: Path) -> bool:
    """Whether the header of a CSV file is one of :func:`write_points`."""
    with path.open("rb") as file:
        header = file.readline(_LONGEST_HEADER)
    try:
        names = next(csv.reader([header.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        return False
    answer = re.compile(
        r".+ (mean|std|lower|upper|q[0-9.e-]+)|P\(.+\)|effective support", re.DOTALL
    )
    return header.startswith(b'"') and any(map(answer.fullmatch, names[1:]))


TABLE = Kind("table of points and answers", _is_table)


def write_points(result: Result, out: Path, overwrite: bool) -> Result:
    """Write points and the answers beside them to a CSV file, whole or not at all."""
    import pyarrow as pa
    from pyarrow import csv

    columns = [*zip(*result["points"], strict=True), *zip(*result["values"], strict=True)]
    table = pa.table(list(map(pa.array, columns)), names=[*result["columns"], *result["answers"]])
    with writing(out, TABLE, overwrite=overwrite) as aside, disk_errors(out):
        csv.write_csv(table, aside)
    retained = {key: result[key] for key in ("model", "given", "answers")}
    return {**retained, "out": str(out), "rows": len(result["points"])}


def predict_store(
    query: Query,
    model: str,
    store: str,
    out: Path,
    *,
    chunk_rows: int | None,
    compute: Any,
    overwrite: bool,
) -> Result:
    """Write the answers at all rows of a store to a new one, and describe the result."""
    from cme_dask.cli.describe import size_on_disk
    from cme_dask.cli.fitting import describe_memory
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.cli.run_report import PeakMemory
    from cme_dask.data.outputs import OUTPUT
    from cme_dask.passes.driver import RunOptions
    from cme_dask.passes.lazy_laws import given_rows
    from cme_dask.passes.write import write_answers

    check_output(out, OUTPUT, overwrite)
    rows = given_rows(store, query.given, reverse=query.reverse)
    with ProgressLines() as progress, compute.open() as scheduler, PeakMemory(scheduler) as memory:
        executor = RunOptions(scheduler, compute.workers, compute.memory_limit).executor()
        report, chunk = write_answers(
            rows,
            query,
            out,
            chunk_rows=chunk_rows,
            overwrite=overwrite,
            executor=executor,
            progress=progress.rows_of("predict"),
        )
        progress.say(
            f"answered {report.rows:,} rows in {report.seconds:.3g} s, "
            f"{report.rows_per_second:,.0f} rows/s"
        )
    return {
        "model": model,
        "store": store,
        "out": str(out),
        "rows": report.rows,
        "arrays": {f.name: [report.rows, *f.shape] for f in query.fields},
        "answers": list(query.labels),
        "chunk_rows": chunk,
        "bytes": size_on_disk(out),
        "passes": 1,
        "tasks": report.tasks,
        "seconds": report.seconds,
        "rows_per_second": report.rows_per_second,
        "memory": describe_memory(report.memory, memory),
    }
