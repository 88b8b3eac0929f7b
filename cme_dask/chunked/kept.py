"""A pass whose sums are kept in a checkpoint: what is done is read, what is not is run."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cme_dask.chunked.checkpoints import KeptPass
from cme_dask.chunked.driver import Executor
from cme_dask.chunked.plan import Run, Tree
from cme_dask.chunked.strips import Reading
from cme_dask.errors import ShardDone

log = logging.getLogger("cme_dask.run")


@dataclass(frozen=True)
class Pass:
    """A pass over rows.

    Attributes
    ----------
    job, merge, shared
        As in :meth:`Executor.run`; the job is called with a run, how it reads, and its sources.
    reading
        How tasks read.
    runs
        Its tasks.
    given
        The sources of a run.
    name
        Of the tasks.
    """

    job: Callable[..., Any]
    merge: Callable[[Any, Any], Any]
    shared: Any
    reading: Reading
    runs: list[Run]
    given: Callable[[Run], list[Any]]
    name: str


def run_kept(
    asked: Pass, executor: Executor, n_rows: int, block: int, on_done: Callable[[int], None]
) -> Any:
    """The sum over all runs, kept in the checkpoint of the executor.

    Parameters
    ----------
    asked
        The pass.
    executor
        Where it runs.
    n_rows, block
        Number of rows, and of rows in a block.
    on_done
        See :meth:`Executor.run`.

    Raises
    ------
    StoreError
        If the checkpoint is of another run, or damaged.
    ShardDone
        If only a share was to be done, and that is.
    """
    checkpoint, runs = executor.checkpoint, asked.runs
    assert checkpoint is not None
    computed_from = (asked.job, asked.merge, asked.shared, asked.reading)
    kept = checkpoint.begin(asked.name, computed_from, n_rows, block)
    total = kept.read_total()
    if total is not None:
        checkpoint.resumed_strips += sum(run.strips for run in runs)
        for number in range(len(runs)):
            on_done(number)
        return total
    done = [kept.has(run) for run in runs]
    checkpoint.resumed_strips += sum(r.strips for r, there in zip(runs, done, strict=True) if there)
    share = list(range(len(runs)))
    if checkpoint.shard is not None and not all(done):
        share = [i for i, run in enumerate(runs) if kept.ours(run)]
        finished = all(done[i] for i in share)
        if finished:
            raise ShardDone(_waiting(checkpoint.shard, kept))
    value = executor.run(
        _Kept(asked.job, kept),
        [(runs[i], asked.reading, *(() if done[i] else asked.given(runs[i]))) for i in share],
        partial(_merge, asked.merge),
        shared=asked.shared,
        name=asked.name,
        on_done=lambda number: on_done(share[number]),
        after=_after(kept, [runs[i] for i in share]),
    )
    if len(share) < len(runs):
        raise ShardDone(_waiting(checkpoint.shard, kept))
    if checkpoint.shard is None:
        kept.end(value)
        log.info(
            "%s is kept in %s", kept.name, kept.folder, extra={"event": "kept", "pass": kept.name}
        )
    return value


def _waiting(shard: tuple[int, int] | None, kept: KeptPass) -> str:
    i, k = shard or (0, 1)
    return (
        f"shard {i + 1} of {k} has done its share of {kept.name}: when all shards have, run the "
        "same fit without a shard, which adds them up"
    )


@dataclass(frozen=True)
class _Kept:
    """The work of a task, unless the block of its rows is done: then None stands for it."""

    job: Callable[..., Any]
    kept: KeptPass

    def __call__(self, shared: Any, run: Run, *given: Any) -> Any:
        # Of a block that was done before there are no sources, whatever this worker sees.
        return None if len(given) < 2 or self.kept.has(run) else self.job(shared, run, *given)


def _merge(merge: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return None if a is None or b is None else merge(a, b)


def _after(kept: KeptPass, runs: list[Run]) -> dict[int, Callable[[Any], Any]]:
    """Nodes that are blocks: their sums are written, or read where they were."""
    after: dict[int, Callable[[Any], Any]] = {}
    for node, (first, last) in enumerate(Tree.over(len(runs)).spans):
        start, stop = runs[first].start, runs[last - 1].stop
        if start % kept.block == 0 and stop == min(start + kept.block, kept.n_rows):
            after[node] = partial(_keep, kept, start)
    return after


def _keep(kept: KeptPass, row: int, value: Any) -> Any:
    return kept.write(row, value)
