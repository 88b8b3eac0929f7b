"""What a run depends on, told by short fingerprints: its rows, its parameters, its versions."""

import asyncio
import hashlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from cme_dask.chunked.checkpoints import token_of, versions
from cme_dask.chunked.sources import DaskSource
from cme_dask.chunked.user_modules import user_modules
from cme_dask.storage.rows import RowSource, ZarrSource
from cme_dask.storage.sample import Sample

_CHECKSUM = 4  # bytes of a CRC-32C, which close a chunk of our stores
_AT_ONCE = 32


def about_run(
    name: str, parameters: Mapping[str, Any], sample: Sample, given: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """Fingerprints of a fit, by what they are of and by name.

    Parameters
    ----------
    name
        Of the estimator.
    parameters
        Its parameters.
    sample
        The rows. Of a Zarr store the last bytes of every chunk are read, which are its checksum in
        stores of ours, and of files of others when they were written, and their size; arrays in
        memory are hashed; a Dask array is told by its name.
    given
        What else the fit was given: functions.
    """
    # A function of a module goes by its name: what the module says is part of what it is.
    configuration = {"estimator": name} | {
        key: _told(value, key) for key, value in {**parameters, **given}.items()
    }
    return {"version": versions(), "configuration": configuration, "data": _rows(sample)}


def _told(value: Any, name: str) -> str:
    """A value in words where these tell all of it, else with a fingerprint."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    words = repr(value) if len(repr(value)) < 60 and " at 0x" not in repr(value) else ""
    sources = [_digest(module) for module in sorted(user_modules(value))]
    token = token_of((value, *sources) if sources else value, name)
    return f"{words or type(value).__name__} ({token[:12]})"


def _digest(module: str) -> str:
    """A fingerprint of the source of a module, where there is one."""
    path = Path(getattr(sys.modules[module], "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _rows(sample: Sample) -> dict[str, str]:
    told = {
        "rows": f"{sample.n_rows:,}",
        "columns": "; ".join(columns.listed() for columns in sample.columns),
        "part": str(sample.part),
        "folds": str(sample.folding),
    }
    names = ["x", "y"][: len(sample.sources)]
    names += ["weights"] if sample.weights is not None else []
    names += list(sample.units)
    for name, source in zip(names, sample.reads, strict=True):
        told[f"values of {name}"] = _values(source)
    if sample.row_sample is not None:
        rows = sample.row_sample
        told["row sample"] = token_of((rows.index, rows.keys), "row sample")[:16]
    return told


def _values(source: RowSource) -> str:
    if isinstance(source, ZarrSource):
        return f"{_chunks(source.array, source.whole)} {source.columns or ''}".strip()
    if isinstance(source, DaskSource):
        return str(source.array.name)
    return token_of(np.asarray(source.array), "rows")[:16]  # type: ignore[attr-defined]


def _chunks(array: zarr.Array[Any], ours: bool) -> str:
    """A fingerprint of all chunks of a Zarr array, from their last bytes."""
    rows = int((array.shards or array.chunks)[0])
    grid = [math.ceil(array.shape[0] / rows)]
    grid += [math.ceil(s / c) for s, c in zip(array.shape[1:], array.chunks[1:], strict=True)]
    prefix = f"{array.path}/" if array.path else ""
    encode = array.metadata.encode_chunk_key
    keys = (prefix + encode(tuple(map(int, key))) for key in np.ndindex(*grid))
    found = hashlib.sha256(repr((array.shape, str(array.dtype), rows)).encode())

    root = getattr(array.store, "root", None)  # of a local folder

    async def ends() -> None:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def end(key: str) -> bytes:
            async with gate:
                part = await array.store.get(
                    key, default_buffer_prototype(), byte_range=SuffixByteRequest(_CHECKSUM)
                )
            if part is None:
                return b"gone"
            return part.to_bytes() + (b"" if ours or root is None else _written(root / key))

        for piece in await asyncio.gather(*map(end, keys)):
            found.update(piece)

    sync(ends())
    return found.hexdigest()[:16]


def _written(path: Path) -> bytes:
    """Size and time of a file: chunks without a checksum show no change in their last bytes."""
    try:
        found = path.stat()
    except OSError:
        return b""
    return f"{found.st_size} {found.st_mtime_ns}".encode()
