"""Multinomial logistic regression in the span of kernel functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import helmert, solve_triangular
from scipy.optimize import minimize
from scipy.special import softmax

from cme_dask.errors import DataError, option
from cme_dask.numerics.reduction import Cost, Extent, Reduction, Strip, blocks, sub_block, tree_sum

# Multinomial logistic loss over rows in the span of kernel functions, with its gradient


Array = Any

_WORD = 8
_KERNEL_FLOPS = 20  # of a kernel value, in operations of a product


@dataclass(frozen=True, eq=False)
class LogisticSums:
    r"""Sums over rows, which add: of the weights, the losses, and the gradient's products.

    Attributes
    ----------
    weight
        Sum of w.
    loss
        Sum of :math:`-w \log p_y(x)`.
    gradient
        Sum of w [k(x, p), 1] (P - Y), shape (m + 1, K).
    rows
        Number of rows.
    """

    weight: float
    loss: float
    gradient: Array
    rows: int

    def __add__(self, other: "LogisticSums") -> "LogisticSums":
        """Sums over both sets of rows."""
        return LogisticSums(
            self.weight + other.weight,
            self.loss + other.loss,
            self.gradient + other.gradient,
            self.rows + other.rows,
        )

    @classmethod
    def of(
        cls, sections: Array, codes: Array, weights: Array | None, coefficients: Array
    ) -> "LogisticSums":
        """Of some rows.

        Parameters
        ----------
        sections
            k(p, x), then a row of ones, shape (m + 1, n).
        codes
            Number of the class of each row, integers, shape (n,).
        weights
            Shape (n,), or None for ones.
        coefficients
            Of the scores [k(x, p), 1] A, shape (m + 1, K).
        """
        rows = np.arange(len(codes))
        residual = softmax(sections.T @ coefficients, axis=1)
        losses = -np.log(np.maximum(residual[rows, codes], np.finfo(np.float64).tiny))
        residual[rows, codes] -= 1.0
        if weights is None:
            weight, loss = float(len(codes)), float(losses.sum())
        else:
            weight, loss = float(weights.sum()), float(weights @ losses)
            residual *= weights[:, None]
        return cls(weight, loss, sections @ residual, len(codes))


@dataclass(frozen=True, eq=False)
class LogisticGradient(Reduction[LogisticSums, LogisticSums]):
    """Loss and gradient of scores [k(x, p), 1] A over all rows.

    Kernel sections are not solved for here: that needs n m^2 operations, scores and gradient of K
    classes need 4 n m K.

    Parameters
    ----------
    kernel, points
        k, and the pivots p, shape (m, d).
    coefficients
        A, shape (m + 1, K).
    """

    kernel: Any
    points: Array
    coefficients: Array
    name = "logistic-rows"
    on_device = False
    kinds = (LogisticSums,)

    @property
    def _block(self) -> int:
        """Rows that stay in cache."""
        return sub_block(len(self.points) + 2 * int(self.coefficients.shape[1]) + 1)

    def cost(self, extent: Extent) -> Cost:
        """Kernel values and two products of a block with A."""
        m, classes = len(self.points), int(self.coefficients.shape[1])
        return Cost(
            flops=m * (_KERNEL_FLOPS + 4 * classes),
            state=3 * self._block * (m + 2 * classes + 1) * _WORD,
            partial=self.coefficients.size * _WORD,
            subject=f"{m} pivots and {classes} classes",
            remedies=(f"lower {option('max_rank')}",),
        )

    def start(self, like: Array) -> Any:
        """What writes kernel sections."""
        return self.kernel.evaluator(self.points)

    def update(self, state: Any, strip: Strip) -> LogisticSums:
        """Of one strip, in blocks that stay in cache."""
        return tree_sum(self._sums(state, strip, here) for here in blocks(len(strip), self._block))

    def _sums(self, write: Any, strip: Strip, here: slice) -> LogisticSums:
        classes = int(self.coefficients.shape[1])
        x, codes = strip.parts[0][here], strip.parts[1][here, 0].astype(np.intp)
        if not ((codes >= 0) & (codes < classes)).all():
            raise DataError(f"codes of labels must be 0 to {classes - 1}: correct y")
        sections = np.ones((len(self.coefficients), len(x)))
        write(x, sections[:-1])
        weights = None if strip.weights is None else strip.weights[here]
        return LogisticSums.of(sections, codes, weights, self.coefficients)


@dataclass(frozen=True, eq=False)
class LogisticProblem:
    r"""Ridge-penalised multinomial logistic regression in V = span{k(., p_1), ..., k(., p_m)}.

    .. math:: J(f) = \mathrm E[-\log p_Y(X)] + \frac r2 \sum_c |f_c|_{\mathcal H}^2, \qquad
              p_c(x) = \frac{\exp(f_c(x) + b_c)}{\sum_e \exp(f_e(x) + b_e)}

    The penalty is minimal where the f_c add up to zero, so the unknowns are K - 1 combinations of
    them: f + b = [N, 1] theta Q^T with Q orthonormal and orthogonal to ones (the Helmert matrix).
    Intercepts b are not penalised. For two classes the log-odds u = f_1 - f_0 have the penalty
    (r / 4) |u|^2: lambda = r / 4 in Zhu and Hastie's form.

    Unknowns are scaled: theta = L^-T z, with L L^T = E[a a^T] / K + diag(r, ..., r, 0) and
    a = [N, 1], the curvature where all classes are equally probable. Then the curvature at z is
    about the identity.

    Parameters
    ----------
    factor
        R with K(p, p) = R R^T, N = k R^-T, shape (m, m).
    gram
        E[a a^T], shape (m + 1, m + 1).
    classes
        Their number K.
    reg
        r > 0.
    """

    factor: Array
    gram: Array
    classes: int
    reg: float

    @property
    def shape(self) -> tuple[int, int]:
        """Of the unknowns: (m + 1, K - 1)."""
        return len(self.gram), self.classes - 1

    @property
    def contrasts(self) -> Array:
        """Q, shape (K, K - 1)."""
        return np.asarray(helmert(self.classes).T)

    @property
    def scaling(self) -> Array:
        """L, lower-triangular, shape (m + 1, m + 1)."""
        curvature = self.gram / self.classes + np.diag(self._ridge)
        return np.linalg.cholesky((curvature + curvature.T) / 2)

    @property
    def _ridge(self) -> Array:
        return np.append(np.full(len(self.factor), self.reg), 0.0)

    def newton(self, z: Array) -> Array:
        """Coefficients of [N, 1] from the scaled unknowns, shape (m + 1, K)."""
        theta = solve_triangular(self.scaling.T, z.reshape(self.shape))
        return np.asarray(theta @ self.contrasts.T)

    def coefficients(self, newton: Array) -> Array:
        """Coefficients of [k(., p), 1] from those of [N, 1], shape (m + 1, K)."""
        return np.vstack(
            [solve_triangular(self.factor, newton[:-1], trans="T", lower=True), newton[-1:]]
        )

    def value(self, newton: Array, sums: LogisticSums) -> tuple[float, Array]:
        """J, and its gradient in the scaled unknowns, flat, at coefficients of [N, 1].

        Parameters
        ----------
        newton
            Coefficients, shape (m + 1, K).
        sums
            Over all rows, at these.
        """
        raw = sums.gradient / sums.weight
        gradient = np.vstack([solve_triangular(self.factor, raw[:-1], lower=True), raw[-1:]])
        gradient += self._ridge[:, None] * newton
        penalty = 0.5 * self.reg * float((newton[:-1] ** 2).sum())
        scaled = solve_triangular(self.scaling, gradient @ self.contrasts, lower=True)
        return sums.loss / sums.weight + penalty, scaled.ravel()


# Kernel logistic regression solved with one pass over the rows for each gradient


@dataclass(frozen=True, eq=False)
class LogisticSolution:
    """Where the iteration ended.

    Attributes
    ----------
    newton
        Coefficients of [N, 1], shape (m + 1, K); rows of sum zero.
    objective
        J there: mean loss and penalty.
    gradient_norm
        Norm of the gradient in the scaled unknowns, in which the curvature is about the identity:
        J is about half its square above the least value.
    iterations, passes
        Steps, and gradients that were made: each is a pass over the rows.
    """

    newton: Array
    objective: float
    gradient_norm: float
    iterations: int
    passes: int


def solve_logistic(
    problem: LogisticProblem,
    sums: Callable[[Array], LogisticSums],
    *,
    tol: float,
    max_iter: int,
) -> LogisticSolution:
    """Minimise by L-BFGS in scaled unknowns (scipy), from probabilities that are all equal.

    Parameters
    ----------
    problem
        The objective.
    sums
        From coefficients of [k(., p), 1], shape (m + 1, K), to the sums over all rows.
    tol
        Norm of the gradient at which the iteration ends.
    max_iter
        Largest number of steps.

    Notes
    -----
    Source: Byrd, Lu, Nocedal and Zhu (1995), SIAM Journal on Scientific Computing 16, 1190.
    """
    unknowns = int(np.prod(problem.shape))

    def value(z: Array) -> tuple[float, Array]:
        newton = problem.newton(z)
        return problem.value(newton, sums(problem.coefficients(newton)))

    result = minimize(
        value,
        np.zeros(unknowns),
        jac=True,
        method="L-BFGS-B",
        # The largest component is at most the norm.
        options={
            "gtol": tol / np.sqrt(unknowns),
            "ftol": 0.0,
            "maxiter": max_iter,
            "maxfun": 2 * max_iter,
            "maxcor": 20,
        },
    )
    return LogisticSolution(
        problem.newton(result.x),
        float(result.fun),
        float(np.linalg.norm(result.jac)),
        int(result.nit),
        int(result.nfev),
    )
