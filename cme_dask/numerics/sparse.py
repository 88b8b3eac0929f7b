"""Sparse approximations of a conditional mean embedding: penalties, problem, solver, held-out loss.

The embedding mu(x) = sum_ij M_ij k_X(x_i, x) k_Y(y_j, .) on a few of many candidate points is to be
near the dense one. With L L^T = K at the candidates of each variable and B the dense embedding in
the orthonormal functions whose values L holds, M minimises |B - L_X^T M L_Y|_F^2 + gamma Omega(M).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from cme_dask.numerics.embedding import ConditionalEmbedding, embedding_loss
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.problem import iterate

Array = Any
Split = tuple[Array, ...]
"""What each term of a penalty contributes to Z - prox(Z)."""
Terms = Sequence[tuple[float, int | None]]

PENALTIES = ("l1", "rows", "columns", "rows-and-columns")

_DYKSTRA, _BOUNDS = 5_000, 10  # iterations at most
_NEWTON = 30  # Newton steps at a centre at most
_GROWTH = (3, 4.0), (14, 2.0), (_NEWTON, 1.0)  # of sigma, after so many steps at most
_INEXACT = 0.05  # gradient at which a centre is left, over |M - centre| / sqrt(sigma)
_COOLING = 300.0  # by how much sigma falls from one gamma to the next
_FACTORIZED = 1_000  # unknowns of l1 up to which systems are factorized
_CG = 500  # iterations of conjugate gradients at most
_ROUGH, _FINE = 0.1, 1e-6  # their relative residuals: on a scattered support, and on groups
_ROUNDING = 1e-15  # ridge of a refit over unknowns and diagonal
_EPS = float(np.finfo(np.float64).eps)
_TINY = np.finfo(np.float64).tiny

# Penalties: sums of norms of groups of entries


@dataclass(frozen=True)
class Penalty:
    r"""A norm Omega(M): over its terms, weight times the sum of the norms of groups of entries.

    ``rows-and-columns`` is n_Y sum_i |M_i.| + n_X sum_j |M_.j|. The paper's penalty, the sum over i
    and j of sqrt(|M_i.|^2 + |M_.j|^2), has no closed prox; it is between 1 / sqrt 2 times this sum
    and this sum.

    Attributes
    ----------
    name
        One of :data:`PENALTIES`.
    terms
        Weight, and the axis along which entries form a group (None: each is one).
    """

    name: str
    terms: Terms

    @classmethod
    def of(cls, name: str, shape: tuple[int, int]) -> "Penalty":
        """Return the penalty of this name for matrices of this shape."""
        n_x, n_y = map(float, shape)
        terms: dict[str, Terms] = {
            "l1": ((1.0, None),),
            "rows": ((1.0, 1),),
            "columns": ((1.0, 0),),
            "rows-and-columns": ((n_y, 1), (n_x, 0)),
        }
        return cls(name, terms[name])

    def value(self, matrix: Array) -> float:
        """Omega(M)."""
        return float(sum(weight * _norms(matrix, axis).sum() for weight, axis in self.terms))

    def prox(self, matrix: Array, step: float, start: Split | None = None) -> tuple[Array, Split]:
        """Minimiser X of |X - Z|^2 / 2 + step Omega(X), 0 off its support, and the split of Z - X.

        A sum of two terms takes Dykstra's iteration, from the split ``start`` of a similar matrix.
        """
        if len(self.terms) == 1:
            ((weight, axis),) = self.terms
            result = _shrunk(matrix, step * weight, axis)
            return result, (matrix - result,)
        (one, first), (two, second) = self.terms
        q = ahead = np.zeros_like(matrix) if start is None else start[1]
        momentum = 1.0
        for _ in range(_DYKSTRA):
            left = _shrunk(matrix - ahead, step * one, first)
            p = matrix - ahead - left
            right = _shrunk(matrix - p, step * two, second)
            before, q = q, matrix - p - right
            if np.abs(q - ahead).max(initial=0.0) <= 1e-14 * step * max(one, two):
                break
            # Dykstra's iteration is gradient descent on the dual of the prox. Nesterov's momentum,
            # begun again where it leads uphill, saves nine of ten iterations.
            uphill = float(((ahead - q) * (q - before)).sum()) > 0.0
            after = 0.5 + np.sqrt(0.25 + momentum**2)
            ahead = q if uphill else q + (momentum - 1.0) / after * (q - before)
            momentum = 1.0 if uphill else after
        return np.where(left != 0.0, right, 0.0), (p, q)

    def dual_norm(self, matrix: Array, split: Split | None = None) -> float:
        """Supremum of <R, M> over Omega(M) <= 1; of a sum of terms a bound above, by a split of R.

        Without a split that bound is tight to nine digits: for X = prox(R, step) the quotient
        <R, X> / Omega(X) is a bound from below, nearer than the step, which is the last of them.
        """
        if len(self.terms) > 1 and split is None:
            lower, upper = 0.0, np.inf
            for _ in range(_BOUNDS):
                point, split = self.prox(matrix, lower, split)
                upper, size = min(upper, self.dual_norm(matrix, split)), self.value(point)
                lower = max(lower, float((matrix * point).sum()) / size) if size else lower
                if upper - lower <= 1e-9 * upper:
                    break
            return upper
        parts = (matrix,) if split is None or len(self.terms) == 1 else split
        rest = (matrix - sum(parts)) / len(parts)
        return max(
            float(_norms(part + rest, axis).max(initial=0.0)) / weight
            for part, (weight, axis) in zip(parts, self.terms, strict=True)
        )


def _norms(matrix: Array, axis: int | None) -> Array:
    """Norms of the groups, which broadcast against the matrix."""
    return np.abs(matrix) if axis is None else np.sqrt((matrix**2).sum(axis=axis, keepdims=True))


def _shrunk(matrix: Array, threshold: float, axis: int | None) -> Array:
    """Groups of a norm up to the threshold become zero, the others lose as much of it."""
    norms = np.maximum(_norms(matrix, axis), max(threshold, _TINY))
    return matrix * (1.0 - threshold / norms)


# The problem, and its solver on explicit state


@dataclass(frozen=True, eq=False)
class SparseProblem:
    """Minimise |B - L_X^T M L_Y|_F^2 + gamma Omega(M) for one or several gamma.

    Attributes
    ----------
    factor_x, factor_y
        L, values of orthonormal functions at the candidates, shapes (n_X, m_X) and (n_Y, m_Y).
    target
        B, the dense embedding in these functions, shape (m_X, m_Y).
    penalty
        Omega.
    """

    factor_x: Array
    factor_y: Array
    target: Array
    penalty: Penalty

    @cached_property
    def kernels(self) -> tuple[Array, Array]:
        """K = L L^T of x and of y, shapes (n_X, n_X) and (n_Y, n_Y)."""
        return self.factor_x @ self.factor_x.T, self.factor_y @ self.factor_y.T

    @cached_property
    def gamma_max(self) -> float:
        """The smallest gamma at which M = 0: twice the dual norm of L_X B L_Y^T."""
        return 2.0 * self.penalty.dual_norm(self.lift(self.target))

    def embed(self, matrix: Array) -> Array:
        """L_X^T M L_Y, shape (m_X, m_Y)."""
        return self.factor_x.T @ matrix @ self.factor_y

    def lift(self, residual: Array) -> Array:
        """L_X E L_Y^T, shape (n_X, n_Y): minus half the gradient of |E|_F^2 by M."""
        return self.factor_x @ residual @ self.factor_y.T


@dataclass(frozen=True, eq=False)
class SparseState:
    """Where the solver of one gamma is.

    Attributes
    ----------
    point, split
        M = prox of centre + sigma L_X y L_Y^T, and the split of what the prox took off.
    residual
        E = B - L_X^T M L_Y.
    objective, gap
        |E|_F^2 + gamma Omega(M), and the duality gap relative to it.
    centre, sigma
        The proximal term is |M - centre|^2 / (2 sigma).
    dual, lifted
        y, which is E in the end, and L_X y L_Y^T.
    steps
        Newton steps at this centre.
    """

    point: Array
    split: Split
    residual: Array
    objective: float
    gap: float
    centre: Array
    sigma: float
    dual: Array
    lifted: Array
    steps: int = 0


@dataclass(frozen=True, eq=False)
class SparseSolver:
    r"""Augmented Lagrangian of the dual, minimised by Newton steps on the support of the prox.

    .. math:: \max_y 2 \langle B, y \rangle - |y|^2 \quad \text{such that} \quad
              2 \Omega^\circ(L_X y L_Y^T) \le \gamma

    First-order steps would need tens of thousands of iterations on Gram matrices. A Newton step
    solves with the part of K_X (x) K_Y on the support alone, and that is small where M is sparse.
    Groups fill a block, on which eigenvectors, and a correction for each group, solve it; with
    groups of rows and of columns they nearly do, and conjugate gradients take few iterations. On a
    large scattered support these end early, far from the solution.

    Attributes
    ----------
    problem, gamma
        What is minimised.
    tol
        Duality gap relative to the objective.
    start
        State for a similar gamma, or None.
    factorized
        Unknowns up to which linear systems of the penalty ``l1`` are factorized.

    Notes
    -----
    Source: Li, Sun and Toh (2018), SIAM Journal on Optimization 28, 433, for the lasso.
    """

    problem: SparseProblem
    gamma: float
    tol: float
    start: SparseState | None = None
    factorized: int = _FACTORIZED

    def init(self) -> SparseState:
        """Return the state at M = 0, or at M of the similar gamma."""
        if self.start is not None:
            return self._moved(self.start, 1.0 / _COOLING)
        target, largest = self.problem.target, [np.diag(k).max() for k in self.problem.kernels]
        lifted = self.problem.lift(target)
        zero, sigma = np.zeros_like(lifted), 1.0 / float(np.prod(largest))
        return self._moved(
            SparseState(zero, (zero, zero), target, 0.0, 0.0, zero, sigma, target, lifted), 1.0
        )

    def step(self, state: SparseState) -> SparseState:
        """Return the state after a Newton step, or at a new centre where none is needed."""
        slope = state.residual - state.dual
        moved = float(np.linalg.norm(state.point - state.centre))
        small = float(np.linalg.norm(slope)) <= _INEXACT * moved / np.sqrt(state.sigma)
        if small or state.steps >= _NEWTON:
            growth = next(factor for most, factor in _GROWTH if state.steps <= most)
            return self._moved(state, growth)
        step = self._newton_step(state, slope)
        lift, gain, length = self.problem.lift(step), float((slope * step).sum()), 1.0
        before = self._lagrangian(state.dual, state.point, state.sigma)
        while True:  # Armijo's rule
            dual, lifted = state.dual + length * step, state.lifted + length * lift
            point, split = self._prox(state.centre, state.sigma, lifted, state.split)
            value = self._lagrangian(dual, point, state.sigma)
            if value <= before - 1e-4 * length * gain + 1e-14 * abs(before) or length < 1e-6:
                break
            length /= 2.0
        return self._measured(replace(state, point=point, split=split, dual=dual, lifted=lifted))

    def done(self, state: SparseState) -> bool:
        """Whether the gap is within the tolerance."""
        return state.gap <= self.tol

    def _moved(self, state: SparseState, growth: float) -> SparseState:
        """Return the state whose centre is the point, with another sigma."""
        centre, sigma = state.point, growth * state.sigma
        start = tuple(growth * part for part in state.split)
        point, split = self._prox(centre, sigma, state.lifted, start)
        return self._measured(
            replace(state, point=point, split=split, centre=centre, sigma=sigma, steps=-1)
        )

    def _prox(
        self, centre: Array, sigma: float, lifted: Array, start: Split | None
    ) -> tuple[Array, Split]:
        step = 0.5 * self.gamma * sigma * (1.0 + 16.0 * _EPS)  # at gamma_max nothing is left
        return self.problem.penalty.prox(centre + sigma * lifted, step, start)

    def _lagrangian(self, dual: Array, point: Array, sigma: float) -> float:
        linear = float((self.problem.target * dual).sum())
        return 0.5 * float((dual**2).sum()) - linear + float((point**2).sum()) / (2.0 * sigma)

    def _measured(self, state: SparseState) -> SparseState:
        """Return the state with residual, objective and gap of its point."""
        problem, dual = self.problem, state.dual
        residual = problem.target - problem.embed(state.point)
        objective = float((residual**2).sum()) + self.gamma * problem.penalty.value(state.point)
        # y is scaled into its constraint. E would do as well, but sees the rounding of M.
        split = tuple(part / state.sigma for part in state.split)
        largest = 0.5 * self.gamma / max(problem.penalty.dual_norm(state.lifted, split), _TINY)
        linear, square = float((problem.target * dual).sum()), float((dual**2).sum())
        share = max(min(largest, linear / max(square, _TINY)), 0.0)
        gap = (objective - share * (2.0 * linear - share * square)) / max(objective, _TINY)
        steps = state.steps + 1
        return replace(state, residual=residual, objective=objective, gap=gap, steps=steps)

    def _newton_step(self, state: SparseState, slope: Array) -> Array:
        """S = slope - L_X^T D L_Y, where D solves a linear system on the support of the prox.

        (K_X (x) K_Y + gamma Omega'' / 2 + 1 / sigma) D = L_X slope L_Y^T.
        """
        problem, support, ridge = self.problem, state.point != 0.0, 1.0 / state.sigma
        rows, columns = (np.flatnonzero(support.any(axis=axis)) for axis in (1, 0))
        if rows.size == 0:
            return slope
        block = np.ix_(rows, columns)
        own = replace(problem, factor_x=problem.factor_x[rows], factor_y=problem.factor_y[columns])
        point, right = state.point[block], own.lift(slope)
        if any(axis is not None for _, axis in problem.penalty.terms):
            direction = self._on_groups(own, point, ridge, right)
        elif np.count_nonzero(support) <= self.factorized:
            direction = solve_on(own, support[block], ridge)(right)
        else:
            # Far from the solution of this centre a rough step does as well.
            size = float(np.linalg.norm(slope)) / max(float(np.linalg.norm(state.dual)), _TINY)
            return _on_entries(own, support[block] / ridge, slope, min(_ROUGH, size))
        return slope - own.embed(direction)

    def _on_groups(self, own: SparseProblem, point: Array, ridge: float, right: Array) -> Array:
        """D, with a product of weights of rows and of columns in the preconditioner."""
        support, terms = point != 0.0, []
        for weight, axis in own.penalty.terms:
            norms = _norms(point, axis)
            terms.append((0.5 * self.gamma * weight / norms, point / norms, axis))

        def system(values: Array) -> Array:
            image = own.kernels[0] @ values @ own.kernels[1] + ridge * values
            for curve, unit, axis in terms:
                image += curve * (values - unit * (unit * values).sum(axis=axis, keepdims=True))
            return np.where(support, image, 0.0)

        free = np.where(support, 1.0 / (ridge + sum(curve for curve, _, _ in terms)), 0.0)
        inverse, weight = _preconditioner(own.factor_x, own.factor_y, free, within=False)
        invert: Callable[[Array], Array] = inverse
        if len(terms) == 1:  # then the weights are exact, and one correction makes the inverse
            ((curve, unit, axis),) = terms
            invert = inverse.without(np.sqrt(free * curve) * unit, axis)
        return conjugate_gradients(
            system,
            lambda values: np.where(support, weight * invert(weight * values), 0.0),
            np.where(support, right, 0.0),
            _FINE,
        )


def _on_entries(own: SparseProblem, free: Array, slope: Array, tol: float) -> Array:
    """S with S + L_X^T J(L_X S L_Y^T) L_Y = slope, J = free: each iterate is a descent."""
    return conjugate_gradients(
        lambda step: step + own.embed(free * own.lift(step)),
        _preconditioner(own.factor_x, own.factor_y, free, within=True)[0],
        slope,
        tol,
    )


@dataclass(frozen=True, eq=False)
class _Inverse:
    """The inverse of 1 + G_X (x) G_Y by eigenvectors of both."""

    vectors_x: Array
    vectors_y: Array
    damping: Array

    def __call__(self, values: Array) -> Array:
        within = self.vectors_x.T @ values @ self.vectors_y / self.damping
        return self.vectors_x @ within @ self.vectors_y.T

    def without(self, parts: Array, axis: int | None) -> Callable[[Array], Array]:
        """The inverse where v v^T is taken off for each group v of ``parts`` along this axis.

        By Sherman, Morrison and Woodbury: one small system, of as many unknowns as groups.
        """
        if axis == 1:
            turned = _Inverse(self.vectors_y, self.vectors_x, self.damping.T).without(parts.T, 0)
            return lambda values: turned(values.T).T
        small = np.eye(parts.shape[1])
        for share, damping in zip(self.vectors_x.T @ parts, self.damping, strict=True):
            half = self.vectors_y * np.sqrt(1.0 / damping)
            small -= np.outer(share, share) * (half @ half.T)
        factor = cho_factor(small, lower=True, overwrite_a=True)

        def invert(values: Array) -> Array:
            plain = self(values)
            return plain + self(parts * cho_solve(factor, (parts * plain).sum(axis=0)))

        return invert


def _preconditioner(
    factor_x: Array, factor_y: Array, free: Array, *, within: bool
) -> tuple[_Inverse, Array]:
    """The inverse of 1 + W_X W_X^T (x) W_Y W_Y^T, or ``within`` of W^T W, and the weights.

    W is the factor with weights of rows and of columns, whose product stands for ``free``.
    """
    root = np.sqrt(free.mean())
    of_x, of_y = (np.sqrt(free.mean(axis=axis) / root)[:, None] for axis in (1, 0))
    (lam_x, vectors_x), (lam_y, vectors_y) = (
        np.linalg.eigh(w.T @ w if within else w @ w.T) for w in (of_x * factor_x, of_y * factor_y)
    )
    damping = 1.0 + np.outer(np.maximum(lam_x, 0.0), np.maximum(lam_y, 0.0))
    return _Inverse(vectors_x, vectors_y, damping), of_x * of_y.T


def conjugate_gradients(
    system: Callable[[Array], Array],
    precondition: Callable[[Array], Array],
    right: Array,
    tol: float,
) -> Array:
    """Solve to a residual, in the norm of the preconditioner, that is ``tol`` times ``right``."""
    result, residual, direction = np.zeros_like(right), right, np.zeros_like(right)
    before, goal = np.inf, -1.0
    for _ in range(_CG):
        step = precondition(residual)
        size = float((residual * step).sum())
        if goal < 0.0:
            goal = tol**2 * size
        if size <= goal:
            break
        direction = step + size / before * direction
        image = system(direction)
        length = size / float((direction * image).sum())
        result = result + length * direction
        residual = residual - length * image
        before = size
    return result


# The coefficients on a support, without the penalty


def refitted(problem: SparseProblem, state: SparseState, tol: float, max_iter: int) -> SparseState:
    r"""The state with the coefficients on its support that are nearest to the dense embedding.

    .. math:: \min_M |B - L_X^T M L_Y|_F^2 \quad \text{such that} \quad
              M_{ij} = 0 \text{ off the support},

    which undoes the shrinkage by the penalty (relaxed lasso). All pairs of some points have two
    small least-squares problems; other supports have their normal equations.

    Parameters
    ----------
    problem
        Its target and factors.
    state
        The solution with the penalty.
    tol
        Gap at which to stop.
    max_iter
        Least-squares steps at most; each after the first only makes good the rounding of those
        before.

    Returns
    -------
    state : SparseState
        Its gap is the larger one of that of the solution, and of |E|_F^2 above its minimum,
        relative to it, by the normal equations; what the rounding of L_X^T M L_Y makes of |E|_F^2
        does not count. Its objective remains that of the solution.

    Notes
    -----
    Source: Meinshausen (2007), Computational Statistics and Data Analysis 52, 374.
    """
    point, residual, gap = state.point, state.residual, np.inf
    solve = _least_squares(problem, point != 0.0)
    floor = _EPS * float((problem.target**2).sum())
    sizes = replace(problem, factor_x=abs(problem.factor_x), factor_y=abs(problem.factor_y))
    for _ in range(max_iter):
        step = solve(residual)
        fall = float((problem.lift(residual) * step).sum())
        # A support that spans all functions has the minimum 0, and coefficients of ill-conditioned
        # Gram matrices are so large that rounding alone keeps |E| from it.
        rounding = (_EPS * float(np.linalg.norm(sizes.embed(abs(point))))) ** 2
        gap = max(fall - rounding, 0.0) / max(float((residual**2).sum()) - fall, floor, _TINY)
        if gap <= tol:
            break
        point = point + step
        residual = problem.target - problem.embed(point)
    return replace(state, point=point, residual=residual, gap=max(state.gap, gap))


def _least_squares(problem: SparseProblem, support: Array) -> Callable[[Array], Array]:
    """From E to the step on the support that takes off its projection."""
    rows, columns = (np.flatnonzero(support.any(axis=axis)) for axis in (1, 0))
    block = np.ix_(rows, columns)
    if not support[block].all():
        # Repeated steps make good what the ridge, which only has to outweigh rounding, takes off.
        largest = np.prod([np.diag(kernel).max() for kernel in problem.kernels])
        solve = solve_on(problem, support, _ROUNDING * np.count_nonzero(support) * largest)
        return lambda residual: solve(problem.lift(residual))
    of_x, of_y = problem.factor_x[rows].T, problem.factor_y[columns].T
    result = np.zeros(support.shape)

    def on_block(residual: Array) -> Array:
        half = np.linalg.lstsq(of_x, residual, rcond=None)[0]
        result[block] = np.linalg.lstsq(of_y, half.T, rcond=None)[0].T
        return result

    return on_block


def solve_on(problem: SparseProblem, support: Array, ridge: float) -> Callable[[Array], Array]:
    """From R to D, zero off the support, with K_X D K_Y + ridge D = R on it."""
    i, j = np.nonzero(support)
    gram_x, gram_y = problem.kernels
    gram = gram_x[np.ix_(i, i)] * gram_y[np.ix_(j, j)]
    gram[np.diag_indices(len(i))] += ridge
    factor = cho_factor(gram, lower=True, overwrite_a=True)

    def solve(right: Array) -> Array:
        result = np.zeros(support.shape)
        result[i, j] = cho_solve(factor, right[i, j])
        return result

    return solve


# The path of solutions, and its losses on held-out folds


def sparse_path(
    problem: SparseProblem,
    gammas: Sequence[float],
    tol: float,
    max_iter: int,
    relax: bool = False,
) -> Iterator[tuple[SparseState, int]]:
    """Yield for each gamma the last state and the number of steps, each started from the last.

    Parameters
    ----------
    problem
        What is minimised.
    gammas
        Descending.
    tol, max_iter
        Relative duality gap, and steps for each gamma at most.
    relax
        Whether the states are :func:`refitted`, in at most so many steps again.
    """
    last: SparseState | None = None
    for gamma in gammas:
        state, steps = iterate(SparseSolver(problem, float(gamma), tol, last), max_iter)
        yield (refitted(problem, state, tol, max_iter) if relax else state), steps
        last = state


def held_out_losses(
    problem: SparseProblem,
    reg: float,
    tol: float,
    max_iter: int,
    relax: bool,
    rest: Moments,
    held: Moments,
    gammas: Array,
) -> Array:
    """Surrogate losses on one fold of the path that the others give, and of their dense embedding.

    Parameters
    ----------
    problem
        That of all rows: factors and penalty are those of the folds, too.
    reg
        The ridge of the dense embeddings.
    tol, max_iter, relax, gammas
        As in :func:`sparse_path`.
    rest, held
        Means over the rows of the other folds, and over its own.

    Returns
    -------
    losses : (G + 1,), of the dense embedding last
    """
    own = replace(problem, target=ConditionalEmbedding.of(rest, reg).operator(rest))
    path = sparse_path(own, gammas, tol, max_iter, relax)
    every = [*(own.embed(state.point) for state, _ in path), own.target]
    return np.array([embedding_loss(held, each) for each in every])
