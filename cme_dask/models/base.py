"""The base of fitted models: saving, loading and showing them.

A model is a frozen dataclass of small arrays and JSON values, whose annotations declare the shapes
of the arrays. The base writes files and reads them by these declarations, refuses damaged ones and
shows models.
"""

import os
from abc import ABC, abstractmethod
from html import escape
from typing import Any, ClassVar, Self

from cme_dask import kernels
from cme_dask.codec import Codec
from cme_dask.data.columns import Columns
from cme_dask.data.model_file import ModelState, write_model
from cme_dask.data.store import brief
from cme_dask.errors import DataError, StoreError, printable
from cme_dask.kernels import Kernel, Transform
from cme_dask.numerics.basis import Basis, FeatureBasis, NewtonBasis
from cme_dask.numerics.location import MeanFunction
from cme_dask.numerics.partition import PartitionBasis

Array = Any
Custom = dict[str, Kernel] | None
"""Users' own kernels by name."""

_LATER = 2  # version of files whose models fill in columns, or have other locations than ridge
_RIDGE = MeanFunction.__name__
_LABEL = 10  # letters of the labels of ``repr``, at least


MODELS: dict[str, type["Model"]] = {}
"""All kinds of models by the name that their files hold."""


class Model(ABC):
    """What fits make and :func:`cme_dask.load` reads; needs neither data nor Dask.

    Subclasses declare their fields and give ``summary`` and ``contents``; a method ``_validate``
    raises DataError where the contents of a file do not fit together.
    """

    _made_by: ClassVar[str]

    about: dict[str, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "_made_by"):  # else a base of models
            MODELS[cls.__name__] = cls

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the model to a folder (Zarr, no pickles), whole or not at all."""
        write_model(path, self.to_state(), overwrite=overwrite)

    def to_state(self) -> ModelState:
        """Plain arrays and JSON values."""
        arrays: dict[str, Array] = {}
        description = _codec(None).encode(self, arrays)
        version = _LATER if _is_later(description) else 1
        return ModelState(type(self).__name__, description, arrays, version)

    @classmethod
    def from_state(cls, state: ModelState, custom: Custom = None) -> Self:
        """Inverse of :meth:`to_state`, for files that can't be trusted.

        Raises
        ------
        StoreError
            If arrays or descriptions do not fit together.
        DataError
            If a user's own kernel is needed and not in ``custom``.
        """
        try:
            model: Self = _codec(custom).decode(cls, state.description, state.arrays, {})
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"the model's description is damaged: {error!r}") from error
        check_about(model)
        return model

    @abstractmethod
    def contents(self) -> dict[str, Any]:
        """JSON form of the columns and functions that queries accept."""

    @abstractmethod
    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""

    def __repr__(self) -> str:
        lines = self.summary()
        width = max(_LABEL, *(len(label) for label, _ in lines))
        body = "\n".join(f"  {label:<{width}} {text}" for label, text in lines)
        return f"{type(self).__name__}\n{printable(body)}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(label)}</th>"
            f"<td style='text-align:left'>{escape(text)}</td></tr>"
            for label, text in self.summary()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _is_later(description: Any) -> bool:
    """Whether columns say what takes the place of missing values, or a location is no ridge."""
    if not isinstance(description, dict):
        return False
    other = description.get("location", {})
    other = isinstance(other, dict) and other.get("type", _RIDGE) != _RIDGE
    return other or "imputation" in description or any(map(_is_later, description.values()))


def check_about(model: Model) -> None:
    """StoreError unless the description of its fit has what its summary shows."""
    try:
        model.summary()
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise StoreError(
            f"the model's description of its fit is damaged ({brief(error)}): restore it or fit it "
            "again"
        ) from error


def _codec(custom: Custom) -> Codec:
    """What reads models with these kernels of users, and writes them."""
    readers = {
        Kernel: lambda described: kernels.from_dict(described, custom),
        Columns: Columns.from_dict,
        Transform: _transform,
    }
    return Codec(readers, {Basis: (NewtonBasis, PartitionBasis, FeatureBasis)}, MODELS)


def _transform(described: Any) -> Transform:
    try:
        return Transform.from_dict(described)
    except DataError as error:
        raise StoreError(
            f"the model's transform of columns is damaged ({error}): restore it or fit it again"
        ) from error


def maker(kind: type[Model]) -> str:
    """What makes models of a kind, for messages."""
    return kind._made_by
