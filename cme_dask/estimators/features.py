"""What a fitted ``PivotedCholesky`` does with rows: features, Gram columns, saving."""

import os
from dataclasses import replace
from typing import Any, Self

import numpy as np
from sklearn.base import TransformerMixin

from cme_dask.chunked.clusters import Scheduler
from cme_dask.chunked.driver import Executor
from cme_dask.chunked.features import FeatureReport, WriteProgress, write_features
from cme_dask.chunked.lazy import gram_columns, lazy_features
from cme_dask.chunked.memory import MemoryBudget
from cme_dask.chunked.sources import open_sample
from cme_dask.errors import DataError
from cme_dask.estimators.recipe import FittedBasis, NotFitted
from cme_dask.kernels import Kernel
from cme_dask.models import FeatureModel, load_only
from cme_dask.storage.columns import Columns
from cme_dask.storage.rows import ArraySource
from cme_dask.storage.sample import Sample

Array = Any


class FittedFeatures(TransformerMixin):  # type: ignore[misc]
    """The half of :class:`PivotedCholesky` that follows the fit."""

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
        return self._fitted().basis.eigenvalues

    def transform(self, X: Any) -> Any:
        """Features of the rows of X, shape (n, m).

        A Dask array or a store gives a lazy Dask array, with its row chunks divided where a block
        of features would exceed 64 MiB; anything else a NumPy array. Columns that have names are
        taken by name.

        Parameters
        ----------
        X
            Rows, shape (n, d), as in :meth:`JointDistribution.fit`; of a sample store, its x.

        Raises
        ------
        DataError
            On a wrong number of columns, NaN or infinity (when the rows are read).
        """
        model = self._fitted()
        sample = self._rows_of(X)
        sample.check_whole("transform")
        source = sample.sources[0]
        if isinstance(source, ArraySource):
            return model.checked(source.read(0, sample.n_rows), 0)
        return lazy_features(source, model)

    def transform_store(
        self,
        X: Any,
        out: str | os.PathLike[str],
        *,
        chunk_rows: int | None = None,
        dtype: Any = "float64",
        overwrite: bool = False,
        scheduler: Scheduler = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: WriteProgress | None = None,
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
        scheduler, workers, memory_limit
            As in :meth:`JointDistribution.fit`.
        progress
            Called with a :class:`PassProgress` when a task has ended.

        Returns
        -------
        FeatureReport
            Rows, passes over them, seconds, predicted memory.

        Raises
        ------
        DataError
            On wrong columns, an output that exists, values that are not finite, or features too
            large for float32.
        StoreError
            On damaged chunks of the source.
        ResourceError
            If the memory does not suffice (no row has been read then), or the disk.
        """
        model = self._fitted()
        sample = self._rows_of(X)
        executor = Executor.resolve(scheduler, workers)
        budget = MemoryBudget.of(executor, memory_limit)
        return write_features(
            sample,
            model,
            out,
            chunk_rows=chunk_rows,
            dtype=dtype,
            overwrite=overwrite,
            budget=budget,
            progress=progress,
        )

    def gram_columns(self, X: Any) -> Any:
        """Columns k(x_i, p_j) at the pivots as a lazy Dask array, see :func:`gram_columns`."""
        model = self._fitted()
        return gram_columns(model.kernel, self._rows_of(X), model.pivots)

    def get_feature_names_out(self, input_features: Any = None) -> Array:
        """Names of the features: newton0, newton1, ... or spectral0, ..."""
        return np.array(self._fitted().names, dtype=object)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the fitted features to a folder, see :meth:`FeatureModel.save`.

        ``cme_dask.load(path)`` gives a :class:`FeatureModel`, which needs no Dask;
        :meth:`PivotedCholesky.load` gives an estimator that is lazy where X is.
        """
        self._fitted().save(path, overwrite=overwrite)

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
        estimator._adopt(model)
        return estimator

    def _adopt(self, model: FeatureModel) -> None:
        """Become fitted."""
        self.model_ = model
        self.basis_ = FittedBasis(model.basis.newton, model.basis, model.trace_error)
        self.columns_ = model.columns
        self.n_features_in_ = len(model.columns.names)
        self.n_passes_ = int(model.about["passes"])

    def _rows_of(self, X: Any) -> Sample:
        """The sample with those columns of x, by name or position, that the fit had."""
        sample = open_sample(X)
        names, found = self._fitted().columns.names, sample.columns[0].names
        named = sample.row_sample is not None or not _made_up(found)
        if named and (not _made_up(names) or set(names) <= set(found)):
            where = "X" if sample.location == "memory" else sample.location
            places = sample.columns[0].positions_of(self._fitted().columns, where)
            sample = sample.select([found[place] for place in places])
        if len(sample.columns[0].names) != len(names):
            raise DataError(
                f"X has {len(sample.columns[0].names)} columns, the fit had {len(names)}"
            )
        return sample

    def _fitted(self) -> FeatureModel:
        if not hasattr(self, "model_"):
            raise NotFitted("this PivotedCholesky is not fitted: call fit first")
        return self.model_


def _made_up(names: tuple[str, ...]) -> bool:
    """Whether these are the names that arrays without names get: such columns go by position."""
    return names == Columns.default("x", len(names)).names


def x_alone(sample: Sample) -> Sample:
    """The same rows without y."""
    if len(sample.sources) == 1:
        return sample
    rows = sample.row_sample
    alone = None if rows is None else replace(rows, parts=rows.parts[:1])
    return replace(sample, sources=sample.sources[:1], columns=sample.columns[:1], row_sample=alone)
