"""The study of transfer operators: eigenvalues beside known ones, and beside kooplearn's."""

import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.signal import lfilter
from scipy.special import beta, binom

from benchmarks.run import write_result
from benchmarks.study import StudyOptions, judge_cells
from cme_dask import TransferOperator, kernels
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.models.plots import PALETTE, STYLE

Array = Any
Result = dict[str, Any]

DECAY = float(np.exp(-0.25))  # of the Ornstein-Uhlenbeck process with theta = 1 and dt = 0.25
NOISE = 10  # half the power of the cosine in the noise of the logistic map
LEADING = 5
"""Eigenvalues that are compared, that of the constant function included."""

RANK, CENTERS = 20, 100  # of kooplearn's estimators
DENSE_ROWS, CENTERED_ROWS = 19_000, 1_000_000
"""Rows that kooplearn's estimators are given: five n x n matrices in 16 GB, and as a choice."""

OUTPUTS = "koopman.json", "koopman.png", "koopman.md"
_WARM_ROWS = 300


def ornstein_uhlenbeck(n: int, seed: int) -> Array:
    """A stationary path, shape (n, 1)."""
    noise = np.sqrt(1.0 - DECAY**2) * np.random.default_rng(seed).normal(size=n)
    noise[0] /= np.sqrt(1.0 - DECAY**2)
    return lfilter([1.0], [1.0, -DECAY], noise)[:, None]


def logistic_map(n: int, seed: int) -> Array:
    """A path of x -> 4 x (1 - x) + noise modulo 1, shape (n, 1).

    The noise has a density in proportion to cos(pi t)^(2 NOISE): the sine of pi t is that of a beta
    distribution, brought to [-1, 1].
    """
    draws = np.random.default_rng(seed).beta(NOISE + 0.5, NOISE + 0.5, n + _WARM_ROWS)
    state, path = 0.3, []
    for noise in (np.arcsin(2.0 * draws - 1.0) / np.pi).tolist():
        state = (4.0 * state * (1.0 - state) + noise) % 1.0
        path.append(state)
    return np.array(path[_WARM_ROWS:])[:, None]


def logistic_eigenvalues() -> Array:
    r"""Eigenvalues of the noisy logistic map F by descending modulus, shape (2 NOISE + 1,).

    By the binomial theorem the density of a step from x to y is
    :math:`\sum_i \varphi_i(F(x)) \varphi_i(y)` with functions
    :math:`\varphi_i = c_i \sin^{2 N - i}(\pi y) \cos^i(\pi y)`, so that the operator has rank
    2 N + 1 and the eigenvalues of the matrix :math:`\int \varphi_i(x) \varphi_j(F(x)) dx`:
    Ostruszka et al. (2000), Dynamical entropy for systems with stochastic perturbation.
    """
    nodes, weights = _quadrature()
    values = np.linalg.eigvals(
        noise_functions(nodes).T @ (weights[:, None] * noise_functions(4.0 * nodes * (1.0 - nodes)))
    )
    return values[np.argsort(-np.abs(values))]


def noise_functions(y: Array) -> Array:
    """The functions of :func:`logistic_eigenvalues`, shape (n, 2 NOISE + 1)."""
    i, y = np.arange(2 * NOISE + 1), np.pi * y[:, None]
    scale = np.sqrt(np.pi * binom(2 * NOISE, i) / beta(NOISE + 0.5, 0.5))
    return np.asarray(scale * np.sin(y) ** (2 * NOISE - i) * np.cos(y) ** i)


def _quadrature() -> tuple[Array, Array]:
    """Nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    return (nodes + 1.0) / 2.0, weights / 2.0


@dataclass(frozen=True)
class Process:
    """A process whose eigenvalues are known.

    Attributes
    ----------
    path
        Draws a path from the number of rows and a seed.
    eigenvalues
        The leading ones, by descending modulus.
    length_scale, reg
        Of the Gaussian kernel, and the ridge: the same for all estimators, and not tuned.
    """

    path: Callable[[int, int], Array]
    eigenvalues: Array
    length_scale: float
    reg: float


SCENARIOS = {
    "ornstein-uhlenbeck": Process(ornstein_uhlenbeck, DECAY ** np.arange(LEADING), 1.5, 1e-5),
    "logistic-map": Process(logistic_map, logistic_eigenvalues()[:LEADING], 0.2, 1e-5),
}


@dataclass(frozen=True)
class KoopmanOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    rows: tuple[int, ...] = (500, 2_000)
    seeds: int = 3
    known = tuple(SCENARIOS)


def run_koopman(
    options: KoopmanOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Measure errors and times; write JSON, a picture and a page into ``out``, if any."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    if not peer_installed():
        progress.say("kooplearn is not installed: pip install kooplearn, to compare with it")
    result = judge_cells("koopman", options, judge, verdicts, progress)
    if out is not None:
        pages = {OUTPUTS[2]: koopman_page}
        write_result(result, out, OUTPUTS[:2], koopman_picture, progress, pages)
    return result


def peer_installed() -> bool:
    """Whether kooplearn can be imported."""
    return importlib.util.find_spec("kooplearn") is not None


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """Errors and seconds of CPU of each estimator on one path."""
    process = SCENARIOS[name]
    path = process.path(n, seed)
    result = {}
    for method, fit in estimators(process, n).items():
        fit(path[:_WARM_ROWS])  # imports
        begin = time.process_time()
        values = fit(path)
        seconds = time.process_time() - begin
        result[method] = {"error": distance(values, process.eigenvalues), "seconds": seconds}
    return result


def estimators(process: Process, n: int) -> dict[str, Callable[[Array], Array]]:
    """From a path to eigenvalues, by name: those that take so many rows."""
    given = {"gamma": 0.5 / process.length_scale**2, "alpha": process.reg, "random_state": 0}
    kernel = kernels.Gaussian(process.length_scale)
    ours = TransferOperator(kernel, reg=process.reg, tol=1e-8, random_state=0)
    result: dict[str, Callable[[Array], Array]] = {
        "TransferOperator": lambda path: ours.fit(path, scheduler="synchronous").eigenvalues_
    }
    if peer_installed():
        peer = importlib.import_module("kooplearn.kernel")
        if n <= DENSE_ROWS:
            dense = peer.KernelRidge(RANK, kernel="rbf", eigen_solver="randomized", **given)
            result["KernelRidge"] = lambda path: _quietly(dense, path)
        if n <= CENTERED_ROWS:
            centered = peer.NystroemKernelRidge(RANK, kernel="rbf", n_centers=CENTERS, **given)
            result["NystroemKernelRidge"] = lambda path: _quietly(centered, path)
    return result


def _quietly(estimator: Any, path: Array) -> Array:
    """Eigenvalues of kooplearn's estimator, which warns of small singular values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(estimator.fit(path).eig())


def distance(values: Array, truth: Array) -> float:
    """Mean distance of true eigenvalues from their estimates, in the assignment of least sum."""
    away = np.abs(np.asarray(truth)[:, None] - np.asarray(values))
    return float(away[linear_sum_assignment(away)].mean())


def verdicts(cells: Sequence[Result]) -> list[Result]:
    """For each process and rival: at its most rows, and how much smaller our error is at ours."""
    result = []
    for name in dict.fromkeys(cell["scenario"] for cell in cells):
        mine = [cell for cell in cells if cell["scenario"] == name]
        last = max(mine, key=lambda cell: cell["rows"])
        least = last["models"]["TransferOperator"]["error"]["mean"]
        for rival in ("KernelRidge", "NystroemKernelRidge"):
            cells_of_rival = [cell for cell in mine if rival in cell["models"]]
            if not cells_of_rival:
                continue
            most = max(cells_of_rival, key=lambda cell: cell["rows"])
            ours, other = most["models"]["TransferOperator"], most["models"][rival]
            result.append(
                {
                    "scenario": name,
                    "rival": rival,
                    "rows": most["rows"],
                    "error_ratio": other["error"]["mean"] / ours["error"]["mean"],
                    "seconds_ratio": other["seconds"]["mean"] / ours["seconds"]["mean"],
                    "most_rows": last["rows"],
                    "gain": other["error"]["mean"] / least,
                }
            )
    return result


def koopman_tables(result: Result) -> Iterator[Any]:
    """Errors and times, and the comparison."""
    head = ("process", "rows", "estimator", "error", "std. error", "CPU s")
    yield grid("Leading eigenvalues: mean distance from the known ones", head, _rows(result))
    if result["verdicts"]:
        yield ""
        ratios = ("process", "kooplearn's", "rows", "its error / ours", "its time / ours")
        most = ("rows of ours", "its error / that of ours there")
        rows = [_verdict(verdict) for verdict in result["verdicts"]]
        yield grid("At the most rows of kooplearn's estimators", (*ratios, *most), rows)


def _rows(result: Result) -> list[tuple[str, ...]]:
    return [
        (
            cell["scenario"],
            f"{cell['rows']:,}",
            method,
            f"{figures['error']['mean']:.5f}",
            f"{figures['error']['std_error']:.5f}",
            f"{figures['seconds']['mean']:.2f}",
        )
        for cell in result["cells"]
        for method, figures in cell["models"].items()
    ]


def _verdict(verdict: Result) -> tuple[str, ...]:
    return (
        verdict["scenario"],
        verdict["rival"],
        f"{verdict['rows']:,}",
        *(f"{verdict[key]:.2f}" for key in ("error_ratio", "seconds_ratio")),
        f"{verdict['most_rows']:,}",
        f"{verdict['gain']:.2f}",
    )


def koopman_page(result: Result) -> str:
    """The tables as a page."""
    lines = [
        "# Eigenvalues of transfer operators",
        "",
        f"The leading {LEADING} eigenvalues: mean distance from the known ones, with its standard",
        f"error over {result['settings']['seeds']} paths, and CPU time on one thread.",
        "",
        "| process | rows | estimator | error | std. error | CPU s |",
        "|---|---:|---|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in _rows(result)),
    ]
    if result["verdicts"]:
        lines += [
            "",
            "| process | kooplearn's | rows | its error / ours | its time / ours | rows of ours "
            "| its error / that of ours there |",
            "|---|---|---:|---:|---:|---:|---:|",
            *(f"| {' | '.join(_verdict(verdict))} |" for verdict in result["verdicts"]),
        ]
    return "\n".join([*lines, "", f"![Errors against rows]({OUTPUTS[1]})", ""])


def koopman_picture(result: Result, path: Path) -> None:
    """Draw the errors against the rows.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(cell["scenario"] for cell in result["cells"]))
    methods = list(dict.fromkeys(m for cell in result["cells"] for m in cell["models"]))
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(names), 3.4), layout="constrained")
        axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for ax, name in zip(axes, names, strict=True):
            for color, method in zip(PALETTE, methods, strict=False):
                cells = [
                    cell
                    for cell in result["cells"]
                    if cell["scenario"] == name and method in cell["models"]
                ]
                errors = [cell["models"][method]["error"] for cell in cells]
                ax.errorbar(
                    [cell["rows"] for cell in cells],
                    [error["mean"] for error in errors],
                    [error["std_error"] for error in errors],
                    fmt="o-",
                    ms=4,
                    capsize=2,
                    color=color,
                    label=method,
                )
            ax.set(xscale="log", yscale="log", xlabel="rows", title=name)
            ax.legend(fontsize=8.5)
        axes[0].set_ylabel("mean distance of eigenvalues")
        figure.savefig(path, format="png", dpi=130)
