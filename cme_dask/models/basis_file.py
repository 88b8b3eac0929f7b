"""A variable's basis as arrays and JSON values of a saved model, and back."""

from typing import Any

import numpy as np

from cme_dask import kernels
from cme_dask.errors import StoreError
from cme_dask.numerics.basis import LinearBasis, NewtonBasis
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.stacked import StackedBasis
from cme_dask.storage.columns import Columns
from cme_dask.storage.model_file import ModelState

Array = Any

NEWTON, PARTITION, STACKED = "newton", "partition", "stacked"
_MOST_PARTS = 100

AnyBasis = LinearBasis | StackedBasis


def basis_arrays(key: str, basis: AnyBasis) -> dict[str, Array]:
    """Arrays of the basis of the variable ``key``."""
    if isinstance(basis, StackedBasis):
        named = [basis_arrays(f"{key}{i}", part) for i, part in enumerate(basis.parts)]
        return {name: values for arrays in named for name, values in arrays.items()}
    newton = basis.newton
    arrays = {
        f"{key}_points": newton.points,
        f"{key}_transform": basis.transform,
        f"{key}_eigenvalues": basis.eigenvalues,
    }
    if not isinstance(newton, PartitionBasis):
        arrays[f"{key}_factor"] = newton.factor
    return arrays if newton.rows is None else {**arrays, f"{key}_rows": newton.rows}


def basis_description(columns: Columns, basis: AnyBasis) -> dict[str, Any]:
    """JSON description that belongs to :func:`basis_arrays`."""
    if isinstance(basis, StackedBasis):
        described = {"basis": STACKED, "parts": [_description(part) for part in basis.parts]}
    else:
        described = _description(basis)
    return {"columns": columns.to_dict(), **described}


def _description(basis: LinearBasis) -> dict[str, Any]:
    kind = PARTITION if isinstance(basis.newton, PartitionBasis) else NEWTON
    return {"kernel": basis.newton.kernel.to_dict(), "basis": kind}


def read_basis(
    state: ModelState, key: str, about: Any, custom: dict[str, kernels.Kernel] | None
) -> tuple[Columns, AnyBasis]:
    """Inverse of both, for files that can't be trusted.

    Raises
    ------
    StoreError
        If arrays or description are damaged.
    DataError
        If a user's own kernel is needed and not in ``custom``.
    """
    try:
        columns = Columns.from_dict(about["columns"])
        parts = about["parts"] if about.get("basis") == STACKED else None
        if parts is not None and not (isinstance(parts, list) and 0 < len(parts) <= _MOST_PARTS):
            raise TypeError(f"parts must be a list of 1 to {_MOST_PARTS} bases")
        if parts is None:
            return columns, _read(state, key, about, columns, custom)
        read = [_read(state, f"{key}{i}", p, columns, custom) for i, p in enumerate(parts)]
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"the model's description of {key} is damaged: {error!r}") from error
    return columns, StackedBasis(tuple(read))


def _read(
    state: ModelState,
    key: str,
    about: Any,
    columns: Columns,
    custom: dict[str, kernels.Kernel] | None,
) -> LinearBasis:
    kernel = kernels.from_dict(about["kernel"], custom)
    kind = about.get("basis", NEWTON)  # files of before there were others don't say
    points = state.array(f"{key}_points", (None, len(columns.names)))
    m = len(points)
    transform = state.array(f"{key}_transform", (m, None))
    eigenvalues = state.array(f"{key}_eigenvalues", (transform.shape[1],))
    kernel.check(points.shape[1])
    rows = state.array(f"{key}_rows", (m,)) if f"{key}_rows" in state.arrays else None
    if kind == PARTITION:
        return LinearBasis(PartitionBasis(kernel, points, rows), transform, eigenvalues)
    if kind != NEWTON:
        raise StoreError(
            f"the model's basis of {key} should be {NEWTON!r} or {PARTITION!r}, it is {kind!r}: "
            "restore it, fit it again, or read it with a newer version"
        )
    factor = state.array(f"{key}_factor", (m, m))
    if not (np.diagonal(factor) > 0).all():
        raise StoreError(f"the model's factor of {key} is singular: restore it or fit it again")
    return LinearBasis(NewtonBasis(kernel, points, factor, rows), transform, eigenvalues)
