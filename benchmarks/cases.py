"""The cases of the bench: a function per case adds its measurements and ratios."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import CASE_NAMES
from benchmarks.classes import multiclass_case
from benchmarks.cluster import cluster_case, large_case
from benchmarks.coverage import LEVEL, Coverage
from benchmarks.device import device_case
from benchmarks.fits import Bare, EmbeddingFit, Fit, Rows, StoreRead, write_uniform
from benchmarks.ingest import ingest_case
from benchmarks.machine import GemmRate, MachineRates
from benchmarks.measure import (
    Bench,
    D,
    Measurement,
    Ratio,
    Size,
    Term,
    Together,
    measure,
    spacing,
)
from benchmarks.memory import memory_case
from benchmarks.peers import NOT_INSTALLED, ConditionalMean, Fmca, Reference, fmca_installed
from benchmarks.programs import CLOSED, SolveCoupling, SolveProgram
from benchmarks.queries import queries_case
from benchmarks.sizing import sizing_case
from benchmarks.small import small_case
from benchmarks.sparse import CLARABEL, OURS, SolveSparse
from cme_dask import kernels
from cme_dask.data.generate import write_normal3
from cme_dask.kernels import Kernel
from cme_dask.numerics.sparse import PENALTIES

FMCA_SCALE = 0.3
_MANY_ROWS = 10**7  # of which a fit without arguments aims at 1.5 times the pass with its kernels
_REG = 1e-6
_TOL = 1e-6  # where a rank is given: these kernels reach the rank long before it
_RIDGES, _FOLDS = 20, 5  # of the embeddings that are cross-validated
_TRIALS = 4
_NEAR = 0.985  # of their error: one pivot more or less changes it by about this much
_PROGRAM_RATIO = 5  # pivots of y for each of x
_LARGEST_PROGRAM = 250_000  # unknowns that go to the quadratic programming solvers
_PROGRAM_SECONDS = 35.0  # that they may take
_SPARSE_SHARE = 0.1  # of gamma_max
_COVERED = 24  # samples of which intervals are judged
_COUPLINGS = {200: 5.0, 1000: 60.0}  # landmarks of x and of y, and the seconds aimed at


def machine_case(bench: Bench, size: Size) -> None:
    """Rates of the machine; one run, which takes samples of each."""
    bench.measure({"machine/rates": MachineRates(bench.workers)}, 1)


def fmca_case(bench: Bench, size: Size) -> None:
    """A whole fit beside FMCA's decomposition, at equal trace error over all rows."""
    n, rows = size.rows, Rows(size.rows, D)
    kernel = kernels.Gaussian(FMCA_SCALE).to_dict()
    for tol in size.tols:
        at = f"fmca/tol {tol:g}"
        fit, fmca, bare, gemm = (f"{at}/{who}" for who in ("fit", "FMCA", "bare pass", "rates"))
        theirs = Fmca(n, D, FMCA_SCALE, tol)
        if fmca_installed():
            bench.measure({fmca: theirs}, 1, peers=(fmca,))
        else:
            bench.measurements[fmca] = Measurement(None, missing=NOT_INSTALLED)
        pivots = str(bench.folder / "pivots.npz")

        def ours(requested: float, save: str = pivots) -> Fit:
            return Fit(rows, "cholesky", kernel, requested, workers=bench.workers, save=save)

        requested = _equal_error(bench, ours, bench.measurements[fmca], tol)
        jobs = {
            fit: ours(requested),
            bare: Bare(rows, pivots, FMCA_SCALE, bench.workers),
            gemm: GemmRate(bench.workers),
            fmca: theirs,
        }
        bench.measure(jobs, peers=(fmca,))
        bench.limit(f"{at}/limit", fit, gemm, n)
        aim = (18.0 if tol >= 1e-2 else 15.0) if n >= FULL["fmca"].rows else None
        bench.compare(at, "FMCA / fit", fmca, fit, at_least=aim)
        bench.compare(at, "trace error, fit / FMCA", fit, fmca, "trace_error", at_most=1)
        over, under = Term(bare, "trace_error"), Term(fmca, "checked_error")
        name = "trace error, both by the same code"
        bench.ratios.append(Ratio(at, name, [over], [under], at_most=1))
        bench.compare(at, "limit / fit", f"{at}/limit", fit)
        bench.bare_rate(at, bare, gemm, n)


def _equal_error(
    bench: Bench, ours: Callable[[float], Fit], theirs: Measurement, tol: float
) -> float:
    """The tol to ask for, so that the fit's error over all rows is theirs or just below it.

    Found by trials that aren't counted: a fit ends below its tol by what it can't be sure of.
    """
    if theirs.missing is not None:
        return tol
    target = requested = float(theirs.runs[0]["trace_error"])
    met = 0.0  # the largest tolerance that did not end above theirs
    for _ in range(_TRIALS):
        trial: dict[str, Measurement] = {}
        measure({"trial": ours(requested)}, 1, trial, lambda *_: None)
        reached = trial["trial"].median("trace_error")
        if reached <= target:
            met = max(met, requested)
            if reached >= _NEAR * target:
                break
        requested *= (1.0 + _NEAR) / 2 * target / reached
    return met or requested


def pass_case(bench: Bench, size: Size) -> None:
    """A whole joint fit from a store beside the bare pass; threads beside processes."""
    store = bench.folder / "uniform.zarr"
    write_uniform(store, size.rows, D)
    for rank in size.ranks:
        _pass_at(bench, Rows(size.rows, D, str(store)), rank)


def _pass_at(bench: Bench, rows: Rows, rank: int) -> None:
    at, scale, w = f"pass/rank {rank}", spacing(rank, D), bench.workers
    kernel, pivots = kernels.Gaussian(scale).to_dict(), str(bench.folder / "joint.npz")
    fit, one, bare = f"{at}/fit", f"{at}/fit, 1 thread", f"{at}/bare pass"
    apart, gemm = f"{at}/fit, {w} processes on shares", f"{at}/rates"

    def ours(rows: Rows, workers: int, save: str | None = None) -> Fit:
        return Fit(rows, "joint", kernel, _TOL, rank, workers=workers, save=save)

    jobs: dict[str, Any] = {
        fit: ours(rows, w, pivots),
        bare: Bare(rows, pivots, scale, w),
        gemm: GemmRate(w),
        f"{at}/reading alone": StoreRead(rows, w),
    }
    if w > 1:
        jobs[one] = ours(rows, 1)
        shares = (replace(rows, share=(i, w)) for i in range(w))
        jobs[apart] = Together(tuple(ours(share, 1) for share in shares))
    bench.measure(jobs)
    bench.limit(f"{at}/limit", fit, gemm, rows.n)
    large = rows.n >= FULL["pass"].rows
    bench.compare(at, "fit / bare pass", fit, bare, at_most=1.3 if large else None)
    inside = [Term(fit, "pass_seconds")]
    bench.ratios.append(Ratio(at, "pass of the fit / bare pass", inside, [Term(bare)]))
    bench.bare_rate(at, bare, gemm, rows.n)
    bench.compare(at, "limit / fit", f"{at}/limit", fit)
    if w > 1:
        aim = 1.8 if large and w == 2 else None
        bench.compare(at, f"1 thread / {w} threads", one, fit, at_least=aim)
        bench.compare(at, f"1 thread / {w} processes on shares", one, apart)


def random_case(bench: Bench, size: Size) -> None:
    """Randomly pivoted fits beside the plain and the accelerated algorithm of the paper."""
    n = size.rows
    for rank in size.ranks:
        at, scale = f"random/rank {rank}", spacing(rank, D)
        kernel = kernels.Gaussian(scale).to_dict()
        fit, sampled, plain, fast = (
            f"{at}/{who}"
            for who in ("fit, random pivots", "fit, sampled pivots", "RPCholesky", "accelerated")
        )
        rows, w = Rows(n, D), bench.workers
        bench.measure(
            {
                fit: Fit(rows, "cholesky", kernel, _TOL, rank, "random", workers=w),
                plain: Reference(n, D, scale, rank, accelerated=False),
                fast: Reference(n, D, scale, rank, accelerated=True),
                sampled: Fit(rows, "cholesky", kernel, _TOL, rank, workers=w),
            },
            peers=(plain, fast),
        )
        aim = 1.0 if n >= FULL["random"].rows else None
        bench.compare(at, "RPCholesky / fit", plain, fit, at_least=aim)
        bench.compare(at, "accelerated / fit", fast, fit)
        name = "trace error, fit / RPCholesky"
        bench.compare(at, name, fit, plain, "trace_error", at_most=1.1)


def ridge_case(bench: Bench, size: Size) -> None:
    """Conditional means beside scikit-learn's Nystroem features and ridge regression."""
    for rank in size.ranks:
        at, scale = f"ridge/rank {rank}", 2 * spacing(rank, D)
        fit, peer = f"{at}/fit", f"{at}/Nystroem + Ridge"
        jobs = {
            key: ConditionalMean(method, size.rows, D, scale, rank, _REG, bench.workers)
            for key, method in ((fit, "ours"), (peer, "nystroem"))
        }
        bench.measure(jobs, peers=(peer,))
        bench.compare(at, "Nystroem + Ridge / fit", peer, fit)
        name = "held-out error, fit / Nystroem + Ridge"
        bench.compare(at, name, fit, peer, "held_out_error")


def crossval_case(bench: Bench, size: Size) -> None:
    """Embeddings from a store: 20 ridges compared on 5 folds, beside a given ridge and no folds."""
    store = bench.folder / "crossval.zarr"
    write_uniform(store, size.rows, D)
    rows, w = Rows(size.rows, D, str(store)), bench.workers
    for rank in size.ranks:
        at, scale = f"crossval/rank {rank}", spacing(rank, D)
        chosen, given = f"{at}/{_RIDGES} ridges on {_FOLDS} folds", f"{at}/given ridge"
        jobs = {
            chosen: EmbeddingFit(rows, scale, rank, _RIDGES, _FOLDS, w),
            given: EmbeddingFit(rows, scale, rank, 1, 1, w),
        }
        bench.measure(jobs)
        aim = 1.2 if size.rows >= FULL["crossval"].rows else None
        for name, quantity in (("seconds", "seconds"), ("CPU time", "cpu_seconds")):
            bench.compare(at, f"{name}, chosen / given", chosen, given, quantity, at_most=aim)


def sweep_case(bench: Bench, size: Size) -> None:
    """Fits that differ from one in the middle by rows, columns, rank, kernel or scheduler."""
    n, m, w = size.rows, size.ranks[0], bench.workers

    def fit(
        n: int = n,
        d: int = D,
        rank: int = m,
        kernel: Kernel | None = None,
        scheduler: str = "threads",
        workers: int = w,
        store: str | None = None,
    ) -> Fit:
        kernel = kernel or kernels.Gaussian(spacing(rank, d))
        rows = Rows(n, d, store)
        described = kernel.to_dict()
        return Fit(rows, "cholesky", described, _TOL, rank, scheduler=scheduler, workers=workers)

    jobs = {f"sweep/rows {k:,}": fit(n=k) for k in (n // 4, n, 4 * n)}
    jobs |= {f"sweep/columns {d}": fit(d=d) for d in (1, 10)}
    jobs |= {f"sweep/rank {k}": fit(rank=k) for k in (m // 2, 2 * m)}
    scale = spacing(m, D)
    others = (
        kernels.Laplace(scale),
        kernels.Matern(scale, 0.5),
        kernels.Matern(scale, 2.5),
        kernels.RationalQuadratic(scale, 1.0),
    )
    jobs |= {f"sweep/kernel {_kernel_name(k)}": fit(kernel=k) for k in others}
    store = bench.folder / "sweep.zarr"
    write_uniform(store, n, D)
    for scheduler in ("threads", "processes"):
        for workers in sorted({1, w}):
            key = f"sweep/{scheduler} {workers}, store"
            jobs[key] = fit(scheduler=scheduler, workers=workers, store=str(store))
    bench.measure(jobs)


def programs_case(bench: Bench, size: Size) -> None:
    """Certified programs: the closed form beside the paper's own form by Clarabel and OSQP.

    A solver's time is what it is: OSQP, which may take all of its limit, runs once.
    """
    for rank in size.ranks:
        ranks = rank, _PROGRAM_RATIO * rank
        unknowns = ranks[0] * ranks[1]
        at = f"programs/{unknowns:,} unknowns"
        closed, clarabel, osqp = (f"{at}/{who}" for who in (CLOSED, "Clarabel", "OSQP"))

        def job(solver: str, ranks: tuple[int, int] = ranks) -> SolveProgram:
            return SolveProgram(solver, size.rows, *ranks, _PROGRAM_SECONDS)

        jobs = {closed: job(CLOSED)}
        if unknowns <= _LARGEST_PROGRAM:
            jobs[clarabel] = job("clarabel")
        bench.measure(jobs)
        if unknowns > _LARGEST_PROGRAM:
            _bound(bench, at, f"{CLOSED}, seconds", closed, "seconds", 1.0)
            _bound(bench, at, f"{CLOSED}, KKT residual", closed, "kkt_residual", 1e-10)
            continue
        bench.measure({osqp: job("osqp")}, 1)
        bench.compare(at, f"Clarabel / {CLOSED}", clarabel, closed)
        bench.compare(at, "OSQP / Clarabel", osqp, clarabel)
        bench.compare(at, f"objective, Clarabel / {CLOSED}", clarabel, closed, "objective")
        bench.compare(at, f"error, Clarabel / {CLOSED}", clarabel, closed, "oracle_error")
        if unknowns >= _LARGEST_PROGRAM // 2:
            _bound(bench, at, "Clarabel, seconds", clarabel, "seconds", 15.0)
            _bound(bench, at, "Clarabel, KKT residual", clarabel, "kkt_residual", 1e-6)
    for landmarks, seconds in _COUPLINGS.items():
        at = f"programs/{landmarks**2:,} unknowns"
        for scale in (1.0, 0.5):
            for reg in (1e-3, 1e-4):
                key = f"{at}/coupling, scale {scale}, reg {reg:g}"
                bench.measure({key: SolveCoupling(size.rows, landmarks, scale, reg)}, 1)
                _bound(bench, at, key.split("/")[-1] + ", seconds", key, "seconds", seconds)
                _bound(bench, at, key.split("/")[-1] + ", KKT", key, "kkt_residual", 1e-6)


def sparse_case(bench: Bench, size: Size) -> None:
    """Sparse embeddings on as many candidates as the rank: our solver beside Clarabel."""
    for rank in size.ranks:
        for penalty in PENALTIES:
            at = f"sparse/{penalty}, {rank} + {rank} candidates"
            ours, clarabel = f"{at}/{OURS}", f"{at}/{CLARABEL}"
            jobs = {
                key: SolveSparse(solver, penalty, size.rows, rank, _SPARSE_SHARE)
                for key, solver in ((ours, OURS), (clarabel, CLARABEL))
            }
            bench.measure(jobs)
            name = "CPU time, Clarabel / cme_dask"
            bench.compare(at, name, clarabel, ours, "cpu_seconds", at_least=1.0)
            name = "objective, cme_dask / Clarabel"
            bench.compare(at, name, ours, clarabel, "objective", at_most=1.0 + 1e-8)


def tuning_case(bench: Bench, size: Size) -> None:
    """A fit without arguments, beside its pass and a fit with its kernels, pivots and ridges."""
    store, model = bench.folder / "normal3.zarr", str(bench.folder / "model.zarr")
    write_normal3(store, size.rows, scenario="strong")
    at = f"tuning/{size.rows:,} rows"
    fit, given = f"{at}/no arguments", f"{at}/its kernels given"
    rows = Rows(size.rows, D, str(store))
    learned = Fit(rows, "joint", None, None, workers=bench.workers, model=model)
    bench.measure({fit: learned, given: replace(learned, model=None, given=model)})
    whole, many = [Term(fit)], size.rows >= _MANY_ROWS
    for name, passed, most in (
        ("whole fit / pass of the finalists", fit, 3.0),
        ("whole fit / pass with its kernels given", given, 1.5 if many else None),
    ):
        bench.ratios.append(Ratio(at, name, whole, [Term(passed, "pass_seconds")], at_most=most))


def coverage_case(bench: Bench, size: Size) -> None:
    """Intervals of conditional expectations: how often they hold the truth."""
    for scenario in ("bimodal", "skewed"):
        for chosen in ("median", "learned"):
            key = f"coverage/{scenario}, {size.rows:,} rows/{chosen}"
            bench.measure({key: Coverage(scenario, size.rows, chosen, _COVERED)}, 1)
            for name, quantity in (
                ("truth within 2 standard errors", "two"),
                (f"truth within the {LEVEL:.0%} interval", "t"),
                ("the same, worst point", "lowest"),
                ("mean of all estimates within it", "variance"),
                ("bias / standard deviation", "bias"),
            ):
                at, label = key.rsplit("/", 1)
                bench.ratios.append(
                    Ratio(at, f"{label} kernels, {name}", [Term(key, quantity)], [Term()])
                )


def _bound(
    bench: Bench, group: str, name: str, measurement: str, quantity: str, at_most: float
) -> None:
    """Add a quantity of one measurement, and the most that is aimed at."""
    terms = [Term(measurement, quantity)]
    bench.ratios.append(Ratio(group, name, terms, [Term()], at_most=at_most))


def _kernel_name(kernel: Kernel) -> str:
    order = getattr(kernel, "nu", None)
    return type(kernel).__name__ + (f" {order}" if order is not None else "")


CASES: dict[str, Callable[[Bench, Size], None]] = dict(
    zip(
        CASE_NAMES,
        (
            machine_case,
            fmca_case,
            pass_case,
            random_case,
            ridge_case,
            crossval_case,
            sweep_case,
            programs_case,
            sparse_case,
            ingest_case,
            tuning_case,
            small_case,
            coverage_case,
            queries_case,
            cluster_case,
            large_case,
            multiclass_case,
            sizing_case,
            memory_case,
            device_case,
        ),
        strict=True,
    )
)

QUICK = {
    "machine": Size(0),
    "fmca": Size(10**5, tols=(1e-2, 1e-4, 1e-6)),
    "pass": Size(2 * 10**5, ranks=(100, 400)),
    "random": Size(2 * 10**4, ranks=(300,)),
    "ridge": Size(10**5, ranks=(200,)),
    "crossval": Size(2 * 10**5, ranks=(100,)),
    "sweep": Size(10**5, ranks=(100,)),
    "programs": Size(5000, ranks=(5, 14, 45, 100, 200, 448)),
    "sparse": Size(1000, ranks=(20, 40)),
    "ingest": Size(10**6),
    "tuning": Size(2 * 10**5),
    "small": Size(1000),
    "coverage": Size(1000),
    "queries": Size(10**5, ranks=(100,)),
    "cluster": Size(10**6, ranks=(100,)),
    "large": Size(10**6, ranks=(50,)),
    "multiclass": Size(2 * 10**5),
    "sizing": Size(2 * 10**6, ranks=(100,)),
    "memory": Size(10**6),
    "device": Size(10**6, ranks=(100, 400)),
}
"""Sizes that take a few minutes."""

FULL = {
    "machine": Size(0),
    "fmca": Size(10**6, tols=(1e-2, 1e-4, 1e-6)),
    "pass": Size(10**7, ranks=(100, 400)),
    "random": Size(10**5, ranks=(1000,)),
    "ridge": Size(10**6, ranks=(400,)),
    "crossval": Size(10**7, ranks=(100,)),
    "sweep": Size(10**6, ranks=(200,)),
    "programs": Size(5000, ranks=(5, 14, 45, 100, 200, 448)),
    "sparse": Size(1000, ranks=(20, 40)),
    "ingest": Size(32 * 10**6),
    "tuning": Size(10**7),
    "small": Size(1000),
    "coverage": Size(5000),
    "queries": Size(10**6, ranks=(100, 300)),
    "cluster": Size(10**7, ranks=(100,)),
    "large": Size(10**8, ranks=(50,)),
    "multiclass": Size(10**7),
    "sizing": Size(10**7, ranks=(100,)),
    "memory": Size(10**8),
    "device": Size(10**7, ranks=(100, 400, 1000)),
}
"""Sizes of the published figures."""
