"""Cross-validation from moments by fold: held-out losses, every ridge, intervals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy.special import stdtrit

from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import parallel_map
from cme_dask.kernels.lapack import CholeskyFactor
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.moments import Moments, MomentSums, squared_error
from cme_dask.numerics.problem import JointProblem, JointSolution, Regularization, SolverInfo

# Jackknife replicates and held-out errors, from moments by fold and without another pass


Array = Any
Solve = Callable[[Moments], JointSolution]
Evaluated = TypeVar("Evaluated")

_AT_ONCE = 1 << 15  # numbers in coefficients of several folds and ridges, which caches hold


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
    moments: MomentSums, evaluate: Callable[[Moments, Moments], Evaluated], cores: int = 1
) -> tuple[list[Evaluated], Array]:
    """Evaluate refits on each fold that can be held out, from moments alone.

    Parameters
    ----------
    moments
        By fold.
    evaluate
        Called with the means over the rows of the other folds, and over those of the fold.
    cores
        Threads: a fold each.

    Returns
    -------
    values : list, of the folds that can be held out
    shares : (F,), of the weight, sum 1
    """

    def of_fold(fold: int) -> tuple[Evaluated, float]:
        held = moments.means(fold=fold)
        return evaluate(moments.means(without=fold), held), held.weight

    each = parallel_map(of_fold, moments.held_out_folds, cores)
    shares = np.array([weight for _, weight in each])
    return [value for value, _ in each], shares / shares.sum() if each else shares


class HeldOut(NamedTuple):
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
        (gram_x, mean_x), (gram_y, mean_y) = (
            (transform.T @ held.blocks[v, v] @ transform, transform.T @ held.means[v])
            for v, transform in zip("xy", (transform_x, transform_y), strict=True)
        )
        cross = transform_y.T @ held.blocks["y", "x"] @ transform_x
        return cls(gram_x, gram_y, cross, mean_x, mean_y)

    def loss(self, coef: Array, square: Array | None = None) -> Array:
        """The loss of H, shape (k_Y, k_X), or of several, shape (..., k_Y, k_X).

        ``square``: H^T E[psi_Y psi_Y^T] H, where it is known.
        """
        centred = self.cross - self.mean_y[..., :, None] * self.mean_x[..., None, :]
        gain = (coef * centred).sum(axis=(-2, -1))
        if square is None:
            squared = (self.gram_y @ coef) * (coef @ self.gram_x)
        else:
            squared = square * self.gram_x
        return np.asarray(squared.sum(axis=(-2, -1)) - 2.0 * gain)


def held_out_loss(held: Moments, solution: JointSolution) -> float:
    r"""Joint loss of a solution on rows that it has not seen, from their moments.

    .. math:: -2 (E_P h - E_{P_X \otimes P_Y} h) + E_{P_X \otimes P_Y} h^2, \quad h = g - 1,

    with all expectations over the held-out rows. Up to a constant that no model changes it is
    ``|g - g_0|^2`` in L2(P_X x P_Y): it compares between kernels and between constraints, and
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
    return float(HeldOut.of(held, solution.transform_x, solution.transform_y).loss(coef))


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


class Losses(NamedTuple):
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


class HeldFolds(NamedTuple):
    r"""Folds held out, F of them: means in the centred eigenbases psi of the rows of the others.

    Attributes
    ----------
    eigenvalues_x, eigenvalues_y
        E psi^2 over the other folds, shapes (F, k_X) and (F, k_Y).
    correlation
        E[psi_Y psi_X^T] over the other folds, shape (F, k_Y, k_X): over D, see
        :class:`Regularization`, it is H of their refit.
    target, constant
        E[psi_Y f^T] and E f of functions f of y over the other folds, (F, k_Y, q) and (F, q).
    gram_x, gram_y, cross, mean_x, mean_y
        Means over each fold, see :class:`HeldOut`, with a first axis of folds.
    of_x, mean, square
        E[psi_X f^T], E f and E f^2 over each fold, shapes (F, k_X, q), (F, q) and (F, q).
    """

    eigenvalues_x: Array
    eigenvalues_y: Array
    correlation: Array
    target: Array
    constant: Array
    gram_x: Array
    gram_y: Array
    cross: Array
    mean_x: Array
    mean_y: Array
    of_x: Array
    mean: Array
    square: Array

    def losses(self, regs: Sequence[Regularization]) -> Losses:
        """Losses of refits with positive ridges on the fold that they lack: arrays (F, ...)."""
        at_once = max(_AT_ONCE // max(len(regs) * self.correlation[0].size, 1), 1)
        parts = [
            HeldFolds(*(each[i : i + at_once] for each in self))._losses(regs)
            for i in range(0, len(self.mean), at_once)
        ]
        return Losses(*map(np.concatenate, zip(*parts, strict=True)))

    def _losses(self, regs: Sequence[Regularization]) -> Losses:
        lam = self.eigenvalues_y, self.eigenvalues_x
        denominators = np.stack([reg.denominator(*lam) for reg in regs], axis=1)
        # The second axis is that of ridges.
        each = HeldFolds(*(of_folds[:, None] for of_folds in self))
        coef = each.correlation / denominators
        unseen = HeldOut(each.gram_x, each.gram_y, each.cross, each.mean_x, each.mean_y)
        squared = each._squared_error(coef.mT @ each.target)
        return Losses(
            unseen.loss(coef), squared, each._squared_error(each.target[..., :0, :])[:, 0]
        )

    def _squared_error(self, slope: Array) -> Array:
        """Of constant + psi^T slope, with as many functions psi as there are slopes."""
        k = slice(slope.shape[-2])
        return squared_error(
            self.constant,
            slope,
            self.gram_x[..., k, k],
            self.mean_x[..., k],
            self.of_x[..., k, :],
            self.mean,
            self.square,
        )


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
        return JointSolution.of(problem, problem.free, SolverInfo.of_closed_form())

    def losses(self, regs: Sequence[Regularization]) -> Losses:
        """Losses on the fold of refits with positive ridges, fitted without it."""
        rest, held, shift = self.rest, self.held, self.rest.shifts["y"]
        (transform_x, lam_x), (transform_y, lam_y) = self.bases
        alone = (
            lam_x,
            lam_y,
            transform_y.T @ rest.blocks["y", "x"] @ transform_x,
            transform_y.T @ rest.blocks["y", "f(y)"],
            rest.means["f(y)"] - shift,
            *HeldOut.of(held, transform_x, transform_y),
            transform_x.T @ held.blocks["x", "f(y)"],
            held.means["f(y)"] - shift,
            np.diagonal(held.blocks["f(y)", "f(y)"]),
        )
        losses = HeldFolds(*(each[None] for each in alone)).losses(regs)
        return Losses(*(each[0] for each in losses))


@dataclass(frozen=True, eq=False)
class FactoredFold:
    r"""One fold held out, refitted by Cholesky factors: for a few two-sided ridges.

    .. math:: H = S_Y(r_Y) \, \mathrm E[N_Y N_X^T] \, S_X(r_X), \qquad
              S(r) = A^{-1} - \frac{A^{-1} c c^T A^{-1}}{c^T A^{-1} c}, \quad
              A = \mathrm E[N N^T] + r, \quad c = \mathrm E N

    is what :class:`HeldFold` has from eigenbases, on the complements of the means c.

    Attributes
    ----------
    rest, held
        Means over the rows of the other folds, and over its own.
    """

    rest: Moments
    held: Moments

    def smoothed(self, variable: str, reg: float, right: Array) -> Array:
        """S(r) of a variable times a matrix."""
        mean = self.rest.means[variable]
        factor = CholeskyFactor.of(self.rest.blocks[variable, variable], reg)
        both = factor.solve(np.vstack([right.T, mean])).T
        solved, of_mean = both[:, :-1], both[:, -1]
        scale = float(mean @ of_mean)
        if scale > 0.0:
            solved = solved - np.outer(of_mean / scale, mean @ solved)
        return np.asarray(solved)

    def solution(self, reg: Regularization) -> JointSolution:
        """What the other folds give, normalized, in the Newton bases."""
        left = self.smoothed("y", reg.y, self.rest.blocks["y", "x"])
        return JointSolution.in_newton_bases(self.smoothed("x", reg.x, left.T).T)

    def losses(self, regs: Sequence[Regularization]) -> Losses:
        """Losses on the fold of refits with positive ridges, fitted without it."""
        rest, held, constant = self.rest, self.held, self.rest.means["f(y)"]
        joint = np.empty(len(regs))
        squared = np.empty((len(regs), len(constant)))
        gram = held.blocks["y", "y"]
        of_y = {r: self.smoothed("y", r, np.eye(len(gram))) for r in {reg.y for reg in regs}}
        squares = {r: smoother.T @ gram @ smoother for r, smoother in of_y.items()}
        for reg_x in {r.x for r in regs}:
            # What x predicts of the basis of y: its features from here on.
            predicted = self.smoothed("x", reg_x, rest.blocks["y", "x"].T)
            of_fold = held.projected("x", predicted)
            both = held.blocks["y", "x"] @ predicted
            unseen = HeldOut(
                of_fold.blocks["x", "x"], gram, both, of_fold.means["x"], held.means["y"]
            )
            some = [i for i, reg in enumerate(regs) if reg.x == reg_x]
            for i in some:
                joint[i] = unseen.loss(of_y[regs[i].y], squares[regs[i].y])
            smoothers = np.stack([of_y[regs[i].y] for i in some])
            slopes = smoothers.transpose(0, 2, 1) @ rest.blocks["y", "f(y)"]
            squared[some] = of_fold.squared_error("x", "y", constant, slopes)
        flat = np.zeros((len(rest.means["x"]), len(constant)))
        return Losses(joint, squared, held.squared_error("x", "y", constant, flat))


def held_folds(moments: MomentSums) -> Iterator[HeldFold]:
    """Each fold that can be held out, see :meth:`MomentSums.split_folds`."""
    for rest, held in moments.split_folds():
        yield HeldFold(rest, held, [eigenbasis(rest.blocks[v, v], rest.means[v]) for v in "xy"])


def factored_folds(moments: MomentSums) -> Iterator[FactoredFold]:
    """The same folds, for two-sided ridges."""
    for rest, held in moments.split_folds():
        yield FactoredFold(rest, held)


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


def over_folds(weights: Array, values: Array) -> tuple[Array, Array]:
    """Mean of values (F, ...) by the weights of the folds, shape (F,), and its standard error."""
    share = weights / weights.sum()
    mean = np.tensordot(share, values, 1)
    spread = np.tensordot(share**2, (values - mean) ** 2, 1)
    return mean, np.sqrt(spread * len(share) / max(len(share) - 1, 1))
