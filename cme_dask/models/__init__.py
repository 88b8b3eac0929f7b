"""Frozen models and ``load``: queries without data, Dask or scikit-learn."""

import os
from typing import Any

from cme_dask.errors import StoreError
from cme_dask.kernels import Kernel
from cme_dask.models.joint import JointModel
from cme_dask.storage.model_file import read_model

_TYPES = {"JointModel": JointModel}


def load(
    path: str | os.PathLike[str],
    *,
    kernels: dict[str, Kernel] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> JointModel:
    """Load a saved model.

    Parameters
    ----------
    path
        Folder or fsspec URL that ``save`` wrote (or a copy of it).
    kernels
        Users' own kernels by name, for models fitted with them.
    storage_options
        Passed on to fsspec with URLs.

    Raises
    ------
    StoreError
        If there is no model, or it is damaged, unfinished or of a newer version.
    DataError
        If a user's own kernel is needed and not given.
    """
    state = read_model(path, storage_options)
    if state.type not in _TYPES:
        raise StoreError(f"{path} holds a {state.type!r}; known are {', '.join(_TYPES)}")
    return _TYPES[state.type].from_state(state, kernels)


__all__ = ["JointModel", "load"]
