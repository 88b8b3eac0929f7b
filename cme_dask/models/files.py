"""Bases and cells as arrays of a saved model, and back."""

from typing import Any

import numpy as np

from cme_dask import kernels
from cme_dask.data.columns import Columns
from cme_dask.data.model_file import ModelState
from cme_dask.errors import DataError, StoreError
from cme_dask.models.base import Custom
from cme_dask.numerics.basis import LinearBasis, NewtonBasis
from cme_dask.numerics.cells import CellStatistics, ValueRange
from cme_dask.numerics.joint import StackedBasis
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.support import Support

# A variable's basis as arrays and JSON values of a saved model, and back


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


def read_basis(state: ModelState, key: str, custom: Custom) -> tuple[Columns, AnyBasis]:
    """Inverse of both for the variable ``key``, for files that can't be trusted.

    Raises
    ------
    StoreError
        If arrays or description are damaged.
    DataError
        If a user's own kernel is needed and not in ``custom``.
    """
    try:
        metadata = state.about["variables"][key]
        columns = Columns.from_dict(metadata["columns"])
        if metadata["basis"] != STACKED:
            return columns, _read(state, key, metadata, columns, custom)
        parts = metadata["parts"]
        if not (isinstance(parts, list) and 0 < len(parts) <= _MOST_PARTS):
            raise TypeError(f"parts must be a list of 1 to {_MOST_PARTS} bases")
        read = [_read(state, f"{key}{i}", p, columns, custom) for i, p in enumerate(parts)]
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"the model's description of {key} is damaged: {error!r}") from error
    return columns, StackedBasis(tuple(read))


def read_linear_basis(state: ModelState, key: str, custom: Custom) -> tuple[Columns, LinearBasis]:
    """Columns and basis of a variable of a model whose bases are never stacked.

    Raises
    ------
    StoreError, DataError
        As :func:`read_basis`.
    """
    columns, basis = read_basis(state, key, custom)
    if not isinstance(basis, LinearBasis):
        raise StoreError(
            f"the model's basis of {key} is stacked, which only joint models have: fit it again"
        )
    return columns, basis


def _read(state: ModelState, key: str, about: Any, columns: Columns, custom: Custom) -> LinearBasis:
    kernel, kind = kernels.from_dict(about["kernel"], custom), about["basis"]
    if kind not in (NEWTON, PARTITION):
        raise StoreError(
            f"the model's basis of {key} should be {NEWTON!r} or {PARTITION!r}, it is {kind!r}: "
            "restore it, fit it again, or read it with a newer version"
        )
    points = state.array(f"{key}_points", (None, len(columns.names)))
    m = len(points)
    transform = state.array(f"{key}_transform", (m, None))
    eigenvalues = state.array(f"{key}_eigenvalues", (transform.shape[1],))
    kernel.check(points.shape[1])
    rows = state.array(f"{key}_rows", (m,)) if f"{key}_rows" in state.arrays else None
    if kind == PARTITION:
        return LinearBasis(PartitionBasis(kernel, points, rows), transform, eigenvalues)
    factor = state.array(f"{key}_factor", (m, m))
    if not (np.diagonal(factor) > 0).all():
        raise StoreError(f"the model's factor of {key} is singular: restore it or fit it again")
    return LinearBasis(NewtonBasis(kernel, points, factor, rows), transform, eigenvalues)


# The cells of a variable's laws as arrays of a saved model, and back


_SUM_ERROR = 1e-9  # of shares that should add up to one


def cells_arrays(key: str, cells: CellStatistics) -> dict[str, Array]:
    """Arrays of the cells of the variable ``key``."""
    arrays = cells.support.to_arrays() | {
        "masses": cells.masses,
        "means": cells.means,
        "covariances": cells.covariances,
        "functions": cells.functions,
        "atoms": cells.atoms,
        "starts": cells.starts,
        "shares": cells.shares,
        "whole": cells.whole.astype(np.int8),
        "counts": cells.counts,
        "hashes": cells.hashes.view(np.int64),
        "weights": cells.weights,
        "low": cells.values.low,
        "high": cells.values.high,
        "integer": cells.values.integer.astype(np.int8),
    }
    if cells.components is not None:
        arrays["components"] = cells.components
    return {f"{key}_cells_{name}": values for name, values in arrays.items()}


def read_cells(
    state: ModelState, key: str, d: int, rank: int | None, names: tuple[str, ...]
) -> CellStatistics | None:
    """Inverse of :func:`cells_arrays`, for files that can't be trusted; None if there are none.

    Parameters
    ----------
    state
        The file.
    key
        ``x`` or ``y``.
    d
        Number of columns of the variable.
    rank
        Number of functions of its partition of unity; None for other bases.
    names
        Its declared functions.

    Raises
    ------
    StoreError
        If they are damaged.
    """
    prefix = f"{key}_cells_"
    if not any(name.startswith(prefix) for name in state.arrays):
        return None
    shapes: dict[str, tuple[int | None, ...]] = {"points": (None, d)}
    shapes |= dict.fromkeys(("edges", "feature", "threshold", "left"), (None,))
    support = _support(state, prefix, shapes)
    size, atoms = support.size, len(state.array(f"{prefix}shares", (None,)))

    def array(name: str, *shape: int) -> Array:
        return state.array(prefix + name, shape)

    rows, counts, hashes = array("atoms", atoms, d), array("counts", size), array("hashes", atoms)
    if counts.dtype != np.int64 or hashes.dtype != np.int64:
        raise StoreError(
            f"the model's arrays {prefix}counts and {prefix}hashes should be int64, they are "
            f"{counts.dtype} and {hashes.dtype}: restore it or fit it again"
        )
    starts = array("starts", size + 1)
    cells = CellStatistics(
        support=support,
        masses=array("masses", size),
        means=array("means", size, d),
        covariances=array("covariances", size, d, d),
        names=names,
        functions=array("functions", size, len(names)),
        atoms=rows,
        starts=starts,
        shares=array("shares", atoms),
        whole=array("whole", size) != 0,
        components=None if rank is None else array("components", rank, size),
        counts=counts,
        hashes=hashes.view(np.uint64),
        weights=array("weights", atoms),
        values=_values(state, prefix, d),
    )
    _check(cells, key)
    return cells


def _values(state: ModelState, prefix: str, d: int) -> ValueRange:
    """Which values the columns take."""
    low, high = (state.array(f"{prefix}{name}", (d,), finite=False) for name in ("low", "high"))
    return ValueRange(low, high, state.array(f"{prefix}integer", (d,)) != 0)


def _support(state: ModelState, prefix: str, shapes: dict[str, tuple[int | None, ...]]) -> Support:
    result = {
        name: state.array(prefix + name, shape, finite=False)  # nodes without a threshold hold inf
        for name, shape in shapes.items()
        if prefix + name in state.arrays
    }
    try:
        return Support.from_arrays(result)
    except KeyError as error:
        raise StoreError(
            f"the model lacks the array {prefix}{error.args[0]}: restore it or fit it again"
        ) from error
    except DataError as error:
        raise StoreError(
            f"the model's support is damaged ({error}): restore it or fit it again"
        ) from error


def _check(cells: CellStatistics, key: str) -> None:
    """StoreError unless all values are in their range and all shares add up."""
    numbers = (
        cells.support.points,
        cells.masses,
        cells.means,
        cells.covariances,
        cells.functions,
        cells.atoms,
        cells.shares,
        *(() if cells.components is None else (cells.components,)),
    )
    starts, covariances = cells.starts, cells.covariances
    in_order = (
        starts.dtype.kind in "iu"
        and starts[0] == 0
        and starts[-1] == len(cells.atoms)
        and bool((np.diff(starts) > 0).all())
    )
    faults = {
        "values that are not finite": not all(np.isfinite(a).all() for a in numbers),
        "masses": bool((cells.masses < 0).any()) or abs(cells.masses.sum() - 1.0) > _SUM_ERROR,
        "covariances": bool((np.einsum("sii->si", covariances) < 0).any())
        or not np.array_equal(covariances, covariances.swapaxes(1, 2), equal_nan=True),
        "starts": not in_order,
        "shares": not in_order
        or bool((cells.shares <= 0).any())
        or np.abs(np.add.reduceat(cells.shares, starts[:-1]) - 1.0).max() > _SUM_ERROR,
        "counts": not in_order or not _counts_fit(cells),
        "components": cells.components is not None
        and (
            bool((cells.components < 0).any())
            or np.abs(cells.components.sum(axis=0) - cells.masses).max() > _SUM_ERROR
        ),
        "ranges": not _ascends(cells.values),
    }
    wrong = [name for name, result in faults.items() if result]
    if wrong:
        raise StoreError(
            f"the model's cells of {key} are damaged ({', '.join(wrong)}): restore it or fit it "
            "again"
        )


def _ascends(values: ValueRange) -> bool:
    """Whether these may be ranges of columns, of whole numbers between whole numbers."""
    low, high = values.low, values.high
    with np.errstate(invalid="ignore"):
        whole = (np.floor(low) == low) & (np.floor(high) == high)
    return bool((low <= high).all() and whole[values.integer].all())


def _counts_fit(cells: CellStatistics) -> bool:
    """Whether counts and weights may be those of the atoms."""
    finite = bool(np.isfinite(cells.weights).all()) and bool((cells.weights >= 0).all())
    retained = np.bincount(cells.cell_of_atom[cells.weights > 0], minlength=cells.size)
    return finite and bool((retained <= cells.counts).all())
