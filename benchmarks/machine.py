"""A description of this machine, and its rates, to which times are compared."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from threadpoolctl import threadpool_info, threadpool_limits

Result = dict[str, Any]
Work = Callable[[], Any]

_GEMM = 1024  # matrices of this order: three of them per thread stay in the last cache
_EXP = 1 << 15  # values that stay in the cache of a core
_TRIAD = 1 << 24  # values that stay in no cache
_SECONDS = 0.1  # of one sample of a rate
_PACKAGES = (
    "cme-dask",
    "numpy",
    "scipy",
    "dask",
    "distributed",
    "zarr",
    "scikit-learn",
    "FMCA",
    "lightgbm",
    "ngboost",
    "quantile-forest",
    "kooplearn",
)


def limit_seconds(n: int, d: int, ranks: Sequence[int], gemm: float, exp: float) -> float:
    """Seconds that the arithmetic of one pass takes at the measured rates, reads free.

    n (M^2 + 2 sum m (d + 2)) flops, M = sum m, of the rank-k update and the exponents, and n M
    exponentials. The solve is not counted: where its guard allows it, it comes after the pass.

    Parameters
    ----------
    n, d
        Numbers of rows, and of columns of each variable.
    ranks
        Numbers of pivots m, one per variable.
    gemm
        Flops per second of matrix products, on the cores in use.
    exp
        Exponentials per second, likewise.
    """
    total = sum(ranks)
    return n * ((total**2 + 2 * total * (d + 2)) / gemm + total / exp)


@dataclass(frozen=True)
class GemmRate:
    """Rates of matrix products and exponentials, per second.

    ``gemm_one``: float64 products on one core. ``gemm_all``: on all, one BLAS thread in each of
    ``workers`` threads. ``exp_all``: float64 exponentials on all.
    """

    workers: int
    samples: int = 5

    def prepare(self) -> Callable[[], Callable[[], Result]]:
        """Nothing: each rate has a warm-up of its own."""
        return self._measure

    def _measure(self) -> Callable[[], Result]:
        result = {
            "gemm_one": _gemm(1, 1, np.float64, self.samples),
            "gemm_all": _gemm(self.workers, 1, np.float64, self.samples),
            "exp_all": _exp(self.workers, self.samples),
        }
        return lambda: {name: float(np.median(rates)) for name, rates in result.items()}


@dataclass(frozen=True)
class MachineRates:
    """All rates of the machine, each with its samples.

    Float64 and float32 products on one core and on all (``workers`` threads with one BLAS thread
    each, and one call with as many BLAS threads), exponentials, and memory traffic of a triad.
    """

    workers: int
    samples: int = 7

    def prepare(self) -> Callable[[], Callable[[], Result]]:
        """Nothing: each rate has a warm-up of its own."""
        return self._measure

    def _measure(self) -> Callable[[], Result]:
        w, k = self.workers, self.samples
        result = {
            "gemm_one": _gemm(1, 1, np.float64, k),
            "gemm_all": _gemm(w, 1, np.float64, k),
            "gemm_blas_threads": _gemm(1, w, np.float64, k),
            "gemm32_one": _gemm(1, 1, np.float32, k),
            "gemm32_all": _gemm(w, 1, np.float32, k),
            "exp_one": _exp(1, k),
            "exp_all": _exp(w, k),
            "memory_one": _triad(1, k),
            "memory_all": _triad(w, k),
        }
        return lambda: {"rates": result}


def _gemm(threads: int, blas_threads: int, dtype: Any, samples: int) -> list[float]:
    """Flops per second, per sample."""
    rng = np.random.default_rng(0)

    def work() -> Work:
        a, b = rng.standard_normal((2, _GEMM, _GEMM)).astype(dtype)
        return partial(np.matmul, a, b, out=np.empty_like(a))

    with threadpool_limits(blas_threads):
        return _rates([work() for _ in range(threads)], 2.0 * _GEMM**3, samples)


def _exp(threads: int, samples: int) -> list[float]:
    """Exponentials per second, per sample."""
    rng = np.random.default_rng(0)

    def work() -> Work:
        exponents = -30.0 * rng.uniform(size=_EXP)
        return partial(np.exp, exponents, out=np.empty_like(exponents))

    return _rates([work() for _ in range(threads)], float(_EXP), samples)


def _triad(threads: int, samples: int) -> list[float]:
    """Bytes per second that a = b + 3 c reads and writes in NumPy's two steps, per sample."""

    def work() -> Work:
        a, b, c = np.ones((3, _TRIAD // threads))

        def triad() -> None:
            np.multiply(c, 3.0, out=a)
            np.add(a, b, out=a)

        return triad

    return _rates([work() for _ in range(threads)], 5.0 * 8 * (_TRIAD // threads), samples)


def _rates(work: list[Work], amount: float, samples: int) -> list[float]:
    """What all threads together do per second: each repeats its work for a while, per sample."""
    begin = time.perf_counter()
    work[0]()
    first = time.perf_counter() - begin
    times = max(1, int(_SECONDS / max(first, 1e-6)))

    def repeat(one: Work) -> None:
        for _ in range(times):
            one()

    result = []
    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(repeat, work))  # warm-up
        for _ in range(samples):
            begin = time.perf_counter()
            list(pool.map(repeat, work))
            result.append(len(work) * times * amount / (time.perf_counter() - begin))
    return result


def describe_machine() -> Result:
    """Processor, cores, memory, system, BLAS, and versions of what computes."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": platform.platform(),
        "python": platform.python_version(),
        "blas": sorted(
            {
                f"{pool['internal_api']} {pool['version']} ({pool.get('architecture', 'unknown')})"
                for pool in threadpool_info()
                if pool["user_api"] == "blas"
            }
        ),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
