"""The group of all commands, whose errors are one sentence and an exit code."""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
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

_INTERRUPTED, _TERMINATED = 130, 143  # exit codes, of shells after Ctrl-C and SIGTERM

_AGAIN_SECONDS = 0.05  # after which a signal is raised again that had no effect

# A click group whose errors are one sentence, with fixed exit codes


def _fail(message: str, code: int) -> NoReturn:
    if os.environ.get("CME_DASK_TRACEBACK") == "1":
        traceback.print_exc()
    click.echo(f"error: {printable(without_secrets(message))}", err=True)
    raise click.exceptions.Exit(code)


class Terminated(KeyboardInterrupt):
    """SIGTERM: what batch systems send to a job before they kill it."""


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise in the block, where it runs in the main thread.

    A signal that arrives while an object is deleted, where Python prints exceptions and goes on, is
    raised again shortly afterwards.
    """
    pending, show_lost = list[threading.Timer](), sys.unraisablehook

    def terminate(*_: object) -> None:
        raise Terminated

    def raise_again(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            show_lost(lost)
            return
        number = signal.SIGTERM if issubclass(lost.exc_type, Terminated) else signal.SIGINT
        # To the main thread, which may wait for another one.
        to = threading.main_thread().ident, number
        pending.append(threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, to))
        pending[-1].start()

    handlers: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: terminate,
    }
    before = {number: signal.getsignal(number) for number in handlers}
    # Who ignores a signal goes on to do so, and so does what others than Python handle.
    changed = {n: h for n, h in handlers.items() if before[n] not in (signal.SIG_IGN, None)}
    if threading.current_thread() is not threading.main_thread():
        changed = {}
    try:
        for number, handler in changed.items():
            signal.signal(number, handler)
        sys.unraisablehook = raise_again if changed else show_lost
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
        sys.unraisablehook = show_lost
        for timer in pending:
            timer.cancel()


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Map errors to one sentence on stderr and an exit code, warnings to a line each."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = getattr(message, "for_command", str(message))
        click.echo(f"warning: {printable(without_secrets(text))}", err=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ToleranceWarning)
            warnings.simplefilter("always", RankWarning)
            warnings.showwarning = show
            yield
    except KeyboardInterrupt as error:
        # Zarr's event loop dies with its unfinished writes, and asyncio would report each.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        ended = isinstance(error, Terminated)
        notes = [wording(note, command=True) for note in getattr(error, "__notes__", ())]
        what = "terminated" if ended else "interrupted"
        _fail(
            f"{what}: {'; '.join(('no output was left half-written', *notes))}",
            _TERMINATED if ended else _INTERRUPTED,
        )
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
    """End the process after Ctrl-C or SIGTERM, without what is registered for its exit.

    Zarr's unfinished writes would be waited for, and reported with tracebacks.
    """
    if code in (_INTERRUPTED, _TERMINATED):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
            with _one_sentence(), _signals_raise():
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
    """Run the command and exit: 0, 2 data or usage, 3 environment, 130 Ctrl-C, 143 SIGTERM."""
    try:
        cli(prog_name="cme-dask")
    except SystemExit as ended:
        _leave_if_interrupted(ended.code)
        raise
