"""``predict``, ``predict_proba`` and ``score`` of fitted models, as their estimators have them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cme_dask.errors import DataError
from cme_dask.models.lazily import is_out_of_core
from cme_dask.numerics.projection import project
from cme_dask.storage.columns import Columns, labels_have_no_mean

Array = Any


def positive(probabilities: Array, rows: float) -> Array:
    """(n p + 1 / K) / (n + 1) of probabilities p, shape (b, K), from n rows.

    As if one more row had been seen, shared evenly among the labels: no label is excluded, and the
    log loss of one that the law excludes is about log(n K).
    """
    labels = probabilities.shape[1]
    return (rows * probabilities + 1.0 / labels) / (rows + 1.0)


def r_squared(y: Any, means: Array, weights: Any = None) -> float:
    r"""Coefficient of determination :math:`R^2`, the mean over the columns of y.

    Parameters
    ----------
    y
        What was observed, shape (n,) or (n, d).
    means
        Predicted means, of the same shape.
    weights
        Of the rows, shape (n,).

    Raises
    ------
    DataError
        If the shapes differ.

    Notes
    -----
    A column that is constant in these rows has the score 1 where it is met and 0 where it is not,
    as in ``sklearn.metrics.r2_score``.
    """
    observed, found = (np.asarray(values, dtype=np.float64) for values in (y, means))
    observed, found = (v[:, None] if v.ndim == 1 else v for v in (observed, found))
    if observed.shape != found.shape:
        raise DataError(f"y must have shape {found.shape}, got {observed.shape}")
    w = np.ones(len(observed)) if weights is None else np.asarray(weights, dtype=np.float64)
    centre = np.average(observed, axis=0, weights=w)
    error, total = w @ (observed - found) ** 2, w @ (observed - centre) ** 2
    constant = np.where(error == 0.0, 1.0, 0.0)
    return float(
        np.where(total > 0.0, 1.0 - error / np.where(total > 0, total, 1), constant).mean()
    )


class PredictedMeans(ABC):
    """What a model predicts of its y: means of numbers, or the label of one column of labels.

    Models give ``_means(X)``, shape (n, d_Y), ``_shares(X)``, shape (n, K), and their columns.
    """

    about: dict[str, Any]

    def predict(self, X: Any) -> Array:
        """E[Y | x], shape (n,) of one column and (n, d_Y) of more; of labels the most probable one.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. Points out of core give a
            Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns or NaN, or if y holds labels beside other columns.
        """
        columns = self._answered()
        if self._one_label(columns):
            found = self.predict_proba(X)
            if is_out_of_core(X):
                named = {"classes": self.classes, "dtype": self.classes.dtype, "drop_axis": 1}
                return found.map_blocks(most_probable, token="predict", **named)
            return most_probable(found, self.classes)
        for name in columns.categories:
            raise labels_have_no_mean(name, columns)
        means = self._means(X)
        means = means if is_out_of_core(X) else np.asarray(means)
        return means[:, 0] if len(columns.names) == 1 and means.ndim == 2 else means

    def predict_proba(self, X: Any) -> Array:
        """P(Y = label | x), shape (n, K), in the order of ``classes``: positive, sum 1.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. Points out of core give a
            Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns or NaN, or if y is no column of labels.
        """
        columns = self._answered()
        if not self._one_label(columns):
            raise DataError(
                f"y is {columns.listed()}, and only one column of labels has probabilities of "
                "labels: ask for predict, or conditional(x).probability(event)"
            )
        return positive(self._shares(X), float(self.about["rows"]))

    @property
    def classes(self) -> Array:
        """The labels, shape (K,), where y is one column of them."""
        columns = self._answered()
        labels: Sequence[Any] = columns.categories[columns.names[0]]
        found = self.about.get("classes")  # in their own type, where a classifier was fitted
        whole = isinstance(found, list) and len(found) == len(labels)
        return np.asarray(found if whole else labels)

    def score(self, X: Any, Y: Any, sample_weight: Any = None) -> float:
        """R^2 of the predicted means, or the accuracy of predicted labels; higher is better.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name.
        Y
            What was observed there, shape (n,) or (n, d_Y).
        sample_weight
            Weights of the rows, shape (n,).

        Raises
        ------
        DataError
            As :meth:`predict`, or if the shapes differ.
        """
        found = self.predict(X)
        if self._one_label(self._answered()):
            hits = np.asarray(found) == np.asarray(Y).reshape(len(found))
            return float(np.average(hits, weights=sample_weight))
        return r_squared(np.asarray(Y).reshape(found.shape), found, sample_weight)

    @abstractmethod
    def _answered(self) -> Columns:
        """Columns of y."""

    @abstractmethod
    def _means(self, X: Any) -> Array: ...

    @abstractmethod
    def _shares(self, X: Any) -> Array: ...

    def _one_label(self, columns: Columns) -> bool:
        return len(columns.names) == 1 and bool(columns.categories)


def class_name(code: int) -> str:
    """What the indicator of a label is called among the declared functions of y."""
    return f"class {code}"


def nearest_shares(signed: Array) -> Array:
    """The probabilities (b, K) nearest to signed estimates of them, which have the same order."""
    return np.asarray(project(signed, np.ones(signed.shape[1]))[0])


def most_probable(probabilities: Array, classes: Array) -> NDArray[Any]:
    """The label of the largest of each row."""
    return np.asarray(classes[np.asarray(probabilities).argmax(axis=1)])
