"""The study of the pendulum: figure 1 of Grünewälder et al. (2012), policies, a million rows."""

import resource
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
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
from cme_dask.models.sparse import SparseModel
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.sparse import PENALTIES
from cme_dask.passes.cluster import connected
from cme_dask.passes.processes import begin_worker

Array = Any
Result = dict[str, Any]

OUTPUTS = ("pendulum.json", "pendulum.png", "pendulum.md")
SCHEMA_VERSION = 3
EXAMPLES = 200
SHARE = 0.2
"""Share of the points of the dense embedding that a sparse policy may have."""

AIM = 0.95
"""Share of the starts that a sparse policy is to balance."""

KINDS = ("penalised", "relaxed")

_KERNELS = Gaussian((1.5, 1.5, 8.0, 16.0)), Gaussian((1.0, 1.0, 5.0))
_REG, _LARGE_REG = 1e-4, 1e-6
_TOL = 1e-8  # of the candidates of a sparse embedding
_GAP, _STEPS = 1e-4, 2_000
_RATIO = {"l1": 1e-3}  # smallest gamma over the largest one, for the figure
_OTHER_RATIO, _POLICY_RATIO = 1e-2, 0.1
_POLICY_GAMMAS = 10
_FLAT = 1e-10  # eigenvalues of Gram matrices below this share of the largest are rounding
_TEST, _STARTS = 2_000, 100
_QUERIES = 4_000  # points asked at once, of every model
_BLOCK = 1_000  # rows whose kernel functions are held at once, at all of these points
_ONCE = 200_000  # rows from which the kernel functions of all rows are timed once, not three times


@dataclass(frozen=True)
class PendulumOptions:
    """What to study.

    Attributes
    ----------
    rows
        Sizes of the tables in a store.
    seeds
        Tables of examples for the policies; the first is that of the figure.
    examples
        Rows of these tables.
    gammas
        Weights of each penalty, for the figure.
    rank
        Pivots of the fits from a store.
    penalties
        Those of the figure.
    cluster
        Whether the largest table is also fitted on two processes.
    workers
        Processes for paths and policies; default one per core.
    """

    rows: tuple[int, ...] = (200, 1_000, 10_000, 100_000, 1_000_000)
    seeds: int = 5
    examples: int = EXAMPLES
    gammas: int = 10
    rank: int = 100
    penalties: tuple[str, ...] = PENALTIES
    cluster: bool = True
    workers: int | None = None

    def __post_init__(self) -> None:
        if min(self.rows, default=0) < 200:
            raise DataError(f"tables of at least 200 rows are needed, got {list(self.rows)}")


def run_pendulum(
    options: PendulumOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Make every part; write JSON, a picture and a page into the folder ``out``, if any."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    begin = time.time()
    table = Table.of(options.examples, 0)
    with ProcessPoolExecutor(options.workers, get_context("spawn"), begin_worker) as pool:
        path_of = partial(penalty_path, options.examples, options.gammas)
        solved = pool.map(path_of, options.penalties)
        learned = pool.map(partial(table_policies, options.examples), range(options.seeds))
        paths = dict(zip(options.penalties, solved, strict=True))
        for penalty, path in paths.items():
            steps, gap = (max(each[key] for each in path) for key in ("steps", "gap"))
            progress.say(f"path of {penalty}: {steps} steps at most, gap {gap:.0e} at most")
        policies, runs = [judged("true dynamics", true_outputs, {})], []
        for seed, (policies_of, run) in enumerate(learned):
            policies += policies_of
            runs.append(run)
            last = {policy["name"]: policy["balanced"] for policy in policies_of}
            progress.say(f"table {seed + 1}, starts that end balanced: {last}")
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
            "pivots": options.rank,
            "share": SHARE,
            "aim": AIM,
        },
        "dense": table.dense(),
        "paths": paths,
        "cholesky": table.cholesky(),
        "policies": policies,
        "large": large,
        "run": runs[0],
        "files": [],
    }
    result["verdicts"] = _verdicts(result)
    if out is not None:
        write_result(
            result, out, OUTPUTS[:2], pendulum_picture, progress, {OUTPUTS[2]: pendulum_page}
        )
    return result


def penalty_path(examples: int, gammas: int, penalty: str) -> list[Result]:
    """The path of a penalty on the first table."""
    return Table.of(examples, 0).path(penalty, gammas)


def table_policies(examples: int, seed: int) -> tuple[list[Result], Result]:
    """Policies that the models of a table learn, and a simulated run under that of the sparse."""
    models = Table.of(examples, seed).models()
    policies = [judged(name, *each, seed=seed) for name, each in models.items()]
    return policies, simulated_run(models["sparse"][0])


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
    factors
        Values at the examples of the orthonormal functions of x and of y that the Gram matrices'
        eigenvectors give.
    target
        The dense embedding in these functions.
    held_out
        Values of these functions at fresh transitions.
    """

    x: Array
    y: Array
    weights: Array
    factors: tuple[Array, Array]
    target: Array
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
        of_x, of_y = factors
        target = of_x.T @ weights @ of_y
        return cls(x, y, weights, (of_x, of_y), target, (values[0], values[1]))

    def sparse(self, penalty: str, **options: Any) -> SparseEmbedding:
        """The library's fit, whose candidates are the examples that others do not span."""
        fit = SparseEmbedding(
            penalty=penalty,
            kernel_x=_KERNELS[0],
            kernel_y=_KERNELS[1],
            reg=_REG,
            tol=_TOL,
            max_rank=len(self.x),
            gap=_GAP,
            max_iter=_STEPS,
            random_state=0,
            **options,
        )
        fitted: SparseEmbedding = quietly(fit, self.x, self.y)
        return fitted

    def path(self, penalty: str, gammas: int) -> list[Result]:
        """Sizes and errors of relaxed solutions from the largest gamma down, and of those before.

        An embedding that is not relaxed has the support of the relaxed one, which is solved again
        on it.
        """
        ratio = _RATIO.get(penalty, _OTHER_RATIO)
        fit = self.sparse(penalty, relax=True, n_gammas=gammas, gamma_ratio=ratio, n_folds=2)
        path, solutions = fit.path_, []
        for i, gamma in enumerate(path.gammas):
            shrunk = self.sparse(penalty, gamma=float(gamma), n_folds=1)
            coefs, points_x, points_y = map(int, path.counts[i])
            solutions.append(
                {
                    "share": float(gamma / path.gamma_max),
                    "coefs": coefs,
                    "points_x": points_x,
                    "points_y": points_y,
                    "gap": max(float(path.gaps[i]), float(shrunk.path_.gaps[0])),
                    "steps": int(path.steps[i]),
                    "relaxed": self._model_errors(fit.model_at(i)),
                    "penalised": self._model_errors(shrunk.model_),
                }
            )
        return solutions

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
        model = quietly(fit, self.x, self.y).model_
        fresh = transitions(_TEST, 999)[0]
        weights = _KERNELS[0](fresh, self.x) @ self.weights
        remainder = 1.0 - weights.sum(axis=1, keepdims=True)  # spread evenly over all rows
        plain = weights @ self.y + remainder * self.y.mean(axis=0)
        return {
            "coefs": self.weights.size,
            "norm": float(np.linalg.norm(self.target)),
            "loss": self._errors(self.target)["loss"],
            "library": float(np.abs(model.expect(None, fresh) - plain).max()),
        }

    def models(self) -> dict[str, tuple[Outputs, Result]]:
        """E[Y | x] of the models whose policies are compared, with their sizes."""
        n = len(self.x)
        fit = self.sparse(
            "rows", relax=True, n_gammas=_POLICY_GAMMAS, gamma_ratio=_POLICY_RATIO, n_folds=2
        )
        relaxed = densest(fit, SHARE * n)
        shrunk = self.sparse("rows", gamma=relaxed.about["gamma"], n_folds=1).model_
        pivots = pivoted_cholesky(_KERNELS[0], self.x, 1e-12, len(relaxed.points_x)).pivots
        return {
            "dense": (partial(_expect, self.x, self.weights @ self.y), _size(n, n * n)),
            "sparse": (partial(relaxed.expect, None), _model_size(relaxed)),
            "sparse, not relaxed": (partial(shrunk.expect, None), _model_size(shrunk)),
            "incomplete Cholesky": (
                self._regression(pivots),
                _size(len(pivots), len(pivots) * n),
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
        return partial(quietly(fit, self.x, self.y).model_.expect, None)

    def _model_errors(self, model: SparseModel) -> Result:
        """Of a sparse embedding, by its points and coefficients alone."""
        of_x, of_y = (
            factor[(rows == points[:, None]).all(axis=2).argmax(axis=1)]
            for factor, rows, points in zip(
                self.factors, (self.x, self.y), (model.points_x, model.points_y), strict=True
            )
        )
        return self._errors(of_x.T @ model.coef @ of_y)

    def _projected(self, rows: Array, columns: Array) -> Array:
        """The embedding on these points that is nearest to the dense one."""
        bases = [
            np.linalg.qr(factor[points].T)[0]
            for factor, points in zip(self.factors, (rows, columns), strict=True)
        ]
        inner = bases[0].T @ self.target @ bases[1]
        return bases[0] @ inner @ bases[1].T

    def _errors(self, embedded: Array) -> Result:
        """Relative distance (16) to the dense embedding, and loss on fresh transitions."""
        target, (of_x, of_y) = self.target, self.held_out
        mean = of_x @ embedded
        loss = 1.0 - 2.0 * (mean * of_y).sum(axis=1) + (mean**2).sum(axis=1)
        return {
            "distance": float(np.linalg.norm(target - embedded) / np.linalg.norm(target)),
            "loss": float(loss.mean()),
        }


def _expect(points: Array, coefs: Array, inputs: Array) -> Array:
    return _KERNELS[0](inputs, points) @ coefs


def _size(points: int, coefs: int) -> Result:
    return {"points_x": points, "coefs": coefs}


def _model_size(model: SparseModel) -> Result:
    return _size(len(model.points_x), int(np.count_nonzero(model.coef)))


def densest(fit: SparseEmbedding, points: float) -> SparseModel:
    """The model of the smallest gamma of the path that has at most so many points of x."""
    few = np.flatnonzero(fit.path_.counts[:, 1] <= points)
    return fit.model_at(int(few[-1]) if few.size else 0)


def quietly(estimator: Any, *data: Any, **options: Any) -> Any:
    """The fitted estimator, without the warning that the rank is limited, which is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        return estimator.fit(*data, **{"workers": 1} | options)


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


def simulated_run(outputs: Outputs) -> Result:
    """States of one simulated start under the policy of a model."""
    policy = policy_iteration(outputs)
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
            dense, fitted = self._timed(self._dense(self.options.rank), store)
            policy = judged("pivots", partial(dense.model_.expect, None), fitted)
            sizes.append(policy | self._query_times(rows, dense))
            self.progress.say(f"{rows:,} rows: fitted in {fitted['fit_seconds']:.1f} s")
        at, policies = transitions(_QUERIES, 5)[0], []
        path = {"n_gammas": _POLICY_GAMMAS, "gamma_ratio": _POLICY_RATIO, "relax": True}
        fit, fitted = self._timed(self._sparse(n_folds=2, **path), store)
        relaxed = densest(fit, SHARE * dense.basis_x_.rank)
        shrunk, once = self._timed(self._sparse(n_folds=1, gamma=relaxed.about["gamma"]), store)
        for name, model, figures in (
            ("sparse", relaxed, fitted),
            ("sparse, not relaxed", shrunk.model_, once),
        ):
            outputs = partial(model.expect, None)
            query = {"query_us": {"pivots": _microseconds(outputs, at)}}
            policies.append(judged(name, outputs, figures | _model_size(model)) | query)
        sizes[-1]["query_us"]["sparse"] = policies[0]["query_us"]["pivots"]
        return {
            "sizes": sizes,
            "policies": policies,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "equal": self._equal(store, dense),
        }

    def _sparse(self, **options: Any) -> SparseEmbedding:
        return SparseEmbedding(
            penalty="rows",
            kernel_x=_KERNELS[0],
            kernel_y=_KERNELS[1],
            reg=_LARGE_REG,
            max_rank=self.options.rank,
            tol=1e-12,
            gap=_GAP,
            max_iter=_STEPS,
            random_state=0,
            **options,
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
        quietly(estimator, str(store), **options)
        return estimator, {
            "rows": int(estimator.moments_.n_rows),
            "points_x": estimator.basis_x_.rank,
            "fit_seconds": time.perf_counter() - begin,
            "passes": estimator.n_passes_,
        }

    def _query_times(self, rows: int, dense: ConditionalMeanEmbedding) -> Result:
        """Microseconds of E[Y | x] per point: kernel functions of all rows, and of the pivots."""
        at, points = transitions(_QUERIES, 5)[0], transitions(rows, 7)[0]
        coefs = np.ones((rows, 3))

        def every_row(inputs: Array) -> Array:
            parts = (slice(i, i + _BLOCK) for i in range(0, rows, _BLOCK))
            return sum(_expect(points[part], coefs[part], inputs) for part in parts)

        repeats = 3 if rows < _ONCE else 1
        return {
            "query_us": {
                "all rows": _microseconds(every_row, at, repeats),
                "pivots": _microseconds(partial(dense.model_.expect, None), at),
            },
            "query_points": dict.fromkeys(("all rows", "pivots"), len(at)),
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


def _microseconds(outputs: Outputs, inputs: Array, repeats: int = 3) -> float:
    """Least time of some repeats, per point."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        outputs(inputs)
        times.append(time.perf_counter() - begin)
    return 1e6 * min(times) / len(inputs)


# Verdicts, tables, page and picture


def _verdicts(result: Result) -> Result:
    """Sparse against incomplete Cholesky at equal coefficients; sparse policies against the aim."""
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}
    for penalty, path in result["paths"].items():
        at = np.sqrt([each["coefs"] for each in path])
        ratios[penalty] = {kind: {} for kind in KINDS}
        for name, curve in result["cholesky"].items():
            other = np.interp(
                at,
                np.sqrt([point["coefs"] for point in curve]),
                [point["distance"] for point in curve],
            )
            for kind in KINDS:
                distances = np.array([each[kind]["distance"] for each in path])
                ratios[penalty][kind][name] = (distances / other).tolist()
    few = SHARE * result["settings"]["examples"]
    met: dict[str, list[int]] = {"sparse": [], "sparse, not relaxed": []}
    for policy in result["policies"]:
        if policy["name"] in met and policy["points_x"] <= few:
            met[policy["name"]].append(policy["balanced"])
    return {
        "distance_over_cholesky": ratios,
        "met": {name: sum(n >= AIM * _STARTS for n in each) for name, each in met.items()},
    }
