"""A sample of (x, y, weight) rows, wherever it lies, and its Zarr schema.

Schema version 1: a Zarr (version 3) group with float64 arrays ``x`` (n, d_x), ``y`` (n, d_y),
optionally ``weights`` (n,), and the priority sample in ``row_sample/{keys,index,x,y}``. Chunks hold
whole rows. Version 2: ``x`` may be float32, and ``y`` may be absent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr

from cme_dask.errors import DataError, StoreError
from cme_dask.storage.columns import Columns
from cme_dask.storage.priority import RowSample
from cme_dask.storage.rows import RowSource, ZarrSource
from cme_dask.storage.zarr_files import member, read_array, read_attribute, stored_array

KIND, SCHEMA_VERSION = "sample", 2


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows (x_i, y_i, w_i), not read yet.

    Attributes
    ----------
    sources
        Rows of x and, if there is a y, of y.
    columns
        Descriptions of their columns.
    weights
        Weights of the rows, a source with one column, or None for equal weights.
    row_sample
        The stored priority sample, or None if the source holds none.
    location
        Where the rows lie, for messages.
    """

    sources: tuple[RowSource, ...]
    columns: tuple[Columns, ...]
    weights: RowSource | None = None
    row_sample: RowSample | None = None
    location: str = "memory"

    def __post_init__(self) -> None:
        named = list(zip("xy", self.sources, strict=False))
        if self.weights is not None:
            named.append(("weights", self.weights))
        rows = {name: source.shape[0] for name, source in named}
        if len(set(rows.values())) != 1:
            counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise DataError(
                f"the numbers of rows differ: {counts}; row i of each must be one observation"
            )
        for name, source in named:
            if source.shape[1] == 0:
                raise DataError(f"{name} has no columns: at least one is needed")
        for (name, source), columns in zip(named, self.columns, strict=False):
            if source.shape[1] != len(columns.names):
                raise DataError(
                    f"{name} has {source.shape[1]} columns but {len(columns.names)} names"
                )

    def __repr__(self) -> str:
        names = "; ".join(
            f"{variable}: {columns.listed()}"
            for variable, columns in zip("xy", self.columns, strict=False)
        )
        weights = "" if self.weights is None else ", weighted"
        return f"Sample({self.n_rows:,} rows{weights}, {names}, in {self.location})"

    @property
    def n_rows(self) -> int:
        """Number of rows n."""
        return self.sources[0].shape[0]

    @property
    def reads(self) -> tuple[RowSource, ...]:
        """All sources that a pass reads: x, y, weights."""
        return self.sources if self.weights is None else (*self.sources, self.weights)

    def select(self, x: Sequence[str] | None = None, y: Sequence[str] | None = None) -> "Sample":
        """The same rows with the wanted columns of x and y only."""
        if y is not None and len(self.sources) < 2:
            raise DataError("columns of y are wanted, but there are only rows of x: give y as well")
        wanted = [x, y][: len(self.sources)]
        if all(w is None for w in wanted):
            return self
        sources, columns, parts = [], [], list(self.row_sample.parts) if self.row_sample else []
        for i, (source, info, names) in enumerate(
            zip(self.sources, self.columns, wanted, strict=True)
        ):
            if names is None:
                sources.append(source)
                columns.append(info)
                continue
            positions = info.positions(names)
            sources.append(source.pick(positions))
            columns.append(info.only(names))
            if parts:
                parts[i] = parts[i][:, list(positions)]
        sample = self.row_sample and replace(self.row_sample, parts=tuple(parts))
        return replace(self, sources=tuple(sources), columns=tuple(columns), row_sample=sample)


def open_store(group: zarr.Group, location: str) -> Sample:
    """The sample in a Zarr group.

    Raises
    ------
    StoreError
        If it is no sample of this schema, was never finished, or is of a newer version.
    """
    about = read_attribute(group, KIND, SCHEMA_VERSION, location)
    if not isinstance(about.get("weights"), bool):
        raise StoreError(f"{location} does not say whether it has weights: write it again")
    variables = _variables(about)
    names = [*variables, *(["weights"] if about["weights"] else [])]
    arrays = {name: stored_array(group, name, location) for name in names}
    for name, array in arrays.items():
        either = name == "x" and about["schema_version"] > 1
        floats = ("float64", "float32") if either else ("float64",)
        if array.dtype not in floats or array.ndim != (1 if name == "weights" else 2):
            raise StoreError(
                f"the array {name!r} of {location} should be {' or '.join(floats)} rows, it is "
                f"{array.dtype} of shape {array.shape}: write the store again"
            )
        if array.shape[0] != about.get("rows"):
            raise StoreError(
                f"the array {name!r} of {location} has {array.shape[0]} rows, its description says "
                f"{about.get('rows')}: restore it from a copy or write the store again"
            )
    try:
        columns = tuple(Columns.from_dict(about["columns"][v]) for v in variables)
    except (KeyError, TypeError) as error:
        raise StoreError(f"{location} describes no columns: {error!r}") from error
    return Sample(
        sources=tuple(ZarrSource(arrays[v]) for v in variables),
        columns=columns,
        weights=ZarrSource(arrays["weights"]) if "weights" in arrays else None,
        row_sample=_row_sample(
            group,
            {v: arrays[v] for v in variables},
            about.get("row_sample_complete") is True,
            location,
        ),
        location=location,
    )


def schema_version(variables: Sequence[zarr.Array[Any]]) -> int:
    """The lowest version that allows these arrays x and y: older readers read what they can."""
    return 1 if len(variables) == 2 and variables[0].dtype == np.float64 else 2


def _variables(about: dict[str, Any]) -> str:
    """``"xy"``, or ``"x"`` if the store describes no y, as it may from version 2 on."""
    described = about.get("columns")
    alone = isinstance(described, dict) and "y" not in described
    return "x" if alone and about["schema_version"] > 1 else "xy"


def _row_sample(
    group: zarr.Group, arrays: dict[str, zarr.Array[Any]], complete: bool, location: str
) -> RowSample:
    rows = member(group, "row_sample", location)
    if not isinstance(rows, zarr.Group):
        raise StoreError(f"{location} holds no row sample: write it again")
    keys, index, weights, *parts = (
        read_array(rows, name, location) for name in ("keys", "index", "weights", *arrays)
    )
    widths = [(len(keys), array.shape[1]) for array in arrays.values()]
    kinds = [a.dtype.kind for a in (index, keys, weights, *parts)]
    if (
        keys.ndim != 1
        or index.shape != keys.shape
        or weights.shape != keys.shape
        or [part.shape for part in parts] != widths
        or kinds != ["i", *(["f"] * (len(kinds) - 1))]
        or not len(keys)
        or not 0 <= index.min() <= index.max() < arrays["x"].shape[0]
    ):
        raise StoreError(f"the row sample of {location} does not fit its rows: write it again")
    return RowSample(keys, index, tuple(parts), weights, complete)
