"""What ``cme-dask predict`` does: answers of conditional laws at points, files or whole stores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cme_dask.jobs.query import parse_points
from cme_dask.models import JointModel, load_only
from cme_dask.models.query import Query
from cme_dask.storage.atomic import check_output, disk_errors, writing

Array = Any
Result = dict[str, Any]


def query_of(
    model: str,
    *,
    reverse: bool,
    answers: Sequence[str],
    levels: Sequence[float],
    events: Sequence[str],
) -> Query:
    """The query of a saved model.

    Raises
    ------
    DataError
        On unknown answers or events, levels out of range, or a model without laws.
    StoreError
        If the model is unusable.
    """
    law = load_only(JointModel, model)
    return Query(law, reverse, tuple(answers), tuple(levels), tuple(events))


def predict_points(query: Query, model: str, given: Sequence[str], points: Path | None) -> Result:
    """JSON form of the answers at some points.

    Parameters
    ----------
    query
        What is asked.
    model
        Path or URL of its model.
    given, points
        As of :func:`cme_dask.jobs.query.answer`.
    """
    array = parse_points(query.given.columns, given, points)
    values = query.flat(query.given.points(array, "the points"))
    return {
        "model": model,
        "given": "y" if query.reverse else "x",
        "columns": list(query.given.columns.names),
        "points": array.tolist(),
        "answers": list(query.labels),
        "values": values.tolist(),
        "units": query.given.columns.units | query.answered.columns.units,
    }


def write_points(result: Result, out: Path, overwrite: bool) -> Result:
    """Write points and the answers beside them to a CSV file, whole or not at all.

    Parameters
    ----------
    result
        Of :func:`predict_points`.
    out, overwrite
        File to make.
    """
    import pyarrow as pa
    from pyarrow import csv

    columns = [*zip(*result["points"], strict=True), *zip(*result["values"], strict=True)]
    table = pa.table(list(map(pa.array, columns)), names=[*result["columns"], *result["answers"]])
    with writing(out, overwrite=overwrite) as aside, disk_errors(out):
        csv.write_csv(table, aside)
    kept = {key: result[key] for key in ("model", "given", "answers")}
    return {**kept, "out": str(out), "rows": len(result["points"])}


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
    """Write the answers at all rows of a store to a new one, and describe what was done.

    Parameters
    ----------
    query
        What is asked.
    model, store
        Paths or URLs.
    out, chunk_rows, overwrite
        See :func:`cme_dask.chunked.answers.write_answers`.
    compute
        A :class:`cme_dask.jobs.fitting.Compute`: where to run.
    """
    from cme_dask.chunked.answers import write_answers
    from cme_dask.chunked.driver import Executor
    from cme_dask.chunked.lazy_laws import given_rows
    from cme_dask.chunked.memory import MemoryBudget
    from cme_dask.jobs.describe import size_on_disk
    from cme_dask.jobs.fitting import describe_memory
    from cme_dask.report.memory import PeakMemory
    from cme_dask.report.progress import ProgressLines

    check_output(out, overwrite)
    rows = given_rows(store, query.given, reverse=query.reverse)
    with ProgressLines() as progress, compute.open() as scheduler, PeakMemory(scheduler) as memory:

        def show(event: Any) -> None:
            progress.counter("predict", event.rows_total)(event.rows)

        budget = MemoryBudget.of(Executor.resolve(scheduler, compute.workers), compute.memory_limit)
        report, chunk = write_answers(
            rows,
            query,
            out,
            chunk_rows=chunk_rows,
            overwrite=overwrite,
            budget=budget,
            progress=show,
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
