"""Frozen models and ``load``: queries without data, Dask or scikit-learn."""

import os
from typing import Any, TypeVar

from cme_dask.data.model_file import read_model
from cme_dask.data.store import brief
from cme_dask.errors import DataError, StoreError
from cme_dask.kernels import Kernel
from cme_dask.models.base import MODELS, Model, maker
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.features import FeatureModel
from cme_dask.models.filter import FilterModel
from cme_dask.models.joint import JointModel
from cme_dask.models.logistic import LogisticModel
from cme_dask.models.operators import Operator
from cme_dask.models.reweighted import ReweightedModel
from cme_dask.models.sparse import SparseModel
from cme_dask.models.transfer import TransferModel

Kind = TypeVar("Kind", bound=Model)


def load(
    path: str | os.PathLike[str],
    *,
    kernels: dict[str, Kernel] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Model:
    """Load a saved model: what ``save`` of any estimator wrote.

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
    if state.type not in MODELS:
        known = ", ".join(MODELS)
        raise StoreError(f"{path} holds a {brief(repr(state.type))}; known are {known}")
    return MODELS[state.type].from_state(state, kernels)


def load_only(
    kind: type[Kind],
    path: str | os.PathLike[str],
    *,
    kernels: dict[str, Kernel] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Kind:
    """Load a saved model of one kind; other parameters and errors as those of :func:`load`.

    Raises
    ------
    DataError
        If it is of the other kind.
    """
    return only(kind, load(path, kernels=kernels, storage_options=storage_options), path)


def only(kind: type[Kind], model: Model, path: str | os.PathLike[str]) -> Kind:
    """The model of a path, if it is of this kind; DataError if not."""
    if not isinstance(model, kind):
        name = type(model).__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise DataError(
            f"{os.fspath(path)} holds {article} {name}, a {kind.__name__} was expected: "
            f"save one by {maker(kind)}"
        )
    return model


__all__ = [
    "EmbeddingModel",
    "FeatureModel",
    "FilterModel",
    "JointModel",
    "LogisticModel",
    "Model",
    "Operator",
    "ReweightedModel",
    "SparseModel",
    "TransferModel",
    "load",
    "load_only",
    "only",
]
