"""Peak memory of this process and the processes it started."""

import contextlib
import sys
import threading
import time
from typing import Any, Self

import psutil

_PAUSE = 0.1  # seconds between samples
_COST = 100.0  # a sample that takes t seconds is followed by a pause of at least 100 t: 1 %


class PeakMemory:
    """Sample the memory of the process tree in a thread; use as a context manager.

    On Linux the proportional set size (PSS): pages that several processes share count once.
    Elsewhere the resident set size (RSS).

    Attributes
    ----------
    peak
        Largest sum seen, in bytes.
    measure
        ``"PSS"`` or ``"RSS"``.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.measure = "PSS" if sys.platform == "linux" else "RSS"
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            begin = time.perf_counter()
            self._sample()
            pause = max(_PAUSE, _COST * (time.perf_counter() - begin))

    def _sample(self) -> None:
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it may have ended by now
                total += self._bytes(process)
        self.peak = max(self.peak, total)

    def _bytes(self, process: psutil.Process) -> int:
        if self.measure == "PSS":
            return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
