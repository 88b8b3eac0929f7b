"""Landmarks of partitions of unity, chosen from the row sample: which rows, and how many."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.constraints import LANDMARKS, Coupling
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.numerics.crossval import held_out_losses
from cme_dask.numerics.folds import distinct_in_random_order, fold_of_rows, sklearn_seed
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.numerics.partition import PartitionBasis, pivot_landmarks
from cme_dask.numerics.problem import JointSolver, Regularization
from cme_dask.numerics.scoring import mean_and_error
from cme_dask.numerics.support import deviations, distinct_rows, make_support

Array = Any

CANDIDATES = (8, 16, 32, 64, 128, 256)
"""Numbers of landmarks that are tried."""

_ITERATIONS = 10  # of Lloyd: more of them take seconds and gain little
_CLUSTERED = 1 << 15  # rows that k-means sees: a thousand clusters of them take a second

_FOLDS = 5
_TOL = 1e-4  # of the solutions that are compared: their losses differ by far more


def choose_landmarks(
    kernel: Any,
    rows: Array,
    weights: Array,
    count: int,
    choice: str = "pivots",
    seed: int = 0,
    categorical: Sequence[bool] = (),
) -> Array:
    """Landmarks of one variable from the row sample.

    Parameters
    ----------
    kernel
        The kernel.
    rows
        Rows of the row sample, shape (n, d).
    weights
        Their weights, shape (n,).
    count
        How many; fewer if there are not so many distinct rows, or the kernel can't tell them apart.
    choice
        ``"pivots"``: greedy pivoted Cholesky, of which fewer are a prefix of more. ``"kmeans"``:
        centres of k-means on standardised columns, means of quantile bins for a scalar variable.
        Of columns of labels each has the commonest label of its rows.
    seed
        Of k-means.
    categorical
        Which columns are codes of labels; default none.

    Returns
    -------
    points : (m, d), m <= count

    Raises
    ------
    DataError
        On an unknown choice.
    """
    if choice not in LANDMARKS:
        raise DataError(f"choice must be one of {', '.join(LANDMARKS)}, got {choice!r}")
    if choice == "kmeans":
        if rows.shape[1] == 1 and not any(categorical):
            return make_support(rows, weights, count).points
        return _centres(rows[:_CLUSTERED], weights[:_CLUSTERED], count, seed, categorical)
    first, which = distinct_in_random_order(rows)
    distinct = np.asarray(rows)[first]
    return distinct[pivot_landmarks(kernel, distinct, np.bincount(which, weights), count)]


def check_given(constraint: Coupling, given: Sequence[Array | None], max_rank: int | None) -> None:
    """Refuse options that ask for other landmarks than the pivots that are given.

    Parameters
    ----------
    constraint
        The options.
    given
        The pivots of x and of y, shapes (m, d), or None where landmarks are to be chosen.
    max_rank
        As the user gave it.

    Raises
    ------
    DataError
        If numbers of landmarks are others, or more than ``max_rank``, or all points are given
        where the options choose them.
    """
    for i, points in enumerate(given):
        if points is None:
            continue
        those = f"the {len(points)} given pivots of {'xy'[i]} are the landmarks of the coupling"
        if constraint.counts is not None and constraint.counts[i] != len(points):
            raise DataError(
                f"{those}, and landmarks asks for {constraint.counts[i]}: give either pivots or a "
                "number of landmarks"
            )
        if max_rank is not None and max_rank < len(points):
            raise DataError(
                f"{those}, more than max_rank={max_rank}: raise max_rank, or give fewer pivots"
            )
    if constraint.choice != "pivots" and all(points is not None for points in given):
        raise DataError(
            f"given pivots are the landmarks of the coupling, so that choice={constraint.choice!r} "
            "has none to choose: give either pivots or a choice"
        )


def _centres(
    rows: Array, weights: Array, count: int, seed: int, categorical: Sequence[bool]
) -> Array:
    """Centres of k-means on standardised columns, or all distinct rows if they are no more.

    Source of k-means++: Arthur and Vassilvitskii (2007), Proceedings of SODA, 1027.
    """
    distinct, mass = distinct_rows(rows, weights)
    if len(distinct) <= count:
        return distinct
    middle, scale = mass @ distinct, deviations(distinct, mass)
    from sklearn.cluster import KMeans  # which takes longer to import than most fits need

    means = KMeans(count, n_init=1, max_iter=_ITERATIONS, random_state=sklearn_seed(seed))
    # Several threads of k-means add up in the order in which they end: last bits would change.
    with one_blas_thread():
        means.fit((distinct - middle) / scale, sample_weight=mass)
    centres = means.cluster_centers_ * scale + middle
    for j in np.flatnonzero(categorical):
        levels, codes = np.unique(distinct[:, j], return_inverse=True)
        masses = np.zeros((len(centres), len(levels)))
        np.add.at(masses, (means.labels_, codes), mass)
        centres[:, j] = levels[masses.argmax(axis=1)]
    return np.asarray(np.unique(centres, axis=0))


@dataclass(frozen=True)
class LandmarkChoice:
    """The number of landmarks, and what it was chosen by.

    Attributes
    ----------
    count
        Of x and of y.
    candidates
        Numbers that were tried, in order: the last one may not have been an improvement.
    losses
        Held-out joint loss of each, mean over the folds by weight; 0 is independence.
    errors
        Standard error of what each improves on the best before.
    """

    count: int
    candidates: tuple[int, ...]
    losses: tuple[float, ...]
    errors: tuple[float, ...]


def landmark_number(
    kernels: tuple[Any, Any],
    parts: tuple[Array, Array],
    weights: Array,
    reg: Regularization,
    *,
    choice: str = "pivots",
    seed: int = 0,
    candidates: Sequence[int] = CANDIDATES,
    folds: Array | None = None,
    categorical: tuple[Sequence[bool], Sequence[bool]] = ((), ()),
) -> LandmarkChoice:
    """Choose the number of landmarks by the held-out joint loss of the coupling.

    Numbers are tried in ascending order, on folds of the row sample, until one does not improve
    by a standard error of its paired differences over the folds, or there are no more landmarks.

    Parameters
    ----------
    kernels
        Of x and of y.
    parts
        Rows of the row sample, of x and of y, shapes (n, d).
    weights
        Their weights, shape (n,).
    reg
        The ridge.
    choice, seed
        See :func:`choose_landmarks`.
    candidates
        Numbers to try.
    folds
        Fold of each row, shape (n,): rows that belong together in one. Default row by row.
    categorical
        Of x and of y, see :func:`choose_landmarks`.

    Raises
    ------
    DataError
        If a kernel can be negative, or there are fewer rows than folds.
    """
    n = len(weights)
    if n < _FOLDS:
        raise DataError(
            f"to choose the number of landmarks takes {_FOLDS} rows, got {n}: give landmarks"
        )
    if folds is None:
        folds = fold_of_rows(0, n, _FOLDS)
    candidates = sorted(set(candidates))
    points = _Nested(kernels, parts, weights, candidates[-1], choice, seed, categorical)
    tried: list[int] = []
    losses: list[Array] = []
    errors: list[float] = []
    best = 0
    for number in candidates:
        if tried and points.exhausted(tried[-1]):
            break
        x, y = (
            FeatureBlock(PartitionBasis(kernel, points(i, number)), _names(parts[i]))
            for i, kernel in enumerate(kernels)
        )
        with one_blas_thread():
            loss, share = _fold_losses((x, y), parts, weights, folds, reg)
        gain = losses[best] - loss if losses else -loss
        mean, error = (float(each) for each in mean_and_error(gain, share))
        tried.append(number)
        losses.append(loss)
        errors.append(error)
        if len(losses) > 1:
            if mean <= error:
                break
            best = len(losses) - 1
    return LandmarkChoice(
        tried[best], tuple(tried), tuple(float(share @ loss) for loss in losses), tuple(errors)
    )


def _names(part: Array) -> tuple[str, ...]:
    return tuple(map(str, range(part.shape[1])))


class _Nested:
    """Landmarks of both variables for every number; of pivots one run holds them all."""

    def __init__(
        self,
        kernels: tuple[Any, Any],
        parts: tuple[Array, Array],
        weights: Array,
        most: int,
        choice: str,
        seed: int,
        categorical: tuple[Sequence[bool], Sequence[bool]],
    ) -> None:
        self._arguments = (kernels, parts, weights, choice, seed, categorical)
        self._all = [self._choose(i, most) for i in (0, 1)]

    def _choose(self, i: int, count: int) -> Array:
        kernels, parts, weights, choice, seed, categorical = self._arguments
        return choose_landmarks(kernels[i], parts[i], weights, count, choice, seed, categorical[i])

    def __call__(self, i: int, count: int) -> Array:
        if count >= len(self._all[i]) or self._arguments[3] == "pivots":
            return self._all[i][:count]
        return self._choose(i, count)

    def exhausted(self, count: int) -> bool:
        """Whether more landmarks than these there are none, of either variable."""
        return all(count >= len(points) for points in self._all)


def _fold_losses(
    sides: tuple[FeatureBlock, FeatureBlock],
    parts: tuple[Array, Array],
    weights: Array,
    folds: Array,
    reg: Regularization,
) -> tuple[Array, Array]:
    """Held-out loss on each fold that has rows, and the folds' shares of the weight."""
    moments = strip_moments(MomentReduction(sides, _FOLDS), parts, weights, folds)
    losses, shares = held_out_losses(moments, JointSolver(Coupling(tol=_TOL), reg).solve)
    if not len(losses):
        raise DataError("all weight is on one fold of the row sample: give the number of landmarks")
    return losses, shares
