"""Options that several commands share, and their values.

Values of options: seeds, counts, column names, pairs, ridges, outputs.

Click takes functions as types; what they raise is shown with the name of the option.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cme_dask.errors import DataError

# Values of options: seeds, counts, column names, pairs, ridges, outputs


_MOST = 1 << 53

SEED = click.IntRange(0, 2**63 - 1)
"""A seed of generators and of the row sample."""


def count(value: object) -> int:
    """A count such as 10000000, 10_000_000, 1e7 or 10M."""
    text = str(value).strip()
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    try:
        product = float(text[:-1] if factor > 1 else text) * factor
        exact = int(product)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{text!r} is no count: expected for example 10000000, 1e7 or 10M"
        ) from error
    if exact > _MOST:
        raise click.BadParameter(f"{text!r} is more than 2^53, the largest count there can be")
    if exact != product or exact < 1:
        raise click.BadParameter(f"{text!r} is no whole number of at least 1")
    return exact


def columns(value: str) -> tuple[str, ...]:
    """Column names, separated by commas."""
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise click.BadParameter(f"{value!r} does not read COLUMN,COLUMN,...")
    return names


def unit(value: str) -> tuple[str, str]:
    """A column and its unit from COLUMN=UNIT."""
    name, _, text = value.partition("=")
    if not (name and text):
        raise click.BadParameter(f"{value!r} does not read COLUMN=UNIT")
    return name, text


def periodic(value: str) -> tuple[str, float]:
    """A column and its period from COLUMN=PERIOD."""
    name, _, text = value.rpartition("=")
    try:
        period = float(text)
    except ValueError:
        period = 0.0
    if not name or not 0.0 < period < float("inf"):
        raise click.BadParameter(f"{value!r} does not read COLUMN=PERIOD, such as hour=24")
    return name, period


def calendar(value: str) -> tuple[str, tuple[str, ...]]:
    """A column of times and what to make of it from COLUMN=PART,PART,..."""
    name, _, text = value.rpartition("=")
    if not (name and text):
        raise click.BadParameter(f"{value!r} does not read COLUMN=PART,..., such as date=hour")
    return name, columns(text)


def size(value: object) -> int:
    """A number of bytes such as 8MB, 512KiB or 1000000."""
    text = str(value).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG]?)(i?)[bB]?", text)
    if not match:
        raise click.BadParameter(f"{text!r} is no size: expected for example 8MB or 512KiB")
    power = ["", "K", "M", "G"].index(match[2].upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def option(value: str) -> tuple[str, object]:
    """A key and its value, JSON or text, from KEY=VALUE."""
    key, _, text = value.partition("=")
    if not (key and text):
        raise click.BadParameter(f"{value!r} does not read KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


def ridge(value: str) -> list[float] | float:
    """One number, or the pair rY,rX."""
    try:
        parts = [float(part) for part in value.split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise click.BadParameter(f"{value!r} is neither a number nor a pair rY,rX")
    return parts if len(parts) == 2 else parts[0]


def constraint(value: str) -> dict[str, object]:
    """A constraint and its options from NAME or NAME,OPTION=VALUE,... in the JSON form."""
    from cme_dask.constraints import parse  # which loads the solvers

    name, *options = value.split(",")
    found: dict[str, object] = {"name": name}
    for option in options:
        key, _, text = option.partition("=")
        if not (key and text):
            raise click.BadParameter(f"{value!r} does not read NAME,OPTION=VALUE,...")
        found[key] = _plain(text)
    try:
        return parse(found).to_dict()
    except DataError as error:
        raise click.BadParameter(str(error)) from error


def _plain(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def kernel(value: str) -> str:
    """A kernel as text, checked as far as possible without the columns."""
    from cme_dask.kernels.text import read_specification

    try:
        read_specification(value)
    except DataError as error:
        raise click.BadParameter(str(error)) from error
    return value


def numbers(value: str) -> tuple[float, ...]:
    """One number, or several separated by commas."""
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} does not read NUMBER or NUMBER,NUMBER,...") from error


def output(value: str | Path) -> Path:
    """A local path; a URL would silently become one."""
    if "://" in str(value):
        raise click.BadParameter(f"outputs are local paths, got the URL {value}")
    return Path(value)


def counts(value: str) -> tuple[int, ...]:
    """Counts, separated by commas."""
    return tuple(count(part) for part in value.split(","))


def share(value: str) -> tuple[int, int]:
    """The number of a share, counted from 0, and how many there are, from I/K counted from 1."""
    match = re.fullmatch(r"(\d+)/(\d+)", str(value).strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"{value!r} does not read I/K with I from 1 to K, such as 3/10")
    return int(match[1]) - 1, int(match[2])


# Options that several commands share


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
        from cme_dask.cli.progress import logging_to

        with logging_to(log):
            return command(*arguments, **options)

    return logged


def _configures(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """What sets a key of Dask's configuration to the value of an option while the command runs."""

    def set_key(ctx: click.Context, _: click.Parameter, value: Any) -> None:
        if value:
            from cme_dask.passes.cluster import configured

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
        from cme_dask.cli.compute import Compute

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
        from cme_dask.cli.compute import Kept

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
