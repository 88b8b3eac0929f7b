"""A fitted kernel logistic regression: small frozen arrays and its probabilities."""

from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np
from scipy.special import softmax

from cme_dask.codec import Shape, Within
from cme_dask.data.columns import Columns
from cme_dask.display import missing_lines, passes
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import each_block
from cme_dask.models.answers import accuracy, most_probable
from cme_dask.models.base import Model
from cme_dask.models.points import FloatArray, is_out_of_core, lazy_answers, query_points
from cme_dask.models.relevance import LengthScales, length_scales
from cme_dask.numerics.basis import LinearBasis

Array = Any


@dataclass(frozen=True, eq=False, repr=False)
class LogisticModel(Model):
    """Class probabilities p_c(x) = exp(f_c(x)) / sum_e exp(f_e(x)), f = intercept + psi_X(x)^T C.

    Made by :class:`cme_dask.KernelLogisticRegression` or :func:`cme_dask.load`; needs neither data
    nor Dask.

    Attributes
    ----------
    columns
        Of x.
    basis
        Spectral basis psi_X.
    coef
        C, shape (k, K).
    intercept
        Shape (K,).
    labels
        The classes: numbers, texts or booleans, K of them.
    about
        What it was fitted on and how.
    """

    _made_by = "KernelLogisticRegression"

    columns: Columns
    basis: Annotated[LinearBasis, Within(d="columns.names")]
    coef: Annotated[Array, Shape("basis.rank", "K")]
    intercept: Annotated[Array, Shape("K")]
    labels: tuple[Any, ...]
    about: dict[str, Any]

    @property
    def length_scales(self) -> LengthScales:
        """Length scale and relevance of each column of x, see :class:`.LengthScales`."""
        return length_scales([("x", self.columns, self.basis)])

    def predict_proba(self, X: Any) -> FloatArray:
        """P(Y = label | x), shape (n, K), in the order of the labels.

        Parameters
        ----------
        X
            Points, shape (n, d), or a table with the columns by name. A Dask array, a Zarr array or
            a store gives a Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "predict_proba", X, self))
        points = query_points(X, self, "X")
        result = np.empty((len(points), len(self.labels)))

        def fill(here: slice) -> None:
            scores = self.basis(points[here]) @ self.coef + self.intercept
            result[here] = softmax(scores, axis=1)

        each_block(fill, len(points))
        return result

    @property
    def columns_y(self) -> Columns:
        """The column of labels."""
        name = str(self.about.get("label", "y"))
        return Columns((name,), categories={name: tuple(map(str, self.labels))})

    @property
    def classes(self) -> Array:
        """The labels, shape (K,)."""
        return np.asarray(self.labels)

    def predict(self, X: Any) -> Array:
        """The most probable label at each point, shape (n,).

        Parameters
        ----------
        X
            As in :meth:`predict_proba`.
        """
        result: Any = self.predict_proba(X)
        if is_out_of_core(X):
            named = {"classes": self.classes, "dtype": self.classes.dtype, "drop_axis": 1}
            return result.map_blocks(most_probable, token="predict", **named)
        return most_probable(result, self.classes)

    def score(self, X: Any, Y: Any, sample_weight: Any = None) -> float:
        """The accuracy of predicted labels; higher is better.

        Parameters
        ----------
        X
            As in :meth:`predict_proba`.
        Y
            The labels that were observed there, shape (n,), also as texts.
        sample_weight
            Weights of the rows, shape (n,).

        Raises
        ------
        DataError
            As :meth:`predict`, if the shapes differ, if no label of Y is known, or if weights are
            negative or all zero.
        """
        return accuracy(Y, self.predict_proba(X), self.columns_y, sample_weight)

    def _validate(self) -> None:
        """DataError unless there is a label for each column of C, and more than one."""
        if not len(self.labels) == len(self.intercept) > 1:
            raise DataError(f"{len(self.labels)} labels for {len(self.intercept)} classes")
        if not all(isinstance(label, (str, int, float)) for label in self.labels):
            raise DataError("the labels are not all numbers, texts or booleans")

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns that queries accept."""
        return {"columns": {"x": self.columns.to_dict()}, "labels": list(self.labels)}

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit, newton = self.about, self.basis.newton
        error = float(fit["trace_error"])
        return [
            ("columns", f"{self.columns.listed()}: rank {newton.rank}, trace error {error:.2e}"),
            ("kernel", repr(newton.kernel)),
            ("labels", ", ".join(map(str, self.labels))),
            ("rows", f"{int(fit['rows']):,} in {passes(fit['passes'])}"),
            *missing_lines(fit),
            ("loss", f"{float(fit['objective']):.4g}, gradient {float(fit['gradient_norm']):.1e}"),
            ("ridge", f"{float(fit['reg']):g}"),
        ]
