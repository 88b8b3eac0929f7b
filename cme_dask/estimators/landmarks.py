"""The step of a fit that chooses the landmarks of a coupling."""

from typing import Any

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.constraints import Coupling
from cme_dask.errors import DataError
from cme_dask.estimators.pivoting import given_points
from cme_dask.estimators.planning import Preparation
from cme_dask.learning.landmarks import CANDIDATES, choose_landmarks, landmark_number
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.problem import Regularization

Array = Any

_ROWS = 1 << 13  # of the row sample, among which landmarks are chosen


def partitions(
    ready: Preparation,
    constraint: Coupling,
    reg: Regularization,
    max_rank: int | None,
    seed: int,
) -> list[PartitionBasis]:
    """Partitions of unity of x and of y on landmarks from the row sample, or on given points.

    Parameters
    ----------
    ready
        The preparation of the fit.
    constraint, reg
        Of the fit: where the number of landmarks is to be chosen, the held-out loss of its
        solutions on the row sample decides.
    max_rank
        Largest number that is tried.
    seed
        Of k-means.

    Raises
    ------
    DataError
        If a kernel can be negative, or pivots are to be chosen over all rows.
    """
    choice, rows = ready.choice, ready.choice.rows.prefix(_ROWS)
    counts = constraint.counts
    if any(isinstance(wanted, str) and wanted != "sampled" for wanted in choice.wanted):
        raise DataError(
            "constraint='coupling' takes landmarks from the row sample or given points as pivots, "
            f"got pivots={choice.wanted!r}"
        )
    if counts is None:  # of a side whose points are given it is not asked
        counts = (1, 1)
    with one_blas_thread():
        if constraint.counts is None and any(isinstance(wanted, str) for wanted in choice.wanted):
            tried = [c for c in CANDIDATES if max_rank is None or c <= max_rank] or [max_rank or 1]
            kernel_x, kernel_y = ready.kernels
            found = landmark_number(
                (kernel_x, kernel_y),
                (rows.parts[0], rows.parts[1]),
                rows.importance,
                reg,
                choice=constraint.choice,
                seed=seed,
                candidates=tried,
            )
            counts = found.count, found.count
        bases = []
        for i, (kernel, wanted) in enumerate(zip(ready.kernels, choice.wanted, strict=True)):
            if isinstance(wanted, str):
                points = choose_landmarks(
                    kernel, rows.parts[i], rows.importance, counts[i], constraint.choice, seed
                )
            else:
                # All of them: landmarks have cells, they need not be linearly independent.
                points = given_points(wanted, choice.sample.columns[i], choice.names[i])
            bases.append(PartitionBasis(kernel, points))
    return bases
