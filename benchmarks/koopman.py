"""The study of transfer operators: eigenvalues beside known ones, and beside kooplearn's."""

import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import eig
from scipy.optimize import linear_sum_assignment
from scipy.signal import lfilter
from scipy.special import beta, binom, eval_hermitenorm

from benchmarks.study import Study, StudyOptions
from cme_dask import TransferOperator, kernels
from cme_dask.cli.tables import grid
from cme_dask.models.plots import PALETTE, picture

Array = Any
Result = dict[str, Any]

DECAY = float(np.exp(-0.25))  # of the Ornstein-Uhlenbeck process with theta = 1 and dt = 0.25
NOISE = 10  # half the power of the cosine in the noise of the logistic map
LEADING = 5
"""Eigenvalues that are compared, that of the constant function included."""

WELL_CONDITIONED = 100.0
"""Condition number up to which errors of eigenvalues are reported apart."""

RIDGES = tuple(10.0**p for p in range(-11, -2, 2))  # of the estimators in hindsight
RANK, CENTERS = 20, 100  # of kooplearn's estimators
DENSE_ROWS, CENTERED_ROWS = 19_000, 1_000_000
"""Rows that kooplearn's estimators are given: five n x n matrices in 16 GB, and as a choice."""

KNOWN, HINDSIGHT = "known functions", "in hindsight"
PEERS = "KernelRidge", "NystroemKernelRidge"
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


def logistic_conditions() -> Array:
    r"""Condition numbers of the leading eigenvalues of the map in L2 of its stationary law.

    Of left and right eigenfunctions l and r it is :math:`|l| |r| / |\langle l, r \rangle|`: an
    error of the operator of norm e moves the eigenvalue by so many e, while that is small.
    """
    nodes, weights = _quadrature()
    density = noise_functions(4.0 * nodes * (1.0 - nodes)) @ noise_functions(nodes).T
    values, left = np.linalg.eig((density * weights).T)
    law = np.abs(left[:, np.argmax(values.real)].real)
    root = np.sqrt(law / law.sum())
    values, left, right = eig(root[:, None] * density * weights / root, left=True)
    leading = np.argsort(-np.abs(values))[:LEADING]
    return 1.0 / np.abs(np.einsum("ij,ij->j", left.conj(), right)[leading])


def logistic_functions(x: Array) -> Array:
    """A basis of what the operator of the map makes of functions, shape (n, 2 NOISE + 1)."""
    angles = 8.0 * np.pi * x * (1.0 - x) * np.arange(1, NOISE + 1)
    return np.hstack([np.ones_like(x), np.cos(angles), np.sin(angles)])


def hermite_functions(x: Array) -> Array:
    """The leading eigenfunctions of the Ornstein-Uhlenbeck process, shape (n, LEADING)."""
    return np.hstack([eval_hermitenorm(k, x) for k in range(LEADING)])


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
    leading
        Makes the leading eigenvalues, by descending modulus, and their condition numbers.
    length_scales
        Of the Gaussian kernels that are compared.
    functions
        A basis of functions that hold the eigenfunctions: who knew them, would estimate the
        operator by least squares on these alone.
    """

    path: Callable[[int, int], Array]
    leading: Callable[[], tuple[Array, Array]]
    length_scales: tuple[float, ...]
    functions: Callable[[Array], Array]

    @cached_property
    def _known(self) -> tuple[Array, Array]:
        return self.leading()

    @property
    def eigenvalues(self) -> Array:
        """The leading eigenvalues, by descending modulus."""
        return self._known[0]

    @property
    def conditions(self) -> Array:
        """Their condition numbers."""
        return self._known[1]


SCENARIOS = {
    "ornstein-uhlenbeck": Process(
        ornstein_uhlenbeck,
        lambda: (DECAY ** np.arange(LEADING), np.ones(LEADING)),
        (0.75, 1.5, 3.0),
        hermite_functions,
    ),
    "logistic-map": Process(
        logistic_map,
        lambda: (logistic_eigenvalues()[:LEADING], logistic_conditions()),
        (0.05, 0.1, 0.2),
        logistic_functions,
    ),
}


@dataclass(frozen=True)
class KoopmanOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    rows: tuple[int, ...] = (500, 2_000)
    seeds: int = 3
    known = tuple(SCENARIOS)


def peer_installed() -> bool:
    """Whether kooplearn can be imported."""
    return importlib.util.find_spec("kooplearn") is not None


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """Errors and seconds of CPU of each estimator on one path."""
    process = SCENARIOS[name]
    path, result = process.path(n, seed), {}

    def measure(method: str, fit: Callable[[Array], Any]) -> Any:
        fit(path[:_WARM_ROWS])  # imports
        begin = time.process_time()
        with warnings.catch_warnings(action="ignore"):  # small singular values, exhausted rows
            fitted = fit(path)
            values = fitted if isinstance(fitted, np.ndarray) else eigenvalues(fitted)
        seconds = time.process_time() - begin
        result[method] = {**errors(values, process), "seconds": seconds}
        return fitted

    ours = measure("TransferOperator", partial(compared, process))
    for method, fit in peers(n, ours.basis_.newton.kernel.length_scale, ours.reg_).items():
        measure(method, fit)
    measure(KNOWN, partial(least_squares, process))
    if n <= DENSE_ROWS:
        result[HINDSIGHT] = each_setting(process, path)
    return result


def compared(process: Process, path: Array) -> TransferOperator:
    """Our estimator, which chooses among the kernels and ridges in its pass."""
    each = [kernels.Gaussian(scale) for scale in process.length_scales]
    return TransferOperator(each, tol=1e-8, random_state=0).fit(path, scheduler="synchronous")


def peers(n: int, length_scale: float, reg: float) -> dict[str, Callable[[Array], Any]]:
    """Fits of kooplearn's estimators that take so many rows, with the same kernel and ridge."""
    if not peer_installed():
        return {}
    given = {"gamma": 0.5 / length_scale**2, "alpha": reg, "random_state": 0, "kernel": "rbf"}
    peer, result = importlib.import_module("kooplearn.kernel"), {}
    if n <= DENSE_ROWS:
        result["KernelRidge"] = peer.KernelRidge(RANK, eigen_solver="randomized", **given).fit
    if n <= CENTERED_ROWS:
        centered = peer.NystroemKernelRidge(RANK, n_centers=CENTERS, **given)
        result["NystroemKernelRidge"] = centered.fit
    return result


def eigenvalues(fitted: Any) -> Array:
    """Those of our estimator, or of kooplearn's."""
    ours = isinstance(fitted, TransferOperator)
    return np.asarray(fitted.eigenvalues_ if ours else fitted.eig())


def least_squares(process: Process, path: Array) -> Array:
    """Eigenvalues of the least-squares regression on functions that hold the eigenfunctions."""
    gram, cross = 0.0, 0.0
    for start in range(0, len(path) - 1, 1 << 16):
        values = process.functions(path[start : start + (1 << 16) + 1])
        gram += values[:-1].T @ values[:-1]
        cross += values[:-1].T @ values[1:]
    return np.linalg.eigvals(np.linalg.solve(gram, cross))


def each_setting(process: Process, path: Array) -> dict[str, float]:
    """Errors of kernel ridge regression with each kernel and ridge, by these in words."""
    result = {}
    for scale in process.length_scales:
        for reg in RIDGES:
            operator = TransferOperator(
                kernels.Gaussian(scale), reg=reg, n_folds=1, tol=1e-8, random_state=0
            )
            with warnings.catch_warnings(action="ignore"):
                values = operator.fit(path, scheduler="synchronous").eigenvalues_
            result[f"l={scale:g}, r={reg:.0e}"] = errors(values, process)["error"]
    return result


def errors(values: Array, process: Process) -> dict[str, float]:
    """Mean distances from the leading eigenvalues, and from the well-conditioned ones of them."""
    well = process.conditions <= WELL_CONDITIONED
    return {
        "error": distance(values, process.eigenvalues),
        "error_well": distance(values, process.eigenvalues[well]),
    }


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
        for rival in (*PEERS, HINDSIGHT):
            cells_of_rival = [cell for cell in mine if rival in cell["models"]]
            if not cells_of_rival:
                continue
            most = max(cells_of_rival, key=lambda cell: cell["rows"])
            ours, (setting, other) = most["models"]["TransferOperator"], best(most["models"][rival])
            seconds = most["models"][rival].get("seconds")
            result.append(
                {
                    "scenario": name,
                    "rival": setting or rival,
                    "rows": most["rows"],
                    "error_ratio": other["mean"] / ours["error"]["mean"],
                    "seconds_ratio": seconds and seconds["mean"] / ours["seconds"]["mean"],
                    "most_rows": last["rows"],
                    "gain": other["mean"] / least,
                }
            )
    return result


def best(figures: Result) -> tuple[str, Result]:
    """The error of an estimator; of several settings the least one, and its setting."""
    if "error" in figures:
        return "", figures["error"]
    setting = min(figures, key=lambda key: float(figures[key]["mean"]))
    return setting, figures[setting]


_HEAD = "process", "rows", "estimator", "error", "std. error", "well-conditioned", "CPU s"
_RATIOS = "process", "other", "rows", "its error / ours", "its time / ours"
_MOST = "rows of ours", "its error / that of ours there"


def koopman_tables(result: Result) -> Iterator[Any]:
    """Errors and times, and the comparison."""
    yield from _conditions(result)
    yield ""
    yield grid("Leading eigenvalues: mean distance from the known ones", _HEAD, _rows(result))
    yield ""
    rows = [_verdict(verdict) for verdict in result["verdicts"]]
    yield grid("At the most rows of the others", (*_RATIOS, *_MOST), rows)


def _conditions(result: Result) -> list[str]:
    """The leading eigenvalues of each process with their condition numbers, a line for each."""
    lines = []
    for name in dict.fromkeys(cell["scenario"] for cell in result["cells"]):
        known = result["settings"][name]
        each = [
            f"{real:.4f}{f'{imaginary:+.4f}i' if imaginary else ''} ({condition:,.0f})"
            for (real, imaginary), condition in zip(
                known["eigenvalues"], known["conditions"], strict=True
            )
        ]
        lines.append(f"{name}: eigenvalues (condition numbers) {', '.join(each)}")
    return lines


def _rows(result: Result) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for cell in result["cells"]:
        for method, figures in cell["models"].items():
            setting, error = best(figures)
            well = "" if setting else f"{figures['error_well']['mean']:.5f}"
            seconds = "" if setting else f"{figures['seconds']['mean']:.2f}"
            named = f"{method}: {setting}" if setting else method
            means = f"{error['mean']:.5f}", f"{error['std_error']:.5f}"
            rows.append((cell["scenario"], f"{cell['rows']:,}", named, *means, well, seconds))
    return rows


def _verdict(verdict: Result) -> tuple[str, ...]:
    seconds = verdict["seconds_ratio"]
    return (
        verdict["scenario"],
        verdict["rival"],
        f"{verdict['rows']:,}",
        f"{verdict['error_ratio']:.2f}",
        "" if seconds is None else f"{seconds:.2f}",
        f"{verdict['most_rows']:,}",
        f"{verdict['gain']:.2f}",
    )


def koopman_page(result: Result) -> str:
    """The tables as a page."""
    lines = [
        "# Eigenvalues of transfer operators",
        "",
        f"The leading {LEADING} eigenvalues: mean distance from the known ones, with its standard",
        f"error over {result['settings']['seeds']} paths; that of the ones with condition numbers",
        f"up to {WELL_CONDITIONED:g}; and CPU time on one thread.",
        "",
        *(f"- {line}" for line in _conditions(result)),
        "",
        f"| {' | '.join(_HEAD)} |",
        "|---|---:|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in _rows(result)),
        "",
        f"| {' | '.join((*_RATIOS, *_MOST))} |",
        "|---|---|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(_verdict(verdict))} |" for verdict in result["verdicts"]),
    ]
    return "\n".join([*lines, "", "![Errors against rows](koopman.png)", ""])


def koopman_picture(result: Result, path: Path) -> None:
    """Draw the errors against the rows.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    names = list(dict.fromkeys(cell["scenario"] for cell in result["cells"]))
    methods = list(dict.fromkeys(m for cell in result["cells"] for m in cell["models"]))
    with picture(path, 4.2 * len(names), 3.4, dpi=130) as figure:
        axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for ax, name in zip(axes, names, strict=True):
            for color, method in zip(PALETTE, methods, strict=False):
                cells = [
                    cell
                    for cell in result["cells"]
                    if cell["scenario"] == name and method in cell["models"]
                ]
                means = [best(cell["models"][method])[1] for cell in cells]
                ax.errorbar(
                    [cell["rows"] for cell in cells],
                    [error["mean"] for error in means],
                    [error["std_error"] for error in means],
                    fmt="o-",
                    ms=4,
                    capsize=2,
                    color=color,
                    label=method,
                )
            ax.set(xscale="log", yscale="log", xlabel="rows", title=name)
            ax.legend(fontsize=8.5)
        axes[0].set_ylabel("mean distance of eigenvalues")


def known_values() -> dict[str, Any]:
    """Eigenvalues and condition numbers of each process, which take a second."""
    return {
        name: {
            "eigenvalues": [[value.real, value.imag] for value in process.eigenvalues + 0j],
            "conditions": process.conditions.tolist(),
        }
        for name, process in SCENARIOS.items()
    }


STUDY = Study(
    "koopman",
    KoopmanOptions,
    judge,
    verdicts,
    koopman_picture,
    koopman_tables,
    page=koopman_page,
    settings=known_values,
    remark=None
    if peer_installed()
    else "kooplearn is not installed: pip install kooplearn, to compare with it",
)
