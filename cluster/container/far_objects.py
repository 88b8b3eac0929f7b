"""The server of moto as if it were far away and busy: each request waits, some of them fail.

``run_plain.py FOLDER --delay 0.01 --failing 0.01`` takes it in the place of the object store.
"""

import argparse
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

BUSY = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
"""What S3 says when it has too many requests."""


class FarApplication:
    """A web application whose answers come late, and some of which are that it is busy."""

    def __init__(self, inner: Any, delay: float, failing: float) -> None:
        self.inner, self.delay, self.failing = inner, delay, failing
        self.asked = self.failed = 0
        self._random, self._lock = random.Random(0), threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        time.sleep(self.delay)
        with self._lock:
            self.asked += 1
            fails = self._random.random() < self.failing
            self.failed += fails
            if fails:
                print(f"busy: {self.failed} of {self.asked} requests", flush=True)
        if fails:
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [BUSY]
        answer: Iterable[bytes] = self.inner(environ, start)
        return answer


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as those of S3

    def log(self, type: str, message: str, *args: Any) -> None:
        """Say nothing of single requests."""


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.01, help="seconds of a request (0.01)")
    parser.add_argument("--failing", type=float, default=0.01, help="share of requests (0.01)")
    given = parser.parse_args()
    moto = DomainDispatcherApplication(create_backend_app)
    application = FarApplication(moto, given.delay, given.failing)
    run_simple("127.0.0.1", given.port, application, threaded=True, request_handler=_Quiet)


if __name__ == "__main__":
    main()
