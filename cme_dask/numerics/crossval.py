"""Cross-validation from moments: every fold and every ridge, from one set of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.heldout import HeldOut
from cme_dask.numerics.joint import JointSolution
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.moments import Moments, Side
from cme_dask.numerics.outcome import Outcome
from cme_dask.numerics.problem import JointProblem, Regularization
from cme_dask.numerics.validation import split_folds, squared_error

Array = Any


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
    transform_x, transform_y, eigenvalues_x, eigenvalues_y
        The centred bases of the other folds, see :class:`JointProblem`.
    """

    rest: MeanMoments
    held: MeanMoments
    transform_x: Array
    transform_y: Array
    eigenvalues_x: Array
    eigenvalues_y: Array

    @classmethod
    def of(cls, rest: MeanMoments, held: MeanMoments) -> "HeldFold":
        """With the eigenbases made."""
        x, y = (eigenbasis(g, c) for g, c in zip(rest.gram, rest.mean, strict=True))
        return cls(rest, held, x[0], y[0], x[1], y[1])

    def problem(self, reg: Regularization) -> JointProblem:
        """The quadratic program of the other folds, normalized, with a positive ridge."""
        assert self.rest.cross is not None
        return JointProblem(
            -(self.transform_y.T @ self.rest.cross @ self.transform_x),
            reg.denominator(self.eigenvalues_y, self.eigenvalues_x),
            self.transform_x,
            self.transform_y,
            self.eigenvalues_x,
            self.eigenvalues_y,
            centred=True,
        )

    def solution(self, reg: Regularization) -> JointSolution:
        """What the other folds give, normalized."""
        problem = self.problem(reg)
        exact = Outcome("closed form", "optimal", 0.0, 0.0, 0.0, 0.0, 0, 0.0, np.inf)
        return JointSolution.of(problem, problem.free, exact)

    def losses(self, regs: Sequence[Regularization]) -> Losses:
        """Losses on the fold of refits with positive ridges, fitted without it."""
        problem = self.problem(regs[0])
        unseen = HeldOut.of(self.held, self.transform_x, self.transform_y)
        target = self.transform_y.T @ self.rest.function_cross[1][1]
        constant = self.rest.function_mean[1]
        joint, squared = [], []
        for reg in regs:
            coef = problem.ridged(reg).free
            joint.append(unseen.loss(coef))
            slope = self.transform_x @ (coef.T @ target)
            squared.append(squared_error(self.held, 0, constant, slope))
        flat = np.zeros((len(self.transform_x), len(constant)))
        baseline = squared_error(self.held, 0, constant, flat)
        return Losses(np.array(joint), np.array(squared), baseline)


def held_folds(moments: Moments, sides: tuple[Side, Side]) -> Iterator[HeldFold]:
    """Each fold that can be held out, see :func:`split_folds`."""
    for rest, held in split_folds(moments, sides):
        yield HeldFold.of(rest, held)


def cross_validate(folds: Sequence[HeldFold], regs: Sequence[Regularization]) -> Losses:
    """Mean losses over the folds, by weight.

    Equal to refits from the rows of the other folds, with the same pivots, for every ridge.

    Parameters
    ----------
    folds
        At least two.
    regs
        Positive ridges.
    """
    each = [fold.losses(regs) for fold in folds]
    parts = zip(*((one.joint, one.squared, one.baseline) for one in each), strict=True)
    joint, squared, baseline = (over_folds(folds, np.stack(part))[0] for part in parts)
    return Losses(joint, squared, baseline)


def over_folds(folds: Sequence[HeldFold], values: Array) -> tuple[Array, Array]:
    """Mean by weight of values (F, ...) over the folds, and its standard error."""
    share = np.array([fold.held.weight for fold in folds])
    share = share / share.sum()
    mean = np.tensordot(share, values, 1)
    spread = np.tensordot(share**2, (values - mean) ** 2, 1)
    return mean, np.sqrt(spread * len(share) / max(len(share) - 1, 1))
