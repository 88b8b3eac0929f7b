"""The user's own functions in a run: the modules that define them, and what these modules say."""

import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_VERSIONED = {"builtins", "cme_dask", "dask", "distributed", "numpy", "scipy", "sklearn"}
_INSTALLED = {"site-packages", "dist-packages"}


def user_modules(value: Any) -> set[str]:
    """Names of the modules of functions and objects in a value, beside packages with versions.

    Scripts are none: what they define travels with its code.
    """
    return {name for part in _parts(value, set()) if (name := _module_of(part)) is not None}


def code_digests(value: Any) -> list[str]:
    """Fingerprints of all modules that functions and objects in a value are made of.

    These are the modules that define them, those that define their classes' bases, those that
    functions of a script name, and what all these import in turn; of packages that are installed
    only the files that are named so, and of those with versions none.
    """
    names, read = set[str](), set[int]()
    waiting = list(_parts(value, set()))
    while waiting:
        part = waiting.pop()
        name = _module_of(part)
        if name is not None and name not in names:
            names.add(name)
            if not _INSTALLED & set(_file_of(name).parts):
                kinds = ModuleType, FunctionType, type
                waiting += [v for v in vars(sys.modules[name]).values() if isinstance(v, kinds)]
        if id(part) in read:
            continue
        read.add(id(part))
        if not isinstance(part, (FunctionType, ModuleType)):
            kind = part if isinstance(part, type) else type(part)
            waiting += kind.__mro__[1:]
            if kind.__module__ == "__main__":
                waiting += [each for each in vars(kind).values() if isinstance(each, FunctionType)]
        elif isinstance(part, FunctionType) and part.__module__ == "__main__":
            waiting += _named_by(part)
    digests = ((name, hashlib.sha256(_file_of(name).read_bytes())) for name in sorted(names))
    return [f"{name} {digest.hexdigest()}" for name, digest in digests]


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """A value and all that lies in it, each once."""
    if id(value) in seen or value is None or isinstance(value, (bool, int, float, str, np.ndarray)):
        return
    seen.add(id(value))
    if _top(_defined_in(value)) == "zarr":
        return  # rows of a store: nobody's functions
    yield value
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        parts += value
    elif isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif not isinstance(value, (type, ModuleType)) and hasattr(value, "__dict__"):
        parts += vars(value).values()
    for part in parts:
        yield from _parts(part, seen)


def _named_by(function: FunctionType) -> Iterator[Any]:
    """What a function names, also within functions in it: globals, and values that it encloses."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        known = function.__globals__
        yield from (known[name] for name in code.co_names if name in known)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty yet
            continue


def _defined_in(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    return getattr(value, "__module__", None) or type(value).__module__


def _top(name: str) -> str:
    return name.partition(".")[0]


def _module_of(value: Any) -> str | None:
    """The module of a value, if it is one of a file and neither a script nor has a version."""
    name = _defined_in(value)
    versioned = _top(name) in _VERSIONED or _top(name) in sys.stdlib_module_names
    if name == "__main__" or versioned or not _file_of(name).is_file():
        return None
    return name


def _file_of(name: str) -> Path:
    return Path(getattr(sys.modules.get(name), "__file__", None) or "")
