"""A few calls at once, in threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    function: Callable[[Item], Result], items: Sequence[Item], cores: int
) -> list[Result]:
    """``function`` of each item in so many threads; with one core in the thread that asks."""
    if min(cores, len(items)) <= 1:
        return [function(item) for item in items]
    contexts = [copy_context() for _ in items]  # such as the settings for floating-point errors
    with ThreadPoolExecutor(cores) as threads:
        return list(threads.map(lambda c, item: c.run(function, item), contexts, items))
