"""The door of the command, ``cme-dask`` and ``python -m cme_dask``: what runs while it is imported.

Nothing heavy is imported here, so that Ctrl-C ends the command cleanly from the start.
"""

import os
import signal
from typing import Any


def main() -> None:
    """Run the command and exit, see :func:`cme_dask.cli.app.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and is not ignored
        signal.signal(signal.SIGINT, leave)
    from cme_dask.cli import main as run

    run()


def leave(number: int, _: Any) -> None:
    """End the process at once, after a signal when nothing has begun or all is done."""
    os.write(2, b"error: interrupted: no output was left half-written\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
