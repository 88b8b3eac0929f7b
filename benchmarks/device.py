"""The case device: fits whose sums are computed on a GPU, beside the same on the host's cores."""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.fits import Fit, Rows, StoreRead, write_uniform
from benchmarks.machine import GemmRate
from benchmarks.measure import Bench, D, Measurement, Ratio, Size, Term, spacing
from cme_dask import kernels
from cme_dask.config import TOL
from cme_dask.data.generate import write_normal3

Result = dict[str, Any]

NO_GPU = "no GPU, or no CuPy: pip install '.[gpu]'"
_ORDER = 8192  # of the matrices whose product is timed
_COPIED = 1 << 28  # bytes that are brought to the GPU
_DEVICE, _TASKS = "cuda", 2  # tasks at once, as by default
_GPU, _HOST = "device/rates/GPU", "device/rates/host"
_TOL = 1e-6  # where a rank is given: these kernels reach the rank long before it


def gpu_name() -> str | None:
    """Name of the first GPU; None without one, or without CuPy."""
    try:
        cupy = importlib.import_module("cupy")
        if not cupy.cuda.runtime.getDeviceCount():
            return None
        return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
    except Exception:  # noqa: BLE001 (no library, no driver: what they raise differs)
        return None


@dataclass(frozen=True)
class GpuRates:
    """Float64 products on the GPU, per second, and bytes per second of arrays brought to it."""

    samples: int = 7

    def prepare(self) -> Callable[[], Callable[[], Result]]:
        """Nothing: each rate has a warm-up of its own."""
        return self._measure

    def _measure(self) -> Callable[[], Result]:
        cupy = importlib.import_module("cupy")
        a, b = cupy.random.random((2, _ORDER, _ORDER), dtype=np.float64)
        out, rows = cupy.empty_like(a), np.random.default_rng(0).random(_COPIED // 8)
        amounts: dict[str, tuple[float, Callable[[], Any]]] = {
            "gemm_all": (2.0 * _ORDER**3, lambda: cupy.matmul(a, b, out=out)),
            "to_device": (float(_COPIED), lambda: cupy.asarray(rows)),
        }
        result = {}
        for name, (amount, work) in amounts.items():
            rates = []
            for _ in range(1 + self.samples):
                cupy.cuda.Device().synchronize()
                begin = time.perf_counter()
                work()
                cupy.cuda.Device().synchronize()
                rates.append(amount / (time.perf_counter() - begin))
            result[name] = float(median(rates[1:]))
        return lambda: {"gpu": gpu_name(), **result}


def device_case(bench: Bench, size: Size) -> None:
    """Joint fits from a store, kernels learned and given: sums on the GPU, and on the host.

    A fit that learns its kernels is run once: its search, on the host, takes most of the time.
    """
    learned = f"device/learned kernels, {size.rows:,} rows"
    if gpu_name() is None:
        bench.measurements[f"{learned}/GPU"] = Measurement(None, missing=NO_GPU)
        return
    bench.measure({_GPU: GpuRates(), _HOST: GemmRate(bench.workers)}, 1)
    store = bench.folder / "normal3.zarr"
    write_normal3(store, size.rows, scenario="strong")
    fit = Fit(Rows(size.rows, D, str(store)), "joint", None, TOL, workers=bench.workers)
    _compare(bench, learned, fit, 1, passes=False)
    store = bench.folder / "uniform.zarr"
    write_uniform(store, size.rows, D)
    for rank in size.ranks:
        at, rows = f"device/rank {rank}, {size.rows:,} rows", Rows(size.rows, D, str(store))
        kernel = kernels.Gaussian(spacing(rank, D)).to_dict()
        fit = Fit(rows, "joint", kernel, _TOL, rank, workers=bench.workers)
        _compare(bench, at, fit)
        total = sum(bench.measurements[f"{at}/GPU"].runs[0]["ranks"])
        flops = Term(number=float(size.rows) * (total**2 + 2 * total * (D + 2)))
        for where, rate in (("GPU", _GPU), ("host", _HOST)):
            under = [Term(f"{at}/{where}", "pass_seconds"), Term(rate, "gemm_all")]
            name = f"pass on the {where}, share of its rate of products"
            bench.ratios.append(Ratio(at, name, [flops], under))


def _compare(
    bench: Bench, at: str, fit: Fit, repeats: int | None = None, *, passes: bool = True
) -> None:
    """A fit on the host and on the GPU, two tasks at once, and what reading alone takes."""
    host, gpu = f"{at}/host", f"{at}/GPU"
    there = replace(fit, device=_DEVICE, workers=_TASKS)
    reading = StoreRead(fit.rows, bench.workers)
    bench.measure({host: fit, gpu: there, f"{at}/reading alone": reading}, repeats)
    bench.compare(at, "fit on the host / fit on the GPU", host, gpu)
    if passes:  # of several, what is reported is one
        bench.compare(at, "pass on the host / pass on the GPU", host, gpu, "pass_seconds")
