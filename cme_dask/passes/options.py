"""Where and how a run goes over the rows, as one object."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cme_dask.data.sample import Sample
from cme_dask.passes.checkpoint import about_run, keeping
from cme_dask.passes.cluster import Scheduler
from cme_dask.passes.driver import Executor
from cme_dask.passes.memory import MemoryBudget
from cme_dask.passes.progress import Event, Listener, listening
from cme_dask.passes.run import PassProgress


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run.

    Parameters
    ----------
    scheduler : str or distributed.Client, optional
        ``"threads"``, ``"processes"``, ``"synchronous"`` or the client of a cluster; default: what
        Dask is set to, else threads.
    workers : int, optional
        Tasks at once, without a cluster; default: one per core.
    memory_limit : str or int, optional
        Bytes that each place may use, such as ``"2GB"``; default: what the machine has.
    progress : bool or callable, optional
        True shows a bar; a function is called with each :class:`cme_dask.Event`.
    checkpoint : path, optional
        Folder for partial results, on a filesystem that all workers share: an interrupted run
        resumes from it.
    shard : (int, int), optional
        (i, k): compute the i-th of k shares into the checkpoint, and no more.
    """

    scheduler: Scheduler = None
    workers: int | None = None
    memory_limit: str | int | None = None
    progress: bool | Listener | None = None
    checkpoint: str | os.PathLike[str] | None = None
    shard: tuple[int, int] | None = None

    @contextmanager
    def budget(
        self, name: str, depends_on: Mapping[str, Any], sample: Sample
    ) -> Iterator[MemoryBudget]:
        """The place of a run and its memory, with its checkpoint held meanwhile.

        Parameters
        ----------
        name
            What runs, such as the name of an estimator.
        depends_on
            What the results depend on beside the rows, by name.
        sample
            The rows.

        Raises
        ------
        DataError
            On unusable options, or if another run goes on in the checkpoint.
        StoreError
            If the checkpoint is of another run; the message names what differs.
        ResourceError
            If the cluster has no workers, or they don't see the checkpoint.
        """

        def described() -> dict[str, dict[str, str]]:
            return about_run(name, depends_on, sample, {})

        with keeping(self.checkpoint, described, self.shard) as checkpoint:
            executor = Executor.resolve(self.scheduler, self.workers, checkpoint)
            yield MemoryBudget.of(executor, self.memory_limit)

    @contextmanager
    def opened(
        self, name: str, depends_on: Mapping[str, Any], sample: Sample
    ) -> Iterator[tuple[MemoryBudget, Callable[[PassProgress], None] | None]]:
        """The same, and what to call with the progress of the only pass."""
        with self.budget(name, depends_on, sample) as budget, listening(self.progress) as listener:
            yield budget, None if listener is None else _EventsOf(listener)


@dataclass(frozen=True)
class _EventsOf:
    """From the progress of a pass to events."""

    listener: Listener

    def __call__(self, done: PassProgress) -> None:
        share = done.rows / done.rows_total
        left = done.seconds * (1.0 / share - 1.0)
        text = f"{done.rows / max(done.seconds, 1e-9):,.0f} rows/s"
        self.listener(Event(1, 1, done.name, share, done.seconds, left, text, done))
