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

_SMALL = 40  # matrices that are inverted in one call for all folds
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


class PairMeans(NamedTuple):
    r"""Means over rows of a pair of bases; over held-out rows a loss is two small products of them.

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
    def of(cls, means: Moments) -> "PairMeans":
        """In the Newton bases."""
        blocks, of = means.blocks, means.means
        return cls(blocks["x", "x"], blocks["y", "y"], blocks["y", "x"], of["x"], of["y"])

    def transformed(self, transform_x: Array, transform_y: Array) -> "PairMeans":
        """In the bases psi = T^T N, or in those of each of several folds."""
        (gram_x, mean_x), (gram_y, mean_y) = (
            (transform.mT @ gram @ transform, (transform.mT @ mean[..., None])[..., 0])
            for gram, mean, transform in (
                (self.gram_x, self.mean_x, transform_x),
                (self.gram_y, self.mean_y, transform_y),
            )
        )
        return PairMeans(gram_x, gram_y, transform_y.mT @ self.cross @ transform_x, mean_x, mean_y)

    def smoother_x(self, reg: float) -> "Smoother":
        """S(r) of x, where the first axis is that of folds."""
        return Smoother(self.gram_x, self.mean_x, reg)

    def smoother_y(self, reg: float) -> "Smoother":
        """S(r) of y."""
        return Smoother(self.gram_y, self.mean_y, reg)

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
    unseen = PairMeans.of(held).transformed(solution.transform_x, solution.transform_y)
    return float(unseen.loss(coef))


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
        -2 (E_P h - E_PxP h) + E_PxP h^2, see :class:`PairMeans`; shape (R,). Independence has 0.
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
        Means over each fold, see :class:`PairMeans`, with a first axis of folds.
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
        unseen = PairMeans(each.gram_x, each.gram_y, each.cross, each.mean_x, each.mean_y)
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
        of_x, of_y = ([each[None] for each in basis] for basis in self.bases)
        losses = FoldMeans.of(self.rest, self.held).in_eigenbases(of_x, of_y).losses(regs)
        return Losses(*(each[0] for each in losses))


class FoldMeans(NamedTuple):
    r"""Folds held out, F of them: means in the Newton bases N over them, and over all others.

    Attributes
    ----------
    rest
        Means over the other folds, with a first axis of folds.
    target, constant
        E[N_Y f^T] and E f of functions f of y over the other folds, (F, m_Y, q) and (F, q).
    held
        Means over each fold.
    of_x, mean, square
        E[N_X f^T], E f and E f^2 over each fold, shapes (F, m_X, q), (F, q) and (F, q).
    """

    rest: PairMeans
    target: Array
    constant: Array
    held: PairMeans
    of_x: Array
    mean: Array
    square: Array

    @classmethod
    def of(cls, rest: Moments, held: Moments) -> "FoldMeans":
        """One fold."""
        square = np.diagonal(held.blocks["f(y)", "f(y)"])
        of_rest, of_held = (
            PairMeans(*(each[None] for each in PairMeans.of(one))) for one in (rest, held)
        )
        return cls(
            of_rest,
            rest.blocks["y", "f(y)"][None],
            rest.means["f(y)"][None],
            of_held,
            held.blocks["x", "f(y)"][None],
            held.means["f(y)"][None],
            square[None],
        )

    def in_eigenbases(self, of_x: Sequence[Array], of_y: Sequence[Array]) -> HeldFolds:
        """In centred eigenbases of the other folds: transforms (F, m, k), eigenvalues (F, k)."""
        (transform_x, lam_x), (transform_y, lam_y) = of_x, of_y
        return HeldFolds(
            lam_x,
            lam_y,
            transform_y.mT @ self.rest.cross @ transform_x,
            transform_y.mT @ self.target,
            self.constant,
            *self.held.transformed(transform_x, transform_y),
            transform_x.mT @ self.of_x,
            self.mean,
            self.square,
        )

    def losses(self, regs: Sequence[Regularization]) -> Losses:
        r"""Losses of refits with two-sided ridges on the fold that they lack: arrays (F, ...).

        .. math:: H = S_Y(r_Y) \, \mathrm E[N_Y N_X^T] \, S_X(r_X), \qquad
                  S(r) = A^{-1} - \frac{A^{-1} c c^T A^{-1}}{c^T A^{-1} c}, \quad
                  A = \mathrm E[N N^T] + r, \quad c = \mathrm E N

        is what :class:`HeldFolds` have from eigenbases, on the complements of the means c. Ridges
        are positive.

        Raises
        ------
        LinAlgError
            If a matrix A cannot be solved with, see :class:`Smoother`.
        """
        rest, held = self.rest, self.held
        folds, q = self.mean.shape
        joint, squared = np.empty((folds, len(regs))), np.empty((folds, len(regs), q))
        eye = np.broadcast_to(np.eye(rest.gram_y.shape[-1]), rest.gram_y.shape)
        of_y = {r: rest.smoother_y(r)(eye) for r in dict.fromkeys(reg.y for reg in regs)}
        squares = {r: smoother.mT @ held.gram_y @ smoother for r, smoother in of_y.items()}
        for reg_x in dict.fromkeys(reg.x for reg in regs):
            # What x predicts of the basis of y: its features from here on.
            predicted = rest.smoother_x(reg_x)(rest.cross.mT)
            unseen = PairMeans(
                predicted.mT @ held.gram_x @ predicted,
                held.gram_y,
                held.cross @ predicted,
                (held.mean_x[:, None] @ predicted)[:, 0],
                held.mean_y,
            )
            of_x = predicted.mT @ self.of_x
            for i, reg in enumerate(regs):
                if reg.x == reg_x:
                    joint[:, i] = unseen.loss(of_y[reg.y], squares[reg.y])
                    slope = of_y[reg.y].mT @ self.target
                    squared[:, i] = self._squared_error(slope, unseen.gram_x, unseen.mean_x, of_x)
        flat = np.zeros_like(self.target[:, :0])
        none = np.zeros((folds, 0, 0)), np.zeros((folds, 0)), flat
        return Losses(joint, squared, self._squared_error(flat, *none))

    def gradient(self, reg: Regularization, in_joint: Array, in_squared: Array) -> "FoldMeans":
        r"""Derivatives of a sum of losses of refits with one two-sided ridge in all these means.

        .. math:: \sum_f \alpha_f J_f + \sum_{f, j} \beta_{f j} e_{f j}

        with the joint losses J and the squared errors e of the functions. From the differentials
        dS = -S dA S - S dc u^T - u dc^T S of what :meth:`losses` calls S, with
        u = A^-1 c / (c^T A^-1 c).

        Parameters
        ----------
        reg
            The ridge.
        in_joint, in_squared
            alpha and beta, shapes (F,) and (F, q).

        Returns
        -------
        FoldMeans
            The derivative in each entry in its place; 0 in means of functions alone.
        """
        rest, held, beta = self.rest, self.held, in_squared[:, None]
        alpha = in_joint[:, None, None]
        of_x, of_y = rest.smoother_x(reg.x), rest.smoother_y(reg.y)
        u, v = of_x.of_mean, of_y.of_mean
        predicted = of_x(rest.cross.mT)
        coef = of_y(predicted.mT)
        slope = coef.mT @ self.target
        by_x = coef @ held.gram_x
        centred = held.cross - held.mean_y[..., None] * held.mean_x[:, None]
        # In B = H^T T, and in H.
        offset = held.mean_x[..., None] * self.constant[:, None]
        in_slope = 2.0 * beta * (held.gram_x @ slope + offset - self.of_x)
        in_coef = 2.0 * alpha * (held.gram_y @ by_x - centred) + self.target @ in_slope.mT
        right_x = of_x(in_coef.mT)
        # On the left side of it, and of what u has of y.
        both = np.concatenate([in_coef, rest.cross @ u[..., None]], axis=-1)
        left = of_y(both)
        right_y, of_u = left[..., :-1], left[..., -1]

        def times(matrix: Array, vector: Array) -> Array:
            return (matrix @ vector[..., None])[..., 0]

        in_rest = PairMeans(
            -_symmetric(right_x @ coef),
            -_symmetric(right_y @ coef.mT),
            of_x(right_y.mT).mT,
            -times(coef.mT, times(in_coef, u)) - times(right_x, of_u),
            -times(right_y, times(predicted, v)) - times(coef, times(in_coef.mT, v)),
        )
        in_held = PairMeans(
            alpha * (coef.mT @ held.gram_y @ coef) + (beta * slope) @ slope.mT,
            alpha * (by_x @ coef.mT),
            -2.0 * alpha * coef,
            2.0 * (times(alpha * coef.mT, held.mean_y) + times(slope, in_squared * self.constant)),
            2.0 * times(alpha * coef, held.mean_x),
        )
        none = np.zeros_like(self.mean)
        return FoldMeans(in_rest, coef @ in_slope, none, in_held, -2.0 * beta * slope, none, none)

    def _squared_error(self, slope: Array, gram: Array, centre: Array, cross: Array) -> Array:
        return squared_error(self.constant, slope, gram, centre, cross, self.mean, self.square)


def _symmetric(matrices: Array) -> Array:
    return 0.5 * (matrices + matrices.mT)


class Smoother:
    """S(r) of each of F folds, see :meth:`FoldMeans.losses`, factored once for all its products.

    Parameters
    ----------
    grams, means
        E[N N^T] and c, shapes (F, m, m) and (F, m).
    reg
        r > 0.

    Attributes
    ----------
    of_mean
        A^-1 c / (c^T A^-1 c), or 0 where there is no mean to stay away from; shape (F, m).

    Raises
    ------
    LinAlgError
        If a matrix A is singular, or a large one not positive definite, as computed.
    """

    def __init__(self, grams: Array, means: Array, reg: float) -> None:
        size = grams.shape[-1]
        self._means, self._inverse, self._factors = means[:, None], None, list[CholeskyFactor]()
        if size <= _SMALL:  # threads wait for the interpreter once, and not for each fold
            self._inverse = np.linalg.inv(grams + reg * np.eye(size))
        else:
            self._factors = [CholeskyFactor.of(gram, reg) for gram in grams]
        of_mean = self._solved(means[..., None])[..., 0]
        scale = (means * of_mean).sum(axis=-1)
        self.of_mean = of_mean / np.where(scale > 0.0, scale, np.inf)[:, None]

    def __call__(self, right: Array) -> Array:
        """S(r) times a matrix of each fold, shape (F, m, k)."""
        solved = self._solved(right)
        return solved - self.of_mean[..., None] * (self._means @ solved)

    def _solved(self, right: Array) -> Array:
        if self._inverse is not None:
            return self._inverse @ right
        each = zip(self._factors, right, strict=True)
        return np.stack([factor.solve(one.T).T for factor, one in each])


@dataclass(frozen=True, eq=False)
class FactoredFold:
    """One fold held out, refitted by linear systems, see :meth:`FoldMeans.losses`.

    Attributes
    ----------
    rest, held
        Means over the rows of the other folds, and over its own.
    """

    rest: Moments
    held: Moments

    def solution(self, reg: Regularization) -> JointSolution:
        """What the other folds give, normalized, in the Newton bases."""
        rest = FoldMeans.of(self.rest, self.held).rest
        left = rest.smoother_y(reg.y)(rest.cross)
        right = rest.smoother_x(reg.x)(left.mT)
        return JointSolution.in_newton_bases(right[0].T)

    def losses(self, regs: Sequence[Regularization]) -> Losses:
        """Losses on the fold of refits with positive ridges, fitted without it."""
        losses = FoldMeans.of(self.rest, self.held).losses(regs)
        return Losses(*(each[0] for each in losses))


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

    Up to a constant it is |g - g_0|^2 in L2(P_X x P_Y), see :class:`PairMeans`, so that it compares
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
