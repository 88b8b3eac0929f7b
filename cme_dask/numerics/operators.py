"""Functions of rows that operators multiply by, and the dense formulas of operators from moments.

Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators; conditional expectations,
multiplications and compositions are the regressions of
:class:`cme_dask.numerics.embedding.ConditionalEmbedding`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from scipy.linalg import solve

from cme_dask.display import brief_repr
from cme_dask.errors import DataError
from cme_dask.kernels.lapack import singular_vectors
from cme_dask.numerics.basis import NewtonBasis, eigenbasis
from cme_dask.numerics.embedding import ConditionalEmbedding
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.problem import JointProblem, Regularization

Array = Any
Function = Callable[[Array], Array]

LEAST_EFFECTIVE = 0.01
"""Effective sample size of a density ratio, as a share of the rows, below which it is refused."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """The function c + N(z)^T b of rows, or its positive part.

    Attributes
    ----------
    newton
        The basis N.
    slope
        b, shape (m,).
    constant
        c.
    non_negative
        Whether negative values are replaced by 0.
    """

    newton: NewtonBasis
    slope: Array
    constant: float = 0.0
    non_negative: bool = False

    __repr__ = brief_repr

    def __call__(self, rows: Array) -> Array:
        """Values at rows of shape (n, d), shape (n,)."""
        xp = array_namespace(rows)
        newton = self.newton(rows)
        values = self.constant + newton @ xp.asarray(self.slope)
        return xp.where(values > 0.0, values, 0.0 * values) if self.non_negative else values


@dataclass(frozen=True)
class Reciprocal:
    """The function 1 / f of rows, by which a quotient multiplies.

    Parameters
    ----------
    function
        f, from rows (n, d) to values (n,).
    least
        Values of f nearer to zero than this are an error.
    """

    function: Function
    least: float = 1e-8

    def __call__(self, rows: Array) -> Array:
        """Values at rows of shape (n, d), shape (n,).

        Raises
        ------
        DataError
            If f vanishes at a row; the message holds the row and the value.
        """
        xp = array_namespace(rows)
        values = xp.asarray(self.function(rows))
        size = xp.abs(values)
        if values.shape and bool(xp.any(size < self.least)):
            place = int(xp.argmin(size))
            raise DataError(
                f"the quotient divides by f = {float(values[place]):.3g} at the row "
                f"{np.asarray(rows[place]).tolist()}, nearer to zero than {self.least:g}: leave "
                "such rows out, or add a constant to f"
            )
        return 1.0 / values


@dataclass(frozen=True, eq=False)
class InverseDensity:
    """The function 1 / m of rows of an embedding m >= 0 of a law, and 0 where m is nearly 0.

    Attributes
    ----------
    newton, slope
        m = N^T slope, see :class:`Expansion`.
    least
        Values of m up to this one give 0: no mass is there that a posterior could be asked for.
    """

    newton: NewtonBasis
    slope: Array
    least: float

    def __call__(self, rows: Array) -> Array:
        """Values at rows of shape (n, d), shape (n,)."""
        xp, (values, inside) = array_namespace(rows), self._density(rows)
        return xp.where(inside, 1.0 / xp.where(inside, values, 1.0 + 0.0 * values), 0.0 * values)

    def positive(self, rows: Array) -> Array:
        """1 at rows whose m counts, else 0, shape (n,)."""
        xp, (values, inside) = array_namespace(rows), self._density(rows)
        return xp.where(inside, 1.0 + 0.0 * values, 0.0 * values)

    def _density(self, rows: Array) -> tuple[Array, Array]:
        values = Expansion(self.newton, self.slope)(rows)
        return values, values > self.least


def density_ratio_slope(mean: Moments, target: Array, reg: float) -> Array:
    """Slope b of the ratio 1 + N^T b = dQ/dP by least squares (uLSIF), shape (m,).

    Parameters
    ----------
    mean
        Of P.
    target
        E_Q N, shape (m,).
    reg
        Ridge.

    Notes
    -----
    Source: Kanamori, Hido and Sugiyama (2009), JMLR 10, 1391.
    """
    difference = (target - mean.means["x"])[:, None]
    return ConditionalEmbedding.of(mean, reg).slope(difference)[:, 0]


def joint_ratio(mean: Moments, reg: float) -> Array:
    """H of the density ratio 1 + N_Y^T H N_X of a joint law by least squares, shape (m_Y, m_X).

    Parameters
    ----------
    mean
        Of x and y.
    reg
        Ridge of both variables, positive.
    """
    problem = JointProblem.of(mean, Regularization(reg, reg), centred=True)
    return np.asarray(problem.transform_y @ problem.free @ problem.transform_x.T)


def check_effective_size(first: float, second: float, name: str) -> float:
    """(E r)^2 / E r^2 of a density ratio r; DataError below one percent.

    Parameters
    ----------
    first, second
        E r and E r^2.
    name
        What messages call the ratio.
    """
    share = first * first / second if second > 0.0 else 0.0
    if share < LEAST_EFFECTIVE or first <= 0.0:
        raise DataError(
            f"the effective sample size of {name} is {share:.2%} of the rows, at least "
            f"{LEAST_EFFECTIVE:.0%} are needed: the two laws hardly overlap; raise reg, or bring "
            "rows from where the other law has its mass"
        )
    return share


def posterior_matrix(gram: Array, cross: Array, reg: float) -> Array:
    """(C_YY^2 + r)^-1 C_YY C_YX of reweighted covariances, shape (m_Y, m_X).

    Signed weights make C_YY indefinite, so that its square is regularised.

    Parameters
    ----------
    gram, cross
        C_YY and C_YX, shapes (m_Y, m_Y) and (m_Y, m_X).
    reg
        Ridge r.

    Notes
    -----
    Source: Fukumizu, Song and Gretton (2013), JMLR 14, 3753, (kernel Bayes' rule).
    """
    square = gram @ gram + reg * np.eye(len(gram))
    return np.asarray(solve(square, gram @ cross, assume_a="pos"))


def reduced_rank(mean: Moments, reg: float, rank: int) -> Array:
    """Projection P of regressions on N_X onto the best ones of a rank, shape (m, m).

    P K minimises the regularised surrogate risk among operators of the rank if K is the ridge
    regression (S + r)^-1 S_XY: P = (S + r)^-1/2 U U^T (S + r)^1/2 with the leading left singular
    vectors U of (S + r)^-1/2 S_XY.

    Parameters
    ----------
    mean
        Of x and y.
    reg
        Ridge r > 0.
    rank
        Of the regression.

    Notes
    -----
    Source: Kostic et al. (2022), Learning dynamical systems via Koopman operator regression in
    reproducing kernel Hilbert spaces, section 3.
    """
    transform, lam = eigenbasis(mean.blocks["x", "x"])
    root = np.sqrt(lam + reg)
    whitened = (transform.T / root[:, None]) @ mean.blocks["x", "y"]
    left, _, _ = singular_vectors(whitened, full_matrices=True)
    left = left[:, :rank]
    return np.asarray((transform / root) @ left @ left.T @ (transform * root).T)
