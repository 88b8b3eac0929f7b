"""The study of the pendulum: figure 1 of Grünewälder et al. (2012), policies, a million rows."""

import resource
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.cluster import running_cluster
from benchmarks.machine import describe_machine
from benchmarks.pendulum import (
    COLUMNS,
    STEP,
    SUCCESS,
    Outputs,
    balanced,
    batches,
    policy_iteration,
    returns,
    simulate,
    transitions,
    true_outputs,
)
from benchmarks.pendulum_page import pendulum_page, pendulum_picture
from benchmarks.run import write_result
from cme_dask import ConditionalMeanEmbedding, SparseEmbedding
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError, RankWarning
from cme_dask.kernels import Gaussian
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.sparse import PENALTIES, Penalty, SparseProblem, refitted, sparse_path
from cme_dask.passes.cluster import connected

Array = Any
Result = dict[str, Any]

OUTPUTS = ("pendulum.json", "pendulum.png", "pendulum.md")
SCHEMA_VERSION = 1
EXAMPLES = 200
SHARE = 0.2
"""Share of the points of the dense embedding that a sparse policy may have."""

_KERNELS = Gaussian((1.5, 1.5, 8.0, 16.0)), Gaussian((1.0, 1.0, 5.0))
_REG, _LARGE_REG = 1e-4, 1e-6
_GAP, _STEPS, _RATIO = 1e-8, 500, 2e-2
_LARGE_GAMMAS, _LARGE_RATIO = 5, 0.1
_FLAT = 1e-10  # eigenvalues of Gram matrices below this share of the largest are rounding
_TEST, _STARTS = 2_000, 100
_QUERIES, _MOST = 4_000, 20_000_000  # points asked at once, and kernel values of all rows


@dataclass(frozen=True)
class PendulumOptions:
    """What to study.

    Attributes
    ----------
    rows
        Sizes of the tables in a store.
    seeds
        Tables of 200 examples for the policies; the first is that of the figure.
    examples
        Rows of these tables.
    gammas
        Weights of each penalty.
    rank
        Pivots of the fits from a store.
    penalties
        Those of the figure; policies need rows.
    cluster
        Whether the largest table is also fitted on two processes.
    """

    rows: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    seeds: int = 2
    examples: int = EXAMPLES
    gammas: int = 5
    rank: int = 100
    penalties: tuple[str, ...] = PENALTIES
    cluster: bool = True

    def __post_init__(self) -> None:
        if min(self.rows, default=0) < 500:
            raise DataError(f"tables of at least 500 rows are needed, got {list(self.rows)}")


def run_pendulum(
    options: PendulumOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Make every part; write JSON, a picture and a page into the folder ``out``, if any."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    begin = time.time()
    tables = [Table.of(options.examples, seed) for seed in range(options.seeds)]
    paths = {}
    for penalty in options.penalties:
        paths[penalty] = tables[0].path(penalty, options.gammas)
        steps, gap = (
            max(each[key] for each in paths[penalty]["solutions"]) for key in ("steps", "gap")
        )
        progress.say(f"path of {penalty}: {steps} steps at most, gap {gap:.0e} at most")
    policies = [judged("true dynamics", true_outputs, {})]
    for seed, table in enumerate(tables):
        if seed == 0 and "rows" in paths:
            path = paths["rows"]
        else:
            path = table.path("rows", options.gammas, few=True)
        policies += [judged(name, *each, seed=seed) for name, each in table.models(path).items()]
        progress.say(f"policies of the table {seed}: {policies[-4]['balanced']} balanced")
    with TemporaryDirectory(prefix=".cme-dask-pendulum-", dir=out) as folder:
        large = Large(Path(folder), options, progress).measure()
    result = {
        "kind": "pendulum",
        "schema_version": SCHEMA_VERSION,
        "seconds": time.time() - begin,
        "machine": describe_machine(),
        "settings": {
            "examples": options.examples,
            "rows": list(options.rows),
            "seeds": options.seeds,
            "starts": _STARTS,
            "test": _TEST,
            "success": SUCCESS,
            "kernels": [repr(kernel) for kernel in _KERNELS],
            "reg": _REG,
            "large_reg": _LARGE_REG,
        },
        "dense": tables[0].dense(),
        "paths": paths,
        "cholesky": tables[0].cholesky(),
        "policies": policies,
        "large": large,
        "run": sparse_run(tables[0], paths["rows"]),
        "files": [],
    }
    result["verdicts"] = _verdicts(result)
    if out is not None:
        write_result(
            result, out, OUTPUTS[:2], pendulum_picture, progress, {OUTPUTS[2]: pendulum_page}
        )
    return result


# Figure 1: the sparse embeddings of one table, beside incomplete Cholesky


@dataclass(frozen=True, eq=False)
class Table:
    """A few examples, and the dense embedding W = (K + n r)^-1 of all of them.

    Attributes
    ----------
    x, y
        The examples.
    weights
        W, shape (n, n).
    problem
        In the orthonormal functions of the Gram matrices' eigenvectors.
    held_out
        Values of these functions of x and of y at fresh transitions.
    """

    x: Array
    y: Array
    weights: Array
    problem: SparseProblem
    held_out: tuple[Array, Array]

    @classmethod
    def of(cls, examples: int, seed: int) -> "Table":
        """Draw a table."""
        x, y = transitions(examples, seed)
        fresh = transitions(_TEST, 1_000 + seed)
        weights = np.linalg.inv(_KERNELS[0](x, x) + examples * _REG * np.eye(examples))
        factors, values = [], []
        for kernel, rows, new in zip(_KERNELS, (x, y), fresh, strict=True):
            lam, vectors = np.linalg.eigh(kernel(rows, rows))
            vectors, lam = vectors[:, lam > _FLAT * lam[-1]], lam[lam > _FLAT * lam[-1]]
            factors.append(vectors * np.sqrt(lam))
            values.append(kernel(new, rows) @ (vectors / np.sqrt(lam)))
        target = factors[0].T @ weights @ factors[1]
        of_x, of_y = factors
        penalty = Penalty.of("l1", (examples, examples))
        problem = SparseProblem(of_x, of_y, target, penalty)
        return cls(x, y, weights, problem, (values[0], values[1]))

    def path(self, penalty: str, gammas: int, few: bool = False) -> Result:
        """Sparse embeddings from the largest gamma down, all or those of few points, and errors."""
        begin = time.process_time()
        problem = replace(self.problem, penalty=Penalty.of(penalty, (len(self.x), len(self.x))))
        shares = _RATIO ** (np.arange(1, gammas + 1) / gammas)
        solutions: list[Result] = []
        coefs: list[tuple[Array, Array]] = []
        for (state, steps), share in zip(
            sparse_path(problem, (shares * problem.gamma_max).tolist(), _GAP, _STEPS),
            shares,
            strict=True,
        ):
            support = state.point != 0.0
            if few and coefs and support.any(axis=1).sum() > SHARE * len(self.x):
                break
            rows, columns = (np.flatnonzero(support.any(axis=axis)) for axis in (1, 0))
            again = refitted(problem, state, _GAP)
            solutions.append(
                {
                    "share": float(share),
                    "coefs": int(support.sum()),
                    "points_x": len(rows),
                    "points_y": len(columns),
                    "objective": state.objective,
                    "gap": float(state.gap),
                    "steps": steps,
                    "refitted": self._errors(problem.embed(again.point))["distance"],
                    **self._errors(problem.embed(state.point)),
                }
            )
            coefs.append((state.point, again.point))
        sizes = np.array([each["points_x"] for each in solutions])
        chosen = max(0, int((sizes <= SHARE * len(self.x)).sum()) - 1)
        # The outputs of the model that has few points, and of its refit: coefficients of sin', cos'
        # and omega'.
        rows = np.flatnonzero(coefs[chosen][0].any(axis=1))
        return {
            "gamma_max": problem.gamma_max,
            "seconds": time.process_time() - begin,
            "solutions": solutions,
            "chosen": chosen,
            "points": rows.tolist(),
            "outputs": [(each @ self.y)[rows].tolist() for each in coefs[chosen]],
        }

    def cholesky(self) -> Result:
        """Best coefficients on pivots of x: with all outputs, and with the same rows' outputs."""
        pivots = pivoted_cholesky(_KERNELS[0], self.x, 1e-10).pivots
        counts = np.unique(np.geomspace(2, len(pivots), 40).astype(int))
        everything = np.arange(len(self.x))
        return {
            name: [
                {
                    "points_x": int(m),
                    "coefs": int(m * len(others(m))),
                    **self._errors(self._projected(pivots[:m], others(m))),
                }
                for m in counts
            ]
            for name, others in (
                ("all outputs", lambda _: everything),
                ("same rows", lambda m: pivots[:m]),
            )
        }

    def dense(self) -> Result:
        """Size and errors of the dense embedding, and what the library's fit differs by."""
        fit = ConditionalMeanEmbedding(
            kernel_x=_KERNELS[0],
            kernel_y=_KERNELS[1],
            pivots=(self.x, self.y),
            tol=1e-12,
            max_rank=len(self.x),
            reg=_REG,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)
            model = fit.fit(self.x, self.y, workers=1).model_
        fresh = transitions(_TEST, 999)[0]
        plain = _KERNELS[0](fresh, self.x) @ (self.weights @ self.y)
        return {
            "coefs": self.weights.size,
            "norm": float(np.linalg.norm(self.problem.target)),
            "loss": self._errors(self.problem.target)["loss"],
            "library": float(np.abs(model.expect(None, fresh) - plain).max()),
        }

    def models(self, path: Result) -> dict[str, tuple[Outputs, Result]]:
        """E[Y | x] of the dense, sparse and refitted embedding and of incomplete Cholesky."""
        rows, everything = np.array(path["points"], dtype=int), np.arange(len(self.x))
        pivots = pivoted_cholesky(_KERNELS[0], self.x, 1e-12, len(rows)).pivots
        chosen = path["solutions"][path["chosen"]]
        sparse, again = (
            partial(_expect, self.x[rows], np.reshape(each, (-1, 3))) for each in path["outputs"]
        )
        return {
            "dense": (
                partial(_expect, self.x, self.weights @ self.y),
                _size(everything, self.weights.size),
            ),
            "sparse": (sparse, _size(rows, chosen["coefs"])),
            "sparse, refitted": (again, _size(rows, chosen["coefs"])),
            "incomplete Cholesky": (
                self._regression(pivots),
                _size(pivots, len(rows) * len(self.x)),
            ),
        }

    def _regression(self, rows: Array) -> Outputs:
        """Ridge regression of all outputs on the kernel functions of some rows: a one-pass fit."""
        fit = ConditionalMeanEmbedding(
            kernel_x=_KERNELS[0],
            kernel_y=_KERNELS[1],
            pivots=(self.x[rows], self.y[rows]),
            reg=_REG,
            tol=1e-12,
            max_rank=len(self.x),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)
            return partial(fit.fit(self.x, self.y, workers=1).model_.expect, None)

    def _projected(self, rows: Array, columns: Array) -> Array:
        """The embedding on these points that is nearest to the dense one."""
        bases = [
            np.linalg.qr(factor[points].T)[0]
            for factor, points in (
                (self.problem.factor_x, rows),
                (self.problem.factor_y, columns),
            )
        ]
        inner = bases[0].T @ self.problem.target @ bases[1]
        return bases[0] @ inner @ bases[1].T

    def _errors(self, embedded: Array) -> Result:
        """Relative distance (16) to the dense embedding, and loss on fresh transitions."""
        target, (of_x, of_y) = self.problem.target, self.held_out
        mean = of_x @ embedded
        loss = 1.0 - 2.0 * (mean * of_y).sum(axis=1) + (mean**2).sum(axis=1)
        return {
            "distance": float(np.linalg.norm(target - embedded) / np.linalg.norm(target)),
            "loss": float(loss.mean()),
        }


def _expect(points: Array, coefs: Array, inputs: Array) -> Array:
    return _KERNELS[0](inputs, points) @ coefs


def _size(points: Array, coefs: int) -> Result:
    return {"points_x": len(points), "coefs": int(coefs)}


# Policies


def judged(name: str, outputs: Outputs, size: Result, seed: int = 0) -> Result:
    """Learn a policy with the model, and simulate it."""
    policy = policy_iteration(outputs)
    runs = simulate(policy.torques, _STARTS)
    answers, iteration = policy.seconds
    return {
        "name": name,
        "seed": seed,
        **size,
        "balanced": int(balanced(runs).sum()),
        "return": float(returns(runs).mean()),
        "iterations": policy.iterations,
        "answer_seconds": answers,
        "iteration_seconds": iteration,
    }


def sparse_run(table: Table, path: Result) -> Result:
    """States of one simulated start under the policy of the sparse embedding, refitted."""
    policy = policy_iteration(table.models(path)["sparse, refitted"][0])
    states = simulate(policy.torques, 1)[:, 0]
    return {"step": STEP, "states": states.tolist(), "torques": policy.torques(states).tolist()}


# Tables in a store, and what queries cost


@dataclass(frozen=True, eq=False)
class Large:
    """Fits from a store, one pass each.

    Attributes
    ----------
    folder
        For the stores.
    options
        Sizes.
    progress
        Where lines go.
    """

    folder: Path
    options: PendulumOptions
    progress: ProgressLines

    def measure(self) -> Result:
        """Fits, policies and times of queries at each size; the rest at the largest."""
        sizes = []
        for rows in sorted(self.options.rows):
            store = self.folder / f"{rows}.zarr"
            with writing_sample(store, COLUMNS, expected_rows=rows) as writer:
                for x, y in batches(rows, 7):
                    writer.append(x, y)
            dense, fitted = self._timed(self._dense(self.options.rank), store, workers=1)
            policy = judged("pivots", partial(dense.model_.expect, None), fitted)
            sizes.append(policy | self._query_times(rows, dense))
            self.progress.say(f"{rows:,} rows: fitted in {fitted['fit_seconds']:.1f} s")
        at, policies = transitions(_QUERIES, 5)[0], []
        for name, relax in (("sparse", False), ("sparse, refitted", True)):
            sparse, fitted = self._timed(self._sparse(relax), store, workers=1)
            few = np.flatnonzero(sparse.path_.counts[:, 1] <= SHARE * dense.basis_x_.rank)
            model = sparse.model_at(int(few[-1]) if few.size else 0)
            size = {"points_x": len(model.points_x), "coefs": int(np.count_nonzero(model.coef))}
            outputs = partial(model.expect, None)
            policies.append(judged(name, outputs, fitted | size))
            sizes[-1]["query_us"]["sparse"] = _microseconds(outputs, at)
        return {
            "sizes": sizes,
            "policies": policies,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "equal": self._equal(store, dense),
        }

    def _sparse(self, relax: bool) -> SparseEmbedding:
        return SparseEmbedding(
            penalty="rows",
            kernel_x=_KERNELS[0],
            kernel_y=_KERNELS[1],
            reg=_LARGE_REG,
            max_rank=self.options.rank,
            tol=1e-12,
            n_folds=2,
            n_gammas=_LARGE_GAMMAS,
            gamma_ratio=_LARGE_RATIO,
            relax=relax,
            gap=1e-6,
            random_state=0,
        )

    def _dense(self, rank: int) -> ConditionalMeanEmbedding:
        return ConditionalMeanEmbedding(
            kernel_x=_KERNELS[0],
            kernel_y=_KERNELS[1],
            reg=_LARGE_REG,
            max_rank=rank,
            tol=1e-12,
            random_state=0,
        )

    def _timed(self, estimator: Any, store: Path, **options: Any) -> tuple[Any, Result]:
        """The fit, and its wall time, passes and size."""
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)
            estimator.fit(str(store), **options)
        return estimator, {
            "rows": int(estimator.moments_.n_rows),
            "points_x": estimator.basis_x_.rank,
            "fit_seconds": time.perf_counter() - begin,
            "passes": estimator.n_passes_,
        }

    def _query_times(self, rows: int, dense: ConditionalMeanEmbedding) -> Result:
        """Microseconds of E[Y | x] per point: kernel functions of all rows, and of the pivots."""
        at, points = transitions(_QUERIES, 5)[0], transitions(rows, 7)[0]
        few = at[: max(20, _MOST // rows)]
        coefs = np.ones((rows, 3))

        def every_row(inputs: Array) -> Array:
            parts = range(0, rows, 10_000)
            return sum(
                _expect(points[i : i + 10_000], coefs[i : i + 10_000], inputs) for i in parts
            )

        times = {"all rows": _microseconds(every_row, few)}
        return {
            "query_us": times | {"pivots": _microseconds(partial(dense.model_.expect, None), at)}
        }

    def _equal(self, store: Path, dense: ConditionalMeanEmbedding) -> dict[str, bool]:
        """Whether other schedulers give the same bits of the model."""
        others = {"two threads": self._timed(self._dense(self.options.rank), store, workers=2)[0]}
        if self.options.cluster:
            with (
                running_cluster(self.folder / "cluster", 2) as cluster,
                connected(cluster.address) as client,
            ):
                fit = self._timed(self._dense(self.options.rank), store, scheduler=client)
            others["a two-worker cluster"] = fit[0]
        at = transitions(_QUERIES, 5)[0]
        return {
            name: bool(
                np.array_equal(fit.model_.operator, dense.model_.operator)
                and np.array_equal(fit.model_.expect(None, at), dense.model_.expect(None, at))
            )
            for name, fit in others.items()
        }


def _microseconds(outputs: Outputs, inputs: Array) -> float:
    """Least time of three, per point."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        outputs(inputs)
        times.append(time.perf_counter() - begin)
    return 1e6 * min(times) / len(inputs)


# Verdicts, tables, page and picture


def _verdicts(result: Result) -> Result:
    """Sparse against incomplete Cholesky at equal coefficients; sparse policies against the aim."""
    nearer: dict[str, Result] = {}
    for penalty, path in result["paths"].items():
        nearer[penalty] = {}
        for name, curve in result["cholesky"].items():
            at = [
                np.interp(
                    np.sqrt(each["coefs"]),
                    np.sqrt([point["coefs"] for point in curve]),
                    [point["distance"] for point in curve],
                )
                for each in path["solutions"]
            ]
            ratios = [
                each["distance"] / float(other)
                for each, other in zip(path["solutions"], at, strict=True)
            ]
            nearer[penalty][name] = {
                "ratios": ratios,
                "nearer": sum(ratio < 1.0 for ratio in ratios),
            }
    few = SHARE * result["settings"]["examples"]
    return {
        "distance_over_cholesky": nearer,
        "met": {
            name: sum(
                p["balanced"] >= 0.95 * _STARTS and p["points_x"] <= few
                for p in result["policies"]
                if p["name"] == name
            )
            for name in ("sparse", "sparse, refitted")
        },
    }
