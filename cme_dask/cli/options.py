"""Options that several commands share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cme_dask.cli.types import count, kernel, output, share

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


def kernel_options(command: Command) -> Callable[..., Any]:
    """Kernels of x and of y, as the ``kernels`` of the command: fields of a job's fit."""

    @functools.wraps(command)
    def with_kernels(
        *arguments: Any,
        kernel_both: str | None,
        kernel_x: str | None,
        kernel_y: str | None,
        **options: Any,
    ) -> Any:
        kernels = {"kernel_x": kernel_x or kernel_both, "kernel_y": kernel_y or kernel_both}
        return command(*arguments, kernels=kernels, **options)

    wrapped: Callable[..., Any] = with_kernels
    for option in (
        click.option(
            "--kernel-y",
            type=kernel,
            metavar="KERNEL",
            help="Kernel of y, as --kernel-x.",
        ),
        click.option(
            "--kernel-x",
            type=kernel,
            metavar="KERNEL",
            help="Kernel of x, with length scales in the units of the columns: gaussian:0.3, "
            "matern32:TEMP=8,DEWP=10, products such as 'gaussian:TEMP=8 * categorical:wd=0.7', or "
            "JSON. Names: gaussian, laplace, matern12, matern32, matern52, categorical.",
        ),
        click.option(
            "--kernel",
            "kernel_both",
            type=kernel,
            metavar="KERNEL",
            help="Kernel of x and of y: learned, median (Gaussian by the median heuristic, many "
            "times faster), or as --kernel-x.  [default: learned]",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def log_option(command: Command) -> Callable[..., Any]:
    """A file that takes what happens, for as long as the command runs."""

    @click.option(
        "--log",
        type=output,
        metavar="FILE",
        help="Append what happens to FILE, a line of JSON each: passes, pivots, retries.",
    )
    @functools.wraps(command)
    def logged(*arguments: Any, log: Path | None, **options: Any) -> Any:
        from cme_dask.report.logs import logging_to

        with logging_to(log):
            return command(*arguments, **options)

    return logged


def _configures(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """What sets a key of Dask's configuration to the value of an option while the command runs."""

    def set_key(ctx: click.Context, _: click.Parameter, value: Any) -> None:
        if value:
            from cme_dask.chunked.clusters import configured

            ctx.with_resource(configured({key: value if value is True else str(value)}))

    return set_key


def tls_options(command: Command) -> Command:
    """How a cluster is trusted, by the names of the options of ``dask worker``."""
    files = {
        "--tls-ca-file": ("ca-file", "Certificate authority of a tls:// cluster."),
        "--tls-cert": ("client.cert", "Certificate of this client."),
        "--tls-key": ("client.key", "Private key of this client."),
    }
    kind = click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True)
    wrapped = click.option(
        "--require-tls",
        is_flag=True,
        expose_value=False,
        callback=_configures("distributed.comm.require-encryption"),
        help="Refuse a cluster that is not encrypted.",
    )(command)
    for option, (key, text) in reversed(files.items()):
        wrapped = click.option(
            option,
            type=kind,
            metavar="FILE",
            expose_value=False,
            callback=_configures(f"distributed.comm.tls.{key}"),
            help=f"{text}  [default: Dask's configuration]",
        )(wrapped)
    return wrapped


def compute_options(command: Command) -> Callable[..., Any]:
    """Where to run, as the ``compute`` of the command, and what is told of it."""

    @functools.wraps(command)
    def computing(
        *arguments: Any,
        scheduler: str | None,
        workers: int | None,
        memory_limit: str | None,
        report: Path | None,
        **options: Any,
    ) -> Any:
        from cme_dask.jobs.compute import Compute

        overwrite = bool(options.get("overwrite"))
        compute = Compute(scheduler, workers, memory_limit, report, overwrite)
        return command(*arguments, compute=compute, **options)

    wrapped = tls_options(log_option(computing))
    for option in (
        click.option(
            "--report",
            type=output,
            metavar="DIR",
            help="Folder that tells of the run, if it ends well: passes, memory over time, and of "
            "a cluster Dask's performance report.",
        ),
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
            help="threads, processes, synchronous, or a cluster's tcp://HOST:PORT or tls://...  "
            "[default: threads]",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def checkpoint_options(command: Command) -> Callable[..., Any]:
    """Where the run is kept while it goes on, as the ``kept`` of the command."""

    @functools.wraps(command)
    def keeping(
        *arguments: Any,
        checkpoint: Path | None,
        resume: bool,
        shard: tuple[int, int] | None,
        **options: Any,
    ) -> Any:
        from cme_dask.jobs.kept import Kept

        return command(*arguments, kept=Kept(checkpoint, resume, shard), **options)

    wrapped: Callable[..., Any] = keeping
    for option in (
        click.option(
            "--shard",
            type=share,
            metavar="I/K",
            help="Do only the I-th (from 1) of K shares into the checkpoint; without --shard the "
            "same command then adds them up.",
        ),
        click.option(
            "--resume", is_flag=True, help="Go on with the run that lies in --checkpoint."
        ),
        click.option(
            "--checkpoint",
            type=output,
            metavar="DIR",
            help="Folder, seen by all workers, in which what is done is kept until the output is "
            "there.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped
