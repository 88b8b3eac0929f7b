"""The work of the command plan, and its tables."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from cme_dask.cli.compute import Compute
from cme_dask.cli.fitting import TrainingRows, plan_of_fit
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.schema import FitSection
from cme_dask.cli.tables import facts, format_bytes, grid
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.display import number
from cme_dask.errors import DataError
from cme_dask.estimators.sizing import plan_cluster
from cme_dask.passes.rates import ClusterRates

Result = dict[str, Any]

_COLUMNS = 10, 1
_RANK = 200
_NO_LIMIT = 100_000  # workers
_MADE_UP = 1 << 17  # rows: they fill the row sample


def size_cluster(
    store: str | None,
    section: FitSection,
    *,
    rows: int | None,
    workers: int,
    x: Sequence[str] | None,
    y: Sequence[str] | None,
    columns: tuple[int, int] | None,
    rates: Path | None,
    bandwidth: float | None,
    latency: float | None,
    file_system_rate: float | None,
    stragglers: tuple[float, float] | None,
    **options: Any,
) -> Result:
    """JSON form of the plan of a cluster; options as of ``cme-dask plan``.

    Raises
    ------
    DataError
        If options contradict each other, or a file of rates holds none.
    """
    if store is None and rows is None:
        raise DataError("the number of rows is not known: give --rows, or a store")
    if store is None and (x or y or section.events):
        raise DataError("columns and events are those of a store: give one, or leave them out")
    if store is not None and columns is not None:
        raise DataError("--columns is for a plan without a store, which has columns of its own")
    given = None if rates is None else read_rates(rates)
    if store is None and section.max_rank is None:
        section = section.model_copy(update={"max_rank": _RANK})
    with contextlib.ExitStack() as stack:
        location = store or stack.enter_context(_made_up(columns or _COLUMNS))
        _, plan = plan_of_fit(TrainingRows(location, x, y), section, Compute())
    with ProgressLines() as progress:
        if given is None:
            progress.say(f"measuring a scheduler with up to {min(workers, 400)} stub workers")
            given = ClusterRates.measure(workers)
        changed = {"bandwidth": bandwidth, "latency": latency}
        given = replace(given, **{key: v for key, v in changed.items() if v is not None})
    result = plan_cluster(
        plan,
        workers,
        rows=rows,
        rates=given,
        file_system=file_system_rate,
        stragglers=stragglers or (0.0, 1.0),
        **options,
    )
    variables = [
        {"name": each.name, "columns": len(each.columns), "ranks": list(each.ranks)}
        for each in plan.variables
    ]
    return {"kind": "plan", "store": store, "variables": variables, **result.to_dict()}


def read_rates(path: Path) -> ClusterRates:
    """The rates in the JSON form of an earlier plan, or by themselves.

    Raises
    ------
    DataError
        If the file holds none.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is no JSON: give the output of `cme-dask plan --json` ({error})"
        ) from error
    rates = values.get("rates", values) if isinstance(values, dict) else None
    if not isinstance(rates, dict):
        raise DataError(f"{path} holds no rates: give the output of `cme-dask plan --json`")
    return ClusterRates.from_dict(rates)


@contextlib.contextmanager
def _made_up(counts: tuple[int, int]) -> Iterator[str]:
    """A store of so many columns for as long as it is used: x uniform, y their mean with noise."""
    rng = np.random.default_rng(0)
    x = rng.random((_MADE_UP, counts[0]))
    y = x.mean(axis=1, keepdims=True) + 0.1 * rng.standard_normal((_MADE_UP, counts[1]))
    names = Columns.default("x", counts[0]), Columns.default("y", counts[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.zarr"
        with writing_sample(path, names, expected_rows=_MADE_UP) as writer:
            writer.append(x, y)
        yield str(path)


def sizing_tables(result: Result) -> list[RenderableType]:
    """Of ``cme-dask plan``."""
    done, memory, best = result["pass"], result["memory"], result["recommended"]
    workers, threads = result["workers"], result["threads_per_worker"]
    expected, least, most = result["seconds"]
    bases = ", ".join(
        f"{v['name']}: {v['columns']} columns, rank {' + '.join(map(str, v['ranks']))}"
        for v in result["variables"]
    )
    rounds = ", and rounds of pivots, whose number is not known" * (result["rounds"] is None)
    limit = result["limit_workers"]
    from_on = (
        f"limits the pass from about {number(limit)} workers of {threads} "
        f"thread{'s' * (threads > 1)} on"
        if limit <= _NO_LIMIT
        else "is no limit"
    )
    lines = [
        ("bases", bases),
        (
            "passes",
            f"{result['passes']} over {number(result['rows'])} rows{rounds}; "
            f"{number(done['tasks'])} tasks each",
        ),
        ("time", f"{_time(expected)}, {_time(least)} to {_time(most)}"),
        (
            "memory",
            f"{format_bytes(memory['worker'])} of a worker, {format_bytes(memory['client'])} of "
            "the client",
        ),
        (
            "bytes",
            f"{format_bytes(result['bytes_read'])} read, before compression, "
            f"{format_bytes(result['bytes_sent'])} sent",
        ),
        (
            "scheduler",
            f"busy for {done['scheduler_busy']:.0%} of the pass; handles at most "
            f"{result['tasks_per_second']:,.0f} tasks/s, and {from_on}",
        ),
        (
            "recommended",
            f"{number(best['workers'])} workers of {best['threads']} "
            f"thread{'s' * (best['threads'] > 1)}, --memory-limit "
            f"{format_bytes(memory['worker_limit']).replace(' ', '')}, chunks of "
            f"{number(result['chunk_rows'])} rows",
        ),
    ]
    if best["workers"] * best["threads"] < workers * threads:
        lines.append(("", "more workers would be no faster"))
    stages = [
        (name, *(f"{value:.3g}" for value in values)) for name, values in result["stages"].items()
    ]
    stages.append(("in all", *(f"{value:.3g}" for value in result["seconds"])))
    caption = (
        "Steps on the client as measured here, the pass as simulated. Least: the fastest tenth of "
        "the timed work; most: the slowest, with 1 % of tasks five times as long."
    )
    title = f"{result['store'] or 'made-up rows'} (plan of a fit on a cluster)"
    return [
        facts(title, lines),
        "",
        grid("Seconds", ("", "expected", "least", "most"), stages, caption),
        "",
        _layouts("The pass on fewer and more workers", result["sweep"]),
        *(
            ["", _layouts("The pass in fewer processes", result["layouts"])]
            if len(result["layouts"]) > 1
            else []
        ),
    ]


def _layouts(title: str, layouts: Sequence[Result]) -> RenderableType:
    rows = [
        (
            number(one["workers"]),
            str(one["threads"]),
            f"{one['seconds']:.3g}",
            f"{one['scheduler_busy']:.0%}",
            format_bytes(one["memory"]),
        )
        for one in layouts
    ]
    head = ("workers", "threads", "seconds", "scheduler busy", "memory of each")
    return grid(title, head, rows)


def _time(seconds: float) -> str:
    """Seconds in a unit that is read at a glance."""
    for unit, name in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
