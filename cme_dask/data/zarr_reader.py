"""Zarr groups of columns, with the CF conventions: read them by ranges of rows."""

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import zarr
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from cme_dask.data.arrow import as_arrow, matrix_names
from cme_dask.data.atomic import ATTRIBUTE
from cme_dask.data.remote import with_persistence
from cme_dask.data.sample import Sample, open_store
from cme_dask.data.sources import ZarrSource, in_strips
from cme_dask.data.store import DECODE_ERRORS, check_access, open_zarr, safe
from cme_dask.data.tables import Batch, Kind, common_length, rows_per_batch
from cme_dask.errors import CmeDaskError, DataError, ResourceError, StoreError, without_secrets

# Values that are coded by the CF conventions, as xarray writes them to Zarr


Array = Any
Decode = Callable[[Array], Array]

_ENCODED = ("scale_factor", "add_offset", "missing_value", "_FillValue", "dtype")


def cf_decoder(name: str, array: zarr.Array[Any]) -> Decode | None:
    """What undoes the CF conventions; None if there is nothing to undo."""
    attributes = dict(array.attrs)
    fill = _fill_value(name, array, attributes)
    attributes.pop("_FillValue", None)
    if fill is not None and not np.isnan(fill):
        attributes["_FillValue"] = fill
    if not (" since " in str(attributes.get("units")) or set(_ENCODED) & set(attributes)):
        return None
    return _CF(name, attributes)


def _fill_value(name: str, array: zarr.Array[Any], attributes: Mapping[str, Any]) -> float | None:
    """The number that stands for a missing value, as xarray keeps it."""
    if array.dtype.kind not in "iuf":
        return None
    if "_FillValue" in attributes:
        return _number(name, attributes["_FillValue"])
    if array.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in attributes:
        return None if array.fill_value is None else array.fill_value.item()
    return None


def _number(name: str, fill: Any) -> float:
    """A fill value: a number, or of a float in format 3 its bytes, coded as text."""
    try:
        if isinstance(fill, str) and fill != "NaN":
            return float(np.frombuffer(base64.b64decode(fill), "<f8")[0])
        return fill if isinstance(fill, int) else float(fill)
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(
            f"the array {name!r} has the fill value {fill!r}, a number was expected: correct its "
            "attribute _FillValue"
        ) from error


@dataclass(frozen=True)
class _CF:
    """Decodes values by the CF conventions, as xarray does."""

    name: str
    attributes: Mapping[str, Any]

    def __call__(self, values: Array) -> Array:
        try:
            import xarray
        except ImportError as error:
            raise ResourceError(
                f"the array {self.name!r} is coded by the CF conventions, which needs xarray: "
                "install cme-dask[xarray]"
            ) from error
        dimensions = ("row", "column")[: values.ndim]
        try:
            coded = xarray.Variable(dimensions, values, dict(self.attributes))
            return xarray.conventions.decode_cf_variable(self.name, coded).values
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"the array {self.name!r} is coded by the CF conventions in a way that xarray "
                f"can't read: {error}"
            ) from error


# Zarr groups of columns, our own, xarray's and others: read them by ranges of rows


@dataclass(frozen=True)
class _Stored:
    """One array of rows: its columns, and what turns stored values into theirs."""

    name: str
    array: zarr.Array[Any]
    columns: tuple[str, ...]
    decode: Decode | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def read(self, requested: Sequence[str]) -> tuple[ZarrSource, list[str]]:
        """The requested columns as rows of their own, and which they are."""
        places = [place for place, name in enumerate(self.columns) if name in requested]
        names = [self.columns[place] for place in places]
        source = ZarrSource(self.array)
        whole = len(places) == len(self.columns)
        return source if whole else source.pick(tuple(places)), names

    def arrow(self, rows: Array, place: int, column: str, table: str) -> Any:
        """One of the columns that were read."""
        values = rows if rows.ndim == 1 else rows[:, place]
        if column not in self.labels:
            return as_arrow(values, column, table)
        return _labelled(values, self.labels[column], f"column {column!r} of {table}")


@dataclass(frozen=True)
class StoredRoles:
    """Which columns of a store play which part; the fields as arguments of an ingest."""

    x: tuple[str, ...]
    y: tuple[str, ...]
    weights: str | None = None
    group: str | None = None
    time: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class ZarrTableSource:
    """A Zarr group or array whose first dimension is the rows.

    See :class:`~cme_dask.data.tables.Source`. Arrays of one dimension are columns by their
    names. The columns of a matrix ``a`` are named after the coordinate of its second dimension if
    there is one, or else ``a0, a1, ...``. Values that are coded by the CF conventions (times,
    scaled numbers, fill values), as xarray writes them, are decoded by xarray. A sample store has
    the columns that it describes, and ``weights``; labels instead of their codes.

    Chunks of any shape are read once each, unless reading resumes inside one. Rows in messages
    count from 0. A position is the number of rows read.
    """

    location: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What messages call it."""
        return without_secrets(self.location)

    def fingerprint(self) -> str:
        """A hash of the sizes and times of change, or ETags, of all its files."""
        total, count = 0, 0
        for line in self._files():  # in any order, since millions of names take long to sort
            digest = hashlib.sha256(line.encode()).digest()
            total = (total + int.from_bytes(digest[:16])) % (1 << 128)
            count += 1
        return f"{count} files {total:032x}"

    def columns(self) -> tuple[str, ...]:
        """The names of the columns of all arrays."""
        return tuple(name for stored in self._stored() for name in stored.columns)

    def roles(self) -> "StoredRoles":
        """Which columns play which part: of a sample store its own, else those of x and of y."""
        result = self._open()
        if _is_ours(result):
            return _sample_roles(result, open_store(result, self.location))
        by_array = {stored.name: stored.columns for stored in self._stored()}
        return StoredRoles(by_array.get("x", ()), by_array.get("y", ()))

    def batches(
        self,
        requested: Sequence[str],
        kinds: Mapping[str, Kind],
        null_values: Sequence[str],
        position: Mapping[str, Any] | None,
    ) -> Iterator[Batch]:
        """The stored types; NaN and NaT are missing values, and so is what CF conventions say."""
        chosen = [s for s in self._stored() if set(s.columns) & set(requested)]
        n = common_length(self.name, {s.name: int(s.array.shape[0]) for s in chosen})
        row = int(position["row"]) if position else 0
        step = rows_per_batch(8 * len(requested))
        reads = [stored.read(requested) for stored in chosen]
        strips = [in_strips(source.stored, source.chunk_rows, row, n, step) for source, _ in reads]
        for parts in zip(*strips, strict=True):
            arrays: dict[str, Any] = {}
            for stored, (_, names), part in zip(chosen, reads, parts, strict=True):
                rows = part if stored.decode is None else stored.decode(part)
                for place, name in enumerate(names):
                    arrays[name] = stored.arrow(rows, place, name, self.name)
            batch = pa.RecordBatch.from_arrays(
                [arrays[n] for n in requested], names=list(requested)
            )
            yield Batch(batch, row, {"row": row + batch.num_rows})
            row += batch.num_rows

    def _stored(self) -> list[_Stored]:
        result = self._open()
        if isinstance(result, zarr.Array):
            arrays = {"x": result}
        elif _is_ours(result):
            return _of_sample(result, open_store(result, self.location))
        else:
            try:
                arrays = {n: safe(a, f"{self.name}/{n}") for n, a in sorted(result.arrays())}
            except CmeDaskError:
                raise
            except DECODE_ERRORS as error:
                check_access(error, self.name)
                raise StoreError(
                    f"the description of an array of {self.name} is damaged ({error}): restore it "
                    "from a copy or write it again"
                ) from error
        stored = _of_group(arrays)
        if not stored:
            shapes = ", ".join(f"{name!r} of shape {a.shape}" for name, a in arrays.items())
            raise DataError(
                f"{self.name} holds {shapes or 'no arrays'}: expected arrays of shape (n,) or "
                "(n, d)"
            )
        return stored

    def _open(self) -> Any:
        return open_zarr(self.location, dict(self.storage_options) or None)

    def _files(self) -> Iterator[str]:
        options = with_persistence(self.location, self.storage_options)
        files, path = url_to_fs(self.location, **options)
        if isinstance(files, LocalFileSystem):
            for folder, _, names in os.walk(path):
                for name in names:
                    metadata = os.stat(os.path.join(folder, name))
                    key = f"{os.path.relpath(folder, path)}/{name}"
                    yield f"{key} {metadata.st_size} {metadata.st_mtime}"
            return
        for name, metadata in files.find(path, detail=True).items():
            marks = [metadata.get(key) for key in ("size", "ETag", "etag", "LastModified", "mtime")]
            yield f"{name} {marks}"


def _labelled(values: Array, labels: Sequence[str], what: str) -> Any:
    """The labels that stored codes stand for."""
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)
    codes = np.where(missing, 0, values)
    known = (codes >= 0) & (codes < len(labels)) & (codes == np.floor(codes))
    if not known.all():
        raise StoreError(
            f"{what} has the code {codes[~known][0]}, there are labels for 0 to {len(labels) - 1}: "
            "restore it from a copy or write it again"
        )
    texts = pa.array(labels, pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=missing), texts)


def _is_ours(node: Any) -> bool:
    return isinstance(node, zarr.Group) and ATTRIBUTE in node.attrs


def _of_sample(group: zarr.Group, sample: Sample) -> list[_Stored]:
    """The arrays of a sample store; a column that is in x or y and has another role comes once."""
    metadata: Any = group.attrs[ATTRIBUTE]
    stored = [
        _Stored(name, _array(group, name), columns.names, labels=columns.categories)
        for name, columns in zip("xy", sample.columns, strict=False)
    ]
    names = {name for part in stored for name in part.columns}
    columns = {"weights": "weights"} if sample.weights is not None else {}
    for role, column in {**columns, **metadata.get("roles", {})}.items():
        if column not in names:
            labels = metadata.get("group_labels") if role == "group" else None
            described = {} if labels is None else {column: labels}
            stored.append(_Stored(role, _array(group, role), (column,), labels=described))
            names.add(column)
    return stored


def _sample_roles(group: zarr.Group, sample: Sample) -> StoredRoles:
    metadata: Any = group.attrs[ATTRIBUTE]
    roles = metadata.get("roles", {})
    variables = [*(columns.names for columns in sample.columns), ()]
    labelled = [name for c in sample.columns for name in c.categories]
    if metadata.get("group_labels") is not None and roles.get("group") is not None:
        labelled.append(roles["group"])
    return StoredRoles(
        x=variables[0],
        y=variables[1],
        weights=None if sample.weights is None else "weights",
        group=roles.get("group"),
        time=(roles["time"],) if "time" in roles else (),
        categorical=tuple(dict.fromkeys(labelled)),
        units={name: unit for c in sample.columns for name, unit in c.units.items()},
        seed=metadata.get("seed") or 0,
    )


def _array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    result = group[name]
    assert isinstance(result, zarr.Array)  # `open_store` has looked
    return result


def _of_group(arrays: Mapping[str, zarr.Array[Any]]) -> list[_Stored]:
    """The arrays of one or two dimensions, but for coordinates that name columns."""
    tables = {name: a for name, a in arrays.items() if a.ndim in (1, 2)}
    naming = {_dimensions(a)[1] for a in tables.values() if a.ndim == 2} - {None}
    stored = []
    for name, array in tables.items():
        if array.ndim == 1:
            if name not in naming:
                stored.append(_Stored(name, array, (name,), cf_decoder(name, array)))
            continue
        labels = arrays.get(_dimensions(array)[1] or "")
        named = labels is not None and labels.shape == array.shape[1:]
        columns = (
            tuple(str(label) for label in labels[...].tolist())  # type: ignore[union-attr]
            if labels is not None and named
            else matrix_names(name, array.shape[1])
        )
        stored.append(_Stored(name, array, columns, cf_decoder(name, array)))
    return stored


def _dimensions(array: zarr.Array[Any]) -> tuple[str | None, ...]:
    """Names of the dimensions, as Zarr 3 or, for Zarr 2, xarray keeps them."""
    named = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    return tuple(named) if named else (None,) * array.ndim  # type: ignore[arg-type]
