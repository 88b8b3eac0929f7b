"""The group of all commands, whose errors are one sentence and an exit code."""

import contextlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from cme_dask import __version__
from cme_dask.cli.options import SchemaCommand, examples
from cme_dask.errors import (
    CmeDaskError,
    RankWarning,
    ResourceError,
    ToleranceWarning,
    printable,
    without_secrets,
    wording,
)

_INTERRUPTED = 130  # exit code, of shells after Ctrl-C

# A click group whose errors are one sentence, with fixed exit codes


def _fail(message: str, code: int) -> NoReturn:
    if os.environ.get("CME_DASK_TRACEBACK") == "1":
        traceback.print_exc()
    click.echo(f"error: {printable(without_secrets(message))}", err=True)
    raise click.exceptions.Exit(code)


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Map errors to one sentence on stderr and an exit code, warnings to a line each."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = wording(str(message), command=True)
        click.echo(f"warning: {printable(without_secrets(text))}", err=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ToleranceWarning)
            warnings.simplefilter("always", RankWarning)
            warnings.showwarning = show
            yield
    except KeyboardInterrupt:
        # Zarr's event loop dies with its unfinished writes, and asyncio would report each.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        _fail("interrupted: no output was left half-written", _INTERRUPTED)
    except click.UsageError as error:
        help_of = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _fail(f"{error.format_message()}{help_of}", 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except ResourceError as error:
        _fail(error.for_command, 3)
    except CmeDaskError as error:
        _fail(error.for_command, 2)
    except MemoryError:
        _fail(
            "the memory of this machine is used up: smaller chunks, lower ranks or fewer workers "
            "need less",
            3,
        )
    except BrokenPipeError:  # `cme-dask info | head`: click ends quietly
        raise
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 3)


def _leave_if_interrupted(code: Any) -> None:
    """End the process after Ctrl-C, without what is registered for its exit.

    Zarr's unfinished writes would be waited for, and reported with tracebacks.
    """
    if code == _INTERRUPTED:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)


class SentenceGroup(click.Group):
    """A group whose sentences and exit codes are the same under ``dask cme``."""

    command_class = SchemaCommand

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the group's own options."""
        if isinstance(sys.stdout, io.TextIOWrapper):  # a result is not lost for want of a letter
            sys.stdout.reconfigure(errors="replace")
        with _one_sentence():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the requested command."""
        try:
            with _one_sentence():
                return super().invoke(ctx)
        except click.exceptions.Exit as ended:
            if ctx.parent is not None:  # in the process of `dask cme`
                _leave_if_interrupted(ended.exit_code)
            raise


# The group of all commands


@click.group(
    "cme",
    cls=SentenceGroup,
    invoke_without_command=True,
    epilog=examples(
        "cme-dask demo",
        "cme-dask ingest data/*.csv --out s.zarr --x TEMP,DEWP --y PM2.5",
        'cme-dask fit s.zarr --out m.zarr --event "PM2.5 > 75" --max-rank 300',
        'cme-dask expect m.zarr --given TEMP=20,DEWP=5 --of PM2.5 --of "PM2.5 > 75"',
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="cme-dask")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Learn joint and conditional distributions with kernels, out of core, on Dask."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command and exit: 0, 2 data or usage, 3 environment, 130 interrupted."""
    try:
        cli(prog_name="cme-dask")
    except SystemExit as ended:
        _leave_if_interrupted(ended.code)
        raise
