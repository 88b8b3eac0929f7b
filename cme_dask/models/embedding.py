"""The fitted conditional mean embedding: small frozen arrays and the queries on them."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, overload

import numpy as np

from cme_dask.codec import Shape, Within
from cme_dask.data.columns import Columns
from cme_dask.display import missing_lines, passes
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import each_block
from cme_dask.models.answers import (
    ConditionalExpectation,
    PairModel,
    class_name,
)
from cme_dask.models.events import Event, comparison, looks_like_event
from cme_dask.models.points import FloatArray, is_out_of_core, lazy_answers, query_points
from cme_dask.models.relevance import plot_relevance
from cme_dask.models.spaces import MeanEmbeddings, Space
from cme_dask.numerics.basis import LinearBasis
from cme_dask.numerics.labels import LabelCalibration, nearest_shares
from cme_dask.numerics.moments import MomentSums

Array = Any


@dataclass(frozen=True, eq=False)
class EmbeddedVariable:
    """One variable: its columns and its spectral basis."""

    columns: Columns
    basis: Annotated[LinearBasis, Within(d="columns.names")]


class LinearEmbedding(PairModel):
    """An embedding mu(x) = sum_j [phi(x)^T A]_j psi_j that is linear in functions phi of x.

    Models have ``x``, ``y``, whose orthonormal functions are psi, and ``about``, and give phi
    (``_features``), A (``_slope``) and the slope of E[1 | x] (``_total``).
    """

    x: EmbeddedVariable
    y: EmbeddedVariable
    about: dict[str, Any]

    @abstractmethod
    def expect(self, f: Any = None, X: Any = None) -> Any:
        """E[f(Y) | X = x] of functions f of y; default its numeric columns."""

    @abstractmethod
    def _features(self, points: Array) -> Array: ...

    @property
    @abstractmethod
    def _slope(self) -> Array: ...

    @property
    @abstractmethod
    def _total(self) -> Array: ...

    @property
    def reg(self) -> float:
        """The ridge r; lambda = n r."""
        return float(self.about["reg"])

    def mass(self, X: Any) -> FloatArray:
        """Sum of the weights of rows in mu(x), shape (n,): 1 for a law, less where data are few.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "mass", X, self.x))
        return self._products(X, self._total[:, None])[:, 0]

    def embedding(self, X: Any, Y: Any) -> FloatArray:
        """The embedding mu(x_i) at y_j, E[k_Y(y_j, Y) | X = x_i], shape (n_X, n_Y).

        Parameters
        ----------
        X, Y
            Points, shapes (n_X, d_X) and (n_Y, d_Y), or tables with the columns by name.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        if is_out_of_core(X):
            y = query_points(Y, self.y, "Y")
            return cast(FloatArray, lazy_answers().lazy_method(self, "embedding", X, self.x, Y=y))
        return self._products(X, self._slope @ self.y.basis(query_points(Y, self.y, "Y")).T)

    def embed(self, X: Any) -> MeanEmbeddings:
        """The embeddings mu(x_i), whose inner products and distances compare laws.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name, in memory.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        slope = self._slope @ self.y.basis.transform.T
        return MeanEmbeddings(self._products(X, slope), Space.of(self.y))

    def _products(self, X: Any, right: Array) -> FloatArray:
        """phi(x)^T right, shape (n, ...), of right (k, ...)."""
        points = query_points(X, self.x, "X")
        result = np.zeros((len(points), *right.shape[1:]))

        def fill(here: slice) -> None:
            result[here] = np.tensordot(self._features(points[here]), right, 1)

        each_block(fill, len(points) if len(right) else 0)
        return result

    @abstractmethod
    def _indicators(self, count: int) -> list[Any]:
        """Functions that tell the labels of y, of which there are so many."""

    def _means(self, X: Any) -> Array:
        return self.expect(None, X)

    def _shares(self, X: Any) -> Array:
        (labels,) = self.columns_y.categories.values()
        signed = self.expect(self._indicators(len(labels)), X)
        shares = self.calibration or nearest_shares
        if is_out_of_core(X):
            return signed.map_blocks(shares, dtype=np.float64, token="probabilities-of-labels")
        return shares(np.asarray(signed))

    @property
    def calibration(self) -> LabelCalibration | None:
        """What makes probabilities of labels from signed estimates, where the fit learned it."""
        learned = self.about.get("calibration")
        return None if learned is None else LabelCalibration.from_list(learned["exponents"])

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns that queries accept."""
        return {"columns": {"x": self.columns_x.to_dict(), "y": self.columns_y.to_dict()}}

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        sides = (("x", self.x), ("y", self.y))
        return [
            (name, f"{', '.join(v.columns.names)}: {self._size(name)}, {v.basis.newton.kernel!r}")
            for name, v in sides
        ]

    @abstractmethod
    def _size(self, name: str) -> str:
        """How many functions of a variable there are."""


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddingModel(LinearEmbedding):
    """Conditional mean embedding mu(x) = E[k_Y(., Y) | x], and E[f | x] = a + psi_X(x)^T slope.

    Made by :class:`cme_dask.ConditionalMeanEmbedding` or :func:`cme_dask.load`; needs neither data
    nor Dask.

    Attributes
    ----------
    x, y
        The variables.
    operator
        E[k_Y(y, Y) | x] = psi_X(x)^T operator psi_Y(y), shape (k_X, k_Y).
    total
        Slope of E[1 | x], shape (k_X,).
    answers
        Of y's columns and declared functions, given x.
    about
        What it was fitted on and how.
    moments
        Moments by fold as plain arrays (``MomentSums.to_arrays``), for drift, with the ``shift_x``
        and ``shift_y`` of their functions.
    """

    _made_by = "ConditionalMeanEmbedding"
    plot_relevance = plot_relevance

    x: EmbeddedVariable
    y: EmbeddedVariable
    operator: Annotated[Array, Shape("x.basis.rank", "y.basis.rank")]
    total: Annotated[Array, Shape("x.basis.rank")]
    answers: Annotated[ConditionalExpectation, Within(k="x.basis.rank", m="x.basis.newton.rank")]
    about: dict[str, Any]
    moments: dict[str, Annotated[Array, Shape()]]

    def moment_sums(self) -> MomentSums:
        """The moments by fold, with named blocks."""
        ranks = self.x.basis.newton.rank, self.y.basis.newton.rank
        shifts = self.moments["shift_x"], self.moments["shift_y"]
        return MomentSums.from_arrays(self.moments, ranks, shifts)

    def _indicators(self, count: int) -> list[str]:
        names = [class_name(code) for code in range(count)]
        if not set(names) <= set(self.function_names):
            raise DataError(
                "this embedding was fitted without the indicators of its labels: fit an "
                "EmbeddingClassifier"
            )
        return names

    @property
    def classifies(self) -> bool:
        """Whether y is one column of labels, whose indicators the fit declared."""
        columns = self.columns_y
        if not self._one_label(columns):
            return False
        count = len(columns.categories[columns.names[0]])
        return {class_name(code) for code in range(count)} <= set(self.function_names)

    @property
    def label_events(self) -> dict[str, str]:
        """Of a classifier the event of each label by the name of its indicator."""
        if not self.classifies:
            return {}
        ((name, labels),) = self.columns_y.categories.items()
        return {class_name(code): comparison(name, label) for code, label in enumerate(labels)}

    def _of_labels(self, f: str | Sequence[str] | None) -> str | Sequence[str] | None:
        """Requested names, those of indicators in place of events that one label alone is."""
        columns, known = self.columns_y, self.function_names

        def named(text: Any) -> Any:
            if not isinstance(text, str) or text in known or not looks_like_event(text):
                return text
            codes = np.arange(float(len(self.label_events)))[:, None]
            (holds,) = np.nonzero(Event.of(text, columns, known)(codes))
            return class_name(int(holds[0])) if len(holds) == 1 else text

        if f is None or not self.classifies:
            return f
        return named(f) if isinstance(f, str) else [named(each) for each in f]

    @property
    def function_names(self) -> tuple[str, ...]:
        """Names that ``expect`` knows: columns of y, and functions declared at the fit."""
        return self.answers.names

    @overload
    def expect(
        self,
        f: str | Sequence[str] | None = None,
        X: Any = None,
        *,
        return_std: Literal[False] = False,
    ) -> FloatArray: ...

    @overload
    def expect(
        self, f: str | Sequence[str] | None = None, X: Any = None, *, return_std: Literal[True]
    ) -> tuple[FloatArray, FloatArray]: ...

    @overload
    def expect(
        self, f: str | Sequence[str] | None = None, X: Any = None, *, return_std: bool
    ) -> FloatArray | tuple[FloatArray, FloatArray]: ...

    def expect(
        self, f: str | Sequence[str] | None = None, X: Any = None, *, return_std: bool = False
    ) -> FloatArray | tuple[FloatArray, FloatArray]:
        """E[f(Y) | X = x] = E f + psi_X(x)^T (diag(lam_X) + r)^-1 E[psi_X (f - E f)].

        Signed: an event's answer may leave [0, 1]. The remainder 1 - mass, see :meth:`mass`, is
        spread evenly over all rows.

        Parameters
        ----------
        f
            A numeric column, declared function or declared event of y, or several, of a classifier
            also the event of a label; default the numeric columns.
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives Dask arrays; nothing is computed then.
        return_std
            Also return standard errors by the jackknife over the fixed folds.

        Returns
        -------
        values : (n,) for one name, (n, len(f)) for several; in the units of f
        std : same shape, if ``return_std``

        Raises
        ------
        DataError
            On unknown names, columns of labels, events that were not declared, wrong columns,
            NaN, or folds that the fit did not keep.
        """
        if is_out_of_core(X):
            result = lazy_answers().lazy_method(
                self, "expect", X, self.x, f=f, return_std=return_std
            )
            return cast(FloatArray, result)
        points = query_points(X, self.x, "X")
        names = self.answers.select(self._of_labels(f), self.y.columns, laws=False)
        return self.answers.expect(names, self.x.basis, points, return_std)

    def expect_interval(
        self, f: str | Sequence[str] | None = None, X: Any = None, *, level: float = 0.95
    ) -> tuple[FloatArray, FloatArray]:
        """Bounds value - t std and value + t std of conditional expectations, as of ``expect``.

        The factor t is the quantile of Student's law with one degree of freedom less than there are
        folds. Standard errors measure the variance between samples alone, so an interval holds the
        *mean of the estimator* at its level, and the truth less often: it leaves out the bias of
        smoothing, and what choosing kernels on the same rows costs. The guide has a table.

        Parameters
        ----------
        f, X
            As in :meth:`expect`.
        level
            Of the interval, in (0, 1).

        Raises
        ------
        DataError
            As :meth:`expect`, or on another level.
        """
        value, std = self.expect(f, X, return_std=True)
        margin = self.answers.factor(level) * std
        return value - margin, value + margin

    def _features(self, points: Array) -> Array:
        return self.x.basis(points)

    @property
    def _slope(self) -> Array:
        return self.operator

    @property
    def _total(self) -> Array:
        return self.total

    def _validate(self) -> None:
        """DataError unless the functions are those of the columns of y, and others beside them."""
        names, columns = self.function_names, self.y.columns.names
        if names[: len(columns)] != columns or len(set(names)) != len(names):
            raise DataError("the functions do not fit the columns")
        functions = {"shift_x": len(self.x.columns.names), "shift_y": len(names)}
        width = 1 + self.x.basis.newton.rank + self.y.basis.newton.rank + sum(functions.values())
        folds = len(self.moments.get("rows", ()))
        shapes = {"gram": (folds, width * (width + 1) // 2), "traces": (folds, 2), "rows": (folds,)}
        shapes |= {name: (length,) for name, length in functions.items()}
        if {name: values.shape for name, values in self.moments.items()} != shapes:
            raise DataError(f"the moments should have the shapes {shapes}")
        try:
            _ = self._calibrated(), self.held_out
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError("the calibration or the held-out errors do not fit") from error

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns and functions that queries accept, and the held-out errors."""
        return super().contents() | {
            "functions": {"x": list(self.function_names)},
            "held_out": self.held_out,
        }

    @property
    def held_out(self) -> dict[str, Any]:
        """Held-out errors by function of y; of a classifier by its labels, as events."""
        errors: dict[str, Any] = self.about.get("held_out", {})
        if not self.classifies:
            return errors
        (name,), texts = self.columns_y.names, self.label_events
        return {
            given: {texts.get(f, f): value for f, value in each.items() if f != name}
            for given, each in errors.items()
        }

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit = self.about
        answered = "E[. | x]", ", ".join(self.function_names)
        if self.classifies:
            answered = "classes", ", ".join(map(str, self.classes.tolist()))
        return [
            *super().summary(),
            ("rows", f"{int(fit['rows']):,} in {passes(fit['passes'])}, {fit['folds']} folds"),
            *missing_lines(fit),
            ("ridge", f"{self.reg:.2g}, by {fit['criterion']}"),
            *self._calibrated(),
            answered,
        ]

    def _calibrated(self) -> list[tuple[str, str]]:
        """What the calibration of probabilities gained, if they are calibrated."""
        if self.calibration is None:
            return []
        gain = float(self.about["calibration"]["gain"])
        return [("labels", f"probabilities calibrated: held-out log loss {-gain:+.3g}")]

    def _size(self, name: str) -> str:
        rank = {"x": self.x, "y": self.y}[name].basis.newton.rank
        return f"rank {rank}, trace error {float(self.about['trace_error'][name]):.2e}"
