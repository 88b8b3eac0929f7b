"""Dataclasses that declare the shapes of their arrays, as JSON values and named arrays, and back.

A dataclass says in its annotations what a file may hold::

    newton: Basis
    transform: Annotated[Array, Shape("newton.rank", "k")]
    eigenvalues: Annotated[Array, Shape("k")]

Files of models are written and read by these declarations alone. Nothing in a file is imported or
executed: the kinds of objects that it may name are those that the annotations do.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from cme_dask.errors import DataError, StoreError

Array = Any
Sizes = Mapping[str, int]
Reader = Callable[[Any], Any]

FLOAT32_TEXT = "float32-base64"
"""The only key of the JSON form of an array of float32."""

_FLOAT32_ARRAY = "float32-array"  # the same in files, with the name of the array
_DEEPEST = 16  # objects within objects: a hostile file must not exhaust the stack
_MOST_ITEMS = 10_000
_RESTORE = "restore it or fit it again"


class Shape:
    """The declared shape of an array, in annotations.

    Parameters
    ----------
    sizes
        Of its axes: a number; the path of an attribute of a field that is declared before, such as
        ``"newton.rank"``, whose length counts where it is no number; or another name, which stands
        for the same size throughout an object. A number may be added, ``"S+1"``.
    finite
        Whether NaN and infinity are refused.
    dtype
        ``bool`` and ``np.uint64`` are stored as integers and made again; ``np.int64`` is required.
        ``float``: floating-point numbers. By default these or int64.
    """

    def __init__(self, *sizes: int | str, finite: bool = True, dtype: Any = None) -> None:
        self.sizes, self.finite, self.dtype = sizes, finite, dtype


class Later:
    """In annotations of optional fields: files of earlier versions lack them."""


class Within:
    """Sizes that the declarations of a part name, in annotations: ``Within(d="columns.names")``.

    Parts also know the sizes that are named around them.
    """

    def __init__(self, **sizes: str) -> None:
        self.sizes = sizes


@dataclass(frozen=True, eq=False)
class _Hint:
    """What the annotation of a field says."""

    kinds: tuple[Any, ...]
    optional: bool = False
    shape: Shape | None = None
    within: Mapping[str, str] | None = None
    later: bool = False

    @classmethod
    def of(cls, annotation: Any) -> "_Hint":
        shape, within, kinds, optional, later = None, None, [], False, False
        waiting = [annotation]
        while waiting:
            one = waiting.pop(0)
            if get_origin(one) is Annotated:
                base, *said = get_args(one)
                waiting.append(base)
                shape = next((s for s in said if isinstance(s, Shape)), shape)
                within = next((w.sizes for w in said if isinstance(w, Within)), within)
                later = later or any(isinstance(one, Later) for one in said)
            elif get_origin(one) in (Union, UnionType):
                waiting += get_args(one)
            elif one is NoneType:
                optional = True
            else:
                kinds.append(one)
        return cls(tuple(kinds), optional, shape, within, later)


@lru_cache(maxsize=256)
def _hints(kind: type, names: tuple[tuple[str, type], ...]) -> dict[str, _Hint]:
    """What the annotations of a dataclass say, by field."""
    hints = get_type_hints(kind, localns=dict(names), include_extras=True)
    return {f.name: _Hint.of(hints[f.name]) for f in fields(kind) if f.init}


@dataclass(frozen=True, eq=False)
class Codec:
    """Writes and reads dataclasses by the declarations of their fields.

    Parameters
    ----------
    readers
        From JSON values to objects that have a ``to_dict``, by their class.
    kinds
        The dataclasses that may stand for a protocol.
    names
        Classes by the names that annotations give before they exist.
    """

    readers: Mapping[Any, Reader]
    kinds: Mapping[Any, Sequence[type]]
    names: Mapping[str, type]

    def encode(self, value: Any, arrays: dict[str, Array], path: str = "") -> dict[str, Any]:
        """JSON form of a dataclass; its arrays, and those of its parts, are added to ``arrays``."""
        described: dict[str, Any] = {}
        for name, hint in self._fields(type(value)):
            item, here = getattr(value, name), _joined(path, name)
            if hint.shape is None:
                described[name] = self._plain(item, hint, arrays, here)
            elif item is not None:
                arrays[here] = _stored(item, hint.shape)
        return described

    def decode(
        self, kind: type, data: Any, arrays: Mapping[str, Array], sizes: Sizes, path: str = ""
    ) -> Any:
        """Inverse of :meth:`encode`, for files that can't be trusted.

        Parameters
        ----------
        kind
            The dataclass.
        data, arrays
            What :meth:`encode` made.
        sizes
            Sizes that its declarations name.
        path
            Where it stands in the file.

        Raises
        ------
        StoreError
            If something is missing, of another shape or kind, or does not fit together.
        """
        return self._object(kind, data, arrays, sizes, path, 0)

    def _fields(self, kind: type) -> Iterator[tuple[str, _Hint]]:
        return iter(_hints(kind, tuple(self.names.items())).items())

    def _choices(self, hint: _Hint) -> dict[str, type]:
        """The dataclasses that a field may hold, by name."""
        each: list[type] = [one for kind in hint.kinds for one in self.kinds.get(kind, (kind,))]
        return {one.__name__: one for one in each if is_dataclass(one)}

    def _plain(self, value: Any, hint: _Hint, arrays: dict[str, Array], path: str) -> Any:
        """JSON form of a field that holds no array itself."""
        if value is None:
            return None
        if hint.kinds[0] in self.readers:
            return _without_texts(value.to_dict(), arrays, path)
        choices = self._choices(hint)
        if choices:
            described = self.encode(value, arrays, path)
            return described if len(choices) == 1 else {"type": type(value).__name__, **described}
        if get_origin(hint.kinds[0]) is tuple:
            each = zip(value, _items(hint.kinds[0], len(value)), strict=True)
            return [self._plain(v, h, arrays, _joined(path, i)) for i, (v, h) in enumerate(each)]
        if _of_arrays(hint.kinds[0]):
            arrays.update({_joined(path, name): values for name, values in value.items()})
            return list(value)
        return value

    def _object(
        self,
        kind: type,
        data: Any,
        arrays: Mapping[str, Array],
        sizes: Sizes,
        path: str,
        depth: int,
    ) -> Any:
        if depth > _DEEPEST or not isinstance(data, Mapping):
            raise _damaged(path, "its description is no object, or too deep")
        made: dict[str, Any] = {}
        known = dict(sizes)
        for name, hint in self._fields(kind):
            here = _joined(path, name)
            if hint.shape is not None:
                if here in arrays or not hint.optional:
                    made[name] = _array(arrays, here, hint.shape, known, made)
                else:
                    made[name] = None
            elif name not in data and hint.later:
                made[name] = None
            elif name not in data:
                raise _damaged(path, f"its description lacks {name!r}")
            else:
                within = {
                    label: size
                    for label, token in (hint.within or {}).items()
                    if (size := _size(token, known, made)) is not None
                }
                sizes = {**known, **within}
                made[name] = self._value(hint, data[name], arrays, sizes, here, depth + 1)
        try:
            result = kind(**made)
            getattr(result, "_validate", lambda: None)()
        except StoreError:
            raise
        except DataError as error:
            raise _damaged(path, str(error)) from error
        return result

    def _value(
        self,
        hint: _Hint,
        data: Any,
        arrays: Mapping[str, Array],
        sizes: Sizes,
        path: str,
        depth: int,
    ) -> Any:
        if data is None and hint.optional:
            return None
        first = hint.kinds[0]
        if first in self.readers:
            return self.readers[first](_with_texts(data, arrays))
        choices = self._choices(hint)
        if choices:
            # Files of versions that knew one kind do not name it: it is declared first.
            name = None if len(choices) == 1 else _named(data)
            name = name or next(iter(choices))
            if name not in choices:
                raise _damaged(path, f"it should be one of {', '.join(choices)}, it is {name!r}")
            return self._object(choices[name], data, arrays, sizes, path, depth)
        if get_origin(first) is tuple:
            if not isinstance(data, list) or len(data) > _MOST_ITEMS:
                raise _damaged(path, f"it should be a list of at most {_MOST_ITEMS:,} items")
            each = _items(first, len(data))
            if len(each) != len(data):
                raise _damaged(path, f"{len(each)} items expected, got {len(data)}")
            return tuple(
                self._value(item, value, arrays, sizes, _joined(path, i), depth)
                for i, (item, value) in enumerate(zip(each, data, strict=True))
            )
        shape = _of_arrays(first)
        if shape is not None:
            if not (isinstance(data, list) and all(isinstance(name, str) for name in data)):
                raise _damaged(path, "it should be a list of names")
            return {name: _array(arrays, _joined(path, name), shape, {}, {}) for name in data}
        if first is not Any and not _is_a(data, get_origin(first) or first):
            raise _damaged(path, f"it should be a {first.__name__}, it is {data!r:.80}")
        return data


def _without_texts(described: Any, arrays: dict[str, Array], path: str) -> Any:
    """A description whose float32 arrays, such as weights in base64, are arrays of the file."""
    if not isinstance(described, dict):
        return described
    if set(described) == {FLOAT32_TEXT}:
        arrays[path] = np.frombuffer(base64.b64decode(described[FLOAT32_TEXT]), dtype=np.float32)
        return {_FLOAT32_ARRAY: path}
    return {k: _without_texts(v, arrays, _joined(path, k)) for k, v in described.items()}


def _with_texts(described: Any, arrays: Mapping[str, Array], depth: int = 0) -> Any:
    """Inverse of :func:`_without_texts`."""
    if not isinstance(described, Mapping) or depth > _DEEPEST:
        return described
    if set(described) == {_FLOAT32_ARRAY}:
        values = _array(arrays, str(described[_FLOAT32_ARRAY]), Shape("w"), {}, {})
        text = base64.b64encode(values.astype(np.float32).tobytes())
        return {FLOAT32_TEXT: text.decode()}
    return {k: _with_texts(v, arrays, depth + 1) for k, v in described.items()}


def _of_arrays(annotation: Any) -> Shape | None:
    """The shape of the arrays of a mapping of arrays by name."""
    if get_origin(annotation) is not dict:
        return None
    return _Hint.of(get_args(annotation)[1]).shape


def _named(data: Any) -> Any:
    return data.get("type") if isinstance(data, Mapping) else data


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _items(annotation: Any, count: int) -> list[_Hint]:
    """What the annotation of a tuple says of each of its items."""
    arguments = get_args(annotation)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return [_Hint.of(arguments[0])] * count
    return [_Hint.of(one) for one in arguments]


def _joined(path: str, name: Any) -> str:
    return f"{path}_{name}" if path else str(name)


def _stored(values: Array, shape: Shape) -> Array:
    values = np.asarray(values)
    if shape.dtype is bool:
        return values.astype(np.int8)
    return values.view(np.int64) if shape.dtype is np.uint64 else values


def _size(token: int | str, known: Sizes, made: Mapping[str, Any]) -> int | None:
    """The size that a declaration stands for; None of a name that stands for any as yet."""
    if isinstance(token, int):
        return token
    path, _, more = token.partition("+")
    head, *rest = path.split(".")
    if head not in made:
        return known[head] + int(more or 0) if head in known else None
    value = made[head]
    for name in rest:
        value = getattr(value, name)
    return (value if isinstance(value, int) else len(value)) + int(more or 0)


def _array(
    arrays: Mapping[str, Array],
    name: str,
    shape: Shape,
    known: dict[str, int],
    made: Mapping[str, Any],
) -> Array:
    """The named array, checked; names that stand for any size stand for its sizes from now on."""
    if name not in arrays:
        raise StoreError(f"the model lacks the array {name!r}: {_RESTORE}")
    values = arrays[name]
    tokens = shape.sizes or values.shape
    expected = [_size(token, known, made) for token in tokens]
    fits = values.ndim == len(expected) and all(
        size is None or size == length for size, length in zip(expected, values.shape, strict=True)
    )
    kind = values.dtype.kind
    if shape.dtype in (np.int64, np.uint64):
        wanted, usable = "int64", values.dtype == np.int64
    elif shape.dtype is bool:
        wanted, usable = "integer", kind == "i"
    elif shape.dtype is float:
        wanted, usable = "floating-point", kind == "f"
    else:
        wanted, usable = "numeric", kind == "f" or values.dtype == np.int64
    if not (fits and usable):
        sizes = (str(t if s is None else s) for t, s in zip(tokens, expected, strict=True))
        raise StoreError(
            f"the model's array {name!r} should be {wanted} of shape "
            f"({', '.join(sizes)}), it is {values.dtype} of shape {values.shape}: {_RESTORE}"
        )
    if shape.finite and not np.isfinite(values).all():
        raise StoreError(f"the model's array {name!r} holds values that are not finite: {_RESTORE}")
    for token, size, length in zip(tokens, expected, values.shape, strict=True):
        if size is None:
            known[str(token)] = length
    if shape.dtype is bool:
        return values != 0
    return values.view(np.uint64) if shape.dtype is np.uint64 else values


def _damaged(path: str, why: str) -> StoreError:
    return StoreError(f"the model's {path or 'description'} is damaged ({why}): {_RESTORE}")
