"""A job: leaf tasks whose results are merged along the fixed tree, the same on every scheduler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import uuid4

from dask.delayed import Delayed, delayed

from cme_dask.chunked.plan import Tree


class _Plain:
    """A value with no task in it, into whose fields Dask need not look."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True, eq=False)
class Job:
    """What :meth:`Executor.run` was given, see there."""

    leaf: Callable[..., Any]
    payloads: Sequence[tuple[Any, ...]]
    merge: Callable[[Any, Any], Any]
    shared: Any
    name: str
    on_done: Callable[[int], None]
    after: Mapping[int, Callable[[Any], Any]]
    token: str = field(default_factory=lambda: uuid4().hex)

    @cached_property
    def tree(self) -> Tree:
        """Over the payloads."""
        return Tree.over(len(self.payloads))

    def key(self, node: int, attempt: int = 0) -> str:
        """Name of the task of a node."""
        again = f"-again{attempt}" if attempt else ""
        if node < self.tree.leaves:
            return f"{self.name}-{node}-{self.token}{again}"
        return f"{self.name}-merge-{node - self.tree.leaves}-{self.token}{again}"

    def owns(self, key: str) -> bool:
        """Whether a task is of this job, and not one that its payloads come from."""
        return self.token in key or key.startswith((f"{work.__name__}-", f"{join.__name__}-"))

    def tasks(self, attempts: Mapping[int, int], there: Mapping[int, Any]) -> list[Delayed]:
        """Tasks of nodes, by the number of the attempt; parts that have none are ``there``.

        Nodes come in ascending order, so that parts come before what they go into.
        """
        # Under a name that has not failed yet.
        plan = f"{self.name}-plan-{self.token}-{max(attempts.values(), default=0)}"
        common = delayed(self.shared, name=plan, traverse=False)
        call, add = (delayed(f, pure=False, traverse=False) for f in (work, join))
        made: dict[int, Delayed] = {}
        for node in sorted(attempts):
            after, key = self.after.get(node), self.key(node, attempts[node])
            if node < self.tree.leaves:
                given = [p if isinstance(p, Delayed) else _Plain(p) for p in self.payloads[node]]
                made[node] = call(_Plain((self.leaf, after)), common, *given, dask_key_name=key)
            else:
                parts = self.tree.merges[node - self.tree.leaves]
                a, b = (made[part] if part in made else there[part] for part in parts)
                made[node] = add(self.merge, after, a, b, dask_key_name=key)
        return list(made.values())


def work(job: _Plain, shared: Any, *payload: Any) -> Any:
    """The task of a leaf."""
    leaf, after = job.value
    value = leaf(shared, *(p.value if isinstance(p, _Plain) else p for p in payload))
    return value if after is None else after(value)


def join(
    merge: Callable[[Any, Any], Any], after: Callable[[Any], Any] | None, a: Any, b: Any
) -> Any:
    """The task of a merge."""
    value = merge(a, b)
    return value if after is None else after(value)
