"""Partial results on disk, encoded by structure: nested plain values as a Zarr group of few arrays.

A file names the dataclasses and named tuples in it, and the reader says which these may be: nothing
is imported or executed because a file says so.
"""

import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from cme_dask.data.atomic import ATTRIBUTE, disk_errors, sync, sync_tree
from cme_dask.data.store import (
    brief,
    is_listing,
    open_zarr,
    read_array,
    read_attribute,
    sealed,
    write_array,
)
from cme_dask.errors import StoreError

Array = Any
Kinds = Sequence[type]
"""The dataclasses and named tuples that may lie in a file."""

KIND, SCHEMA_VERSION = "partial", 1

_ADVICE = "remove it to have it computed again"


def write_partial(path: Path, value: Any, kinds: Kinds, *, place: str, flush: bool = False) -> None:
    """Write a value, whole or not at all; one that is there already is left as it is.

    Parameters
    ----------
    path
        Folder to make. Those who write it at once write the same, and the first one wins.
    value
        None, numbers, texts, arrays, tuples, lists and mappings of these, and dataclasses and named
        tuples of ``kinds`` of these.
    kinds
        The dataclasses and named tuples.
    place
        What the value is of, such as the pass and its rows: only those who name it read it.
    flush
        Return when it is on the disk, and not on the way there.

    Raises
    ------
    ResourceError
        If the disk is full or read-only.
    """
    if path.exists():
        return
    flat: dict[str, list[Array]] = {}
    tree = _encoded(value, flat, kinds)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with disk_errors(path):
            group = zarr.open_group(str(aside), mode="w", zarr_format=3)
            arrays = {n: write_array(group, n, np.concatenate(p)) for n, p in flat.items()}
            metadata = {"kind": KIND, "schema_version": SCHEMA_VERSION, "value": tree}
            metadata["place"] = place
            group.attrs[ATTRIBUTE] = sealed({**metadata, "arrays": arrays})
            if flush:
                sync_tree(aside)
            try:
                aside.rename(path)
            except OSError:
                if not path.exists():
                    raise
            if flush:
                sync(path.parent)  # its new name
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_partial(path: Path, kinds: Kinds, *, place: str) -> Any:
    """Inverse of :func:`write_partial`.

    Raises
    ------
    StoreError
        If it is missing or damaged, or was written at another place and copied here.
    """
    location = os.fspath(path)
    group = open_zarr(location)
    if not isinstance(group, zarr.Group):
        raise StoreError(f"{location} is a single array, a partial sum was expected")
    metadata = read_attribute(group, KIND, SCHEMA_VERSION, location)
    written_at = metadata.get("place", place)  # older ones do not say
    if written_at != place:
        raise StoreError(
            f"the partial sum {location} is that of {brief(written_at)}, that of {place} was "
            f"expected: {_ADVICE}"
        )
    listed = metadata.get("arrays")
    if not is_listing(listed):
        raise StoreError(f"the partial sum {location} lists no arrays: {_ADVICE}")
    flat = {name: read_array(group, name, location, listed[name]) for name in listed}
    try:
        return _decoded(metadata["value"], flat, kinds)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise StoreError(f"the partial sum {location} is damaged ({error}): {_ADVICE}") from error


def _encoded(value: Any, flat: dict[str, list[Array]], kinds: Kinds) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        parts = flat.setdefault(value.dtype.str.strip("<>|="), [])
        start = sum(map(len, parts))
        parts.append(np.ravel(value))
        return {"array": [np.dtype(value.dtype).str, start, list(np.shape(value))]}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        name = "tuple" if isinstance(value, tuple) else "list"
        return {name: [_encoded(item, flat, kinds) for item in value]}
    if isinstance(value, Mapping):
        return {"map": [[_encoded(x, flat, kinds) for x in pair] for pair in value.items()]}
    name = type(value).__name__
    if type(value) not in kinds or not (is_dataclass(value) or hasattr(value, "_fields")):
        raise TypeError(
            f"a {name} can't be part of a checkpoint: make it a dataclass or a named tuple, and "
            "name it in the reduction's kinds"
        )
    names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
    items = {field: _encoded(getattr(value, field), flat, kinds) for field in names}
    return {"type": name, "fields": items}


def _decoded(tree: Any, flat: Mapping[str, Array], kinds: Kinds) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "float" in tree:
        return float(tree["float"])
    if "array" in tree:
        dtype, start, shape = tree["array"]
        values = flat[dtype.strip("<>|=")]
        size = math.prod(shape)
        if not 0 <= start <= start + size <= len(values) or values.dtype != np.dtype(dtype):
            raise ValueError(f"no {size} values of {dtype} from {start}")
        # Zarr's types equal those of NumPy, but make other fingerprints of what follows.
        result = values[start : start + size].reshape(shape).view(np.dtype(dtype))
        return result if shape else result[()]
    if "tuple" in tree:
        return tuple(_decoded(item, flat, kinds) for item in tree["tuple"])
    if "list" in tree:
        return [_decoded(item, flat, kinds) for item in tree["list"]]
    if "map" in tree:
        return {_decoded(k, flat, kinds): _decoded(v, flat, kinds) for k, v in tree["map"]}
    made = {name: _decoded(item, flat, kinds) for name, item in tree["fields"].items()}
    return {kind.__name__: kind for kind in kinds}[tree["type"]](**made)


def write_json(path: Path, values: Mapping[str, Any], *, replace: bool = True) -> bool:
    """Write a small description whole; False if one was there that was not to be replaced."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with disk_errors(path):
        with draft.open("w") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(path)
            return True
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True
