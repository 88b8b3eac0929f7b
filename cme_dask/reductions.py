"""Computing your own statistics of all rows in one pass: write a reduction, and run it.

A :class:`Reduction` says what is computed from a strip of rows and how the partial results of two
neighbouring sets of rows are combined. :func:`run` takes it over the rows of a sample: on threads,
processes or a cluster, with predicted memory, checks of the values, progress and checkpoints.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.numerics.basis import FeatureBasis
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip
from cme_dask.numerics.weighted import WeightedMoments
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.progress import listening
from cme_dask.passes.run import PassReport, run_pass

__all__ = [
    "Cost",
    "Extent",
    "FeatureBasis",
    "PassReport",
    "Reduction",
    "RunOptions",
    "Strip",
    "WeightedMoments",
    "run",
]

Result = TypeVar("Result")


@overload
def run(
    sample: Sample, reduction: Reduction[Any, Result], options: RunOptions | None = None
) -> tuple[Result, PassReport]: ...


@overload
def run(
    sample: Sample, reduction: Sequence[Reduction[Any, Any]], options: RunOptions | None = None
) -> tuple[tuple[Any, ...], PassReport]: ...


def run(
    sample: Sample,
    reduction: Reduction[Any, Any] | Sequence[Reduction[Any, Any]],
    options: RunOptions | None = None,
) -> tuple[Any, PassReport]:
    """Compute a reduction over all rows of a sample in one pass.

    Parameters
    ----------
    sample : Sample
        The rows, from :func:`cme_dask.open_sample`; of a part only its rows count.
    reduction : Reduction, or a sequence of them
        The reduction; several are computed in the same pass.
    options : RunOptions, optional
        Where and how to run; default: Dask's current scheduler, without a checkpoint.

    Returns
    -------
    result : what ``reduction.finalize`` returns; of several reductions a tuple of these
    report : PassReport
        With ``rows``, ``seconds``, ``memory`` (predicted peak and limit) and ``resumed_strips``.

    Raises
    ------
    DataError
        On NaN, infinity or negative weights, with the columns and the first rows.
    StoreError
        On damaged chunks, or a checkpoint of another run.
    ResourceError
        If the memory does not suffice; no row has been read then.

    Notes
    -----
    Strips of rows depend on the number of rows alone, and partial results are combined along a
    fixed binary tree. So the bits of the result depend neither on the scheduler nor on workers,
    storage chunks or interruptions.
    """
    reductions = tuple(reduction) if isinstance(reduction, Sequence) else (reduction,)
    for one in reductions:
        if not isinstance(one, Reduction):
            raise DataError(f"reduction must be a Reduction, got {type(one).__name__}")
    if not reductions:
        raise DataError("there is nothing to compute: give at least one reduction")
    if not isinstance(sample, Sample):
        raise DataError(f"sample must come from open_sample, got {type(sample).__name__}")
    options = options or RunOptions()
    depends_on = {"reduction": reduction}
    with (
        options.opened(reductions[0].name, depends_on, sample) as executor,
        listening(options.progress) as listener,
    ):
        results, report = run_pass(sample, reductions, executor, listener)
    return results if isinstance(reduction, Sequence) else results[0], report
