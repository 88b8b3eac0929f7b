"""Saved models: a Zarr group of small arrays and a JSON description; nothing in it is executed."""

import os
from dataclasses import dataclass
from typing import Any

import zarr

from cme_dask.data.atomic import ATTRIBUTE, disk_errors, path_text, stored, writing
from cme_dask.data.store import (
    is_listing,
    open_zarr,
    read_array,
    read_attribute,
    sealed,
    write_array,
)
from cme_dask.errors import StoreError

Array = Any

KIND, SCHEMA_VERSION = "model", 6

OUTPUT = stored(KIND)
"""What a saved model is, among outputs."""


@dataclass(frozen=True, eq=False)
class ModelState:
    """What a model is made of, as plain values.

    Attributes
    ----------
    type
        Name of the model's class.
    description
        JSON values.
    arrays
        Arrays by name.
    schema_version
        The lowest version that allows the description: older readers read what they can.
    """

    type: str
    description: dict[str, Any]
    arrays: dict[str, Array]
    schema_version: int = 1


def write_model(
    path: str | os.PathLike[str],
    state: ModelState,
    *,
    overwrite: bool = False,
    run: str | None = None,
) -> None:
    """Write a model to a local folder, whole or not at all.

    Parameters
    ----------
    path
        The folder.
    state
        The model.
    overwrite
        Whether it may replace an earlier model.
    run
        Fingerprint of the run that made it, which :func:`run_of` reads.

    Raises
    ------
    DataError
        If the path exists and ``overwrite`` is not set, or it is no model.
    ResourceError
        If the disk is full or read-only.
    """
    with writing(path, OUTPUT, overwrite=overwrite) as aside, disk_errors(path):
        group = zarr.open_group(str(aside), mode="w", zarr_format=3)
        group.attrs[ATTRIBUTE] = sealed(
            {
                "kind": KIND,
                "schema_version": state.schema_version,
                **({} if run is None else {"run": run}),
                "type": state.type,
                "description": state.description,
                "arrays": {n: write_array(group, n, values) for n, values in state.arrays.items()},
            }
        )


def run_of(path: str | os.PathLike[str]) -> str | None:
    """Fingerprint of the run that made the model at a path; None if that is not known."""
    try:
        group = open_zarr(path)
        run = read_attribute(group, KIND, SCHEMA_VERSION, os.fspath(path)).get("run")
    except StoreError:
        return None
    return run if isinstance(run, str) else None


def read_model(
    path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None
) -> ModelState:
    """Read a model from a path or fsspec URL.

    Raises
    ------
    DataError
        If it is no path.
    StoreError
        If there is none, or it is damaged, unfinished or of a newer version.
    """
    location = path_text(path, "a model")
    group = open_zarr(path, storage_options)
    if not isinstance(group, zarr.Group):
        raise StoreError(f"{location} is a single array, a model was expected")
    head = read_attribute(group, KIND, SCHEMA_VERSION, location)
    kind, metadata = head.get("type"), head.get("description")
    if not isinstance(kind, str) or not isinstance(metadata, dict):
        raise StoreError(f"{location} has a damaged description: restore it or fit it again")
    listed = head.get("arrays")
    if not is_listing(listed):
        raise StoreError(f"{location} has a damaged list of arrays: restore it or fit it again")
    arrays = {n: read_array(group, n, location, written) for n, written in listed.items()}
    return ModelState(kind, metadata, arrays)
