"""Saved models: a Zarr group of small arrays and a JSON description; nothing in it is executed."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from cme_dask.data.store import (
    ATTRIBUTE,
    disk_errors,
    is_listing,
    open_zarr,
    read_array,
    read_attribute,
    sealed,
    write_array,
    writing,
)
from cme_dask.errors import StoreError

Array = Any

KIND, SCHEMA_VERSION = "model", 1


@dataclass(frozen=True, eq=False)
class ModelState:
    """What a model is made of, as plain values.

    Attributes
    ----------
    type
        Name of the model's class.
    about
        JSON description.
    arrays
        Arrays by name.
    """

    type: str
    about: dict[str, Any]
    arrays: dict[str, Array]

    def array(self, name: str, shape: tuple[int | None, ...], *, finite: bool = True) -> Array:
        """The named array, checked: float64 or integers, of this shape (None is any length).

        Raises
        ------
        StoreError
            If it is missing or of another shape or kind, or holds NaN or infinity where it must be
            ``finite``.
        """
        if name not in self.arrays:
            raise StoreError(f"the model lacks the array {name!r}: restore it or fit it again")
        result = self.arrays[name]
        fits = result.ndim == len(shape) and all(
            want is None or want == got for want, got in zip(shape, result.shape, strict=True)
        )
        if not fits or result.dtype.kind not in "fi":
            raise StoreError(
                f"the model's array {name!r} should be numeric of shape {shape}, it is "
                f"{result.dtype} of shape {result.shape}: restore it or fit it again"
            )
        if finite and not np.isfinite(result).all():
            raise StoreError(
                f"the model's array {name!r} holds values that are not finite: restore it or fit "
                "it again"
            )
        return result


def write_model(
    path: str | os.PathLike[str], state: ModelState, *, overwrite: bool = False
) -> None:
    """Write a model to a local folder, whole or not at all.

    Raises
    ------
    DataError
        If the path exists and ``overwrite`` is not set.
    ResourceError
        If the disk is full or read-only.
    """
    with writing(path, overwrite=overwrite) as aside, disk_errors(path):
        group = zarr.open_group(str(aside), mode="w", zarr_format=3)
        group.attrs[ATTRIBUTE] = sealed(
            {
                "kind": KIND,
                "schema_version": SCHEMA_VERSION,
                "type": state.type,
                "about": state.about,
                "arrays": {n: write_array(group, n, values) for n, values in state.arrays.items()},
            }
        )


def read_model(
    path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None
) -> ModelState:
    """Read a model from a path or fsspec URL.

    Raises
    ------
    StoreError
        If there is none, or it is damaged, unfinished or of a newer version.
    """
    location = os.fspath(path)
    group = open_zarr(path, storage_options)
    if not isinstance(group, zarr.Group):
        raise StoreError(f"{location} is a single array, a model was expected")
    head = read_attribute(group, KIND, SCHEMA_VERSION, location)
    kind, metadata = head.get("type"), head.get("about")
    if not isinstance(kind, str) or not isinstance(metadata, dict):
        raise StoreError(f"{location} has a damaged description: restore it or fit it again")
    listed = head.get("arrays")
    if not is_listing(listed):
        raise StoreError(f"{location} has a damaged list of arrays: restore it or fit it again")
    arrays = {n: read_array(group, n, location, written) for n, written in listed.items()}
    return ModelState(kind, metadata, arrays)
