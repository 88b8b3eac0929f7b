"""Signed expectations, and ``predict`` and ``score`` of fitted models."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from cme_dask.codec import Shape
from cme_dask.data.columns import Columns, labels_have_no_mean
from cme_dask.errors import DataError, remedy
from cme_dask.kernels.evaluator import each_block
from cme_dask.metrics.inputs import row_weights
from cme_dask.models.base import Model
from cme_dask.models.events import Event, looks_like_event
from cme_dask.models.points import FloatArray, is_out_of_core, label_codes, query_points
from cme_dask.models.relevance import LengthScales, length_scales
from cme_dask.numerics.basis import LinearBasis, StackedBasis
from cme_dask.numerics.crossval import interval_factor
from cme_dask.numerics.labels import positive

# E[f | z] of functions f of one variable given the other: what every signed estimator answers


Array = Any


@dataclass(frozen=True, eq=False)
class ConditionalExpectation:
    """Everything E[f | z] needs for the functions f of one variable given the other.

    Attributes
    ----------
    names
        The other variable's columns, then its declared functions.
    constant
        The intercept, shape (q,): E f of joint distributions, 0 of embeddings.
    slope
        E[f | z] = constant + psi(z)^T slope, shape (k, q).
    fold_constant, fold_slope
        The same without one fold, by fold, on the Newton basis: shapes (F, q), (F, m, q); F = 0
        without folds.
    """

    names: tuple[str, ...]
    constant: Annotated[Array, Shape("names")]
    slope: Annotated[Array, Shape("k", "names")]
    fold_constant: Annotated[Array, Shape("F", "names")]
    fold_slope: Annotated[Array, Shape("F", "m", "names")]

    def select(
        self,
        f: str | Sequence[str] | None,
        columns: Columns,
        reverse: bool = False,
        *,
        laws: bool = True,
    ) -> str | list[str]:
        """The requested names; by default those of the columns that hold numbers.

        Parameters
        ----------
        f
            Requested names, or None.
        columns
            Of the other variable.
        reverse
            Whether that is x.
        laws
            Whether the model has laws, which answer events that were not declared.

        Raises
        ------
        DataError
            If they are no texts, unknown, columns of labels, or events that weren't declared.
        """
        if f is None:
            if not columns.numeric:
                raise labels_have_no_mean(columns.names[0], columns, laws=laws)
            return list(columns.numeric)
        if not isinstance(f, str) and not (
            isinstance(f, Iterable) and all(isinstance(name, str) for name in f)
        ):
            raise DataError(
                "expect takes names: declare a function at the fit, functions={'name': f}, and ask "
                f"for its name; known here: {', '.join(self.names)}"
            )
        for name in [f] if isinstance(f, str) else f:
            self._check(name, columns, reverse, laws)
        return f if isinstance(f, str) else list(f)

    def _check(self, name: str, columns: Columns, reverse: bool, laws: bool) -> None:
        if name in columns.categories:
            raise labels_have_no_mean(name, columns, laws=laws)
        if name in self.names:
            return
        known = ", ".join(map(repr, self.names))
        if not looks_like_event(name):
            raise DataError(f"unknown column {name!r}: there are {known}")
        Event.of(name, columns, self.names)
        x, of_x, flag, back = ("Y=y", "_x", "-x", " --reverse") if reverse else ("x", "", "", "")
        asked = (
            f"ask the law, conditional({x}).probability({name!r})",
            f"ask the law, cme-dask predict --event {name!r}{back}",
        )
        if not laws:
            asked = (
                "fit a JointDistribution with laws, which answer any event",
                "fit with --estimator joint, whose laws answer any event",
            )
        raise DataError(
            f"the event {name!r} was not declared, so that its moments are not known: "
            + remedy(
                f"fit with functions{of_x}=[{name!r}], or {asked[0]}",
                f"fit with --event{flag} {name!r}, or {asked[1]}",
            )
        )

    def factor(self, level: float) -> float:
        """Standard errors on each side of an interval, see :func:`interval_factor`."""
        return interval_factor(len(self.fold_constant), level)

    def expect(
        self,
        names: str | list[str],
        basis: LinearBasis | StackedBasis,
        points: Array,
        return_std: bool,
    ) -> FloatArray | tuple[FloatArray, FloatArray]:
        """E[f | z] at points (n, d), shape (n,) for one name and (n, len) for several.

        With ``return_std`` also standard errors by the jackknife over the folds.

        Raises
        ------
        DataError
            On unknown names, or folds that the fit did not keep.
        """
        single = isinstance(names, str)
        pick = [self.names.index(name) for name in ([names] if single else names)]
        folds = len(self.fold_constant)
        if return_std and folds < 2:
            raise DataError(
                f"standard errors need folds: fit with {remedy('n_folds', '--folds')} of at least 2"
            )
        slopes = [basis.slope(self.slope[:, pick])]
        if return_std:  # what the folds say, side by side
            slopes.append(np.concatenate(self.fold_slope[:, :, pick], axis=1))
        functions = basis.newton.combined(*slopes)
        result = np.empty((2 if return_std else 1, len(points), len(pick)))

        def fill(here: slice) -> None:
            values = functions(points[here])
            result[0, here] = self.constant[pick] + values[0]
            if return_std:
                each = values[1].reshape(len(values[1]), folds, len(pick))
                each = each + self.fold_constant[:, pick]
                spread = ((each - each.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
                result[1, here] = np.sqrt((folds - 1) / folds * spread)

        each_block(fill, len(points))
        if single:
            result = result[..., 0]
        return (result[0], result[1]) if return_std else result[0]


# ``predict``, ``predict_proba`` and ``score`` of fitted models, as their estimators have them


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
        If the shapes differ, values are NaN or infinite, or weights are negative or all zero.

    Notes
    -----
    A column that is constant in these rows has the score 1 where it is met and 0 where it is not,
    as in ``sklearn.metrics.r2_score``.
    """
    observed, result = (np.asarray(values, dtype=np.float64) for values in (y, means))
    observed, result = (v[:, None] if v.ndim == 1 else v for v in (observed, result))
    if observed.shape != result.shape:
        raise DataError(f"y must have shape {result.shape}, got {observed.shape}")
    w = row_weights(weights, len(observed))
    for name, values in (("y", observed), ("the predicted means", result)):
        if not np.isfinite(values).all():
            raise DataError(f"R^2 needs finite numbers, but {name} hold NaN or infinity")
    centre = np.average(observed, axis=0, weights=w)
    error, total = w @ (observed - result) ** 2, w @ (observed - centre) ** 2
    constant = np.where(error == 0.0, 1.0, 0.0)
    return float(
        np.where(total > 0.0, 1.0 - error / np.where(total > 0, total, 1), constant).mean()
    )


def accuracy(y: Any, probabilities: Array, columns: Columns, weights: Any = None) -> float:
    """Share of the rows whose label is the most probable one.

    Parameters
    ----------
    y
        The labels that were observed, shape (n,) or (n, 1).
    probabilities
        Of the labels, shape (n, K).
    columns
        The column of the labels.
    weights
        Of the rows, shape (n,).

    Raises
    ------
    DataError
        If the shapes differ, no label of y is known, or weights are negative or all zero.
    """
    likeliest = np.asarray(probabilities).argmax(axis=1)
    observed = label_codes(y, columns, some=True)
    if observed.shape != likeliest.shape:
        raise DataError(f"y must have shape {likeliest.shape}, got {observed.shape}")
    return float(np.average(observed == likeliest, weights=row_weights(weights, len(observed))))


class PairModel(Model):
    """A model of two variables, which predicts y: means of numbers, or the label of its one column.

    Models hold their variables ``x`` and ``y``, with columns and basis, and give ``_means(X)``,
    shape (n, d_Y), and ``_shares(X)``, shape (n, K).
    """

    x: Any
    y: Any

    @property
    def columns_x(self) -> Columns:
        """Columns of x: names, units, and labels of those that hold labels."""
        columns: Columns = self.x.columns
        return columns

    @property
    def columns_y(self) -> Columns:
        """Columns of y: names, units, and labels of those that hold labels."""
        columns: Columns = self.y.columns
        return columns

    @property
    def length_scales(self) -> LengthScales:
        """Length scale and relevance of each column, of x first, see :class:`.LengthScales`."""
        sides = (("x", self.x), ("y", self.y))
        return length_scales([(name, side.columns, side.basis) for name, side in sides])

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
        columns = self.columns_y
        if self._one_label(columns):
            result = self.predict_proba(X)
            if is_out_of_core(X):
                named = {"classes": self.classes, "dtype": self.classes.dtype, "drop_axis": 1}
                return result.map_blocks(most_probable, token="predict", **named)
            return most_probable(result, self.classes)
        for name in columns.categories:
            raise labels_have_no_mean(name, columns, laws=self._has_laws)
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
        columns = self.columns_y
        if not self._one_label(columns):
            asked = "conditional(x).probability(event)" if self._has_laws else "expect(event, x)"
            if not columns.categories:
                asked = f"predict, or {asked}"
            raise DataError(
                f"y is {columns.listed()}, and only one column of labels has probabilities of "
                f"labels: ask for {asked}"
            )
        return positive(self._shares(X), float(self.about["rows"]))

    @property
    def classes(self) -> Array:
        """The labels, shape (K,), where y is one column of them."""
        columns = self.columns_y
        labels: Sequence[Any] = columns.categories[columns.names[0]]
        found = self.about.get("classes")  # in their own type, where a classifier was fitted
        given = found if isinstance(found, list) and len(found) == len(labels) else []
        alike = any(all(isinstance(each, kind) for each in given) for kind in (str, int, float))
        return np.asarray(given if given and alike else labels)

    def score(self, X: Any, Y: Any, sample_weight: Any = None) -> float:
        """R^2 of the predicted means, or the accuracy of predicted labels; higher is better.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name.
        Y
            What was observed there, shape (n,) or (n, d_Y), or a table with the columns by name.
        sample_weight
            Weights of the rows, shape (n,).

        Raises
        ------
        DataError
            As :meth:`predict`, on wrong columns or NaN in Y, if the shapes differ, if no label of Y
            is known, or if weights are negative or all zero.
        """
        if not self._one_label(self.columns_y):
            means = self.predict(X)
            return r_squared(query_points(Y, self.y, "y", observed=True), means, sample_weight)
        return accuracy(Y, self.predict_proba(X), self.columns_y, sample_weight)

    @abstractmethod
    def _means(self, X: Any) -> Array: ...

    @abstractmethod
    def _shares(self, X: Any) -> Array: ...

    @property
    def _has_laws(self) -> bool:
        """Whether there are laws of y given x."""
        return getattr(self.y, "cells", None) is not None

    def _one_label(self, columns: Columns) -> bool:
        return len(columns.names) == 1 and bool(columns.categories)


def class_name(code: int) -> str:
    """What the indicator of a label is called among the declared functions of y."""
    return f"class {code}"


def event_shares(events: Iterable[Event], shares: Array) -> Array:
    """Probabilities of events of one column of labels, shape (n, k): sums of those of labels.

    Parameters
    ----------
    events
        Of that column.
    shares
        Probabilities of the labels, shape (n, K).
    """
    codes = np.arange(float(shares.shape[1]))[:, None]
    return np.stack([shares[:, event(codes) > 0.0].sum(axis=1) for event in events], axis=-1)


def most_probable(probabilities: Array, classes: Array) -> NDArray[Any]:
    """The label of the largest of each row."""
    return np.asarray(classes[np.asarray(probabilities).argmax(axis=1)])
