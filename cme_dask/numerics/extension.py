"""A Newton basis with more pivots, from rows that it does not span."""

from typing import Any

import numpy as np

from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import PivotedRows
from cme_dask.numerics.sampled import GREEDY

Array = Any

_SHARE = 0.8


def extended_basis(
    basis: NewtonBasis,
    rows: Array,
    index: Array,
    weights: Array,
    tol: float,
    max_rank: int | None = None,
) -> NewtonBasis:
    """The basis with greedy pivots from these rows after its own (joint paper, Algorithm 1).

    Its first functions are those of the basis: the factor of K(p, p) on more pivots begins with
    that on the first ones.

    Parameters
    ----------
    basis
        The basis.
    rows
        A random sample of rows, shape (n, d), as it was drawn; as many are looked at as the rank
        asks for.
    index
        Their global row indices, shape (n,).
    weights
        Of the rows, shape (n,).
    tol
        Relative residual trace over the rows beyond which there are more pivots: down to 0.8 of it,
        since it is too small on rows of which some are pivots.
    max_rank
        Largest rank, the pivots of the basis included.

    Returns
    -------
    NewtonBasis
        The same one if the rows are spanned already.
    """
    # Many, since no other rows tell whether these pivots are enough.
    few = GREEDY.prefix_rows(4 * basis.rank, len(rows))
    run = PivotedRows(basis.kernel, rows[:few], index[:few], weights[:few] / weights[:few].sum())
    run.follow(basis.points, basis.factor)
    limit = few if max_rank is None else min(few, max_rank - basis.rank)
    if run.history[-1] <= tol:
        return basis
    tol *= _SHARE
    while run.history[-1] > tol and run.rank < limit and run.greedy(limit):
        pass
    met = np.flatnonzero(np.asarray(run.history[basis.rank :]) <= tol)
    new = run.picks[: int(met[0])] if len(met) else run.picks
    if not len(new):
        return basis
    points = rows[new]
    left = basis(points)
    own = np.linalg.cholesky(basis.kernel(points, points) - left @ left.T)
    factor = np.block([[basis.factor, np.zeros((basis.rank, len(new)))], [left, own]])
    known = basis.rows is not None
    return NewtonBasis(
        basis.kernel,
        np.concatenate([basis.points, points]),
        factor,
        np.concatenate([basis.rows, index[new]]) if known else None,
    )
