"""What one process measures of others: FMCA, references of RPCholesky, Nystroem and ridge."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cme_dask import kernels
from cme_dask.bench.bare import BareBasis, bare_pass
from cme_dask.bench.data import regression_rows, uniform_rows
from cme_dask.bench.references import accelerated_cholesky, random_cholesky

Array = Any
Result = dict[str, Any]
Describe = Callable[[], Result]
Run = Callable[[], Describe]

NOT_INSTALLED = "not installed: pip install 'cme-dask[bench]'"

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
        found = fmca.PivotedCholesky(kernel, columns, self.tol)
        return partial(self._describe, found, columns)

    def _describe(self, found: Any, columns: Array) -> Result:
        factor, pivots = found.matrixL(), found.indices().astype(np.int64)
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
    """E[y | x] of the same rows: ``JointDistribution``, or scikit-learn's Nystroem and Ridge.

    Equal kernel, rank and ridge (n reg on the features of Nystroem); the held-out error is the
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
        from cme_dask.estimators.joint import JointDistribution

        law = JointDistribution(
            kernel_x=kernels.Gaussian(self.length_scale),
            max_rank=rank,
            reg=self.reg,
            n_folds=1,
            random_state=0,
        ).fit(x, y, scheduler="threads", workers=self.workers)
        return lambda rows: np.asarray(law.expect("y0", rows))

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
            Ridge(alpha=len(x) * self.reg),
        ).fit(x, y[:, 0])
        return lambda rows: np.asarray(model.predict(rows))
