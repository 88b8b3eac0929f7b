"""Computing your own statistics of all rows in one pass: write a reduction, and run it.

A :class:`Reduction` says what is computed from a strip of rows and how the partial results of two
neighbouring sets of rows are combined. :func:`run` takes it over the rows of a sample: on threads,
processes or a cluster, with predicted memory, checks of the values, progress and checkpoints.
"""

from typing import Any, TypeVar

from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.numerics.reduction import Cost, Extent, Fused, Reduction, Strip
from cme_dask.numerics.weighted import FeatureBasis, WeightedMoments
from cme_dask.passes.run import PassReport, RunOptions, run_pass

__all__ = [
    "Cost",
    "Extent",
    "FeatureBasis",
    "Fused",
    "PassReport",
    "Reduction",
    "RunOptions",
    "Strip",
    "WeightedMoments",
    "run",
]

Result = TypeVar("Result")


def run(
    sample: Sample, reduction: Reduction[Any, Result], options: RunOptions | None = None
) -> tuple[Result, PassReport]:
    """Compute a reduction over all rows of a sample in one pass.

    Parameters
    ----------
    sample : Sample
        The rows, from :func:`cme_dask.open_sample`; of a part only its rows count.
    reduction : Reduction
        The reduction. Several take one pass as ``Fused((a, b))``.
    options : RunOptions, optional
        Where and how to run; default: Dask's current scheduler, without a checkpoint.

    Returns
    -------
    result : what ``reduction.finalize`` returns
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
    if not isinstance(reduction, Reduction):
        raise DataError(f"reduction must be a Reduction, got {type(reduction).__name__}")
    if not isinstance(sample, Sample):
        raise DataError(f"sample must come from open_sample, got {type(sample).__name__}")
    options = options or RunOptions()
    with options.opened(reduction.name, {"reduction": reduction}, sample) as (budget, progress):
        return run_pass(sample, reduction, budget, progress)
