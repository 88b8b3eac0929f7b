"""Cross-validation from moments by fold: held-out losses, every ridge, intervals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from scipy.special import stdtrit

from cme_dask.errors import DataError
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.moments import Moments, MomentSums
from cme_dask.numerics.problem import JointProblem, JointSolution, Regularization, SolverInfo

# Jackknife replicates and held-out errors, from moments by fold and without another pass


Array = Any
Solve = Callable[[Moments], JointSolution]
Evaluated = TypeVar("Evaluated")


def interval_factor(folds: int, level: Any = 0.95) -> float:
    """Standard errors on each side of an interval: the t quantile with F - 1 degrees of freedom.

    Parameters
    ----------
    folds
        Number F of folds, at least 2, of the jackknife.
    level
        Of the interval, in (0, 1).

    Raises
    ------
    DataError
        On fewer folds or another level.

    Notes
    -----
    A standard error of few folds is itself uncertain: of ten, 2 of them hold 92 % and not 95 %.
    """
    if isinstance(level, bool) or not isinstance(level, Real) or not 0.0 < float(level) < 1.0:
        raise DataError(f"the level of an interval must lie between 0 and 1, got {level!r}")
    if folds < 2:
        raise DataError(f"an interval needs at least 2 folds, got {folds}: fit with n_folds=10")
    return float(stdtrit(folds - 1, 0.5 + 0.5 * float(level)))


def held_out(
    moments: MomentSums, evaluate: Callable[[Moments, Moments], Evaluated]
) -> tuple[list[Evaluated], Array]:
    """Evaluate refits on each fold that can be held out, from moments alone.

    Parameters
    ----------
    moments
        By fold.
    evaluate
        Called with the means over the rows of the other folds, and over those of the fold.

    Returns
    -------
    values : list, of the folds that can be held out
    shares : (F,), of the weight, sum 1
    """
    values, weights = [], []
    for rest, held in moments.split_folds():
        values.append(evaluate(rest, held))
        weights.append(held.weight)
    shares = np.array(weights)
    return values, shares / shares.sum() if weights else shares


@dataclass(frozen=True, eq=False)
class HeldOut:
    r"""Moments of held-out rows in the bases of a solution: then a loss is two small products.

    .. math:: -2 (E_P h - E_{P_X \otimes P_Y} h) + E_{P_X \otimes P_Y} h^2,
              \quad h = g - 1 = \psi_Y^T H \psi_X

    estimates |g - g_0|^2 in L2(P_X x P_Y) up to a constant that no model changes: it is comparable
    across kernels and constraints, and 0 for independence.

    Attributes
    ----------
    gram_x, gram_y, cross
        E[psi psi^T] of x and of y, and E[psi_Y psi_X^T].
    mean_x, mean_y
        E psi.
    """

    gram_x: Array
    gram_y: Array
    cross: Array
    mean_x: Array
    mean_y: Array

    @classmethod
    def of(cls, held: Moments, transform_x: Array, transform_y: Array) -> "HeldOut":
        """In the bases psi = T^T N."""
        return cls(
            transform_x.T @ held.blocks["x", "x"] @ transform_x,
            transform_y.T @ held.blocks["y", "y"] @ transform_y,
            transform_y.T @ held.blocks["y", "x"] @ transform_x,
            transform_x.T @ held.means["x"],
            transform_y.T @ held.means["y"],
        )

    def loss(self, coef: Array) -> float:
        """The loss of H, shape (k_Y, k_X)."""
        joint = float((coef * self.cross).sum())
        product = float(self.mean_y @ coef @ self.mean_x)
        square = float(((self.gram_y @ coef @ self.gram_x) * coef).sum())
        return square - 2.0 * (joint - product)


def held_out_loss(held: Moments, solution: JointSolution) -> float:
    r"""Joint loss of a solution on rows that it has not seen, from their moments.

    .. math:: -2 (E_P h - E_{P_X \otimes P_Y} h) + E_{P_X \otimes P_Y} h^2, \quad h = g - 1,

    with all expectations over the held-out rows. Up to a constant that no model changes it is
    |g - g_0|^2 in L2(P_X x P_Y): it compares between kernels and between constraints, and
    independence has loss 0.

    Parameters
    ----------
    held
        Means over the held-out rows in the Newton bases of the solution.
    solution
        Fitted on other rows.

    Returns
    -------
    loss
    """
    # With base 0 the features of each side add up to one, so h = b_Y^T (C - 1) b_X.
    coef = solution.coef if solution.base else solution.coef - 1.0
    return HeldOut.of(held, solution.transform_x, solution.transform_y).loss(coef)


def held_out_losses(moments: MomentSums, solve: Solve) -> tuple[Array, Array]:
    """Joint loss on each fold of a solution fitted on the others, see :func:`held_out_loss`.

    Parameters
    ----------
    moments
        By fold.
    solve
        From moments to the solution.

    Returns
    -------
    losses : (F,), of the folds that can be held out
    shares : (F,), of the weight, sum 1
    """
    losses, shares = held_out(moments, lambda rest, held: held_out_loss(held, solve(rest)))
    return np.array(losses), shares


# Cross-validation from moments: every fold and every ridge, from one set of them


@dataclass(frozen=True, eq=False)
class Losses:
    """Held-out losses of the normalized model, a row for each ridge.

    Attributes
    ----------
    joint
        -2 (E_P h - E_PxP h) + E_PxP h^2, see :class:`HeldOut`; shape (R,). Independence has 0.
    squared
        E (f(Y) - E[f | x])^2 for functions f of y, shape (R, q).
    baseline
        The same for the mean of f, shape (q,).
    """

    joint: Array
    squared: Array
    baseline: Array


@dataclass(frozen=True, eq=False)
class HeldFold:
    """One fold held out: means over the other folds, means over it, the others' eigenbases.

    Attributes
    ----------
    rest, held
        Means over the rows of the other folds, and over its own.
    bases
        The centred bases of the other folds: transform and eigenvalues of x and of y, see
        :class:`JointProblem`.
    """

    rest: Moments
    held: Moments
    bases: Sequence[tuple[Array, Array]]

    def problem(self, reg: Regularization) -> JointProblem:
        """The quadratic program of the other folds, normalized, with a positive ridge."""
        return JointProblem.of(self.rest, reg, centred=True, bases=self.bases)

    def solution(self, reg: Regularization) -> JointSolution:
        """What the other folds give, normalized."""
        problem = self.problem(reg)
        exact = SolverInfo("closed form", "optimal", 0.0, 0.0, 0.0, 0.0, 0, 0.0, np.inf)
        return JointSolution.of(problem, problem.free, exact)

    def losses(self, regs: Sequence[Regularization]) -> Losses:
        """Losses on the fold of refits with positive ridges, fitted without it."""
        problem = self.problem(regs[0])
        (transform_x, _), (transform_y, _) = self.bases
        unseen = HeldOut.of(self.held, transform_x, transform_y)
        target = transform_y.T @ self.rest.blocks["y", "f(y)"]
        constant = self.rest.means["f(y)"]
        joint, squared = [], []
        for reg in regs:
            coef = problem.ridged(reg).free
            joint.append(unseen.loss(coef))
            slope = transform_x @ (coef.T @ target)
            squared.append(self.held.squared_error("x", "y", constant, slope))
        flat = np.zeros((len(transform_x), len(constant)))
        baseline = self.held.squared_error("x", "y", constant, flat)
        return Losses(np.array(joint), np.array(squared), baseline)


def held_folds(moments: MomentSums) -> Iterator[HeldFold]:
    """Each fold that can be held out, see :meth:`MomentSums.split_folds`."""
    for rest, held in moments.split_folds():
        yield HeldFold(rest, held, [eigenbasis(rest.blocks[v, v], rest.means[v]) for v in "xy"])


def joint_loss(rest: Moments, held: Moments, regs: Array) -> Array:
    r"""Held-out joint loss of normalized models on one fold, shape (R,).

    Up to a constant it is |g - g_0|^2 in L2(P_X x P_Y), see :class:`HeldOut`, so that it compares
    kernels and ridges alike. Of a state and the next one of a Markov process this is the squared
    Hilbert-Schmidt distance of transfer operators, minus the VAMP-E score.

    Parameters
    ----------
    rest, held
        Means over the rows of the other folds, and over its own.
    regs
        Ridges > 0, the same for x and y, shape (R,).

    Notes
    -----
    Source: Wu and Noé (2020), Variational approach for learning Markov processes from time series
    data, section 5.
    """
    bases = [eigenbasis(rest.blocks[v, v], rest.means[v]) for v in "xy"]
    both = [Regularization(reg, reg) for reg in map(float, regs)]
    return HeldFold(rest, held, bases).losses(both).joint


def over_folds(folds: Sequence[HeldFold], values: Array) -> tuple[Array, Array]:
    """Mean by weight of values (F, ...) over the folds, and its standard error."""
    share = np.array([fold.held.weight for fold in folds])
    share = share / share.sum()
    mean = np.tensordot(share, values, 1)
    spread = np.tensordot(share**2, (values - mean) ** 2, 1)
    return mean, np.sqrt(spread * len(share) / max(len(share) - 1, 1))
