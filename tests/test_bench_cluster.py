"""The bench on real clusters: schedulers and workers in processes of their own, over TCP."""

import json
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from distributed import Client, wait

from benchmarks import cluster, measure, run
from benchmarks import cluster as large
from benchmarks.__main__ import cli
from benchmarks.cluster import running_cluster
from benchmarks.measure import Size, Together
from cme_dask.errors import ResourceError
from cme_dask.passes.observing import want_of_memory, worker_states


def command(*args):
    result = CliRunner().invoke(cli, ["bench", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_the_delay_line_is_late_and_keeps_its_bandwidth():
    """An echo server behind the proxy: what was sent comes back, twice the delay later."""

    def echo(server):
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1 << 20):
                connection.sendall(data)

    delay, blob = 0.1, np.random.default_rng(0).bytes(20_000_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        with (
            cluster._delayed([server.getsockname()[1]], delay) as (port,),
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            for _ in range(2):
                begin = time.perf_counter()
                client.sendall(b"ping")
                assert client.recv(4) == b"ping"
                assert 2 * delay <= time.perf_counter() - begin < 2 * delay + 1.0
            begin = time.perf_counter()
            sender = threading.Thread(target=client.sendall, args=(blob,))
            sender.start()
            found = bytearray()
            while len(found) < len(blob):
                found += client.recv(1 << 20)
            sender.join()
            assert found == blob
            # A proxy that waited after each piece would take 76 pieces of 0.2 s.
            assert time.perf_counter() - begin < 5.0


def test_a_cluster_runs_and_leaves_nothing(tmp_path):
    def left():
        return [p for p in psutil.Process().children(recursive=True) if "dask" in p.cmdline()]

    with (
        running_cluster(tmp_path / "c", 1, memory_limit="400MB", delay=0.02) as here,
        Client(here.address) as client,
    ):
        (worker,) = client.scheduler_info(n_workers=-1)["workers"].values()
        assert (worker["nthreads"], worker["memory_limit"]) == (1, 400_000_000)
        begin = time.perf_counter()
        client.nthreads()
        assert time.perf_counter() - begin >= 0.04
        assert want_of_memory(client).spilled == 0
        assert [state.spilled for state in worker_states(client).values()] == [0]
        # Two thirds of its memory in four pieces: it writes some to disk.
        held = [client.submit(np.ones, 9_000_000, pure=False) for _ in range(4)]
        wait(held)
        until = time.monotonic() + 600.0
        while not want_of_memory(client).spilled and time.monotonic() < until:
            time.sleep(0.2)  # the scheduler hears of it with the next heartbeat
        assert want_of_memory(client).spilled > 0
        assert len(left()) >= 2
    assert left() == []


def test_what_does_not_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_START_SECONDS", 0.2)
    with pytest.raises(ResourceError, match="did not start"), running_cluster(tmp_path / "c", 1):
        pass


@pytest.mark.slow
def test_a_worker_whose_port_is_taken_is_an_error_at_once(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster, "_free_ports", lambda count: [port] * count)
        with (
            pytest.raises(ResourceError, match="ended while it was started"),
            running_cluster(tmp_path / "c", 1, delay=0.001),
        ):
            pass


def test_the_last_of_several_counts(monkeypatch):
    runs = [{"seconds": 2.0, "pass_seconds": 1.5}, {"seconds": 3.0, "pass_seconds": 1.0}]
    monkeypatch.setattr(measure, "_run_all", lambda jobs: runs)
    found = measure.run_fresh(Together(()))
    assert found == {"seconds": 3.0, "pass_seconds": 1.5, "together": runs}
    assert measure.last_of([{"seconds": 1.0}, {"seconds": 2.0}]) == {"seconds": 2.0}


@pytest.mark.slow
def test_the_case_cluster(monkeypatch):
    monkeypatch.setattr(run, "QUICK", {"cluster": Size(20_000, ranks=(15,))})
    code, stdout, err = command("--case", "cluster", "--repeats", 1, "--workers", 1, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    ratios = {ratio["name"]: ratio for ratio in result["ratios"]}
    aims = [(r["at_least"], r["at_most"]) for r in ratios.values()]
    assert aims == [
        (0.9, None),
        (None, None),
        (None, 1.1),
        (None, None),
        (None, 1.15),
        (None, None),
    ]
    assert all(ratio["value"] > 0 for ratio in ratios.values())
    errors = {
        round(found["runs"][0]["trace_error"], 12)
        for key, found in result["measurements"].items()
        if "shares" not in key
    }
    assert len(errors) == 1  # it is the same fit everywhere


@pytest.mark.slow
def test_the_case_large(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "QUICK", {"large": Size(20_000, ranks=(15,))})
    monkeypatch.setattr(large, "WORKERS", 1)
    args = ("--case", "large", "--dir", tmp_path, "--json")
    code, stdout, err = command(*args)
    assert code == 0, err
    ratios = {ratio["name"]: ratio for ratio in json.loads(stdout)["ratios"]}
    assert ratios["bytes spilled"]["value"] == ratios["workers paused"]["value"] == 0.0
    # Of so few rows the process itself is what is measured.
    assert ratios["memory of a worker, predicted / measured, at least"]["value"] >= 0.75
    assert ratios["memory of a worker, predicted / measured, at most"]["value"] <= 1.25
    (store,) = tmp_path.iterdir()
    written = store.stat().st_mtime_ns
    monkeypatch.setattr(large, "running_cluster", None)
    with pytest.raises(TypeError):
        command(*args)
    assert store.stat().st_mtime_ns == written  # used again


def test_rows_that_the_disk_does_not_hold_are_refused(tmp_path):
    code, _, err = command("--case", "large", "--rows", "1e12", "--dir", tmp_path)
    assert code == 3
    assert "fewer rows (--rows), or another folder (--dir)" in err
    assert list(tmp_path.iterdir()) == []


def test_the_proxy_ends_with_its_input():
    arguments = [sys.executable, "-m", "benchmarks.delay", "0.01", "127.0.0.1:9"]
    with subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True) as proxy:
        (port,) = json.loads(proxy.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.recv(1) == b""  # nobody answers behind it
        proxy.stdin.close()
        assert proxy.wait(10) == 0
