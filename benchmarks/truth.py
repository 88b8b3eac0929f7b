"""The study of truth: how far laws are from known ones, and densities from kernel estimates."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import logsumexp
from threadpoolctl import threadpool_limits

from benchmarks.methods import Judge, MethodStudy, counted
from benchmarks.study import mean_and_error
from benchmarks.truths import TRUTHS, Truth
from cme_dask.cli.tables import grid
from cme_dask.display import number, with_error
from cme_dask.errors import DataError
from cme_dask.estimators.comparison import ROWS, training_rows
from cme_dask.estimators.peers import ATOMS, METHODS, Answers, Training
from cme_dask.models.plots import PALETTE, picture
from cme_dask.passes.sources import open_sample

Array = Any
Result = dict[str, Any]

OURS, RIVAL = "joint", "quantile-forest"
SIZES = (2_000, 20_000)
SEEDS = 3
TEST_ROWS = 2_000
"""Rows of x at which laws are compared with the true ones."""

DENSITY_ROWS, DRAWS = 1_000, 1_000
"""Rows at which densities are, and draws that a kernel density estimate has at each."""

AIMS = {2_000: 0.04, 20_000: 0.01}
"""Largest excess over the true CRPS that is aimed at, by rows."""

NATS = 0.1
"""How far the log score of the density may be above that of a kernel density estimate."""

LEAST_LOG_DENSITY = float(np.log(np.nextafter(0.0, 1.0)))
"""Logarithm of the smallest density that counts."""

_TEST_SEED = 1_000_003  # of the rows that laws are compared at: no seed of training rows
_BLOCK = 500  # rows whose laws are held at once


# How far a law is from the true one


def crps_of(atoms: Array) -> Array:
    r"""Expected CRPS of laws of equally likely ascending atoms (n, S) at their own draws, (n,).

    .. math:: \int F (1 - F) \, dz
    """
    share = np.arange(1, atoms.shape[1]) / atoms.shape[1]
    return np.diff(atoms, axis=1) @ (share * (1.0 - share))


def excess_crps(atoms: Array, true: Array) -> Array:
    r"""What the expected CRPS of laws is above that of the true ones, shape (n,).

    .. math:: \int (F - F_0)^2 \, dz

    Both are equally likely atoms, shapes (n, S) and (n, T): quantiles of levels (k - 1/2) / S have
    an error of the order 1 / S^2.
    """
    z = np.concatenate([atoms, true], axis=1)
    step = np.concatenate(
        [np.full(atoms.shape, 1.0 / atoms.shape[1]), np.full(true.shape, -1.0 / true.shape[1])],
        axis=1,
    )
    order = np.argsort(z, axis=1, kind="stable")
    z, step = np.take_along_axis(z, order, axis=1), np.take_along_axis(step, order, axis=1)
    gap = np.cumsum(step, axis=1)[:, :-1]
    return np.einsum("ns,ns,ns->n", gap, gap, np.diff(z, axis=1))


def kernel_log_density(draws: Array, y: Array) -> Array:
    """Logarithm of a local normal kernel density estimate at y (n, d) from draws (n, S, d), (n,).

    Its bandwidths are Silverman's: min(std, IQR / 1.34) (4 / ((d + 2) S))^(1 / (d + 4)), where
    quartiles that nearly coincide count as a tenth of the standard deviation. Densities below the
    smallest positive float64 count as that, as in log scores of laws.
    """
    _, size, d = draws.shape
    low, high = np.quantile(draws, [0.25, 0.75], axis=1)
    std, robust = draws.std(axis=1), (high - low) / 1.34
    spread = np.clip(robust, 0.1 * std, std)
    width = spread * (4.0 / ((d + 2.0) * size)) ** (1.0 / (d + 4.0))
    z = (y[:, None] - draws) / width[:, None]
    logarithms = -0.5 * (z**2).sum(axis=2)
    scale = np.log(width * np.sqrt(2.0 * np.pi)).sum(axis=1) + np.log(size)
    return np.maximum(logsumexp(logarithms, axis=1) - scale, LEAST_LOG_DENSITY)


def judge(name: str, n: int, seed: int) -> Result:
    """Figures of a law and method, ``law/method``, fitted on n draws in one thread."""
    which, method = name.split("/")
    truth = TRUTHS[which]
    x, y = truth.draw(n, seed)
    begin, cpu = time.perf_counter(), time.process_time()
    with threadpool_limits(1):
        answers = _fitted(method, training_rows(open_sample(x, y), ROWS, 1, seed))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        at, observed = truth.draw(TEST_ROWS, _TEST_SEED + seed)
        excess, true = np.zeros(TEST_ROWS), np.zeros(TEST_ROWS)
        for start in range(0, TEST_ROWS, _BLOCK):
            rows = slice(start, start + _BLOCK)
            for j, law in enumerate(_atoms(answers, at[rows], truth)):
                levels = np.broadcast_to(np.array(ATOMS), law.shape)
                exact = truth.quantile(at[rows], levels, j)
                excess[rows] += excess_crps(law, exact) / truth.columns
                true[rows] += crps_of(exact) / truth.columns
        result = {
            "excess": float(excess.mean() / true.mean()),
            "crps": float(true.mean()),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }
        if method == OURS and truth.log_pdf is not None:
            result |= _densities(answers[0], truth, at, observed)
    return result


def _fitted(method: str, training: Training) -> list[Answers]:
    """Answers for all columns of y at once, or for each."""
    names = training.sample.columns[1].names
    if method == OURS:
        return [METHODS[method].fit(training)]
    each = (training.sample.select(None, [name]) for name in names)
    return [METHODS[method].fit(training_rows(one, ROWS, 1, training.seed)) for one in each]


def _atoms(answers: Sequence[Answers], x: Array, truth: Truth) -> list[Array]:
    """Equally likely atoms of each column of y at x, shapes (b, S), ascending."""
    values = [np.asarray(law(x).quantile(ATOMS)) for law in answers]
    if truth.columns > 1 and len(values) == 1:
        values = [values[0][..., j] for j in range(truth.columns)]
    return [np.sort(each, axis=1) for each in values]


def _densities(answers: Answers, truth: Truth, x: Array, y: Array) -> Result:
    """Log scores of the density, of a kernel estimate from draws of the law, and of the truth."""
    assert truth.log_pdf is not None
    own, kernel = np.empty(DENSITY_ROWS), np.empty(DENSITY_ROWS)
    for start in range(0, DENSITY_ROWS, _BLOCK):
        rows = slice(start, min(start + _BLOCK, DENSITY_ROWS))
        law = answers(x[rows])
        own[rows] = np.maximum(law.log_pdf(y[rows], paired=True), LEAST_LOG_DENSITY)
        draws = np.asarray(law.sample(DRAWS, first=start)).reshape(len(x[rows]), DRAWS, -1)
        kernel[rows] = kernel_log_density(draws, y[rows])
    exact = truth.log_pdf(x[:DENSITY_ROWS], y[:DENSITY_ROWS])
    return {
        "log_score": float(-own.mean()),
        "kernel_log_score": float(-kernel.mean()),
        "true_log_score": float(-exact.mean()),
    }


# The study


@dataclass(frozen=True)
class TruthOptions:
    """What to study.

    Attributes
    ----------
    scenarios
        Of ``TRUTHS``.
    rows
        Sizes of the training samples.
    seeds
        Draws of each.
    methods
        Of ``METHODS``.
    workers
        Processes; default one per core.
    """

    scenarios: tuple[str, ...] = tuple(TRUTHS)
    rows: tuple[int, ...] = SIZES
    seeds: int = SEEDS
    methods: tuple[str, ...] = (OURS, RIVAL)
    workers: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.scenarios) - set(TRUTHS))
        if unknown:
            raise DataError(
                f"scenarios must be among {', '.join(TRUTHS)}, got {', '.join(unknown)}"
            )
        if min(self.rows, default=0) < 50:
            raise DataError(f"samples of at least 50 rows are needed, got {list(self.rows)}")

    def cells(self) -> list[tuple[str, int, int]]:
        """Law, rows and number of draws."""
        return [(name, n, self.seeds) for n in self.rows for name in self.scenarios]

    def judge(self) -> Judge:
        """Of one method on one draw."""
        return judge

    def to_dict(self) -> Result:
        """The settings."""
        return {
            "seeds": self.seeds,
            "rows": list(self.rows),
            "methods": list(self.methods),
            "test_rows": TEST_ROWS,
            "density_rows": DENSITY_ROWS,
            "draws": DRAWS,
        }


def _cell(name: str, rows: int, runs: dict[str, list[Result]]) -> Result:
    """JSON form of a law: figures of all methods, and how ours compares."""
    models = {
        method: {figure: mean_and_error([run[figure] for run in each]) for figure in each[0]}
        for method, each in runs.items()
    }
    return {"scenario": name, "rows": rows, "models": models, "verdict": _verdict(rows, models)}


def _verdict(rows: int, models: Result) -> Result | None:
    if OURS not in models:
        return None
    ours, aim = models[OURS], AIMS.get(rows)
    excess = ours["excess"]["mean"]
    gap = None
    if "log_score" in ours:
        gap = ours["log_score"]["mean"] - ours["kernel_log_score"]["mean"]
    return {
        "near": None if aim is None else excess <= aim,
        "below_rival": None if RIVAL not in models else excess < models[RIVAL]["excess"]["mean"],
        "gap": gap,
        "dense": None if gap is None else gap <= NATS,
    }


def truth_tables(result: Result) -> Iterator[Any]:
    """For each size the excess of all methods, and the log scores of our densities."""
    settings = result["settings"]
    for rows in settings["rows"]:
        cells = [cell for cell in result["cells"] if cell["rows"] == rows]
        methods = list(cells[0]["models"])
        aim = AIMS.get(rows)
        yield grid(
            f"Excess over the true CRPS in %, {rows:,} rows",
            ("", "true CRPS", *methods, *(f"CPU s, {method}" for method in methods), "met"),
            [
                (
                    cell["scenario"],
                    number(next(iter(cell["models"].values()))["crps"]["mean"]),
                    *(_percent(cell["models"][method]["excess"]) for method in methods),
                    *(
                        number(cell["models"][method]["cpu_seconds"]["mean"], 3)
                        for method in methods
                    ),
                    _met(cell["verdict"]),
                )
                for cell in cells
            ],
            f"Means over {counted(settings['seeds'], 'draw')}, at {settings['test_rows']:,} rows "
            "of x. Met: "
            + (f"{OURS} is at most {aim:.0%} above, and " if aim is not None else f"{OURS} is ")
            + f"below {RIVAL}.",
        )
        yield ""
        dense = [cell for cell in cells if (cell["verdict"] or {}).get("gap") is not None]
        if dense:
            yield _density_table(dense, settings)
            yield ""


def _density_table(cells: Sequence[Result], settings: Result) -> Any:
    names = ("true_log_score", "log_score", "kernel_log_score")
    return grid(
        f"Log scores, {cells[0]['rows']:,} rows",
        ("", "true density", "pdf", "kernel estimate", "pdf above it", "met"),
        [
            (
                cell["scenario"],
                *(f"{cell['models'][OURS][name]['mean']:.3f}" for name in names),
                f"{cell['verdict']['gap']:+.3f}",
                "yes" if cell["verdict"]["dense"] else "no",
            )
            for cell in cells
        ],
        f"At {settings['density_rows']:,} rows; the kernel estimate is made of "
        f"{settings['draws']:,} draws of the same law at each. Met: at most {NATS} nats above it.",
    )


def _percent(values: Result) -> str:
    error = values["std_error"] if len(values["values"]) > 1 else None
    return with_error(100.0 * values["mean"], None if error is None else 100.0 * error)


def _met(verdict: Result | None) -> str:
    tests = [verdict[key] for key in ("near", "below_rival")] if verdict else []
    known = [test for test in tests if test is not None]
    return "-" if not known else "yes" if all(known) else "no"


def truth_picture(result: Result, path: Path) -> None:
    """Draw the excess of each method by law, a panel for each number of rows.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    sizes = result["settings"]["rows"]
    with picture(path, 5.2 * len(sizes), 4.4, dpi=130) as figure:
        axes = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
        for ax, rows in zip(axes, sizes, strict=True):
            cells = [cell for cell in result["cells"] if cell["rows"] == rows]
            for i, method in enumerate(cells[0]["models"]):
                values = [cell["models"][method]["excess"] for cell in cells]
                ax.errorbar(
                    [100.0 * each["mean"] for each in values],
                    range(len(cells)),
                    xerr=[100.0 * each["std_error"] for each in values],
                    color=PALETTE[i % len(PALETTE)],
                    marker="o",
                    ls="",
                    label=method if ax is axes[0] else None,
                )
            if rows in AIMS:
                ax.axvline(100.0 * AIMS[rows], color="#bbbbbb", lw=0.8, zorder=0)
            ax.set_yticks(range(len(cells)), [cell["scenario"] for cell in cells])
            ax.set(xscale="log", title=f"{rows:,} rows", xlabel="excess over the true CRPS, %")
        axes[0].invert_yaxis()
        figure.legend(loc="outside lower center", ncols=8, frameon=False)


STUDY = MethodStudy("truth", TruthOptions, _cell, truth_picture, truth_tables)
