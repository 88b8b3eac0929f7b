"""One ingestion, step by step, with checkpoints from which another process goes on."""

import dataclasses
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cme_dask.defaults import SAMPLE_SIZE
from cme_dask.errors import CmeDaskError, DataError, switch
from cme_dask.storage.checkpoint import Workshop
from cme_dask.storage.encoder import Encoder
from cme_dask.storage.in_order import in_order
from cme_dask.storage.ingest_report import IngestProgress, IngestReport
from cme_dask.storage.layout import Layout
from cme_dask.storage.tables import Source, listed
from cme_dask.storage.typed import Decoded, Decoder
from cme_dask.storage.writer import Described, Roles, SampleWriter

CHECKPOINT_SECONDS = 1.0
CHECKPOINT_BATCHES = 64


@dataclass(frozen=True)
class Plan:
    """All that the stored bytes depend on, beside the files."""

    layout: Layout
    missing: str
    null_values: tuple[str, ...]
    chunk_rows: int
    seed: int
    units: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, flat, to compare."""
        own = {key: value for key, value in dataclasses.asdict(self).items() if key != "layout"}
        layout = dataclasses.asdict(self.layout)
        return {**layout, **own, "null_values": list(self.null_values)}


class Run:
    """One ingestion, from its start or its last checkpoint."""

    def __init__(self, plan: Plan, sources: Sequence[Source], workshop: Workshop) -> None:
        self._plan, self._sources, self._workshop = plan, sources, workshop
        self._encoder = Encoder(plan.layout)
        self._missing = dict.fromkeys(plan.layout.kinds, 0)
        self._rows_read = self._done = 0
        self._position: dict[str, Any] | None = None
        self._marks: list[str] = []  # fingerprints of the files begun
        resumed = None
        if (state := workshop.state) is not None:
            self._check_same(state)
            self._encoder.restore(state["encoder"])
            self._missing, self._rows_read = state["missing"], state["rows_read"]
            self._done, self._position = state["done"], state["position"]
            self._marks = state["marks"]
            resumed = workshop.arrays()
        self._rows_resumed = self._rows_read
        layout = plan.layout
        self._writer = SampleWriter(
            workshop.store,
            layout.columns(plan.units, {}),
            layout.weights is not None,
            plan.chunk_rows,
            SAMPLE_SIZE,
            plan.seed,
            Roles(layout.group, ",".join(layout.time) or None),
            resumed,
        )

    def close(self) -> None:
        """Stop writing."""
        self._writer.close()

    def _check_same(self, state: Mapping[str, Any]) -> None:
        """DataError unless the interrupted ingestion was of the same plan and files."""
        former, plan = state["plan"], _as_json(self._plan.to_dict())
        changed = [key for key in plan if former.get(key) != plan[key]]
        if changed:
            raise DataError(
                f"the interrupted ingest had another {changed[0]} ({former.get(changed[0])!r}, now "
                f"{plan[changed[0]]!r}): give what it had, or start again with "
                f"{switch('overwrite')}"
            )
        names = [source.name for source in self._sources]
        if state["files"] != names:
            other = sorted(set(state["files"]) ^ set(names))
            raise DataError(
                f"the interrupted ingest was of other files ({listed(other)}): give the same ones, "
                f"or start again with {switch('overwrite')}"
            )
        for source, mark in zip(self._sources, state["marks"], strict=False):
            if source.fingerprint() != mark:
                raise DataError(
                    f"{source.name} has changed since the interrupted ingest read it: start again "
                    f"with {switch('overwrite')}"
                )

    def read(self, progress: Callable[[IngestProgress], None] | None) -> None:
        """Read what is left, with checkpoints."""
        saved, since = clock.monotonic(), 0
        try:
            for source, decoded in self._batches():
                self._writer.append(*self._encoder.encode(decoded, source.name))
                self._rows_read += decoded.rows_read
                for name, count in decoded.missing.items():
                    self._missing[name] += count
                self._position = decoded.position
                since += 1
                if since >= CHECKPOINT_BATCHES or clock.monotonic() - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved, since = clock.monotonic(), 0
                if progress is not None:
                    counts = (self._rows_read, self._writer.n_rows, self._done, len(self._sources))
                    progress(IngestProgress(source.name, *counts))
        except CmeDaskError as error:
            if self._workshop.state is None:
                raise
            kept = f"what was read is kept: {switch('resume')} continues"
            raise type(error)(f"{error} ({kept})") from error

    def _batches(self) -> Iterator[tuple[Source, Decoded]]:
        plan = self._plan
        kinds = plan.layout.kinds
        for source in self._sources[self._done :]:
            if len(self._marks) == self._done:
                self._marks.append(source.fingerprint())
            decode = Decoder(plan.layout, plan.missing, source.name)
            batches = source.batches(tuple(kinds), kinds, plan.null_values, self._position)
            for decoded in in_order(decode, batches):
                yield source, decoded
            self._done += 1
            self._position = None

    def _save(self) -> None:
        state = {
            "plan": self._plan.to_dict(),
            "files": [source.name for source in self._sources],
            "marks": self._marks,
            "done": self._done,
            "position": self._position,
            "rows_read": self._rows_read,
            "missing": self._missing,
            "encoder": self._encoder.state(),
        }
        self._workshop.commit(state, self._writer.state())

    def finish(self, location: str) -> IngestReport:
        """Describe the store and put it in its place."""
        layout = self._plan.layout
        origins = layout.origins
        categories = self._encoder.categories
        described = Described(
            layout.columns(self._plan.units, categories),
            {name: self._missing[origin] for name, origin in origins.items()},
            self._encoder.counts,
            self._encoder.group_labels,
        )
        try:
            self._check_kept()
            self._writer.finish(described)
        except DataError:
            self._workshop.discard()  # all is read, so to resume would not help
            raise
        self._workshop.publish()
        return IngestReport(
            files=tuple(source.name for source in self._sources),
            rows_read=self._rows_read,
            rows_kept=self._writer.n_rows,
            rows_resumed=self._rows_resumed,
            missing=dict(self._missing),
            statistics=self._writer.statistics(described),
            categories=categories,
            origins=origins,
            location=location,
        )

    def _check_kept(self) -> None:
        """DataError if no row is left, naming the columns without any value."""
        if self._writer.n_rows:
            return
        bare = [name for name, count in self._missing.items() if count == self._rows_read]
        reason = f": {listed(bare)} has no value in any row" if bare else ""
        raise DataError(f"each of the {self._rows_read:,} rows lacks a wanted value{reason}")


def _as_json(value: Any) -> Any:
    """What comes back from a JSON file: tuples as lists."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value
