"""Measurements of other packages in one process, and of references in plain NumPy.

Randomly pivoted Cholesky, plain and accelerated, written from the paper in plain NumPy.

Epperly, Tropp, Webber, "Embrace rejection: kernel matrix approximation by accelerated randomly
pivoted Cholesky" (2024). Both keep the factor F of K ~ F^T F, of shape (k, n), in memory.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

from benchmarks.fits import BareBasis, bare_pass, regression_rows, uniform_rows
from cme_dask import kernels

# Randomly pivoted Cholesky, plain and accelerated, written from the paper in plain NumPy


Array = Any
Kernel = Callable[[Array, Array], Array]


def random_cholesky(
    kernel: Kernel, points: Array, rank: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """RPCholesky: each pivot is drawn in proportion to the residual diagonal.

    Parameters
    ----------
    kernel
        Block k(X, Z) with k(x, x) = 1.
    points
        Rows, shape (n, d).
    rank
        Number of pivots k.
    rng
        Source of the draws.

    Returns
    -------
    pivots : (k,) integers
    factor : (k, n) array F with K ~ F^T F
    """
    n = len(points)
    factor, residual = np.empty((rank, n)), np.ones(n)
    pivots = np.empty(rank, dtype=np.int64)
    for i in range(rank):
        pivot = _draws(residual, 1, rng)[0]
        row = kernel(points, points[pivot : pivot + 1])[:, 0]
        row -= factor[:i, pivot] @ factor[:i]
        row /= np.sqrt(row[pivot])
        factor[i], pivots[i] = row, pivot
        residual = np.maximum(residual - row * row, 0.0)
        residual[pivot] = 0.0
    return pivots, factor


def accelerated_cholesky(
    kernel: Kernel, points: Array, rank: int, rng: np.random.Generator, block: int | None = None
) -> tuple[Array, Array]:
    """Accelerated RPCholesky: proposals in blocks, accepted with the law of RPCholesky.

    Parameters
    ----------
    kernel, points, rank, rng
        As in :func:`random_cholesky`.
    block
        Proposals per round; default a tenth of the rank.

    Returns
    -------
    pivots, factor
        As in :func:`random_cholesky`.
    """
    n = len(points)
    block = max(1, rank // 10) if block is None else block
    factor, residual = np.empty((rank, n)), np.ones(n)
    pivots = np.empty(0, dtype=np.int64)
    while (m := len(pivots)) < rank:
        proposals = _draws(residual, block, rng)
        at = points[proposals]
        gram = kernel(at, at) - factor[:m, proposals].T @ factor[:m, proposals]
        accepted, root = reject(gram, rank - m, rng)
        new = proposals[accepted]
        rows = kernel(points[new], points) - factor[:m, new].T @ factor[:m]
        added = factor[m : m + len(new)]
        added[:] = solve_triangular(root, rows, lower=True)
        residual = np.maximum(residual - np.einsum("ij,ij->j", added, added), 0.0)
        residual[new] = 0.0
        pivots = np.concatenate([pivots, new])
    return pivots, factor


def reject(gram: Array, most: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Accept each proposal with probability (residual now) / (residual when it was proposed).

    Parameters
    ----------
    gram
        Residual kernel matrix of the proposals, shape (b, b).
    most
        Largest number to accept.
    rng
        Source of the draws.

    Returns
    -------
    accepted : positions, shape (a,)
    root : Cholesky factor of their residual matrix, lower-triangular, shape (a, a)
    """
    left, bound = gram.copy(), np.diag(gram).copy()
    columns: list[Array] = []
    accepted: list[int] = []
    for i, chance in enumerate(rng.uniform(size=len(gram)) * bound):
        if chance < left[i, i] and len(accepted) < most:
            column = left[:, i] / np.sqrt(left[i, i])
            left -= np.outer(column, column)
            columns.append(column)
            accepted.append(i)
    root = np.tril(np.array(columns).T[accepted]) if accepted else np.empty((0, 0))
    return np.array(accepted, dtype=np.int64), root


def _draws(residual: Array, count: int, rng: np.random.Generator) -> Array:
    """Independent draws in proportion to the residual diagonal."""
    sums = np.cumsum(residual)
    result = np.searchsorted(sums, sums[-1] * rng.uniform(size=count), side="right")
    return np.minimum(result, len(residual) - 1)


# What one process measures of others: FMCA, references of RPCholesky, Nystroem and ridge


Result = dict[str, Any]
Describe = Callable[[], Result]
Run = Callable[[], Describe]

NOT_INSTALLED = "not installed: pip install '.[bench]'"

_WARM_ROWS = 2000
_TEST_ROWS = 20_000
_BLOCK = 1 << 16


def fmca_installed() -> bool:
    """Whether FMCA can be imported."""
    return importlib.util.find_spec("FMCA") is not None


@dataclass(frozen=True)
class Fmca:
    """FMCA's pivoted Cholesky decomposition of the same rows, in memory.

    Its threads are its own choice. Only the decomposition is timed, not fetching its factor L.
    """

    n: int
    d: int
    length_scale: float
    tol: float

    def prepare(self) -> Run:
        """Rows as FMCA wants them, and a small decomposition as warm-up."""
        fmca = importlib.import_module("FMCA")
        kernel = fmca.CovarianceKernel("GAUSSIAN", self.length_scale)
        x = uniform_rows(self.n, self.d)[0]
        columns = np.asfortranarray(x.T)
        fmca.PivotedCholesky(kernel, np.asfortranarray(columns[:, :_WARM_ROWS]), 0.1)
        return partial(self._run, fmca, kernel, columns)

    def _run(self, fmca: Any, kernel: Any, columns: Array) -> Describe:
        result = fmca.PivotedCholesky(kernel, columns, self.tol)
        return partial(self._describe, result, columns)

    def _describe(self, factorization: Any, columns: Array) -> Result:
        factor, pivots = factorization.matrixL(), factorization.indices().astype(np.int64)
        flat = factor.ravel(order="K")
        basis = BareBasis(columns[:, pivots].T, np.tril(factor[pivots]), self.length_scale)
        return {
            "ranks": [len(pivots)],
            "trace_error": 1.0 - float(flat @ flat) / self.n,
            "checked_error": checked_error(basis, columns.T),
            "bytes_read": 0,
        }


def checked_error(basis: BareBasis, rows: Array) -> float:
    """Relative trace error of these pivots over these rows, by the same code for everyone."""
    gram = bare_pass([basis], lambda a, b: (rows[a:b],), len(rows), threads=1)
    return 1.0 - float(np.trace(gram)) / len(rows)


@dataclass(frozen=True)
class Reference:
    """RPCholesky, plain (``accelerated`` false) or accelerated, in NumPy with all BLAS threads."""

    n: int
    d: int
    length_scale: float
    rank: int
    accelerated: bool
    seed: int = 0

    def prepare(self) -> Run:
        """Rows at hand, and a small decomposition as warm-up."""
        kernel = kernels.Gaussian(self.length_scale)
        self._decompose(kernel, uniform_rows(_WARM_ROWS, self.d)[0], 10)
        return partial(self._run, kernel, uniform_rows(self.n, self.d)[0])

    def _decompose(self, kernel: Any, rows: Array, rank: int) -> tuple[Array, Array]:
        algorithm = accelerated_cholesky if self.accelerated else random_cholesky
        return algorithm(kernel, rows, rank, np.random.default_rng(self.seed))

    def _run(self, kernel: Any, rows: Array) -> Describe:
        pivots, factor = self._decompose(kernel, rows, self.rank)
        flat = factor.ravel()
        return lambda: {
            "ranks": [len(pivots)],
            "trace_error": 1.0 - float(flat @ flat) / self.n,
            "bytes_read": 0,
        }


@dataclass(frozen=True)
class ConditionalMean:
    """E[y | x] of the same rows: an embedding, or scikit-learn's Nystroem and Ridge.

    Equal kernel, rank and ridge (n reg on the features of Nystroem), all given, so that neither
    searches, and no intercept. The held-out error is the
    root mean square distance to the true mean at rows that were not fitted.
    """

    method: str
    n: int
    d: int
    length_scale: float
    rank: int
    reg: float
    workers: int

    def prepare(self) -> Run:
        """Rows at hand, and a small fit as warm-up."""
        x, y, _ = regression_rows(_WARM_ROWS, self.d, 1)
        self._fit(x, y, 20)
        x, y, _ = regression_rows(self.n, self.d, 0)
        return partial(self._run, x, y)

    def _run(self, x: Array, y: Array) -> Describe:
        predict = self._fit(x, y, self.rank)
        return partial(self._describe, predict)

    def _describe(self, predict: Callable[[Array], Array]) -> Result:
        x, _, truth = regression_rows(_TEST_ROWS, self.d, 2)
        error = float(np.sqrt(np.mean((predict(x) - truth) ** 2)))
        return {"ranks": [self.rank], "held_out_error": error, "bytes_read": 0}

    def _fit(self, x: Array, y: Array, rank: int) -> Callable[[Array], Array]:
        return self._ours(x, y, rank) if self.method == "ours" else self._nystroem(x, y, rank)

    def _ours(self, x: Array, y: Array, rank: int) -> Callable[[Array], Array]:
        from cme_dask.estimators.embedding import ConditionalMeanEmbedding

        fit = ConditionalMeanEmbedding(
            kernel_x=kernels.Gaussian(self.length_scale),
            kernel_y="median",
            max_rank=rank,
            reg=self.reg,
            n_folds=1,
            random_state=0,
        ).fit(x, y, scheduler="threads", workers=self.workers)
        return lambda rows: np.asarray(fit.predict(rows)).reshape(-1)

    def _nystroem(self, x: Array, y: Array, rank: int) -> Callable[[Array], Array]:
        from sklearn.kernel_approximation import Nystroem
        from sklearn.linear_model import Ridge
        from sklearn.pipeline import make_pipeline

        model = make_pipeline(
            Nystroem(
                kernel="rbf",
                gamma=0.5 / self.length_scale**2,
                n_components=rank,
                random_state=0,
            ),
            Ridge(alpha=len(x) * self.reg, fit_intercept=False),
        ).fit(x, y[:, 0])
        return lambda rows: np.asarray(model.predict(rows))
