"""Options that several commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cme_dask.cli.types import count

Command = TypeVar("Command", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """An epilog; the backspace tells click to leave the lines as they are."""
    return "\n".join(
        ["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)]
    )


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."
)
overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace an existing output, once the new one is whole."
)
chunk_option = click.option(
    "--chunk-rows",
    type=count,
    help="Rows per chunk.  [default: a power of two, 8 MB at most, features 32 MB]",
)


fold_by_option = click.option(
    "--fold-by",
    metavar="rows|group|LENGTH",
    help="What folds and hold-outs keep together: rows one by one, groups, or blocks of time such "
    "as 7d, 12h or 30min.  [default: rows; of a score, as the fit did]",
)
hold_out_option = click.option(
    "--hold-out", type=float, metavar="SHARE", help="Share of the rows that is held out, in (0, 1)."
)


def compute_options(command: Command) -> Command:
    """Where to run."""
    for option in (
        click.option(
            "--memory-limit",
            metavar="BYTES",
            help="Memory this process, or each worker of a cluster, may use, such as 2GB; a fit "
            "that would need more is refused.  [default: what there is]",
        ),
        click.option(
            "--workers",
            type=click.IntRange(1),
            help="Threads or processes.  [default: one per core]",
        ),
        click.option(
            "--scheduler",
            metavar="NAME|ADDRESS",
            help="threads, processes, synchronous, or a cluster's tcp://HOST:PORT.  "
            "[default: threads]",
        ),
    ):
        command = option(command)
    return command
