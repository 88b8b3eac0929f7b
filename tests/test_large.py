"""Sizes that no laptop holds in memory; minutes long, run by `python3 run slow`."""

import json
import shutil
import subprocess
import sys
import threading
import time

import psutil
import pytest

from cme_dask.data.generate import write_normal3

pytestmark = pytest.mark.slow


def peak_pss(process):
    """Largest sampled PSS of a process and its children, in bytes, until it ends."""
    peak, root = [0], psutil.Process(process.pid)

    def watch():
        while process.poll() is None:
            total = 0
            try:
                for each in (root, *root.children(recursive=True)):
                    total += each.memory_full_info().pss
            except psutil.Error:
                continue
            peak[0] = max(peak[0], total)
            time.sleep(0.2)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread, peak


def test_hundred_million_rows_in_two_gigabytes(tmp_path):
    """Memory does not grow with n, and the last tenth of the rows is as fast as the first."""
    if shutil.disk_usage(tmp_path).free < 4e9:
        pytest.skip("needs 4 GB of disk")
    write_normal3(tmp_path / "n.zarr", 100_000_000)
    fit = subprocess.Popen(
        [
            *(sys.executable, "-m", "cme_dask", "fit", str(tmp_path / "n.zarr"), "--json"),
            *("--out", str(tmp_path / "m"), "--event", "y1 <= y2 - 0.2"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    thread, peak = peak_pss(fit)
    out, _ = fit.communicate()
    thread.join()
    result = json.loads(out)
    print(json.dumps({key: result[key] for key in ("rows_per_second", "tenths", "memory")}))
    print(f"peak PSS of the process tree {peak[0] / 2**20:.0f} MiB")
    assert result["rows"] == 100_000_000
    assert peak[0] < 2e9
    assert abs(result["tenths"][-1] / result["tenths"][0] - 1) < 0.15
