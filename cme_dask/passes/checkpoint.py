"""Checkpoints: the partial results of each pass on disk, so that an interrupted run may go on.

The rows of a pass are cut into at most 64 blocks, nodes of the fixed tree of its reduction. A task
that has computed a block writes its partial result to a folder that all workers see, and that of
all rows follows when the pass has ended. A resumed run leaves out the tasks of blocks and passes
that are there; since partial results are combined along the same tree, it ends with the same bits.

Partial results are encoded by their structure: this module knows no reduction.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dask.base import tokenize
from dask.tokenize import TokenizationError

import cme_dask
from cme_dask.config import VARIABLES
from cme_dask.data.atomic import (
    ATTRIBUTE,
    check_not_inside,
    disk_errors,
    locked,
    path_text,
    remove,
)
from cme_dask.data.guarded import check_file
from cme_dask.data.partials import read_partial, write_json, write_partial
from cme_dask.data.sample import Sample
from cme_dask.data.store import check_access
from cme_dask.errors import DataError, ResourceError, ShardDone, StoreError
from cme_dask.numerics.reduction import strip_length
from cme_dask.passes.cluster import run_on_workers
from cme_dask.passes.user_code import code_digests

log = logging.getLogger("cme_dask.run")

KIND, SCHEMA_VERSION = "checkpoint", 10

_BLOCKS = 64
_TRIALS, _TRIALS_PER_WRITING = "trials", 20.0
_MANIFEST, _SIGN, _NOTE, _PASS, _TOTAL = "zarr.json", "sign", "note", "pass.json", "total"
_OURS = re.compile(
    rf"lock|zarr\.json|\.zarr\.json\.[0-9a-f]{{8}}|({_SIGN}|{_NOTE}|saving)-[0-9a-f]+"
    rf"|\.{_NOTE}-[0-9a-f]+\.[0-9a-f]{{8}}|\.seen-[0-9a-f]+"
    r"|pass-\d{3}|\.?[a-z]+-\d{9}(\.[0-9a-f]{8})?"
)
"""Names of what a run writes into the folder of its checkpoint."""


def block_rows(n: int, chunk_rows: int, on_device: bool = False) -> int:
    """Rows of a block: strips of n rows in at most 64 blocks, none much shorter than a chunk."""
    length = strip_length(n, on_device)
    rows = max(
        -(-n // _BLOCKS), 4 * chunk_rows if chunk_rows and length % chunk_rows else chunk_rows
    )
    return length << (-(-rows // length) - 1).bit_length()


@dataclass(eq=False)
class Checkpoint:
    """The folder of one run; made by :func:`checkpointed_run`.

    Attributes
    ----------
    folder
        Where it lies.
    run
        Name of the run, which nobody else has: a task that outlives its run writes to no other.
    shard
        (i, k): do the i-th of k shares of each pass, counted from 0, and no more; None: all.
    resumed_strips
        Strips of all passes so far that were done before.
    """

    folder: Path
    run: str
    shard: tuple[int, int] | None = None
    resumed_strips: int = 0
    _begun: int = 0
    _searches: int = 0

    def begin(
        self, name: str, computed_from: Any, n_rows: int, block: int, kinds: tuple[type, ...] = ()
    ) -> "PassSums":
        """The folder of the next pass of the run.

        Parameters
        ----------
        name
            Of its tasks.
        computed_from
            All that its tasks compute from.
        n_rows, block
            Number of rows, and of rows in a block.
        kinds
            The dataclasses in its partial results.

        Raises
        ------
        StoreError
            If what lies there is of another pass, or lacks what the manifest lists.
        """
        number, self._begun = self._begun, self._begun + 1
        share = self._share(n_rows, block)
        sums = PassSums(
            self.folder, self.run, f"pass-{number:03d}", n_rows, block, share, tuple(kinds)
        )
        token = token_of(computed_from, name)
        sums.open({"name": name, "token": token, "rows": n_rows, "block": block})
        return sums

    def states(self, name: str, kinds: tuple[type, ...]) -> "SavedStates":
        """The states of an iteration that is no pass, of these dataclasses."""
        return SavedStates(self.folder, name, kinds)

    def trials(self, kinds: tuple[type, ...]) -> "SavedTrials":
        """The trials of the next search of the run, with these dataclasses in them."""
        self._searches += 1
        return SavedTrials(self.folder, self._searches, kinds)

    def _share(self, n_rows: int, block: int) -> tuple[int, int]:
        """Blocks [first, last) of the pass that are ours."""
        blocks = -(-n_rows // block)
        i, k = self.shard or (0, 1)
        return blocks * i // k, blocks * (i + 1) // k

    def check_seen(self, client: Any) -> None:
        """ResourceError unless all workers of a cluster see the folder, and it sees their files."""
        folder = str(self.folder)
        signs = run_on_workers(client, _sees, folder, self.run)
        # Each name is looked up: a list of the folder may be an old one, on a network.
        blind = [who for who, name in signs.items() if not (name and (self.folder / name).exists())]
        for name in filter(None, signs.values()):
            (self.folder / name).unlink(missing_ok=True)
        if blind:
            who = ", ".join(blind)
            raise ResourceError(
                f"{who} can't see the checkpoint folder {self.folder}: put it on a filesystem "
                "that this process and all workers share"
            )


def _sees(folder: str, run: str) -> str:
    """On a worker: the name of the sign that it left in the folder; empty if it could not."""
    name = f".seen-{uuid.uuid4().hex}"
    if (Path(folder) / _sign_of(run)).exists():
        with contextlib.suppress(OSError):
            (Path(folder) / name).touch()
            return name
    return ""


def _sign_of(run: str) -> str:
    return f"{_SIGN}-{run}"


@dataclass(frozen=True)
class SavedStates:
    """The last state of an iteration that is no pass, beside the passes of a checkpoint.

    Attributes
    ----------
    folder, name
        The checkpoint, and what its files are called.
    kinds
        The dataclasses in a state.
    """

    folder: Path
    name: str
    kinds: tuple[type, ...]

    def latest(self) -> Any:
        """The last state, or None before the first."""
        paths = self._paths()
        if not paths:
            return None
        step = max(paths)
        return read_partial(paths[step], self.kinds, place=self._place(step))

    def save(self, step: int, state: Any) -> None:
        """Write the state after so many steps, and drop earlier ones."""
        earlier = self._paths()
        path = self.folder / f"{self.name}-{step:09d}"
        write_partial(path, state, self.kinds, place=self._place(step), flush=True)
        for number, other in earlier.items():
            if number < step:
                shutil.rmtree(other, ignore_errors=True)

    def _place(self, step: int) -> str:
        return f"{self.name}, step {step}"

    def _paths(self) -> dict[int, Path]:
        names = self.folder.glob(f"{self.name}-*")
        return {int(path.name.rpartition("-")[2]): path for path in names}


class SavedTrials:
    """What the trials of a search gave, beside the passes of a checkpoint.

    They are written in batches. A batch waits until its trials took twenty times as long as the
    last one took to be written: writing takes 5 % of the time of a search at most, and not much
    more than that is lost with a client.

    Parameters
    ----------
    folder
        The checkpoint.
    number
        Of the search in its run, from 1. Searches follow one another as passes do.
    kinds
        The dataclasses and named tuples in the trials.
    """

    def __init__(self, folder: Path, number: int, kinds: tuple[type, ...]) -> None:
        self._folder, self._number, self._kinds = folder, number, kinds
        self._known: dict[Any, Any] = {}
        self._new: dict[Any, Any] = {}
        self._wait = 0.0
        for path in sorted(folder.glob(f"{_TRIALS}-{number:03d}??????")):
            self._known |= read_partial(path, kinds, place=self._place)
        self._since = time.monotonic()
        if self._known:
            count = len(self._known)
            info = {"event": "trials resumed", "search": number, "trials": count}
            log.info("%s trials of search %s were made before", count, number, extra=info)

    def get(self, key: Any) -> Any:
        """What the trial with this key gave, or None."""
        return self._known.get(key)

    def put(self, key: Any, value: Any) -> None:
        """Retain what a trial gave."""
        self._known[key] = self._new[key] = value
        if time.monotonic() - self._since >= self._wait:
            self.flush()

    def flush(self) -> None:
        """Write the trials that are not written yet."""
        if not self._new:
            return
        begin = time.monotonic()
        first = len(self._known) - len(self._new)
        path = self._folder / f"{_TRIALS}-{self._number:03d}{first:06d}"
        write_partial(path, self._new, self._kinds, place=self._place)
        self._new, self._since = {}, time.monotonic()
        self._wait = _TRIALS_PER_WRITING * (self._since - begin)

    @property
    def _place(self) -> str:
        return f"search {self._number}"


@dataclass(frozen=True)
class PassSums:
    """The partial results of one pass on disk, as client and tasks see them.

    Attributes
    ----------
    folder, run, name
        The checkpoint, the name of its run, and the folder of the pass in it.
    n_rows, block
        Number of rows, and of rows in a block.
    share
        Blocks [first, last) that this run makes.
    kinds
        The dataclasses in the partial results.
    """

    folder: Path
    run: str
    name: str
    n_rows: int
    block: int
    share: tuple[int, int]
    kinds: tuple[type, ...] = ()

    def open(self, description: dict[str, Any]) -> None:
        """Begin, or go on with, the pass that is described so."""
        here = self.folder / self.name
        with disk_errors(here):
            here.mkdir(exist_ok=True)
        recorded = _read_json(here / _PASS)
        if recorded is None and _holds(here, ()):
            recorded = _read_json(here / _PASS)  # another shard began it meanwhile
            if recorded is None:
                raise StoreError(
                    f"{here} holds sums but not {_PASS}, which says of what: remove {self.folder}, "
                    "and start the run again"
                )
        if recorded is None:
            write_json(here / _PASS, description, replace=False)
            recorded = _read_json(here / _PASS)
        if recorded != description:
            different = next(
                (key for key in description if recorded.get(key) != description[key]), ""
            )
            raise StoreError(
                f"{self.name} of the checkpoint {self.folder} is of another {recorded.get('name')} "
                f"(its {different} differs): a run goes on where the same data, configuration, "
                "versions and kind of processor lead to the same pivots; start again with another "
                "folder"
            )

    @property
    def total(self) -> Path:
        """Where the sum over all rows lies when the pass has ended."""
        return self.folder / self.name / _TOTAL

    def path(self, row: int) -> Path:
        """Where the block of a row lies when it is done."""
        first, last = self._rows_of(row)
        return self.folder / self.name / f"rows-{first}-{last}-{self.run}"

    def _rows_of(self, row: int) -> tuple[int, int]:
        """The block [first, last) of a row."""
        first = row // self.block * self.block
        return first, min(first + self.block, self.n_rows)

    def _place(self, first: int, last: int) -> str:
        """What the sum of rows is of: a copy of it in another place is none."""
        return f"{self.name} of run {self.run}, rows {first} to {last - 1}"

    def has(self, row: int) -> bool:
        """Whether the block of a row is done."""
        return self.path(row).exists()

    def ours(self, row: int) -> bool:
        """Whether the block of a row is in our share."""
        return self.share[0] <= row // self.block < self.share[1]

    def settle(self, start: int, stop: int, value: Any) -> Any:
        """The partial result of rows: if they are a block it is written, or read if it is None."""
        whole = start % self.block == 0 and stop == min(start + self.block, self.n_rows)
        return self.write(start, value) if whole else value

    def write(self, row: int, value: Any) -> Any:
        """Write the partial result of the block of a row, or read it if it is None; returns it."""
        path, place = self.path(row), self._place(*self._rows_of(row))
        if not (self.folder / _sign_of(self.run)).exists():
            raise ResourceError(
                f"a worker can't see the checkpoint folder {self.folder}: put it on a filesystem "
                "that this process and all workers share"
            )
        if value is None:
            return read_partial(path, self.kinds, place=place)
        write_partial(path, value, self.kinds, place=place)
        return value

    def read_total(self) -> Any:
        """The sum over all rows of a pass that has ended, else None.

        Raises
        ------
        StoreError
            If the manifest says that it has ended, and it is not there.
        """
        manifest = _read_json(self.folder / _MANIFEST)
        ended = (manifest or {}).get("attributes", {}).get(ATTRIBUTE, {}).get("ended", [])
        if not isinstance(ended, list):
            raise StoreError(
                f"{self.folder / _MANIFEST} is damaged (its passes are no list): restore it from a "
                "copy, or start the run again in another folder"
            )
        if self.name not in ended:
            return None
        if not self.total.exists():
            raise StoreError(
                f"the checkpoint {self.folder} lacks the sums of {self.name}, which its manifest "
                "lists: restore them from a copy, or start the run again in another folder"
            )
        return read_partial(self.total, self.kinds, place=self._place(0, self.n_rows))

    def end(self, value: Any) -> None:
        """Keep the sum over all rows, list it in the manifest, and drop its blocks."""
        if self.total.exists():  # of one who was cut off before it was listed
            shutil.rmtree(self.total)
        place = self._place(0, self.n_rows)
        write_partial(self.total, value, self.kinds, place=place, flush=True)  # before blocks go
        path = self.folder / _MANIFEST
        manifest = _read_json(path)
        assert manifest is not None
        manifest["attributes"][ATTRIBUTE]["ended"].append(self.name)
        write_json(path, manifest)
        for block in (self.folder / self.name).iterdir():
            if block.name not in (_TOTAL, _PASS):  # drafts of those who were killed, too
                shutil.rmtree(block, ignore_errors=True)


@contextlib.contextmanager
def checkpointed_run(
    folder: str | os.PathLike[str] | None,
    describe: Callable[[], dict[str, dict[str, str]]],
    shard: tuple[int, int] | None = None,
) -> Iterator[Checkpoint | None]:
    """The checkpoint in a folder, begun or gone on with; None without a folder.

    Parameters
    ----------
    folder
        Where it lies: on a filesystem that this process and all workers share.
    describe
        Gives fingerprints of what the run depends on, by what they are of (``data``,
        ``configuration``, ``version``) and by name.
    shard
        See :class:`Checkpoint`.

    Raises
    ------
    DataError
        If another run goes on in the folder, or the shard is none.
    StoreError
        If what lies there is no checkpoint, or one of another run; the message names what differs.
    ResourceError
        If the folder can't be written to.
    """
    if folder is None:
        if shard is not None:
            raise DataError("a shard needs checkpoint=, the folder that all shards share")
        yield None
        return
    _check_shard(shard)
    path = _checked(folder)
    with disk_errors(path):
        _sweep(path)
        known = path.is_dir() and any(path.iterdir())
        manifest = _read_json(path / _MANIFEST)
        if known and manifest is None and _holds(path, ("lock",)):
            manifest = _read_json(path / _MANIFEST)  # another shard began it meanwhile
            if manifest is None:
                raise StoreError(
                    f"{path} is no checkpoint (it holds no {_MANIFEST}): choose an empty folder, "
                    "or a new one"
                )
        descriptor = locked(path, path, shared=shard is not None)
    try:
        yield Checkpoint(path, _settle(path, _read_json(path / _MANIFEST), describe()), shard)
        if shard is not None:
            raise ShardDone("all shares are done: run the same fit without a shard, for its result")
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"what was computed is in {folder}, the same call or command continues")
        raise
    finally:
        os.close(descriptor)


def _checked(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of the folder of a checkpoint, which need not be there."""
    text = path_text(folder, "checkpoint")
    if "://" in text:
        raise DataError(f"checkpoint must be a folder on a file system that is mounted, got {text}")
    path = Path(os.path.abspath(text))
    if os.path.lexists(path) and not path.is_dir():
        raise DataError(f"checkpoint must be a folder, and {path} is none: choose another path")
    if not path.parent.is_dir():
        raise DataError(f"the folder {path.parent} of the checkpoint does not exist: create it")
    check_not_inside(path)
    return path


def note(folder: Path, run: str, value: Any) -> None:
    """Save a result that a command has computed before its fit, until its output is complete.

    Parameters
    ----------
    folder
        Of the checkpoint, which the fit need not have begun.
    run
        The fingerprint of the command's run.
    value
        Plain values, as :func:`cme_dask.data.partials.write_partial` takes them.

    Raises
    ------
    ResourceError
        If the folder can't be written to.
    """
    path = _checked(folder)
    with disk_errors(path):
        path.mkdir(exist_ok=True)
    write_partial(path / f"{_NOTE}-{run}", value, (), place=run, flush=True)


def noted(folder: Path, run: str) -> Any:
    """The value that :func:`note` has saved for this run, or None.

    Raises
    ------
    DataError
        If the parent of the folder does not exist.
    StoreError
        If the note is damaged, or another run has begun in the folder.
    """
    path = _checked(folder)
    if (path / f"{_NOTE}-{run}").exists():
        return read_partial(path / f"{_NOTE}-{run}", (), place=run)
    if path.is_dir() and _holds(path, ("lock",)):
        raise StoreError(
            f"{path} holds no checkpoint of this run, of which options, input files and output are "
            "a part: choose another folder, or remove this one to start again"
        )
    return None


def is_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint lies in a folder."""
    return _described(_read_json(folder / _MANIFEST)) is not None


def discard(folder: Path) -> None:
    """Remove a checkpoint that nobody holds, and nothing else that lies in its folder.

    Raises
    ------
    DataError
        If a run goes on in it.
    ResourceError
        If the disk is read-only.
    """
    with disk_errors(folder):
        descriptor = locked(folder, folder)
        try:
            # Renamed first: nobody may take the lock of a folder that is half gone.
            trash = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
            folder.rename(trash)
            if not _removed(trash):  # others put something into it
                trash.rename(folder)
        finally:
            os.close(descriptor)


def _removed(folder: Path) -> bool:
    """Remove what runs wrote into a folder, and the folder; False if others wrote into it, too."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            remove(path)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _sweep(folder: Path) -> None:
    """Remove what :func:`discard` had renamed when it was killed."""
    trash = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}")
    for path in folder.parent.iterdir():
        if trash.fullmatch(path.name) and path.is_dir():
            names = {each.name for each in path.iterdir()}
            if names and all(map(_OURS.fullmatch, names)):
                remove(path)


def _holds(path: Path, known: tuple[str, ...]) -> bool:
    """Whether something lies in a folder beside what is known there, signs, notes and drafts."""
    names = (item.name for item in path.iterdir())
    return any(n not in known and not n.startswith((".", f"{_SIGN}-", f"{_NOTE}-")) for n in names)


def _settle(path: Path, manifest: Any, description: dict[str, dict[str, str]]) -> str:
    """Write the manifest, or hold the one that is there against what it should say.

    Gives the name of the run.
    """
    if manifest is None:
        run = uuid.uuid4().hex[:12]
        with disk_errors(path):
            (path / _sign_of(run)).touch()
        head = {"kind": KIND, "schema_version": SCHEMA_VERSION, "run": run, "about": description}
        whole = {"zarr_format": 3, "node_type": "group"}
        whole["attributes"] = {ATTRIBUTE: {**head, "ended": []}}
        if write_json(path / _MANIFEST, whole, replace=False):
            return run
        (path / _sign_of(run)).unlink(missing_ok=True)  # another shard was first
        manifest = _read_json(path / _MANIFEST)
    recorded = _described(manifest)
    if recorded is None:
        raise StoreError(f"{path} is no checkpoint of cme_dask: choose another folder")
    if recorded.get("schema_version") != SCHEMA_VERSION:
        raise StoreError(
            f"the checkpoint {path} has schema version {recorded.get('schema_version')}, this "
            f"cme_dask reads {SCHEMA_VERSION}: finish it with the version that began it"
        )
    before = recorded.get("about", {})
    for part in description:
        names = [
            *description[part],
            *(name for name in before.get(part, {}) if name not in description[part]),
        ]
        for name in names:
            was, now = (side.get(part, {}).get(name) for side in (before, description))
            if was != now:
                raise StoreError(
                    f"the checkpoint {path} is of another run: {part} {name!r} was {_short(was)} "
                    f"and is {_short(now)}; go on with the same, choose another folder, or remove "
                    "this one to start again"
                )
    return str(recorded.get("run"))


def _described(manifest: Any) -> dict[str, Any] | None:
    if not isinstance(manifest, dict):
        return None
    attributes = manifest.get("attributes")
    head = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    return head if isinstance(head, dict) and head.get("kind") == KIND else None


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_shard(shard: Any) -> None:
    if shard is None:
        return
    whole = isinstance(shard, tuple) and len(shard) == 2 and all(isinstance(s, int) for s in shard)
    if not whole or not 0 <= shard[0] < shard[1] <= _BLOCKS:
        raise DataError(
            f"shard must be (i, k) with 0 <= i < k <= {_BLOCKS}, one of k shares, got {shard!r}"
        )


def _read_json(path: Path) -> Any:
    """What a file says; None if there is none."""
    try:
        check_file(str(path.parent), path.name)  # a pipe would be waited for
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        check_access(error, path)
        raise StoreError(
            f"{path} is damaged ({error}): restore it from a copy, or start the run again in "
            "another folder"
        ) from error


def token_of(value: Any, name: str) -> str:
    """A fingerprint of plain values, arrays, kernels and functions.

    Raises
    ------
    DataError
        If there is none that would be the same in another process.
    """
    try:
        return str(tokenize(value, ensure_deterministic=True))
    except TokenizationError as error:
        raise DataError(
            f"a checkpoint must recognise {name!r} in another process, and can't: define its "
            f"functions in a module ({error})"
        ) from error


def versions() -> dict[str, str]:
    """Versions whose change may change bits."""
    return {"cme_dask": cme_dask.__version__, "numpy": np.__version__}


# What a run depends on, as short fingerprints: its rows, its parameters, its versions


def about_run(
    name: str, depends_on: Mapping[str, Any], *samples: Sample
) -> dict[str, dict[str, str]]:
    """Fingerprints of a run, by what they are of and by name.

    Parameters
    ----------
    name
        What runs, such as the name of an estimator.
    depends_on
        Its parameters, and what else it was given.
    samples
        The rows. Of a Zarr store the last bytes of every chunk are read, which are its checksum in
        stores of ours, and of files of others when they were written, and their size, or else all
        of the chunk; arrays in memory are hashed; of a Dask array the name counts.
    """
    # A function of a module goes by its name: what its modules say is part of what it is.
    configuration = {"estimator": name} | {
        key: _fingerprint(value, key) for key, value in depends_on.items()
    }
    data = {
        f"{key} of sample {i + 1}" if i else key: value
        for i, sample in enumerate(samples)
        for key, value in _rows(sample).items()
    }
    return {"version": versions(), "configuration": configuration, "data": data}


def _fingerprint(value: Any, name: str) -> str:
    """A value in words where these tell all of it, else with a fingerprint."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    words = repr(value) if len(repr(value)) < 60 and " at 0x" not in repr(value) else ""
    sources = code_digests(value)
    token = token_of((value, *sources) if sources else value, name)
    return f"{words or type(value).__name__} ({token[:12]})"


def _source_token(value: Any, name: str) -> str:
    """Of rows in memory, and of a function of rows."""
    return token_of(value, name)[:16] if name == "rows" else _fingerprint(value, name)


def _rows(sample: Sample) -> dict[str, str]:
    fingerprints = {
        "rows": f"{sample.n_rows:,}",
        "columns": "; ".join(columns.listed() for columns in sample.columns),
        "part": "all" if sample.part is None else str(sample.part.to_dict()),
        "folds": str(sample.folding),
    }
    names = [*VARIABLES[: len(sample.sources)]]
    names += ["weights"] if sample.weights is not None else []
    names += list(sample.units)
    for name, source in zip(names, sample.reads, strict=True):
        fingerprints[f"values of {name}"] = source.fingerprint(_source_token)
    if sample.dropping:
        fingerprints["missing"] = "dropped"
    if sample.row_sample is not None:
        rows = sample.row_sample
        fingerprints["row sample"] = token_of((rows.index, rows.keys), "row sample")[:16]
    return fingerprints
