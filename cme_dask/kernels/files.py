"""Kernels as plain JSON values, and back."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cme_dask.errors import DataError, remedy
from cme_dask.kernels.base import KERNELS, MAX_DEPTH, Kernel, check_kernel
from cme_dask.kernels.discrete import Custom
from cme_dask.kernels.transforms import Transform


def from_dict(d: Mapping[str, Any], custom: Mapping[str, Kernel] | None = None) -> Kernel:
    """Return the kernel that :meth:`Kernel.to_dict` described.

    Parameters
    ----------
    d
        The description: plain JSON values, which may come from an untrusted file.
    custom
        The user's own kernels by name.

    Raises
    ------
    DataError
        If a name, key, type or value is not one that ``to_dict`` writes, or a kernel of the
        user's own is missing from `custom`.
    """
    return _build(d, custom or {}, 0)


def _build(d: object, custom: Mapping[str, Kernel], depth: int) -> Kernel:
    if depth > MAX_DEPTH:
        raise DataError(f"a kernel may be nested {MAX_DEPTH} deep at most")
    if not isinstance(d, Mapping):
        raise DataError(f"a kernel must be described by a dict, got {type(d).__name__}")
    name, given = d.get("kernel"), {key: value for key, value in d.items() if key != "kernel"}
    cls = KERNELS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise DataError(f"unknown kernel {name!r}: expected one of {', '.join(KERNELS)}")
    expected = {"name"} if cls is Custom else {f.name for f in fields(cls)}
    if set(given) != expected:
        raise DataError(
            f"{name} takes exactly the keys {sorted(expected)}, got {sorted(map(str, given))}"
        )
    if cls is Custom:
        return _supplied(given["name"], custom)
    return cls(**{key: _part(key, value, custom, depth + 1) for key, value in given.items()})


def _part(key: str, value: object, custom: Mapping[str, Kernel], depth: int) -> Any:
    if key == "transform":
        return Transform.from_dict(value)
    if key == "weights":
        return value
    return _build(value, custom, depth) if isinstance(value, Mapping) else _tuples(value)


def _tuples(value: object) -> object:
    """The value of a field, whose tuples JSON wrote as lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _supplied(name: object, custom: Mapping[str, Kernel]) -> Kernel:
    kernel = custom.get(name) if isinstance(name, str) else None
    if kernel is None:
        raise DataError(
            f"the kernel {name!r} is a user's own and was not supplied: "
            + remedy(
                f"pass kernels={{{name!r}: kernel}}",
                f"ask this model in Python, cme_dask.load(path, kernels={{{name!r}: kernel}})",
            )
        )
    check_kernel(f"kernels[{name!r}]", kernel)
    return kernel
