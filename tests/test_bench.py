"""The bench: its bare pass and references are right, and its ratios follow from its JSON."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from statistics import median

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import shorten_searches
from scipy.stats import chi2_contingency

from benchmarks import (
    cases,
    classes,
    device,
    machine,
    measure,
    memory,
    queries,
    report,
    run,
    small,
)
from benchmarks.__main__ import cli
from benchmarks.fits import (
    Bare,
    BareBasis,
    Fit,
    Rows,
    bare_flops,
    bare_pass,
    open_counted,
    regression_rows,
    share_of,
    uniform_rows,
    write_uniform,
)
from benchmarks.machine import limit_seconds
from benchmarks.measure import Measurement, Ratio, Size, Term, Together, run_fresh
from benchmarks.peers import ConditionalMean, accelerated_cholesky, random_cholesky, reject
from benchmarks.programs import CLOSED
from benchmarks.sparse import CLARABEL, OURS
from benchmarks.worker import JOBS, describe_job, make_job, measured
from cme_dask import JointDistribution, kernels
from cme_dask.errors import DataError, ResourceError

KERNEL = kernels.Gaussian(0.5)


def command(*args):
    result = CliRunner().invoke(cli, ["bench", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "u.zarr"
    write_uniform(path, 10_000, 2)
    return path


@pytest.fixture
def here(monkeypatch):
    """Jobs run in this process, still by way of JSON, and rates are taken in a moment."""

    def run_here(job):
        if isinstance(job, Together):
            found = [run_here(one) for one in job.jobs]
            return {"seconds": max(one["seconds"] for one in found), "together": found}
        return json.loads(json.dumps(measured(again(job).prepare())))

    monkeypatch.setattr(measure, "run_fresh", run_here)
    monkeypatch.setattr(machine, "_SECONDS", 1e-4)
    monkeypatch.setattr(machine, "_GEMM", 64)
    monkeypatch.setattr(machine, "_TRIAD", 1 << 12)


def again(job):
    return make_job(json.loads(json.dumps(describe_job(job))))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [1000, 20_001])
def test_the_bare_pass_equals_the_moments_of_a_fit_and_the_dense_ones(n, threads):
    x, y = uniform_rows(n, 3)
    fit = JointDistribution(kernel_x=KERNEL, kernel_y=KERNEL, tol=1e-4, n_folds=1).fit(x, y)
    sides = (fit.basis_x_.newton, fit.basis_y_.newton)
    bases = [BareBasis(side.points, side.factor, 0.5) for side in sides]
    parts = (x, y)
    found = bare_pass(
        bases, lambda a, b: tuple(p[a:b] for p in parts), n, threads=threads, run_rows=700
    )

    dense = []
    for part, basis in zip(parts, bases, strict=True):
        squared = ((basis.points[:, None] - part[None]) ** 2).sum(axis=2)
        dense.append(np.linalg.solve(basis.factor, np.exp(-squared / (2 * 0.5**2))))
    oracle = np.concatenate(dense) @ np.concatenate(dense).T
    np.testing.assert_allclose(found, oracle, rtol=0, atol=1e-9 * n)
    width = len(found)
    gram = fit.moments_.gram.sum(axis=0)[:width, :width]
    np.testing.assert_allclose(found, gram, rtol=0, atol=1e-9 * n)


def test_flops_and_limit_by_hand():
    assert bare_flops(10, [3]) == 2 * 10 * 3**2
    assert bare_flops(10, [3, 4]) == 10 * (9 + 16 + 49)
    # 100 rows, 2 columns, ranks 3 and 5: 8^2 + 2 * 8 * 4 flops, 8 exponentials a row
    assert limit_seconds(100, 2, [3, 5], 1e3, 1e2) == pytest.approx(100 * (128 / 1e3 + 8 / 1e2))


def test_bytes_are_counted_as_they_lie_on_disk(store, tmp_path):
    rows = Rows(10_000, 2, str(store))
    fit = Fit(rows, "joint", KERNEL.to_dict(), 1e-2, save=str(tmp_path / "p.npz"))
    on_disk = sum(
        p.stat().st_size for v in "xy" for p in (store / v / "c").rglob("*") if p.is_file()
    )
    found = measured(fit.prepare())
    assert found["bytes_read"] >= on_disk
    bare = measured(Bare(rows, fit.save, 0.5, 2).prepare())
    assert bare["bytes_read"] == on_disk
    assert bare["ranks"] == found["ranks"]
    assert bare["trace_error"] == pytest.approx(found["trace_error"], rel=1e-6)
    parts = [found[f"{part}_seconds"] for part in ("sample", "pivot", "pass", "rest")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found["seconds"], rel=0.05)


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_shares_are_the_rows_divided(store, shares):
    whole, _ = open_counted(str(store))
    parts = [share_of(whole, i, shares) for i in range(shares)]
    assert sum(part.n_rows for part in parts) == whole.n_rows
    for v in range(2):
        rows = [part.sources[v].read(0, part.n_rows) for part in parts if part.n_rows]
        np.testing.assert_array_equal(np.concatenate(rows), whole.sources[v].read(0, 10_000))
        for part in parts:
            kept = part.row_sample
            here = part.sources[v].read(0, part.n_rows)[kept.index]
            np.testing.assert_array_equal(kept.parts[v], here)


def test_references_interpolate_at_their_pivots():
    x = uniform_rows(400, 3)[0]
    gram = KERNEL(x, x)
    for algorithm in (random_cholesky, accelerated_cholesky):
        pivots, factor = algorithm(KERNEL, x, 30, np.random.default_rng(1))
        assert len(set(pivots.tolist())) == 30
        np.testing.assert_allclose(factor.T @ factor[:, pivots], gram[:, pivots], atol=1e-10)
        assert np.linalg.eigvalsh(gram - factor.T @ factor).min() > -1e-10
        best = np.linalg.eigvalsh(gram)[:-30].sum()
        assert best <= np.trace(gram) - (factor**2).sum() < 10 * best


def test_rejection_keeps_the_law_of_the_plain_algorithm():
    """The first three pivots, drawn thousands of times either way."""
    x = np.array([[0.0], [0.1], [0.5], [0.55], [1.5]])
    rng = np.random.default_rng(0)
    draws = 2000

    def ordered(algorithm, *more):
        found = (algorithm(KERNEL, x, 3, rng, *more)[0] for _ in range(draws))
        return Counter(tuple(p.tolist()) for p in found)

    plain, fast = ordered(random_cholesky), ordered(accelerated_cholesky, 4)
    often = [key for key in plain | fast if plain[key] + fast[key] >= 20]
    table = [[count[key] for key in often] for count in (plain, fast)]
    assert len(often) > 20
    assert chi2_contingency(table).pvalue > 1e-3


def test_rejection_accepts_what_is_left_in_full():
    gram = KERNEL(*(np.array([[0.0], [0.0], [9.0]]),) * 2)
    accepted, root = reject(gram, 3, np.random.default_rng(0))
    assert accepted.tolist() == [0, 2]  # of equal rows the second has nothing left
    np.testing.assert_allclose(root, np.eye(2), atol=1e-12)
    assert len(reject(gram, 1, np.random.default_rng(0))[0]) == 1


@pytest.mark.parametrize("method", ["ours", "nystroem"])
def test_ridges_of_equal_kernel_and_rank_are_the_dense_one(method):
    """Where the functions span nearly all of the kernel at the rows."""
    (x, y, _), (at, _, _) = regression_rows(300, 2, 0), regression_rows(100, 2, 1)
    centre = y[:, 0].mean() if method == "ours" else 0.0
    dense = np.linalg.solve(KERNEL(x, x) + 300 * 1e-2 * np.eye(300), y[:, 0] - centre)
    mean = ConditionalMean(method, 300, 2, 0.5, 250, 1e-2, 1)._fit(x, y, 250)
    np.testing.assert_allclose(mean(at), centre + KERNEL(at, x) @ dense, rtol=0, atol=1e-3)


def test_jobs_go_through_json():
    jobs = [Fit(Rows(10, 2, "s", (1, 2)), "joint", KERNEL.to_dict(), 0.1), machine.GemmRate(2)]
    for job in jobs:
        assert describe_job(again(job)) == json.loads(json.dumps(describe_job(job)))
        assert type(job).__name__ in JOBS


def test_rivals_take_turns_and_earlier_runs_count(monkeypatch):
    order = []
    monkeypatch.setattr(measure, "run_fresh", lambda job: order.append(job) or {"seconds": 1.0})
    a, b = machine.GemmRate(1), machine.GemmRate(2)
    measurements = {"b": Measurement(None, [{"seconds": 2.0}])}
    measure.measure({"a": a, "b": b}, 3, measurements, lambda *_: None)
    assert order == [a, a, b, a, b]
    assert measurements["b"].values("seconds") == [2.0, 1.0, 1.0]


def test_a_peer_that_fails_is_told_and_ours_is_an_error(monkeypatch):
    def failing(job):
        if job.workers == 2:
            raise ResourceError("it was killed")
        return {"seconds": 1.0}

    monkeypatch.setattr(measure, "run_fresh", failing)
    jobs = {"a": machine.GemmRate(1), "b": machine.GemmRate(2)}
    measurements, told = {}, []
    measure.measure(jobs, 2, measurements, lambda *event: told.append(event), peers=("b",))
    assert (measurements["b"].runs, measurements["b"].missing) == ([], "it was killed")
    assert len(measurements["a"].runs) == 2
    assert [key for key, *_ in told] == ["a", "b", "a"]
    with pytest.raises(ResourceError, match="it was killed"):
        measure.measure(jobs, 2, {}, lambda *_: None)


def test_ratios_and_their_spread_by_hand():
    runs = {
        "a": Measurement(None, [{"seconds": s} for s in (6.0, 8.0, 10.0)]),
        "b": Measurement(None, [{"seconds": s, "rate": 10.0} for s in (1.0, 4.0, 2.0)]),
        "none": Measurement(None, missing="not installed"),
    }
    found = Ratio("g", "n", [Term("a")], [Term("b")]).to_dict(runs)
    assert (found["value"], found["least"], found["most"]) == (4.0, 2.0, 6.0)
    share = Ratio("g", "n", [Term(number=80.0)], [Term("a"), Term("b", "rate")]).to_dict(runs)
    assert share["value"] == 1.0
    missing = Ratio("g", "n", [Term("none")], [Term("b")]).to_dict(runs)
    assert missing["value"] is missing["least"] is missing["most"] is None


def recomputed(ratio, measurements):
    """A ratio once more, from nothing but the JSON."""

    def side(terms):
        product = 1.0
        for term in terms:
            if term["measurement"] is None:
                product *= term["number"]
                continue
            runs = measurements[term["measurement"]]["runs"]
            product *= term["number"] * median(run[term["quantity"]] for run in runs)
        return product

    return side(ratio["over"]) / side(ratio["under"])


def check(result):
    measurements = result["measurements"]
    for ratio in result["ratios"]:
        if ratio["value"] is not None:
            assert ratio["value"] == pytest.approx(recomputed(ratio, measurements), rel=1e-12)
            assert 0 < ratio["least"] <= ratio["most"]
    for key, found in measurements.items():
        assert found["runs"] or found["missing"], key
        if found["runs"]:
            seconds = [run["seconds"] for run in found["runs"]]
            assert (found["least"], found["most"]) == (min(seconds), max(seconds))
            assert found["median"] == median(seconds)
        job = found["job"]
        if isinstance(job, dict) and job["job"] == "limit":
            for mine, rate in zip(found["runs"], measurements[job["rates"]]["runs"], strict=True):
                m = sum(job["ranks"])
                flops = job["n"] * (m**2 + 2 * m * (job["d"] + 2))
                again = flops / rate["gemm_all"] + job["n"] * m / rate["exp_all"]
                assert mine["seconds"] == pytest.approx(again)


SMALL = {
    "machine": Size(0),
    "fmca": Size(3000, tols=(1e-1, 1e-2)),
    "pass": Size(9000, ranks=(20,)),
    "random": Size(3000, ranks=(30,)),
    "ridge": Size(3000, ranks=(30,)),
    "crossval": Size(3000, ranks=(20,)),
    "sweep": Size(3000, ranks=(20,)),
    "ingest": Size(3000),
    "tuning": Size(1500),
    "small": Size(1000),
    "queries": Size(1000, ranks=(20,)),
    "multiclass": Size(2000),
    "memory": Size(10**8),
}


LONG = ("tuning", "queries", "multiclass")  # of default fits


def test_pictures_tell_rivals_from_what_is_ours():
    ours = [
        *({"job": job} for job in ("WatchedFit", "MulticlassFit", "EmbeddingFit", "Ingest")),
        *({"job": job} for job in ("Expectations", "Quantiles", "Coverage", "simulation")),
        {"job": "SolveSparse", "solver": OURS},
        {"job": "SolveProgram", "solver": CLOSED},
        {"job": "ConditionalMean", "method": "ours"},
        [{"job": "Fit"}, {"job": "Fit"}],
    ]
    others = [
        *({"job": job} for job in ("Fmca", "Reference", "ArrowRead", "BoostingFit")),
        {"job": "SolveSparse", "solver": CLARABEL},
        {"job": "SolveProgram", "solver": "osqp"},
        {"job": "ConditionalMean", "method": "nystroem"},
    ]
    looks = [{report._look("", {"job": job}) for job in jobs} for jobs in (ours, others)]
    assert looks == [{(report._OURS, "o")}, {(report._OTHERS, "s")}]
    assert report._look("bare pass", {"job": {"job": "Bare"}}) == (report._BARE, "D")


def test_every_case_but_rates_of_the_machine_has_titles():
    assert set(report._TITLES) == set(report._TITLES_PICTURE) == set(cases.CASES) - {"machine"}


@pytest.mark.slow
def test_the_case_of_a_gpu_reports_and_says_where_none_is(
    here, brief_search, monkeypatch, tmp_path
):
    args = ("--case", "device", "--rows", 1000, "--ranks", 20, "--repeats", 1, "--workers", 2)
    monkeypatch.setattr(device, "gpu_name", lambda: None)
    code, stdout, err = command(*args, "--out", tmp_path / "none")
    assert (code, device.NO_GPU in stdout) == (0, True), err
    monkeypatch.setattr(device, "gpu_name", lambda: "a GPU")  # as which the host itself stands in
    monkeypatch.setattr(device, "_DEVICE", None)
    rates = {"gpu": "a GPU", "gemm_all": 1e12, "to_device": 1e10}
    monkeypatch.setattr(device.GpuRates, "_measure", lambda self: lambda: rates)
    code, _, err = command(*args, "--out", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "out" / "bench.png").stat().st_size > 5_000
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    check(result)
    assert len({ratio["name"] for ratio in result["ratios"]}) == 4


def test_figures_are_on_disk_though_their_picture_fails(tmp_path, monkeypatch):
    def fail(result, path):
        raise KeyError("device")

    monkeypatch.setattr(run, "bench_picture", fail)
    monkeypatch.setattr(run, "CASES", {"sparse": lambda bench, size: None})
    with pytest.raises(KeyError):
        command("--case", "sparse", "--out", tmp_path)
    assert json.loads((tmp_path / "bench.json").read_text())["measurements"] == {}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in LONG else ())
        for case in SMALL
        if case not in ("ridge", "sweep")
    ],
)
def test_every_case_measures_and_reports(case, here, monkeypatch, tmp_path):
    shorten_searches(monkeypatch, rows=200, max_rank=20, evaluations=2)
    monkeypatch.setattr(run, "QUICK", SMALL)
    monkeypatch.setattr(classes, "BOOSTING_ITERATIONS", 2)
    monkeypatch.setattr(queries, "DEFAULTS", (("line", 200, 4, True), ("Friedman", 150, 5, False)))
    monkeypatch.setattr(memory, "SHAPES", {"one": memory.Shape(2000, (2, 1), rank=20, scale=0.3)})
    monkeypatch.setattr(memory, "LIMITED", ())
    monkeypatch.setattr(small, "LAWS", {"line": small.LAWS["line"]})
    monkeypatch.setattr(small, "_MORE", 1)
    monkeypatch.setattr(small, "_FIRST", 60)
    out = tmp_path / "out"
    repeats = 1 if case in ("tuning", "small", "multiclass", "memory") else 2
    args = ("--case", case, "--repeats", repeats, "--workers", 2, "--out", out)
    code, stdout, err = command(*args, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    check(result)
    assert json.loads((out / "bench.json").read_text()) == result
    assert set(out.iterdir()) == {out / "bench.json", out / "bench.png"}
    assert (out / "bench.png").stat().st_size > 5_000
    timed = [m for m in result["measurements"].values() if m["runs"]]
    assert all(len(m["runs"]) == (1 if case == "machine" else repeats) for m in timed)
    for ratio in result["ratios"]:
        if "trace error" in ratio["name"] and case == "fmca" and ratio["value"] is not None:
            assert ratio["value"] <= 1.0
    if case == "tuning":
        learned, given = (m["runs"][0] for m in result["measurements"].values())
        assert given["ranks"] == learned["ranks"]  # the model has one member
        assert given["passes"] == 1
    code, stdout, err = command(*args)
    assert code == 2
    assert "already holds bench.json" in err


def test_coverage_is_measured_for_given_and_learned_kernels(
    here, brief_search, monkeypatch, tmp_path
):
    monkeypatch.setattr(run, "QUICK", {"coverage": Size(1000)})
    monkeypatch.setattr(cases, "_COVERED", 2)
    out = tmp_path / "out"
    code, stdout, err = command("--case", "coverage", "--workers", 1, "--out", out)
    assert code == 0, err
    result = json.loads((out / "bench.json").read_text())
    assert (out / "bench.png").stat().st_size > 5_000
    lines = stdout.splitlines()
    assert any("Intervals of conditional expectations, beside the truth" in line for line in lines)
    kinds = [(law, chosen) for law in ("bimodal", "skewed") for chosen in ("median", "learned")]
    keys = [f"coverage/{law}, 1,000 rows/{chosen}" for law, chosen in kinds]
    assert list(result["measurements"]) == keys
    for key in keys:
        (found,) = result["measurements"][key]["runs"]
        assert 0.0 <= found["lowest"] <= found["t"] <= 1.0
        assert 0.3 < found["two"] <= found["t"]
        assert found["variance"] > 0.3
        assert 0.0 < found["bias"] < 10.0
        group, chosen = key.rsplit("/", 1)
        own = [r for r in result["ratios"] if r["group"] == group and chosen in r["name"]]
        names = ("two", "t", "lowest", "variance", "bias")
        assert [r["value"] for r in own] == [found[name] for name in names]
        row = next(line for line in lines if key.split("/")[1] in line and chosen in line)
        assert row.count(" %") == 4
        assert f"{100 * found['two']:.0f} %" in row


def test_the_sweep_changes_one_thing_at_a_time(here, monkeypatch):
    monkeypatch.setattr(run, "QUICK", SMALL)
    code, stdout, err = command("--case", "sweep", "--repeats", 1, "--workers", 1)
    assert code == 0, err
    for name in ("rows 750", "rows 12,000", "columns 10", "rank 40", "Matern 0.5", "processes 1"):
        assert name in stdout


@pytest.mark.slow
def test_a_case_in_fresh_processes(monkeypatch):
    monkeypatch.setattr(run, "QUICK", SMALL)
    code, stdout, err = command("--case", "ridge", "--repeats", 1, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    check(result)
    for found in result["measurements"].values():
        assert 0 < found["runs"][0]["held_out_error"] < 0.5
    assert result["files"] == []
    assert [line.split(":")[0] for line in err.splitlines()] == list(result["measurements"])


@pytest.mark.slow
def test_fresh_processes_start_together_and_tell_their_memory(tmp_path):
    small = Fit(Rows(2000, 2), "cholesky", KERNEL.to_dict(), 0.1)
    found = run_fresh(Together((small, small)))
    assert found["seconds"] == max(one["seconds"] for one in found["together"])
    for one in found["together"]:
        assert one["bytes_read"] == 0
        assert one["passes"] == 1
        if sys.platform == "linux":
            assert one["peak_bytes"] >= one["base_bytes"] > 2**20


@pytest.mark.slow
def test_errors_of_a_process_reach_the_caller():
    with pytest.raises(DataError, match="tol must lie between"):
        run_fresh(Fit(Rows(2000, 2), "cholesky", KERNEL.to_dict(), 2.0))
    with pytest.raises(ResourceError, match=r"Bare failed: FileNotFoundError.*missing\.npz"):
        run_fresh(Bare(Rows(2000, 2), "missing.npz", 0.5, 1))


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path):
    """Ctrl-C reaches the whole group of processes, as in a terminal."""
    args = ["--case", "ridge", "--rows", "1e6", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "bench", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore SIGINT; a terminal doesn't.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    begin = time.monotonic()
    while not list(tmp_path.glob("out/.cme-dask-bench-*")):
        assert process.poll() is None
        assert time.monotonic() - begin < 60
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    stdout, err = process.communicate(timeout=600)
    assert (process.returncode, stdout) == (130, "")
    assert err.startswith("error: interrupted")
    assert err.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_the_mark_of_memory_is_that_of_the_run():
    if sys.platform != "linux":
        pytest.skip("the high-water mark is read from /proc")
    before = np.ones(1 << 24)
    del before

    def job():
        held = np.ones(1 << 23)
        return lambda: {"held": float(held[0])}

    found = measured(job)
    assert 0.9 * 2**26 < found["peak_bytes"] - found["base_bytes"] < 1.5 * 2**26


def test_without_fmca_the_rest_is_measured(here, monkeypatch):
    monkeypatch.setattr(run, "QUICK", SMALL)
    monkeypatch.setattr(cases, "fmca_installed", lambda: False)
    args = ("--case", "fmca", "--repeats", 1, "--workers", 1)
    code, stdout, err = command(*args, "--json")
    assert code == 0, err
    result = json.loads(stdout)
    check(result)
    peer = result["measurements"]["fmca/tol 0.1/FMCA"]
    assert peer["missing"] == "not installed: pip install '.[bench]'"
    assert len(result["measurements"]["fmca/tol 0.1/fit"]["runs"]) == 1
    code, stdout, err = command(*args)
    assert code == 0, err
    assert "FMCA: not installed" in stdout


@pytest.mark.skipif(importlib.util.find_spec("FMCA") is None, reason="FMCA is not installed")
def test_fmca_is_held_to_the_same_error():
    from benchmarks.peers import Fmca

    found = measured(Fmca(3000, 3, 0.3, 1e-3).prepare())
    assert 0 < found["trace_error"] <= 1e-3
    assert found["checked_error"] == pytest.approx(found["trace_error"], rel=1e-6)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--rows", 500), "rows must be at least 1,000"),
        (("--case", "pass", "--rows", 5000, "--ranks", 600), "a tenth of the 5,000 rows"),
        (("--case", "fmca", "--tols", "2"), "tols must lie between 0 and 1"),
        (("--case", "nonsense"), "'nonsense' is not one of"),
        (("--case", "machine", "--rows", 5000), "no chosen case takes --rows"),
        (("--case", "fmca", "--ranks", 7), "no chosen case takes --ranks"),
        (("--case", "pass", "--case", "machine", "--tols", 1e-3), "no chosen case takes --tols"),
        (("--case", "machine", "--dir", "."), "no chosen case takes --dir"),
        (("--ranks", "a,b"), "no count"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(args, says):
    code, stdout, err = command(*args)
    assert (code, stdout) == (2, "")
    assert says in err
    assert err.count("\n") == 1
