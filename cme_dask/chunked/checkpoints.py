"""Checkpoints: the strips of each pass that are done, on disk, so that a run may go on.

The rows of a pass are cut into at most 64 blocks, nodes of the fixed tree of its sums. A task that
has made the sum of a block writes it to a folder that all workers see, and the sum over all rows
follows when the pass has ended. A run that goes on finds blocks and passes that are done and leaves
out their tasks; since sums follow the same tree, it ends with the same bits.
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dask.base import tokenize
from dask.tokenize import TokenizationError

import cme_dask
from cme_dask.chunked.plan import Run, Together, strip_length
from cme_dask.errors import DataError, ResourceError, ShardDone, StoreError
from cme_dask.numerics.cell_sums import CellSums
from cme_dask.numerics.kept_rows import Kept
from cme_dask.numerics.logistic import LogisticSums
from cme_dask.numerics.moments import Moments
from cme_dask.numerics.pivot_state import Measured
from cme_dask.numerics.pools import Bound
from cme_dask.numerics.rounds import GreedyOffer, RandomOffer
from cme_dask.numerics.scoring import ScoreSums
from cme_dask.numerics.value_range import ValueRange
from cme_dask.storage.atomic import ATTRIBUTE, disk_errors
from cme_dask.storage.checkpoint import locked
from cme_dask.storage.partials import read_partial, write_json, write_partial
from cme_dask.storage.priority import RowSample

KIND, SCHEMA_VERSION = "checkpoint", 2

_BLOCKS = 64
_MANIFEST, _SIGN, _PASS, _TOTAL = "zarr.json", "sign", "pass.json", "total"
_kinds: dict[str, type] = {}


def keeps(*kinds: type) -> None:
    """Let dataclasses lie in checkpoints."""
    _kinds.update({kind.__name__: kind for kind in kinds})


keeps(Together, Moments, CellSums, Kept, LogisticSums, Measured, GreedyOffer, RandomOffer)
keeps(Bound, RowSample, ScoreSums, ValueRange)


def block_rows(n: int, chunk_rows: int) -> int:
    """Rows of a block: strips of n rows in at most 64 blocks, none much shorter than a chunk."""
    length = strip_length(n)
    rows = max(
        -(-n // _BLOCKS), 4 * chunk_rows if chunk_rows and length % chunk_rows else chunk_rows
    )
    return length << (-(-rows // length) - 1).bit_length()


@dataclass(eq=False)
class Checkpoint:
    """The folder of one run; made by :func:`keeping`.

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

    def begin(self, name: str, asked: Any, n_rows: int, block: int) -> "KeptPass":
        """The folder of the next pass of the run.

        Parameters
        ----------
        name
            Of its tasks.
        asked
            All that its tasks compute from.
        n_rows, block
            Number of rows, and of rows in a block.

        Raises
        ------
        StoreError
            If what lies there is of another pass, or lacks what the manifest lists.
        """
        number, self._begun = self._begun, self._begun + 1
        kept = KeptPass(
            self.folder, self.run, f"pass-{number:03d}", n_rows, block, self._share(n_rows, block)
        )
        about = {"name": name, "token": token_of(asked, name), "rows": n_rows, "block": block}
        kept.open(about)
        return kept

    def _share(self, n_rows: int, block: int) -> tuple[int, int]:
        """Blocks [first, last) of the pass that are ours."""
        blocks = -(-n_rows // block)
        i, k = self.shard or (0, 1)
        return blocks * i // k, blocks * (i + 1) // k

    def check_seen(self, client: Any) -> None:
        """ResourceError unless all workers of a cluster see the folder, and it sees their files."""
        folder = str(self.folder)
        found = client.run(_sees, folder, self.run, on_error="ignore")  # some may die now
        # Each name is looked up: a list of the folder may be an old one, on a network.
        blind = [who for who, name in found.items() if not (name and (self.folder / name).exists())]
        for name in filter(None, found.values()):
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
class KeptPass:
    """The sums of one pass on disk, as client and tasks see them.

    Attributes
    ----------
    folder, run, name
        The checkpoint, the name of its run, and the folder of the pass in it.
    n_rows, block
        Number of rows, and of rows in a block.
    share
        Blocks [first, last) that this run makes.
    """

    folder: Path
    run: str
    name: str
    n_rows: int
    block: int
    share: tuple[int, int]

    def open(self, about: dict[str, Any]) -> None:
        """Begin, or go on with, the pass that is described so."""
        here = self.folder / self.name
        with disk_errors(here):
            here.mkdir(exist_ok=True)
        found = _read_json(here / _PASS)
        if found is None and _holds(here, ()):
            found = _read_json(here / _PASS)  # another shard began it meanwhile
            if found is None:
                raise StoreError(
                    f"{here} holds sums but not {_PASS}, which says of what: remove {self.folder}, "
                    "and start the run again"
                )
        if found is None:
            write_json(here / _PASS, about, replace=False)
            found = _read_json(here / _PASS)
        if found != about:
            different = next((key for key in about if found.get(key) != about[key]), "")
            raise StoreError(
                f"{self.name} of the checkpoint {self.folder} is of another {found.get('name')} "
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
        first = row // self.block * self.block
        last = min(first + self.block, self.n_rows)
        return self.folder / self.name / f"rows-{first}-{last}-{self.run}"

    def has(self, run: Run) -> bool:
        """Whether the block of these rows is done."""
        return self.path(run.start).exists()

    def ours(self, run: Run) -> bool:
        """Whether the block of these rows is in our share."""
        return self.share[0] <= run.start // self.block < self.share[1]

    def write(self, row: int, value: Any) -> Any:
        """Keep the sum of the block of a row, or read it if there is one; returns it."""
        path = self.path(row)
        if not (self.folder / _sign_of(self.run)).exists():
            raise ResourceError(
                f"a worker can't see the checkpoint folder {self.folder}: put it on a filesystem "
                "that this process and all workers share"
            )
        if value is None:
            return read_partial(path, _kinds)
        write_partial(path, value, _kinds)
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
        if self.name not in ended:
            return None
        if not self.total.exists():
            raise StoreError(
                f"the checkpoint {self.folder} lacks the sums of {self.name}, which its manifest "
                "lists: restore them from a copy, or start the run again in another folder"
            )
        return read_partial(self.total, _kinds)

    def end(self, value: Any) -> None:
        """Keep the sum over all rows, list it in the manifest, and drop its blocks."""
        if self.total.exists():  # of one who was cut off before it was listed
            shutil.rmtree(self.total)
        write_partial(self.total, value, _kinds, flush=True)  # blocks go when it is safe
        path = self.folder / _MANIFEST
        manifest = _read_json(path)
        assert manifest is not None
        manifest["attributes"][ATTRIBUTE]["ended"].append(self.name)
        write_json(path, manifest)
        for block in (self.folder / self.name).iterdir():
            if block.name not in (_TOTAL, _PASS):  # drafts of those who were killed, too
                shutil.rmtree(block, ignore_errors=True)


@contextlib.contextmanager
def keeping(
    folder: str | os.PathLike[str] | None,
    about: Callable[[], dict[str, dict[str, str]]],
    shard: tuple[int, int] | None = None,
) -> Iterator[Checkpoint | None]:
    """The checkpoint in a folder, begun or gone on with; None without a folder.

    Parameters
    ----------
    folder
        Where it lies: on a filesystem that this process and all workers share.
    about
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
    path = Path(os.path.abspath(folder))
    if not path.parent.is_dir():
        raise DataError(f"the folder {path.parent} of the checkpoint does not exist: create it")
    with disk_errors(path):
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
        yield Checkpoint(path, _settle(path, _read_json(path / _MANIFEST), about()), shard)
        if shard is not None:
            raise ShardDone("all shares are done: run the same fit without a shard, for its result")
    finally:
        os.close(descriptor)


def is_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint lies in a folder."""
    return _described(_read_json(folder / _MANIFEST)) is not None


def discard(folder: Path) -> None:
    """Remove a checkpoint that nobody holds.

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
            shutil.rmtree(trash, ignore_errors=True)
        finally:
            os.close(descriptor)


def _holds(path: Path, known: tuple[str, ...]) -> bool:
    """Whether something lies in a folder beside what is known there, signs and drafts."""
    names = (item.name for item in path.iterdir())
    return any(n not in known and not n.startswith((".", f"{_SIGN}-")) for n in names)


def _settle(path: Path, manifest: Any, about: dict[str, dict[str, str]]) -> str:
    """Write the manifest, or hold the one that is there against what it should say.

    Gives the name of the run.
    """
    if manifest is None:
        run = uuid.uuid4().hex[:12]
        with disk_errors(path):
            (path / _sign_of(run)).touch()
        head = {"kind": KIND, "schema_version": SCHEMA_VERSION, "run": run, "about": about}
        whole = {"zarr_format": 3, "node_type": "group"}
        whole["attributes"] = {ATTRIBUTE: {**head, "ended": []}}
        if write_json(path / _MANIFEST, whole, replace=False):
            return run
        (path / _sign_of(run)).unlink(missing_ok=True)  # another shard was first
        manifest = _read_json(path / _MANIFEST)
    found = _described(manifest)
    if found is None:
        raise StoreError(f"{path} is no checkpoint of cme_dask: choose another folder")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise StoreError(
            f"the checkpoint {path} has schema version {found.get('schema_version')}, this "
            f"cme_dask reads {SCHEMA_VERSION}: finish it with the version that began it"
        )
    before = found.get("about", {})
    for part in about:
        names = [*about[part], *(name for name in before.get(part, {}) if name not in about[part])]
        for name in names:
            was, now = (side.get(part, {}).get(name) for side in (before, about))
            if was != now:
                raise StoreError(
                    f"the checkpoint {path} is of another run: {part} {name!r} was {_short(was)} "
                    f"and is {_short(now)}; go on with the same, or choose another folder"
                )
    return str(found.get("run"))


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
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
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
