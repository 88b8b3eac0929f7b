"""``PivotedCholesky``: low-rank kernel features, fitted and transformed."""

import os
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np
from sklearn.base import TransformerMixin

from cme_dask.config import SAMPLE_SIZE, TOL
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.base import (
    Declarations,
    FittedBasis,
    Measured,
    check_choice,
)
from cme_dask.estimators.growing import MomentEstimator
from cme_dask.estimators.planning import FitPlan
from cme_dask.kernels import Kernel
from cme_dask.models import load_only
from cme_dask.models.features import BASES, FeatureModel
from cme_dask.models.merging import FitSums
from cme_dask.numerics.basis import LinearBasis, eigenbasis
from cme_dask.numerics.folds import RowSample
from cme_dask.numerics.moments import MomentReduction
from cme_dask.numerics.precision import SpectrumChange
from cme_dask.passes.driver import (
    MomentFitKeywords,
    MomentKeywords,
    PassKeywords,
    options_of,
    with_run_options,
)
from cme_dask.passes.lazy import gram_columns, lazy_features
from cme_dask.passes.lazy_laws import given_rows
from cme_dask.passes.progress import listening
from cme_dask.passes.sources import open_sample
from cme_dask.passes.write import FeatureReport, write_features

# What a fitted ``PivotedCholesky`` does with rows: features, Gram columns, saving


Array = Any


class FittedFeatures(TransformerMixin, MomentEstimator):  # type: ignore[misc]
    """The half of :class:`PivotedCholesky` that follows the fit."""

    @property
    def pivots_(self) -> Array:
        """Pivots, shape (m, d)."""
        return self.model_.pivots

    @property
    def trace_error_(self) -> float:
        """Relative trace error over all rows."""
        return float(self.model_.trace_error)

    @property
    def eigenvalues_(self) -> Array:
        """Eigenvalues lam of the spectral basis, descending, shape (m,)."""
        return self.model_.basis.eigenvalues

    def transform(self, X: Any) -> Any:
        """Features of the rows of X, shape (n, m).

        A Dask array or a store gives a lazy Dask array, with its row chunks divided where a block
        of features would exceed 64 MiB; anything else a NumPy array. After
        ``set_output(transform="pandas")``, scikit-learn makes a DataFrame of either, for which it
        computes all rows of a lazy array: keep the default where features exceed the memory.
        Columns that have names are taken by name, and labels are those of the fit.

        Parameters
        ----------
        X
            Rows, shape (n, d), as in :meth:`JointDistribution.fit`; of a sample store, its x.

        Raises
        ------
        DataError
            On other columns than those of the fit, labels that it has not seen and its kernel does
            not pool, NaN or infinity (when the rows are read).
        """
        model = self.model_
        sample = self._rows_of(X)
        sample.check_whole("transform")
        source = sample.sources[0]
        if source.in_memory:
            return model.checked(source.read(0, sample.n_rows), 0)
        return lazy_features(source, model)

    @with_run_options
    def transform_store(
        self,
        X: Any,
        out: str | os.PathLike[str],
        *,
        chunk_rows: int | None = None,
        dtype: Any = "float64",
        overwrite: bool = False,
        **keywords: Unpack[PassKeywords],
    ) -> FeatureReport:
        """Write the features of all rows of X to a sample store, out of core, in one pass.

        The store holds the features as its x (columns newton0, newton1, ... or spectral0, ...),
        and the source's y, weights and row sample: estimators fit on it, and ``open_sample`` opens
        it. It appears at ``out`` when it is whole; a run that fails or is killed leaves nothing
        there. The values are bit-equal for any chunks of X and ``out``, scheduler and number of
        workers. Workers of a cluster must see the folder of ``out``.

        Parameters
        ----------
        X
            Rows, or rows with y and weights, as in :func:`open_sample`.
        out
            Local folder to make.
        chunk_rows
            Rows per chunk of the new store. Default: a power of two, at most 32 MB of features.
        dtype
            ``"float64"``, or ``"float32"`` to halve the disk space.
        overwrite
            Replace an existing store when the new one is whole.
        **keywords
            As in :class:`RunOptions`.

        Returns
        -------
        FeatureReport
            Rows, passes over them, seconds, predicted memory.

        Raises
        ------
        DataError
            On wrong columns or labels, an output that exists, values that are not finite, or
            features too large for float32.
        StoreError
            On damaged chunks of the source.
        ResourceError
            If the memory does not suffice (no row has been read then), or the disk.
        """
        model = self.model_
        sample = self._rows_of(X)
        options = options_of(keywords, PassKeywords)
        with listening(options.progress) as listener:
            return write_features(
                sample,
                model,
                out,
                chunk_rows=chunk_rows,
                dtype=dtype,
                overwrite=overwrite,
                executor=options.executor(),
                progress=listener,
            )

    def gram_columns(self, X: Any) -> Any:
        """Columns k(x_i, p_j) at the pivots as a lazy Dask array, see :func:`gram_columns`."""
        model = self.model_
        return gram_columns(model.kernel, self._rows_of(X), model.pivots)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Names of the features: newton0, newton1, ... or spectral0, ..."""
        return np.array(self.model_.names, dtype=object)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        kernels: dict[str, Kernel] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> Self:
        """A fitted estimator from what :meth:`save` wrote; its pivots are now given points.

        Parameters
        ----------
        path, kernels, storage_options
            As in :func:`cme_dask.load`.

        Raises
        ------
        StoreError
            If there is no model, or it is damaged, unfinished or of a newer version.
        DataError
            If it is a model of another type, or a user's own kernel is needed and not given.
        """
        model = load_only(FeatureModel, path, kernels=kernels, storage_options=storage_options)
        estimator = cls(
            model.kernel, tol=float(model.about["tol"]), basis=model.kind, pivots=model.pivots
        )
        estimator.__dict__.update(_attributes(model))
        return estimator

    def _rows_of(self, X: Any) -> Sample:
        """The sample with those columns of x that the fit had, in the codes of its labels."""
        sample = open_sample(X)
        (x,) = given_rows(sample, self.model_).sources
        rows = sample.row_sample
        return replace(
            sample,
            sources=(x, *sample.sources[1:]),
            columns=(self.model_.columns, *sample.columns[1:]),
            row_sample=rows and replace(rows, parts=()),  # its rows are read anew
        )


def _attributes(model: FeatureModel) -> dict[str, Any]:
    """What a fitted estimator says of its model."""
    return {
        "model_": model,
        "basis_": FittedBasis(model.basis.newton, model.basis, model.trace_error),
        "columns_": model.columns,
        "n_features_in_": len(model.columns.names),
        "n_passes_": int(model.about["passes"]),
    }


def one_variable(sample: Sample, place: int = 0) -> Sample:
    """The same rows with x alone, or with y alone (``place`` 1) as their x.

    Raises
    ------
    DataError
        If there is no y.
    """
    if place >= len(sample.sources):
        raise DataError(f"there are only rows of x in {sample.location}, and no y")
    if len(sample.sources) == 1:
        return sample
    here, rows = slice(place, place + 1), sample.row_sample
    alone = None if rows is None else replace(rows, parts=rows.parts[here])
    return replace(
        sample,
        sources=sample.sources[here],
        columns=sample.columns[here],
        row_sample=alone,
        beside=sample.sources[1 - place :][:1] if sample.dropping else (),
    )


# ``PivotedCholesky``: low-rank kernel features for anyone's kernel PCA, ridge or clustering


class PivotedCholesky(FittedFeatures):
    """Low-rank kernel features by pivoted Cholesky, K ~ L L^T, from data of any size.

    Row i of L is N(x_i), the Newton basis at x_i (joint paper, section 5): inner products of
    features are kernel values up to the power function, k(x, z) = N(x) . N(z) + error, with
    ``|error| <= P(x) P(z)``. One pass over the data measures the trace error and makes the spectral
    basis; transforming is lazy for Dask arrays and stores, and ``transform_store`` writes the
    features of any number of rows to a new store.

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
    pivots : {"sampled", "greedy", "random"} or array
        As in :class:`JointDistribution`, or given points, shape (m, d).
    span : float
        For ``greedy``, in (0, 1], as in :class:`JointDistribution`.
    sample_size : int
        Rows of the row sample from which pivots are chosen.
    accuracy : float, optional
        Faster arithmetic is used as far as it changes eigenvalues by this fraction at most, and
        the trace error by a thousandth of ``tol``, as tried on the row sample before the pass; 0:
        solve first, in float64, always. Default: a tenth of sqrt(2 / n), the standard error of an
        eigenvalue.
    random_state : int, optional
        Seed of the row sample of arrays and of random pivots; default 0.

    Attributes
    ----------
    model_ : FeatureModel
        The fitted features: small, and usable without Dask; what ``save`` writes.
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
    arithmetic_ : ComputeMode
        How the moments were computed: ``name``, and the ``change`` that the trial measured.
    report_ : PassReport
        Time and rows per second of the pass.
    """

    _kernels = {"kernel": "X"}  # noqa: RUF012 - never changed
    _bases = ("basis_",)
    _required = ("sample_size", "tol")

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        tol: float = TOL,
        max_rank: int | None = None,
        basis: str = "newton",
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        accuracy: float | None = None,
        random_state: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.tol = tol
        self.max_rank = max_rank
        self.basis = basis
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.accuracy = accuracy
        self.random_state = random_state

    @with_run_options
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        weights: Any = None,
        **keywords: Unpack[MomentFitKeywords],
    ) -> Self:
        """Choose pivots, and measure them in a pass over the rows.

        Parameters
        ----------
        X
            Rows, shape (n, d), as in :meth:`JointDistribution.fit`; of a sample store, its x.
        y, Y
            Ignored.
        weights
            As in :meth:`JointDistribution.fit`.
        **keywords
            As in :class:`RunOptions`.
        """
        options = options_of(keywords, MomentFitKeywords)
        return self._fit(X, None, weights, {}, options)

    @with_run_options
    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        weights: Any = None,
        **keywords: Unpack[MomentKeywords],
    ) -> Self:
        """Fit, or add rows to an earlier fit, in one pass over the new rows alone.

        The first call is a fit. Later calls keep the pivots, and so the Newton features; the trace
        error and the spectral basis are, to rounding, those over all rows. Saved features hold no
        moments, so that what :meth:`load` gives takes no more rows.

        Parameters
        ----------
        X, weights
            As in :meth:`fit`, of the new rows.
        y, Y
            Ignored.
        **keywords
            As in :class:`RunOptions`.

        Raises
        ------
        DataError
            As :meth:`fit`, or on other columns than before.

        Warns
        -----
        ToleranceWarning
            If the trace error over the new rows is above ``tol``, and more than twice that over the
            earlier ones.
        """
        options = options_of(keywords, MomentKeywords)
        fit = self._grow if hasattr(self, "model_") else self._fit
        return fit(X, None, weights, {}, options)

    @with_run_options
    def plan(
        self,
        X: Any,
        *,
        weights: Any = None,
        **keywords: Unpack[MomentKeywords],
    ) -> FitPlan:
        """What :meth:`fit` would do and take, see :meth:`JointDistribution.plan`.

        Parameters
        ----------
        X, weights
            As in :meth:`fit`.
        **keywords
            As in :class:`RunOptions`.
        """
        options = options_of(keywords, MomentKeywords)
        return self._plan(X, None, weights, {}, options)

    def _check(self) -> None:
        super()._check()
        check_choice("basis", self.basis, BASES)

    @property
    def _default_rank(self) -> None:
        return None

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        return one_variable(open_sample(X, weights=weights))

    def _change(
        self, spec: MomentReduction, trial: RowSample, rows: RowSample, accuracy: float, solver: Any
    ) -> SpectrumChange:
        return SpectrumChange(float(self.tol or TOL), accuracy)

    def _solve(self, sample: Sample, measured: Measured) -> dict[str, Any]:
        (side,), mean = measured.sides, measured.moments.means()
        metadata = {
            "rows": measured.moments.n_rows,
            "passes": measured.passes,
            "tol": float(self.tol or TOL),
            "trace_error": float(mean.trace_error[0]),
            "location": sample.location,
        }
        spectral = LinearBasis(side.basis, *eigenbasis(mean.blocks["x", "x"]))
        model = FeatureModel(sample.columns[0], spectral, self.basis, metadata)
        fitted = _attributes(model)
        return fitted | {"_sides": measured.sides, "_moments": measured.moments}

    def _sums(self, functions: Declarations) -> FitSums:
        if not hasattr(self, "_moments"):
            raise DataError(
                "these features were loaded, and their file holds no moments, without which no "
                "rows can be added: fit them again"
            )
        columns = (self.model_.columns,)
        return FitSums(columns, self._sides, self._moments, (), (), self.model_.about)
