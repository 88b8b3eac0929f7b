"""The scikit-learn side of estimators: prediction, score, tags, labels as classes."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.base import Estimator
from cme_dask.models.answers import most_probable
from cme_dask.models.points import FloatArray, is_out_of_core
from cme_dask.models.relevance import LengthScales
from cme_dask.numerics.moments import Function
from cme_dask.passes.sources import coded, is_chunked, open_sample

Array = Any


def given_rows(Y: Any, y: Any, weights: Any, sample_weight: Any) -> tuple[Any, Any]:
    """The rows of y and the weights, by whichever names they were given.

    Raises
    ------
    DataError
        If both names of one of them were used.
    """
    if Y is not None and y is not None:
        raise DataError("Y and y are two names of the same argument: give one of them")
    if weights is not None and sample_weight is not None:
        raise DataError("weights and sample_weight are the same: give one of them")
    return y if Y is None else Y, sample_weight if weights is None else weights


def names_of(f: Any, declared: Mapping[str, Function]) -> Any:
    """The same question with declared callables replaced by their names."""
    by_id = {id(function): name for name, function in declared.items()}
    if callable(f):
        return by_id.get(id(f), f)
    if isinstance(f, str) or not isinstance(f, Iterable):
        return f
    return [by_id.get(id(g), g) for g in f]


class MeanRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A regressor that predicts conditional means of y; ``score`` is their R^2.

    Estimators give ``_means(X)``, shape (n, d_Y).
    """

    def predict(self, X: Any) -> FloatArray:
        """E[Y | x], shape (n,) if the fit was given y of that shape, else (n, d_Y).

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives a Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns or NaN, or if a column of y holds labels.
        """
        labels = tuple(self.model_.y.columns.categories)
        if labels:
            raise DataError(
                f"column {labels[0]!r} holds labels, which have no mean: ask for "
                "probabilities, or fit a JointClassifier"
            )
        means = self._means(X)
        means = means if is_out_of_core(X) else np.asarray(means)
        if means.ndim == 1 + len(self._shape):
            return cast(FloatArray, means)
        return cast(FloatArray, means[:, None] if self._shape else means[:, 0])

    @property
    def length_scales_(self) -> LengthScales:
        """Length scale and relevance of each column, of the fitted model."""
        scales: LengthScales = self.model_.length_scales
        return scales

    @property
    def columns_x(self) -> Columns:
        """Columns of x: names, units, and labels of those that hold labels."""
        result: Columns = self.model_.x.columns
        return result

    @property
    def columns_y(self) -> Columns:
        """Columns of y: names, units, and labels of those that hold labels."""
        result: Columns = self.model_.y.columns
        return result

    @abstractmethod
    def _means(self, X: Any) -> Array:
        """Conditional means of y, shape (n, d_Y)."""

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        sample = open_sample(X, Y, weights=weights)
        if len(sample.sources) != 2:
            raise DataError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: it "
                "needs rows of x and of y: give Y, or a store"
            )
        return sample

    def _adopt(self, X: Any, Y: Any, sample: Sample) -> None:
        """Keep the shape of predictions."""
        super()._adopt(X, Y, sample)
        ndim = Y.ndim if hasattr(Y, "ndim") else np.asarray(Y).ndim  # None and paths have none
        count = len(sample.columns[1].names)
        self._shape = () if count == 1 and ndim < 2 else (count,)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags


class LabelClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A classifier by conditional probabilities of the labels of y; ``score`` is the accuracy."""

    _expected: Array | None = None  # labels given to a first call of partial_fit
    _every_label = False  # whether rows of each must be among those of a first call

    def predict_proba(self, X: Any) -> FloatArray:
        """P(Y = label | x), shape (n, K), in the order of ``classes_``: non-negative, sum 1.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives a Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        return cast(FloatArray, self.model_.predict_proba(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable label at each point, shape (n,).

        Parameters
        ----------
        X
            As in :meth:`predict_proba`.
        """
        result = self.model_.predict_proba(X)
        if is_out_of_core(X):
            names = {"classes": self.classes_, "dtype": self.classes_.dtype, "drop_axis": 1}
            return cast(NDArray[Any], result.map_blocks(most_probable, token="predict", **names))
        return most_probable(result, self.classes_)

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows, with the labels as codes of a categorical column."""
        sample, self._classes = labelled_sample(
            X, Y, weights, self._expected, complete=self._every_label
        )
        return sample

    def _adopt(self, X: Any, Y: Any, sample: Sample) -> None:
        """Keep the labels, too, now that the fit has ended well."""
        super()._adopt(X, Y, sample)
        self.classes_ = self._classes

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows of a later call, with the codes that labels had in the first."""
        self._classes = self.classes_  # a plan, or a fit that failed, may have left others
        return labelled_sample(X, Y, weights, self.classes_)[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = False
        tags.target_tags.single_output = True
        tags.regressor_tags = None
        return tags


class GrowingClassifier(LabelClassifier):
    """A classifier whose estimator takes more rows: its ``partial_fit`` knows labels."""

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        classes: Any = None,
        weights: Any = None,
        sample_weight: Any = None,
        scheduler: Any = None,
        workers: int | None = None,
        memory_limit: str | int | None = None,
        progress: Any = None,
    ) -> Self:
        """Fit, or add rows to the fitted model, in one pass over the new rows alone.

        As of the estimator without classes: later calls keep kernels, pivots and folds.

        Parameters
        ----------
        X, y, weights, sample_weight, scheduler, workers, memory_limit, progress
            As in :meth:`fit`, of the new rows.
        Y
            Another name of ``y``.
        classes
            On the first call, all labels that may come, shape (K,); default those of its rows.

        Raises
        ------
        DataError
            As :meth:`fit`, or on labels that are not among those.
        """
        if classes is not None and hasattr(self, "classes_"):
            if not np.array_equal(np.unique(classes), np.sort(self.classes_)):
                raise DataError("classes belong to the first call of partial_fit: leave them out")
        elif classes is not None:
            self._expected = np.unique(classes)
        labels, weights = given_rows(y, Y, weights, sample_weight)
        try:
            super().partial_fit(
                X,
                labels,
                weights=weights,
                scheduler=scheduler,
                workers=workers,
                memory_limit=memory_limit,
                progress=progress,
            )
        finally:
            self._expected = None
        return self


def labelled_sample(
    X: Any, y: Any, weights: Any, known: Array | None = None, *, complete: bool = False
) -> tuple[Sample, Array]:
    """Rows of x and codes of labels, and the labels in the order of the codes, shape (K,).

    Parameters
    ----------
    X
        Rows of x; or a store or ``Sample`` whose y is one categorical column.
    y
        Labels, shape (n,): numbers, texts or booleans, in an array, Dask array or pandas Series.
    weights
        Of the rows.
    known
        Labels of earlier rows, if there are some: these have no others.
    complete
        Whether there must be rows of all known labels.

    Raises
    ------
    DataError
        If labels are missing, continuous, unknown, or all the same.
    """
    if y is None:
        return _stored_labels(open_sample(X, weights=weights))
    name = str(getattr(y, "name", None) or "y") if hasattr(y, "to_numpy") else "y"
    if is_chunked(y):
        classes, codes = coded(y)
    else:
        # As scikit-learn does: a column vector is taken with a warning.
        y = column_or_1d(y, warn=True)
        _check_labels(y)
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        codes = codes.astype(np.float64)
    if known is not None:
        _check_complete(classes, known if complete else classes)
        classes, codes = known, _recoded(classes, codes, known)
    if len(classes) < 2:
        got = f"1 class: {classes[0]!r}" if len(classes) else "no rows"
        raise DataError(f"y must hold at least two classes, got {got}")
    sample = open_sample(X, codes, weights=weights)
    name = name if name not in sample.columns[0].names else f"{name} label"
    labels = Columns((name,), {}, {name: tuple(map(str, classes))})
    return replace(sample, columns=(sample.columns[0], labels)), classes


def _check_complete(classes: Array, known: Array) -> None:
    missing = sorted(set(known.tolist()) - set(classes.tolist()), key=str)
    if missing:
        raise DataError(
            f"the first call of partial_fit has no rows labelled {', '.join(map(repr, missing))}: "
            "pivots and cells of the labels come from its rows, so give it some of each, or take "
            "an EmbeddingClassifier, which needs none"
        )


def _recoded(classes: Array, codes: Array, known: Array) -> Array:
    """Codes in the order of the known labels, of codes in that of some of them."""
    unknown = [label for label in classes.tolist() if label not in set(known.tolist())]
    if unknown:
        raise DataError(
            f"y holds labels that the first call had not, {', '.join(map(repr, unknown))}: fit all "
            "rows again"
        )
    numbers = [known.tolist().index(label) for label in classes.tolist()]
    # Codes of chunked labels are lazy, and Dask arrays are no index.
    table = np.array(numbers, dtype=np.float64)
    if is_chunked(codes):
        return codes.map_blocks(lambda block: table[block.astype(np.int64)], dtype=np.float64)
    return table[codes.astype(np.int64)]


def _stored_labels(sample: Sample) -> tuple[Sample, Array]:
    columns = sample.columns[-1]
    if len(sample.sources) != 2:
        raise DataError(
            "a classifier requires y to be passed, but the target y is None: give labels, or a "
            "store whose y is one categorical column"
        )
    if len(columns.names) != 1 or not columns.categories:
        result = f"y: {columns.listed()}"
        raise DataError(
            "a classifier needs y to be one categorical column (ingest with categorical=), "
            f"{sample.location} has {result}"
        )
    return sample, np.array(columns.categories[columns.names[0]], dtype=object)


def _check_labels(y: Array) -> None:
    missing = [v is None or v != v for v in y.tolist()] if y.dtype.kind in "fO" else [False]
    if any(missing):
        raise DataError(
            f"y must hold labels, but {sum(missing):,} (first at row {missing.index(True)}) are "
            "NaN or missing: drop these rows"
        )


@dataclass(frozen=True)
class Level:
    """The indicator of a code, as a declared function of y."""

    code: int

    def __call__(self, rows: Array) -> Array:
        """Indicators, shape (n,), at rows (n, 1)."""
        return rows[:, 0] == self.code
