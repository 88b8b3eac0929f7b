"""A fitted kernel logistic regression: small frozen arrays and its probabilities."""

import os
from dataclasses import dataclass
from html import escape
from typing import Any, Self, cast

import numpy as np
from scipy.special import softmax

from cme_dask.data.columns import Columns
from cme_dask.data.model_file import ModelState, write_model
from cme_dask.data.store import brief
from cme_dask.display import passes
from cme_dask.errors import StoreError
from cme_dask.kernels import Kernel
from cme_dask.models.answers import most_probable
from cme_dask.models.files import basis_arrays, basis_description, read_basis
from cme_dask.models.points import FloatArray, is_out_of_core, lazy_answers, query_points
from cme_dask.models.relevance import LengthScales, length_scales
from cme_dask.numerics.basis import LinearBasis

Array = Any

_QUERY_ROWS = 4096


@dataclass(frozen=True, eq=False)
class LogisticModel:
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

    columns: Columns
    basis: LinearBasis
    coef: Array
    intercept: Array
    labels: tuple[Any, ...]
    about: dict[str, Any]

    @property
    def length_scales(self) -> LengthScales:
        """Length scale and relevance of each column of x, see :class:`ColumnRelevance`."""
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
        points = query_points(X, self.columns, "X", self.basis.newton.kernel)
        result = np.empty((len(points), len(self.labels)))
        for start in range(0, len(points), _QUERY_ROWS):
            here = slice(start, start + _QUERY_ROWS)
            scores = self.basis(points[here]) @ self.coef + self.intercept
            result[here] = softmax(scores, axis=1)
        return result

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
        found: Any = self.predict_proba(X)
        if is_out_of_core(X):
            named = {"classes": self.classes, "dtype": self.classes.dtype, "drop_axis": 1}
            return found.map_blocks(most_probable, token="predict", **named)
        return most_probable(found, self.classes)

    def score(self, X: Any, Y: Any, sample_weight: Any = None) -> float:
        """The accuracy of predicted labels; higher is better.

        Parameters
        ----------
        X
            As in :meth:`predict_proba`.
        Y
            The labels that were observed there, shape (n,).
        sample_weight
            Weights of the rows, shape (n,).
        """
        found = self.predict(X)
        hits = found == np.asarray(Y).reshape(len(found))
        return float(np.average(hits, weights=sample_weight))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the model to a folder (Zarr, no pickles), whole or not at all."""
        write_model(path, self.to_state(), overwrite=overwrite)

    def to_state(self) -> ModelState:
        """Plain arrays and JSON values."""
        about = {
            "variables": {"x": basis_description(self.columns, self.basis)},
            "labels": list(self.labels),
            "fit": self.about,
        }
        arrays = {"coef": self.coef, "intercept": self.intercept}
        return ModelState("LogisticModel", about, basis_arrays("x", self.basis) | arrays)

    @classmethod
    def from_state(cls, state: ModelState, custom: dict[str, Kernel] | None = None) -> Self:
        """Inverse of :meth:`to_state`, for files that can't be trusted.

        Raises
        ------
        StoreError
            If arrays or descriptions do not fit together.
        DataError
            If a user's own kernel is needed and not in ``custom``.
        """
        try:
            about, labels = state.about["variables"]["x"], tuple(state.about["labels"])
        except (KeyError, TypeError) as error:
            raise StoreError(f"the model's description is damaged: {error!r}") from error
        columns, basis = read_basis(state, "x", about, custom)
        if not isinstance(basis, LinearBasis):
            raise StoreError("the model's basis is stacked, which it never is: fit it again")
        coef = state.array("coef", (basis.rank, len(labels)))
        intercept = state.array("intercept", (len(labels),))
        if len(labels) < 2:
            raise StoreError("the model has fewer than two labels: restore it or fit it again")
        model = cls(columns, basis, coef, intercept, labels, state.about.get("fit", {}))
        try:
            model.summary()
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise StoreError(
                f"the model's description of its fit is damaged ({brief(error)}): restore it or "
                "fit it again"
            ) from error
        return model

    def contents(self) -> dict[str, Any]:
        """JSON form of what can be asked for."""
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
            ("loss", f"{float(fit['objective']):.4g}, gradient {float(fit['gradient_norm']):.1e}"),
            ("ridge", f"{float(fit['reg']):g}"),
        ]

    def __repr__(self) -> str:
        body = "\n".join(f"  {label:<10} {text}" for label, text in self.summary())
        return f"LogisticModel\n{body}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(label)}</th>"
            f"<td style='text-align:left'>{escape(text)}</td></tr>"
            for label, text in self.summary()
        )
        return f"<table><caption>LogisticModel</caption>{rows}</table>"
