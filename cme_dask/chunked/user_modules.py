"""Modules of the user's own functions: part of what a run is, and workers must have them."""

import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from distributed import Client

from cme_dask.errors import ResourceError

_VERSIONED = {"builtins", "cme_dask", "dask", "distributed", "numpy", "scipy", "sklearn"}


def user_modules(value: Any) -> set[str]:
    """Names of the modules of functions and objects in a value, beside packages with versions.

    Scripts are none: what they define travels with its code.
    """
    return _modules(value, set())


def _modules(value: Any, seen: set[int]) -> set[str]:
    if id(value) in seen or value is None or isinstance(value, (bool, int, float, str, np.ndarray)):
        return set()
    seen.add(id(value))
    found: set[str] = set()
    name = getattr(value, "__module__", None) or type(value).__module__
    top = name.partition(".")[0]
    versioned = top in _VERSIONED or top in sys.stdlib_module_names
    file = getattr(sys.modules.get(name), "__file__", None)
    if name != "__main__" and not versioned and file is not None:
        found.add(name)
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        parts += value
    elif isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        parts += vars(value).values()
    return found.union(*(_modules(part, seen) for part in parts))


def check_workers_have(client: Client, value: Any) -> None:
    """ResourceError unless all workers can import the modules that a value needs.

    A worker that can't unpack a task dies of it, and the next one, too.
    """
    names = sorted(user_modules(value))
    if not names:
        return
    missing = client.run(_missing, names, on_error="ignore")  # some may die now
    lacking = {name: who for who, lost in missing.items() for name in lost}
    for name, who in lacking.items():
        raise ResourceError(
            f"the worker {who} can't import {name!r}, where functions of this run are defined: "
            "install it there, put it on PYTHONPATH, or send it with Client.upload_file"
        )


def _missing(names: list[str]) -> list[str]:
    lost = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            lost.append(name)
    return lost
