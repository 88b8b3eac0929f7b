"""``PivotedCholesky``: low-rank kernel features for anyone's kernel PCA, ridge or clustering."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.chunked.driver import Executor, Scheduler
from cme_dask.chunked.lazy import map_rows
from cme_dask.chunked.memory import MemoryBudget
from cme_dask.chunked.sources import open_sample
from cme_dask.defaults import SAMPLE_SIZE, TOL
from cme_dask.errors import DataError
from cme_dask.estimators.recipe import (
    FittedBasis,
    NotFitted,
    PivotChoice,
    Progress,
    check_parameters,
    choose_kernel,
    make_moments,
    make_side,
    usable_rows,
    warn_of_error,
)
from cme_dask.kernels import Kernel
from cme_dask.numerics.basis import LinearBasis, eigenbasis
from cme_dask.numerics.moments import MeanMoments, MomentSpec
from cme_dask.storage.columns import Columns, check_finite
from cme_dask.storage.rows import ArraySource
from cme_dask.storage.sample import Sample

Array = Any

_BASES = ("newton", "spectral")


class PivotedCholesky(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Low-rank kernel features by pivoted Cholesky, K ~ L L^T, from data of any size.

    Row i of L is N(x_i), the Newton basis at x_i (joint paper, section 5): inner products of
    features are kernel values up to the power function, k(x, z) = N(x) . N(z) + error, with
    |error| <= P(x) P(z). One pass over the data measures the trace error and makes the spectral
    basis; transforming is lazy for Dask arrays and stores.

    Parameters
    ----------
    kernel : Kernel, optional
        Default: Gaussian, length scales by the median heuristic on standardised columns.
    tol : float
        Relative trace error aimed at, in (0, 1).
    max_rank : int, optional
        Largest number of pivots.
    basis : {"newton", "spectral"}
        Features: N(x), or psi(x) = V^T N(x), uncorrelated, ordered by descending lam = E psi^2.
    pivots : "sampled" or array
        Greedy on the row sample, or given points, shape (m, d).
    sample_size : int
        Rows of the row sample from which pivots are chosen.
    random_state : int, optional
        Seed of the row sample of arrays; default 0.

    Attributes
    ----------
    basis_ : FittedBasis
        ``rank``, ``trace_error`` over all rows, ``pivots``.
    pivots_ : (m, d) array
        The pivots.
    eigenvalues_ : (m,) array
        lam of the spectral basis.
    trace_error_ : float
        Relative trace error over all rows.
    n_features_in_ : int
        Number of columns d.
    n_passes_ : int
        Passes over the rows, as in :class:`JointDistribution`.
    report_ : PassReport
        Time and rows per second of the pass.
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        tol: float = TOL,
        max_rank: int | None = None,
        basis: str = "newton",
        pivots: Any = "sampled",
        sample_size: int = SAMPLE_SIZE,
        random_state: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.tol = tol
        self.max_rank = max_rank
        self.basis = basis
        self.pivots = pivots
        self.sample_size = sample_size
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        weights: Any = None,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Choose pivots on the row sample and measure them in one pass.

        Parameters
        ----------
        X
            Rows, shape (n, d), as in :meth:`JointDistribution.fit`; of a sample store, its x.
        y
            Ignored.
        weights, scheduler, workers, memory_limit, progress
            As in :meth:`JointDistribution.fit`.
        """
        check_parameters(self.tol, self.max_rank, 1, self.sample_size, self.random_state)
        if self.basis not in _BASES:
            raise DataError(f"basis must be one of {', '.join(_BASES)}, got {self.basis!r}")
        sample = _x_alone(open_sample(X, weights=weights))
        executor = Executor.resolve(scheduler, workers)
        budget = MemoryBudget.of(executor, memory_limit)
        rows, passes = usable_rows(sample, self.sample_size, self.random_state or 0, executor)
        columns = sample.columns[0]
        kernel = choose_kernel(self.kernel, rows, 0, columns, "kernel")
        choice = PivotChoice(sample, rows, self.tol, self.max_rank, 1, budget, progress)
        newton = choice.basis(0, kernel, self.pivots, "X")
        sides = (make_side(newton, columns, None, rows, 0),)
        moments, self.report_ = make_moments(sample, MomentSpec(sides), budget, progress)
        mean = MeanMoments.of(moments.total(), sides)
        with one_blas_thread():
            spectral = LinearBasis(newton, *eigenbasis(mean.gram[0]))
        self.basis_ = FittedBasis(newton, spectral, mean.trace_error[0])
        self.columns_ = columns
        self.n_features_in_ = len(columns.names)
        self.n_passes_ = passes + 1
        if isinstance(self.pivots, str):
            warn_of_error(
                "X", newton.rank, self.trace_error_, self.tol, self.max_rank, rows.complete
            )
        return self

    @property
    def pivots_(self) -> Array:
        """Pivots, shape (m, d)."""
        return self._fitted().pivots

    @property
    def trace_error_(self) -> float:
        """Relative trace error over all rows."""
        return self._fitted().trace_error

    @property
    def eigenvalues_(self) -> Array:
        """Eigenvalues lam of the spectral basis, descending, shape (m,)."""
        return self._fitted().spectral.eigenvalues

    def transform(self, X: Any) -> Any:
        """Features of the rows of X, shape (n, m).

        A Dask array or a store gives a lazy Dask array with the same row chunks; anything else a
        NumPy array. Columns that have names are taken by name.

        Raises
        ------
        DataError
            On a wrong number of columns, NaN or infinity (when the rows are read).
        """
        features = self._features()
        sample = _x_alone(open_sample(X))
        names, found = self.columns_.names, sample.columns[0].names
        named = sample.row_sample is not None or not _made_up(found)
        if named and (not _made_up(names) or set(names) <= set(found)):
            sample = sample.select(names)
        if len(sample.columns[0].names) != self.n_features_in_:
            raise DataError(
                f"X has {len(sample.columns[0].names)} columns, the fit had {self.n_features_in_}"
            )
        source = sample.sources[0]
        block = _Features(features, self.columns_)
        if isinstance(source, ArraySource):
            return block(source.read(0, sample.n_rows), 0)
        return map_rows(source, block, self._fitted().rank)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Names of the features: newton0, newton1, ... or spectral0, ..."""
        names = [f"{self.basis}{i}" for i in range(self._fitted().rank)]
        return np.array(names, dtype=object)

    def _features(self) -> Any:
        basis = self._fitted()
        return basis.newton if self.basis == "newton" else basis.spectral

    def _fitted(self) -> FittedBasis:
        if not hasattr(self, "basis_"):
            raise NotFitted("this PivotedCholesky is not fitted: call fit first")
        return self.basis_


@dataclass(frozen=True, eq=False)
class _Features:
    """Features of one block of rows, checked."""

    basis: Any
    columns: Columns

    def __call__(self, rows: Array, first: int) -> Array:
        check_finite(rows, self.columns.names, first)
        return self.basis(rows)


def _made_up(names: tuple[str, ...]) -> bool:
    """Whether these are the names that arrays without names get: such columns go by position."""
    return names == Columns.default("x", len(names)).names


def _x_alone(sample: Sample) -> Sample:
    if len(sample.sources) == 1:
        return sample
    rows = sample.row_sample
    alone = None if rows is None else replace(rows, parts=rows.parts[:1])
    return Sample(sample.sources[:1], sample.columns[:1], sample.weights, alone, sample.location)
