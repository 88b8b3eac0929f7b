"""The only door to JAX and optax, which the extra ``nn`` installs: nothing else imports them."""

import importlib
from collections.abc import Mapping
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from cme_dask.errors import DataError

Array = Any

_DEEPEST = 20  # functions within functions


def extra(name: str) -> Any:
    """The module ``jax`` or ``optax``.

    Raises
    ------
    DataError
        If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"networks are learned with {name}, which is not installed: install cme-dask[nn]"
        ) from error


def optax_update(
    optimizer: Any, leaves: tuple[Array, ...], gradient: Array, vector: Array
) -> tuple[Array, tuple[Array, ...]]:
    """What an optimiser of optax adds to a vector, and the leaves of its next state.

    Parameters
    ----------
    optimizer
        A ``GradientTransformation``.
    leaves
        Of its state; none before the first step.
    gradient, vector
        Shapes (p,), in float64, as the whole computation is.
    """
    jax = extra("jax")
    with jax.enable_x64(True):
        start = optimizer.init(jax.numpy.asarray(vector))
        shape = jax.tree.structure(start)
        state = shape.unflatten(map(jax.numpy.asarray, leaves)) if leaves else start
        update, after = optimizer.update(
            jax.numpy.asarray(gradient), state, jax.numpy.asarray(vector)
        )
        return np.asarray(update), tuple(np.asarray(leaf) for leaf in jax.tree.leaves(after))


def description(value: Any, depth: int = 0) -> Any:
    """An optimiser as plain values, the same in every process: functions by name and contents."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, (int, float)):
        return float(value)  # optax makes floats of integers once a schedule was used
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): description(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(description(item, depth + 1) for item in value)
    if isinstance(value, partial):
        return description((value.func, value.args, value.keywords), depth + 1)
    if isinstance(value, CodeType):
        return description((value.co_code.hex(), value.co_names, value.co_consts), depth + 1)
    function = getattr(value, "__wrapped__", value)  # of a compiled one
    cells = getattr(function, "__closure__", None) or ()
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if hasattr(value, "dtype"):
        name = repr(np.asarray(value))
    # Lambdas of the same place have one name.
    names = "__code__", "__defaults__", "__kwdefaults__"
    parts = [getattr(function, key, None) for key in names]
    held = (cell.cell_contents for cell in cells)
    return (name, *(description(part, depth + 1) for part in (*parts, *held)))
