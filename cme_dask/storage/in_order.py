"""Work on a stream of items in threads, results in the order of the items."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WORKERS = 8
"""More would hold more blocks in memory than they would gain in time."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """``map`` in threads that runs at most ``workers`` + 1 items ahead.

    An error of an item, or of the stream itself, is raised where its result would have come.
    """
    workers = workers or min(cores(), MAX_WORKERS)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[Result]] = deque()
        failure: Exception | None = None
        iterator = iter(items)
        try:
            while True:
                try:
                    item = next(iterator)
                except StopIteration:
                    break
                except Exception as error:  # noqa: BLE001 - raised below, in its turn
                    failure = error
                    break
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
        if failure is not None:
            raise failure
