"""Options that several commands share, and options that come from the schema of jobs."""

import functools
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from cme_dask.cli.values import (
    Flag,
    LocalFile,
    columns,
    count,
    option,
    output,
    output_folder,
    share,
    source,
)
from cme_dask.config import ENCRYPTED
from cme_dask.errors import DataError

# Options from the schema of jobs


@dataclass(frozen=True)
class _Fields:
    """Stands for the options of some fields of a section until they are needed."""

    section: str
    names: tuple[str, ...]
    defaults: dict[str, str]

    def options(self) -> Iterator[click.Option]:
        from cme_dask.cli import schema

        fields = getattr(schema, self.section).model_fields
        for key in self.names:
            (flag,) = (each for each in fields[key].metadata if isinstance(each, Flag))
            yield flag.option(key, fields[key], self.defaults.get(key))


def section_options(section: str, *names: str, **defaults: str) -> Callable[[Any], Any]:
    """Options for fields of a section of the schema of jobs, as the dict ``given`` of a command.

    Parameters
    ----------
    section
        Class in :mod:`cme_dask.cli.schema`, which is imported only when its options are needed.
    names
        Of the fields.
    defaults
        Texts of defaults in the help, where they differ from those of the fields.

    Returns
    -------
    decorator
        Values that are not given on the command line are not in the dict.
    """

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def gathering(*arguments: Any, given: dict[str, Any] | None = None, **options: Any) -> Any:
            values = {name: options.pop(name) for name in names}
            mine = {key: value for key, value in values.items() if value not in (None, ())}
            return command(*arguments, given={**(given or {}), **mine}, **options)

        parameters = vars(gathering).setdefault("__click_params__", [])
        parameters.append(_Fields(section, names, defaults))
        return gathering

    return decorate


class SchemaCommand(click.Command):
    """A command whose options may come from the schema, which is imported when they are needed."""

    _declared: list[Any]

    @property
    def params(self) -> list[click.Parameter]:
        """All parameters, those of the schema too."""
        result: list[click.Parameter] = []
        for each in self._declared:
            result += each.options() if isinstance(each, _Fields) else [each]
        self._declared = result
        return result

    @params.setter
    def params(self, declared: list[Any]) -> None:
        self._declared = declared

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, unless its outputs would harm each other or what it reads."""
        from cme_dask.data.atomic import check_apart

        paths: dict[Any, dict[str, Any]] = {kind: {} for kind in (output, output_folder, source)}
        for parameter in self.params:
            value, kind = ctx.params.get(parameter.name or ""), role(parameter)
            if value and kind is not None:
                paths[kind][_called(parameter)] = value
        if paths[output] or paths[output_folder]:
            inputs = [
                (f"input {name}", path)
                for name, given in paths[source].items()
                for path in local_paths(given)
            ]
            check_apart(paths[output], inputs, paths[output_folder])
        return super().invoke(ctx)


def role(parameter: click.Parameter) -> Any:
    """What the value of a parameter is: ``output``, ``output_folder``, ``source``; None: no path.

    Texts among the arguments, which commands have for paths alone, are read.
    """
    if isinstance(parameter.type, click.Path):
        return source
    if isinstance(parameter, click.Argument) and parameter.type is click.STRING:
        return source
    function = getattr(parameter.type, "func", None)
    return function if function in (output, output_folder, source) else None


def _called(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return parameter.make_metavar(click.Context(click.Command("cme"))).strip("[].")


def local_paths(given: Any) -> list[Path]:
    """The files and stores that are there by a path or pattern, or by several."""
    if isinstance(given, Path):  # a folder is no store here, but where files are
        return [given] if given.is_file() else []
    if not isinstance(given, str):
        return [path for each in given for path in local_paths(each)]
    text = given.removeprefix("file://")
    if "://" in text:
        return []
    return [Path(text)] if os.path.exists(text) else [Path(path) for path in glob.glob(text)]


# Options that several commands share


Command = TypeVar("Command", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """An epilog; the backspace tells click to leave the lines as they are."""
    return "\n".join(
        ["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)]
    )


def together(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator of several options, which the help lists in this order."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


Shown = tuple[dict[str, Any], Iterable[Any]]
"""The result of a command in its JSON form, and its tables."""


def json_option(command: Callable[..., Shown]) -> Callable[..., None]:
    """Print the result that the command returns: its tables, or with ``--json`` its JSON form."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object, not tables.")
    @functools.wraps(command)
    def printing(*arguments: Any, as_json: bool, **options: Any) -> None:
        from cme_dask.cli import tables

        tables.show(*command(*arguments, **options), as_json)

    return printing


overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace an existing output once the new one is complete."
)
chunk_option = click.option(
    "--chunk-rows",
    type=count,
    help="Rows per chunk.  [default: a power of two of at most 8 MB, of features 32 MB]",
)

hold_out_option = click.option(
    "--hold-out",
    type=float,
    metavar="SHARE",
    help="Share of the units to hold out, in (0, 1).",
)
x_option = click.option("--x", type=columns, help="Columns of x to use.  [default: all]")
y_option = click.option("--y", type=columns, help="Columns of y to use.  [default: all]")
functions_option = click.option(
    "--of", "functions", multiple=True, help="Column or event; repeatable.  [default: all]"
)
point_options = together(
    click.option(
        "--given",
        multiple=True,
        metavar="COLUMN=VALUE,...",
        help="A point, such as TEMP=20,DEWP=5; repeatable.",
    ),
    click.option(
        "--points",
        type=LocalFile(),
        help="Local CSV file of points with the column names in its header.",
    ),
)
source_options = together(
    click.option("--resume", is_flag=True, help="Continue an interrupted run."),
    click.option(
        "--storage-options",
        metavar="KEY=VALUE",
        type=option,
        multiple=True,
        help="Option of the file system of the URLs, text or JSON; repeatable.",
    ),
)


def out_option(text: str, *, required: bool = True, folder: bool = False) -> Callable[[Any], Any]:
    """The path of the output, or a folder of several."""
    kind = output_folder if folder else output
    return click.option("--out", required=required, type=kind, metavar="PATH", help=text)


def log_option(command: Command) -> Callable[..., Any]:
    """A file that takes what happens, for as long as the command runs."""

    @click.option(
        "--log",
        type=output,
        metavar="FILE",
        help="Append events to FILE, one line of JSON each: passes, pivots, retries.",
    )
    @functools.wraps(command)
    def logged(*arguments: Any, log: Path | None, **options: Any) -> Any:
        from cme_dask.cli.progress import logging_to

        with logging_to(log):
            return command(*arguments, **options)

    return logged


_CERTIFICATES = "cme_dask.certificates"  # whether options name certificates


def _configures(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """What sets a key of Dask's configuration to the value of an option while the command runs."""

    def set_key(ctx: click.Context, _: click.Parameter, value: Any) -> None:
        if value:
            from cme_dask.passes.cluster import configured

            ctx.meta[_CERTIFICATES] = key.startswith("distributed.comm.tls.") or ctx.meta.get(
                _CERTIFICATES, False
            )
            ctx.with_resource(configured({key: value if value is True else str(value)}))

    return set_key


def _certificate(name: str, key: str, text: str) -> Callable[[Any], Any]:
    return click.option(
        name,
        type=click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True),
        metavar="FILE",
        expose_value=False,
        callback=_configures(f"distributed.comm.tls.{key}"),
        help=f"{text}  [default: Dask's configuration]",
    )


tls_options = together(
    _certificate("--tls-ca-file", "ca-file", "Certificate authority of a tls:// cluster."),
    _certificate("--tls-cert", "client.cert", "Certificate of this client."),
    _certificate("--tls-key", "client.key", "Private key of this client."),
    click.option(
        "--require-tls",
        is_flag=True,
        expose_value=False,
        callback=_configures("distributed.comm.require-encryption"),
        help="Refuse a cluster that is not encrypted.",
    ),
)
"""The certificates of a cluster, by the names of the options of ``dask worker``."""


def compute_options(command: Command) -> Callable[..., Any]:
    """Where to run, as the ``compute`` of the command, and its report."""

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

        given = click.get_current_context().meta.get(_CERTIFICATES, False)
        if given and "://" in (scheduler or "") and not str(scheduler).startswith(ENCRYPTED):
            raise DataError(
                f"the certificates are of no use for {scheduler}, which is not encrypted: give the "
                "tls:// address of the scheduler, or leave out --tls-ca-file, --tls-cert and "
                "--tls-key"
            )
        overwrite = bool(options.get("overwrite"))
        compute = Compute(scheduler, workers, memory_limit, report, overwrite)
        return command(*arguments, compute=compute, **options)

    where = together(
        click.option(
            "--scheduler",
            metavar="NAME|ADDRESS",
            help="threads, processes, synchronous, or a cluster's tcp://HOST:PORT or tls://...  "
            "[default: threads]",
        ),
        click.option(
            "--workers",
            type=click.IntRange(1),
            help="Threads or processes.  [default: one per core]",
        ),
        click.option(
            "--memory-limit",
            metavar="BYTES",
            help="Memory that this process, or each worker of a cluster, may use, such as 2GB; a "
            "fit that needs more is refused.  [default: all available]",
        ),
        click.option(
            "--report",
            type=output,
            metavar="DIR",
            help="Folder for a report of a successful run: passes, memory over time, and on a "
            "cluster Dask's performance report.",
        ),
        tls_options,
        log_option,
    )
    return where(computing)  # type: ignore[no-any-return]


def device_options(command: Command) -> Callable[..., Any]:
    """The device on which passes compute, in the ``compute`` of the command."""

    @functools.wraps(command)
    def on_device(
        *arguments: Any,
        compute: Any,
        device: str | None,
        device_memory_limit: str | None,
        **options: Any,
    ) -> Any:
        there = replace(compute, device=device, device_memory_limit=device_memory_limit)
        return command(*arguments, compute=there, **options)

    where = together(
        click.option(
            "--device",
            metavar="cuda|cuda:N",
            help="GPU on which sums over rows are computed, by CuPy (extra gpu).  [default: none]",
        ),
        click.option(
            "--device-memory-limit",
            metavar="BYTES",
            help="Memory of the GPU that the run may use, such as 40GB.  [default: all of it]",
        ),
    )
    return where(on_device)  # type: ignore[no-any-return]


def _checkpointing(command: Command, *, shards: bool) -> Callable[..., Any]:
    @functools.wraps(command)
    def checkpointing(
        *arguments: Any,
        checkpoint: Path | None,
        resume: bool,
        shard: tuple[int, int] | None = None,
        **options: Any,
    ) -> Any:
        from cme_dask.cli.compute import CheckpointOptions

        return command(
            *arguments, checkpoint=CheckpointOptions(checkpoint, resume, shard), **options
        )

    share_of_rows = click.option(
        "--shard",
        type=share,
        metavar="I/K",
        help="Compute only the I-th (from 1) of K shares into the checkpoint; the same command "
        "without --shard then adds them up.",
    )
    folder = together(
        click.option(
            "--checkpoint",
            type=output,
            metavar="DIR",
            help="Folder, shared by all workers, for partial sums until the output is complete. "
            "After an interruption, repeat the same command.",
        ),
        click.option("--resume", is_flag=True, hidden=True),  # which --checkpoint does by itself
        *([share_of_rows] if shards else []),
    )
    return folder(checkpointing)  # type: ignore[no-any-return]


def checkpoint_options(command: Command) -> Callable[..., Any]:
    """Where partial sums are saved, as the ``checkpoint`` of the command."""
    return _checkpointing(command, shards=False)


def shard_options(command: Command) -> Callable[..., Any]:
    """The options of a checkpoint, for a command whose pass can be divided into shares."""
    return _checkpointing(command, shards=True)
