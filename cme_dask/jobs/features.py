"""What ``cme-dask features`` and ``cme-dask transform`` do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cme_dask.chunked.passes import PassProgress
from cme_dask.chunked.sources import open_sample
from cme_dask.errors import DataError
from cme_dask.estimators.cholesky import PivotedCholesky
from cme_dask.jobs.compute import Compute
from cme_dask.jobs.describe import size_on_disk
from cme_dask.jobs.fitting import describe_memory
from cme_dask.jobs.kept import Kept
from cme_dask.report.memory import PeakMemory
from cme_dask.report.progress import ProgressLines
from cme_dask.storage.atomic import check_output

Result = dict[str, Any]


def fit_features(
    estimator: PivotedCholesky,
    store: str,
    columns: Sequence[str] | None,
    compute: Compute,
    out: Path,
    overwrite: bool,
    kept: Kept,
) -> Result:
    """Fit features of a store's x, save them, and describe what was done.

    Parameters
    ----------
    estimator
        Not fitted yet.
    store
        Path or URL.
    columns
        Columns of x to use; default all.
    compute
        Where to run.
    out, overwrite
        The model to write.
    kept
        Its checkpoint.
    """
    check_output(out, overwrite)
    if kept.shard is not None:
        raise DataError("shards are for `cme-dask fit`: leave out --shard")
    sample = open_sample(store, x_columns=columns)
    kept.settle(overwrite)
    with ProgressLines() as progress, compute.open() as scheduler:
        with PeakMemory(scheduler) as memory:
            estimator.fit(
                sample,
                scheduler=scheduler,
                workers=compute.workers,
                memory_limit=compute.memory_limit,
                progress=progress.fit,
                checkpoint=kept.folder,
            )
        estimator.save(out, overwrite=overwrite)
        kept.finish()
        report = estimator.report_
        progress.say(f"fitted {report.rows:,} rows in {report.seconds:.3g} s")
    model = estimator.model_
    return {
        "store": store,
        "model": str(out),
        "rows": report.rows,
        "columns": list(model.columns.names),
        "basis": model.kind,
        "rank": model.rank,
        "trace_error": model.trace_error,
        "kernel": repr(model.kernel),
        "passes": estimator.n_passes_,
        "tasks": report.tasks,
        "resumed_strips": report.resumed_strips,
        "seconds": report.seconds,
        "rows_per_second": report.rows_per_second,
        "pass_seconds": report.pass_seconds,
        "pass_rows_per_second": report.pass_rows_per_second,
        "memory": describe_memory(report.memory, memory),
    }


def transform_store(
    store: str,
    model: str,
    out: Path,
    *,
    chunk_rows: int | None,
    dtype: str,
    compute: Compute,
    overwrite: bool,
) -> Result:
    """Write the features of a store's rows to a new store, and describe what was done.

    Parameters
    ----------
    store, model
        Paths or URLs.
    out, chunk_rows, dtype, overwrite
        See :meth:`PivotedCholesky.transform_store`.
    compute
        Where to run.
    """
    check_output(out, overwrite)
    features = PivotedCholesky.load(model)
    with ProgressLines() as progress, compute.open() as scheduler, PeakMemory(scheduler) as memory:

        def show(event: PassProgress) -> None:
            progress.counter("transform", event.rows_total)(event.rows)

        report = features.transform_store(
            store,
            out,
            chunk_rows=chunk_rows,
            dtype=dtype,
            overwrite=overwrite,
            scheduler=scheduler,
            workers=compute.workers,
            memory_limit=compute.memory_limit,
            progress=show,
        )
        progress.say(
            f"transformed {report.rows:,} rows in {report.seconds:.3g} s, "
            f"{report.rows_per_second:,.0f} rows/s"
        )
    return {
        "store": store,
        "model": model,
        "out": str(out),
        "rows": report.rows,
        "rank": report.rank,
        "basis": features.model_.kind,
        "dtype": report.dtype,
        "chunk_rows": report.chunk_rows,
        "bytes": size_on_disk(out),
        "passes": report.passes,
        "tasks": report.tasks,
        "seconds": report.seconds,
        "rows_per_second": report.rows_per_second,
        "memory": describe_memory(report.memory, memory),
    }
