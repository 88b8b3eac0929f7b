"""Outputs: made aside, put in their place whole, and in that of nothing but their own kind.

An output is made in a hidden folder beside its place, whose lock its writer holds while it lives.
When it is whole and on the disk it takes its place in one step, by exchange with what it replaces.
Where the file system can't exchange two paths it takes two steps, and whoever comes next undoes the
first one if the writer was killed between them.
"""

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cme_dask.errors import DataError, ResourceError, switch, without_secrets

ATTRIBUTE = "cme_dask"
"""Attribute of a Zarr group, and key of a JSON file, that says which output of ours it is."""

PathLike: TypeAlias = str | os.PathLike[str]

# Kinds of outputs, by which our own are told from what others wrote


_HEAD = 1 << 14  # bytes of a file that show what it is


@dataclass(frozen=True)
class Kind:
    """What an output is.

    Parameters
    ----------
    name
        In words, for messages.
    recognises
        Whether a path that exists holds one that this package wrote.
    """

    name: str
    recognises: Callable[[Path], bool]

    def replaceable(self, path: Path) -> bool:
        """Whether an output of this kind may take the place of what is there."""
        with contextlib.suppress(OSError, ValueError):
            return _is_empty(path) or self.recognises(path)
        return False


def stored(kind: str, name: str | None = None) -> Kind:
    """Zarr groups of ours, by the kind in their description."""
    return Kind(name or kind, lambda path: kind_of(path) == kind)


def json_file(name: str) -> Kind:
    """JSON files of :func:`write_json`, by their first key."""
    opening = re.compile(rf'\s*\{{\s*"{ATTRIBUTE}":\s*"{re.escape(name)}"')
    return Kind(name, lambda path: opening.match(_head(path)) is not None)


def marked_file(name: str, opening: str, mark: str) -> Kind:
    """Files that begin in a certain way, and soon after name this package as their writer."""
    return Kind(
        name, lambda path: (head := _head(path)).lstrip().startswith(opening) and mark in head
    )


def of_format(name: str) -> Kind:
    """Files that begin as their suffix says, for folders where the names themselves are ours."""
    suffix = Path(name).suffix
    return Kind(
        f"{suffix} file", lambda path: _head(path).lstrip().startswith(_OPENINGS.get(suffix, ""))
    )


_OPENINGS = {".png": "\x89PNG", ".json": "{", ".md": "#", ".parquet": "PAR1"}

PICTURE = marked_file("picture", "\x89PNG", f"Software\0{ATTRIBUTE}")


def kind_of(folder: Path) -> str | None:
    """What a Zarr group of ours holds, by the description that is written last; None of others."""
    try:
        described = json.loads((folder / "zarr.json").read_text())["attributes"][ATTRIBUTE]
        return str(described["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_HEAD).decode("latin-1")


def _is_empty(path: Path) -> bool:
    """Whether there is nothing to lose, as in what ``mktemp`` makes."""
    return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0


# Refusals before any work is done


def path_text(path: object, what: str) -> str:
    """The text of a path or URL.

    Parameters
    ----------
    path
        What was given for it.
    what
        What lies there, for messages.

    Raises
    ------
    DataError
        If it is neither text nor a path, or is empty.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        given = f"{path!r} ({type(path).__name__})"
        raise DataError(f"{what} must be a path (str or os.PathLike), got {given}") from None
    if not text:
        raise DataError(f"{what} must be a path, got an empty text")
    return text


def check_room(path: PathLike, size: int, what: str) -> None:
    """ResourceError unless the disk of an output has room for it.

    Parameters
    ----------
    path
        The output.
    size
        Bytes that it takes.
    what
        What takes them, for the message.
    """
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ResourceError(
            f"{what} take about {size / 1e9:,.3g} GB, the disk of {folder} has "
            f"{free / 1e9:,.3g} GB free: ask for fewer rows, or choose another path"
        )


def check_output(path: PathLike, kind: Kind, overwrite: bool) -> Path:
    """Refuse an output before any work is done for it.

    What killed writers of it left is cleared away first.

    Parameters
    ----------
    path
        Where it is to be.
    kind
        What it is: ``overwrite`` replaces only outputs of this kind, and what is empty.
    overwrite
        Whether it may replace an earlier one.

    Raises
    ------
    DataError
        If it is no path, is a URL, exists and may not be replaced, lies inside an output of ours,
        or its folder is missing.
    ResourceError
        If its folder can't be written to.
    """
    text = path_text(path, f"the {kind.name}")
    if "://" in text:
        raise DataError(f"outputs are local paths, got the URL {text}: write here and upload it")
    target = Path(text)
    parent = target.absolute().parent
    with disk_errors(target):
        there = os.path.lexists(target)
    if not parent.is_dir():
        raise DataError(f"the folder {parent} of the output does not exist: create it first")
    check_not_inside(target)
    if not os.access(parent, os.W_OK):
        raise ResourceError(f"the folder {parent} can't be written to: check its permissions")
    recover(target)
    there = there or os.path.lexists(target)
    if there and not overwrite:
        raise DataError(
            f"{target} already exists: choose another path or overwrite it ({switch('overwrite')})"
        )
    if there and not kind.replaceable(target):
        raise DataError(
            f"{target} is {_what(target, kind)}: it will not be overwritten; choose another path, "
            "or remove it yourself"
        )
    return target


def _what(path: Path, kind: Kind) -> str:
    """Why an output may not replace what is there."""
    other = kind_of(path)
    if other is not None:
        return f"a {other} of cme_dask, the output is a {kind.name}"
    if path.is_dir():
        return "a folder that cme_dask did not write"
    return f"a file that is not marked as a {kind.name} of cme_dask"


def check_not_inside(target: Path) -> None:
    """DataError on a path inside an output of ours, with which it would be replaced or removed."""
    for folder in Path(os.path.realpath(target)).parents:
        kind = kind_of(folder)
        if kind is not None:
            raise DataError(
                f"{target} lies inside {folder}, a {kind} of cme_dask: choose a path outside of it"
            )


def check_apart(
    outputs: Mapping[str, PathLike | None],
    inputs: Iterable[tuple[str, PathLike]] = (),
    folders: Mapping[str, PathLike | None] | None = None,
) -> None:
    """Refuse outputs that would replace, hold or lie in each other or an input.

    Parameters
    ----------
    outputs
        Paths that are replaced or removed as a whole, by what they are called; None for none.
    inputs
        Names and paths of what is read. URLs are left out.
    folders
        Folders that take several outputs: others may lie in them.

    Raises
    ------
    DataError
        If two paths are the same or nested; the message names both.
    """
    whole, shared = _called(outputs), _called(folders or {})
    for (a, p), (b, q) in itertools.combinations((*whole, *shared), 2):
        if _same(p, q):
            raise DataError(f"{a} and {b} are the same path: choose another one for one of them")
    for output, place in (*whole, *shared):
        for outer, folder in whole:
            if outer != output and place.is_relative_to(folder):
                raise DataError(f"{output} lies inside {outer}: choose a path outside of it")
    for name, path in inputs:
        local = os.fspath(path).removeprefix("file://")
        if "://" in local:
            continue
        given = _real(local)
        for output, place in (*whole, *shared):
            if _same(place, given):
                raise DataError(f"{output} would replace the {name} ({path}): choose another")
            if given.is_relative_to(place) and (output, place) in whole:
                raise DataError(f"{output} would replace the {name} ({path}), which it holds")
            if place.is_relative_to(given):
                raise DataError(f"{output} lies inside the {name} ({path}): choose another")


def _called(paths: Mapping[str, PathLike | None]) -> list[tuple[str, Path]]:
    return [(f"{name} ({path})", _real(path)) for name, path in paths.items() if path is not None]


def _real(path: PathLike) -> Path:
    return Path(os.path.realpath(path))


def _same(p: Path, q: Path) -> bool:
    with contextlib.suppress(OSError):
        return p == q or os.path.samefile(p, q)
    return False


@contextlib.contextmanager
def disk_errors(target: object) -> Iterator[None]:
    """Turn a full or read-only disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk is full while writing {target}: free some space and run it again; "
                "nothing was left half-written"
            ) from error
        raise ResourceError(f"{target} can't be written: {error.strerror or error}") from error


# Made aside, put in its place last: an output is either whole or absent


_LOCK, _OUTPUT, _OLD, _TRASH = "lock", "output", "old", "trash"
_OURS = {_LOCK, _OUTPUT, _OLD, _TRASH}
_LATELY = 86_400.0  # seconds
_LOOKS, _LOOK = 100, 0.01  # tries, and seconds between them


@contextlib.contextmanager
def writing(path: PathLike, kind: Kind, *, overwrite: bool = False) -> Iterator[Path]:
    """A side path to write to; it takes the place of ``path`` when the block ends well.

    On any error the side path is removed and an earlier output stays as it was.

    Parameters
    ----------
    path, kind, overwrite
        As in :func:`check_output`.
    """
    target = check_output(path, kind, overwrite)
    side = target.with_name(f".{target.name}.{_unique()}.partial")
    with disk_errors(target):
        try:
            descriptor = _held(side, target)
        except BaseException:
            shutil.rmtree(side, ignore_errors=True)
            raise
    try:
        yield side / _OUTPUT
        with disk_errors(target):
            publish(side / _OUTPUT, target, kind, overwrite=overwrite)
    finally:
        remove(side)
        if descriptor is not None:
            os.close(descriptor)


def write_json(
    path: PathLike, kind: Kind, values: Mapping[str, Any], *, overwrite: bool = False
) -> None:
    """Write values as a JSON file of a kind that :func:`json_file` made."""
    with writing(path, kind, overwrite=overwrite) as aside, disk_errors(path):
        text = json.dumps({ATTRIBUTE: kind.name, **values}, allow_nan=False, indent=1)
        aside.write_text(f"{without_secrets(text)}\n", encoding="utf-8")


def withdraw(path: Path, kind: Kind) -> None:
    """Remove an earlier output of this kind, and nothing else."""
    with disk_errors(path):
        if os.path.lexists(path) and kind.replaceable(path):
            remove(path)


def work_folder(target: Path) -> Path:
    """Where work on an output goes on that may be resumed, beside it."""
    return target.with_name(f".{target.name}.partial")


def publish(
    made: Path, target: Path, kind: Kind, *, overwrite: bool, exchange: bool = True
) -> None:
    """Put a whole output in its place; an earlier one is there until then.

    It is on the disk before it is there, and what it replaces is looked at again in that moment.

    Parameters
    ----------
    made
        The output, in a folder of its own on the same file system, whose lock the caller holds.
    target, kind, overwrite
        As in :func:`check_output`.
    exchange
        Whether ``made`` may hold, for a moment, what was replaced.

    Raises
    ------
    DataError
        If something else is there by now. It stays, and the output is left beside it.
    """
    sync_tree(made)
    try:
        if overwrite and os.path.lexists(target):
            _replace(made, target, kind, exchange)
        else:
            _place(made, target)
    except FileExistsError as error:
        spare = _spare(target)
        _place(made, spare)
        sync(spare.absolute().parent)
        raise DataError(
            f"{target} was made by something else meanwhile, and stays as it is: the output is in "
            f"{spare}"
        ) from error
    sync(target.absolute().parent)


def _replace(made: Path, target: Path, kind: Kind, exchange: bool) -> None:
    """Put an output in the place of one of its kind; FileExistsError if that is none."""
    _check_replaceable(target, kind)
    if exchange:
        try:
            _rename(made, target, _EXCHANGE)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            if not kind.replaceable(made):
                _rename(made, target, _EXCHANGE)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            return
    if not target.is_dir() and not made.is_dir():
        os.replace(made, target)
        return
    old = made.with_name(_OLD)
    os.rename(target, old)  # from here on `recover` brings it back
    try:
        _check_replaceable(old, kind)
        _place(made, target)
    except BaseException:
        try:
            _place(old, target)
        except FileExistsError:
            _place(old, _spare(target))
        raise
    trash = made.with_name(_TRASH)
    os.rename(old, trash)
    remove(trash)


def _check_replaceable(path: Path, kind: Kind) -> None:
    if not kind.replaceable(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _place(made: Path, target: Path) -> None:
    """Rename to where nothing is; FileExistsError if something is."""
    try:
        _rename(made, target, _NO_REPLACE)
        return
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    if made.is_dir():
        _check_absent(target)
        os.rename(made, target)  # refuses what has come in between, unless it is empty
        return
    try:
        os.link(made, target)
    except FileExistsError:
        raise
    except OSError:  # no links here either
        _check_absent(target)
        os.rename(made, target)
    else:
        os.unlink(made)


def _check_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def recover(target: Path) -> None:
    """Bring back what a killed writer moved out of the way, and remove what killed writers left.

    Only folders that are known as ours are touched, and only if no writer lives.
    """
    parent = target.absolute().parent
    ours = re.compile(rf"\.{re.escape(target.name)}(\.[0-9a-f]{{8}})?\.partial")
    names = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(parent) if ours.fullmatch(name)]
    for name in names:
        with contextlib.suppress(OSError):
            _settle(parent / name, target)


def _settle(side: Path, target: Path) -> None:
    """Clear up after the writer of an output, if it is dead; OSError if it lives."""
    resumable = side.name == work_folder(target).name
    names = set(os.listdir(side))
    if not names and not resumable:
        os.rmdir(side)
        return
    if _LOCK not in names or not (resumable or names <= _OURS):
        return
    descriptor = os.open(side / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(descriptor, side / _LOCK):
            return
        if os.path.lexists(side / _OLD) and not os.path.lexists(target):
            _place(side / _OLD, target)
            sync(target.absolute().parent)
        holder = os.read(descriptor, 200).decode(errors="replace")
        # Some network file systems lock within one host only.
        alive = not holder.endswith(f" on {socket.gethostname()}") and _changed_lately(side)
        if not resumable and not alive:
            remove(side)
    finally:
        os.close(descriptor)


def _changed_lately(folder: Path) -> bool:
    begin = time.time() - _LATELY
    return any(
        os.lstat(os.path.join(here, name)).st_mtime > begin
        for here, _, names in os.walk(folder)
        for name in (".", *names)
    )


def remove(path: Path) -> None:
    """Remove a path; threads that wrote when we were interrupted may still add to it."""
    for pause in (0.0, 0.1, 0.3, 1.0):
        time.sleep(pause)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not os.path.lexists(path):
            return


def _spare(target: Path) -> Path:
    """A new name beside an output, for what must not be lost."""
    return target.with_name(f"{target.name}.{_unique()}")


def _unique() -> str:
    return uuid.uuid4().hex[:8]


# Locks, which end with their process


def locked(folder: Path, target: Path, *, shared: bool = False) -> int:
    """A descriptor that holds the lock of a folder, made if need be; possibly beside others.

    The system drops the lock when its process ends, however it does, so that none is ever stale.
    """
    while True:
        folder.mkdir(exist_ok=True)
        path = folder / _LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the folder went away in between
            continue
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace")
            os.close(descriptor)
            raise DataError(
                f"{target} is being written by {holder or 'another process'}: wait for it, or "
                "choose another path"
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        if _is_at(descriptor, path):
            with contextlib.suppress(OSError):  # who holds it is for messages alone
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return descriptor
        os.close(descriptor)  # the folder was renamed away while we waited: lock the new one


def _held(side: Path, target: Path) -> int | None:
    """The lock of a new folder; None where the file system has no locks: then it is never swept."""
    try:
        for _ in range(_LOOKS):
            with contextlib.suppress(DataError):  # someone looks at it, whether its writer is dead
                return locked(side, target)
            time.sleep(_LOOK)
        return locked(side, target)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.ENOLCK):
            raise
        (side / _LOCK).unlink(missing_ok=True)
        return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


# What the system offers: renames in one step, and waiting for the disk


_AT_CWD = -100
_NO_REPLACE, _EXCHANGE = "no replace", "exchange"
_FLAGS = {"linux": {_NO_REPLACE: 1, _EXCHANGE: 2}, "darwin": {_NO_REPLACE: 4, _EXCHANGE: 2}}
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_AT_ONCE, _BATCH = 8, 1024


def _rename(source: Path, target: Path, how: str) -> None:
    """Rename without replacing, or exchange two paths; OSError, ENOSYS where that is unknown."""
    library = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(source), os.fsencode(target)
    flag = _FLAGS.get(sys.platform, {}).get(how)
    if flag is not None and hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_CWD, paths[0], _AT_CWD, paths[1], flag)
    elif flag is not None and hasattr(library, "renamex_np"):
        failed = library.renamex_np(*paths, flag)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def sync_tree(path: Path) -> None:
    """Wait until a file, or all that a folder holds, is on the disk."""
    if not path.is_dir():
        sync(path)
        return
    every = (os.path.join(here, name) for here, _, names in os.walk(path) for name in (*names, "."))
    with ThreadPoolExecutor(_AT_ONCE, "sync") as threads:  # which the disk serves together
        while batch := list(itertools.islice(every, _BATCH)):
            list(threads.map(sync, batch))


def sync(path: PathLike) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some file systems flush no folders
            raise
    finally:
        os.close(descriptor)
