"""Declared functions in pickles, which hold those alone that can be imported by name."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from cme_dask.errors import DataError

Array = Any
Function = Callable[[Array], Array]


@dataclass(frozen=True)
class LocalFunction:
    """Stands in a pickle for a declared function that cannot be imported by its name.

    Its conditional expectations are exact moments and stay in the model; only the function itself
    is lost, as it is in saved models.
    """

    name: str

    def __call__(self, rows: Array) -> Array:
        """DataError: the function is not there."""
        raise DataError(
            f"the function {self.name!r} was a lambda or a local function, which a pickle cannot "
            "hold: define it at the top level of a module, or pass the function itself"
        )


def importable(functions: Mapping[str, Function]) -> dict[str, Function]:
    """The functions, with a :class:`LocalFunction` for each that pickle could not import."""
    return {
        name: LocalFunction(name) if _is_local(function) else function
        for name, function in functions.items()
    }


def _is_local(function: Any) -> bool:
    """Whether this is a function that is not found under its name in its module."""
    if not isinstance(function, FunctionType):  # other objects are pickled in their own ways
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not function
