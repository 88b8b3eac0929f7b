"""The study of rates: how fast the excess risk of an embedding falls with the number of rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.run import write_result
from benchmarks.study import StudyOptions, judge_cells
from cme_dask import ConditionalMeanEmbedding, kernels
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.models.plots import BLUE, PALETTE, STYLE
from cme_dask.numerics.embedding import SCHEDULES

Array = Any
Result = dict[str, Any]

SCENARIOS = {
    "finite-rank": kernels.Polynomial(2),  # three functions: b = infinity
    "slow-decay": kernels.Laplace(1.0),  # eigenvalues fall as i^-2: b = 2
}
"""Kernels of x, uniform on [-1, 1]; each has the ridge schedule of its name."""

KERNEL_Y = kernels.Gaussian(1.0)
LEVELS = np.array([[-1.0], [0.0], [1.0]])
"""Values of y, whose probabilities given x lie in the space of the kernel of x."""

OUTPUTS = ("rates.json", "rates.png")

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(600)
_TERMS = 2000  # of the series of the scenario slow-decay
_BLOCK = 10_000


@dataclass(frozen=True)
class RatesOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    rows: tuple[int, ...] = (500, 2_000, 8_000, 32_000)
    known = tuple(SCENARIOS)


def run_rates(
    options: RatesOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Measure excess risks and their slopes; write JSON and a picture into ``out``, if any."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    result = judge_cells("rates", options, judge, slopes, progress)
    if out is not None:
        write_result(result, out, OUTPUTS, rates_picture, progress)
    return result


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """The excess risk E |mu_n(x) - mu(x)|^2 of one draw, by quadrature over x."""
    x, y = draw(name, n, seed)
    fit = ConditionalMeanEmbedding(
        kernel_x=SCENARIOS[name], kernel_y=KERNEL_Y, reg=name, max_rank=400, n_folds=1
    ).fit(x, y)
    points, gram = _NODES[:, None], KERNEL_Y(LEVELS, LEVELS)
    away = fit.model_.embedding(points, LEVELS) - probabilities(name, _NODES) @ gram
    squares = (away * np.linalg.solve(gram, away.T).T).sum(axis=1)
    return {"embedding": {"excess": float(_WEIGHTS @ squares / 2.0), "reg": fit.reg_}}


def draw(name: str, n: int, seed: int) -> tuple[Array, Array]:
    """Rows of x and y, shapes (n, 1)."""
    rng = np.random.default_rng([seed, n])
    x = rng.uniform(-1.0, 1.0, size=(n, 1))
    blocks = (x[first : first + _BLOCK, 0] for first in range(0, n, _BLOCK))
    steps = np.concatenate([probabilities(name, block) for block in blocks]).cumsum(axis=1)
    return x, LEVELS[(rng.uniform(size=(n, 1)) > steps[:, :-1]).sum(axis=1)]


def probabilities(name: str, x: Array) -> Array:
    """P(Y = level | x), shape (n, 3).

    For the polynomial kernel they are quadratic. For the Laplace kernel they are a cosine series
    with coefficients near i^-1.5, which hardly converges in its space: the least smooth case,
    c = 1.
    """
    if name == "finite-rank":
        low, high = 0.1 + 0.1 * (1.0 - x) ** 2, 0.1 + 0.1 * (1.0 + x) ** 2
    else:
        order = np.arange(1, _TERMS + 1)
        signs = np.random.default_rng(5).choice([-1.0, 1.0], _TERMS)
        series = np.cos(np.outer((x + 1.0) / 2.0, np.pi * order)) @ (signs * order**-1.55)
        low, high = 1.0 / 3.0 - 0.1 * series, 1.0 / 3.0 + 0.1 * series
    return np.column_stack([low, 1.0 - low - high, high])


def expected_excess(name: str, n: int) -> float:
    r"""The excess risk to first order in 1 / n: squared bias and variance, by quadrature over x.

    .. math:: \mathrm E |\mu - \mu_r|^2 + \frac1n \Big( \mathrm E \Big[ |k_Y(Y, \cdot) - \mu_r(X)|^2
              \sum_i \frac{\lambda_i^2 e_i(X)^2}{(\lambda_i + r)^2} \Big]
              - \mathrm E |r (T + r)^{-1} \mu_r|^2 \Big), \quad \mu_r = T (T + r)^{-1} \mu

    with the eigenvalues and eigenfunctions of k_X under the law of x. The mean excess follows it
    where theory gives an upper bound alone.
    """
    points, share = _NODES[:, None], _WEIGHTS / 2.0
    kernel, root = SCENARIOS[name](points, points), np.sqrt(share)[:, None]
    eigenvalues, vectors = np.linalg.eigh(root * kernel * root.T)
    law, levels = probabilities(name, _NODES), np.linalg.cholesky(KERNEL_Y(LEVELS, LEVELS))
    reg = SCHEDULES[name](n) * (share @ np.diag(kernel))
    factors = np.maximum(eigenvalues, 0.0) / (np.maximum(eigenvalues, 0.0) + reg)
    coefficients = factors[:, None] * (vectors.T @ (root * (law @ levels)))
    fitted = vectors @ coefficients / root
    noise = (law * ((levels - fitted[:, None]) ** 2).sum(axis=2)).sum(axis=1)
    bias = share @ ((law @ levels - fitted) ** 2).sum(axis=1)
    mean = (((1.0 - factors)[:, None] * coefficients) ** 2).sum()
    return float(bias + (noise @ (vectors**2 @ factors**2) - mean) / n)


def slopes(cells: Sequence[Result]) -> list[Result]:
    """Slopes of log excess on log n over the draws, with 95 % intervals, and those of theory.

    Theory bounds the excess risk by a multiple of 1 / n for finite rank, and of (log n / n)^(2/3)
    for eigenvalues that fall as i^-2 (Grünewälder et al. 2012, corollary 4.1). The bound is for the
    worst law; the slope that is expected of this one is that of its bias and variance.
    """
    result = []
    for name in dict.fromkeys(cell["scenario"] for cell in cells):
        mine = [cell for cell in cells if cell["scenario"] == name]
        n = np.array([cell["rows"] for cell in mine], dtype=np.float64)
        values = np.log([cell["models"]["embedding"]["excess"]["values"] for cell in mine])
        bound = 1.0 / n if name == "finite-rank" else (np.log(n) / n) ** (2.0 / 3.0)
        each = _slope(n, values)
        count = len(each)
        error = float(each.std(ddof=1) / np.sqrt(count)) if count > 1 else 0.0
        margin = float(student.ppf(0.975, max(count - 1, 1))) * error
        expected = [expected_excess(name, cell["rows"]) for cell in mine]
        mean = float(each.mean())
        theory, here = (float(_slope(n, np.log(v)[:, None])[0]) for v in (bound, expected))
        result.append(
            {
                "scenario": name,
                "slope": mean,
                "interval": [mean - margin, mean + margin],
                "theory": theory,
                "no_slower": mean - margin <= theory,
                "expected": expected,
                "expected_slope": here,
                "as_expected": abs(mean - here) <= margin,
            }
        )
    return result


def _slope(n: Array, values: Array) -> Array:
    """Least-squares slopes on log n, shape (draws,), of values of shape (sizes, draws)."""
    log = np.log(n) - np.log(n).mean()
    return np.asarray(log @ values / (log @ log)) if len(n) > 1 else np.zeros(values.shape[1])


def rates_tables(result: Result) -> Iterator[Any]:
    """The excess risks, and the slopes."""
    expected = [each for verdict in result["verdicts"] for each in verdict["expected"]]
    rows = [
        (
            cell["scenario"],
            f"{cell['rows']:,}",
            *(f"{figures[key]['mean']:.3g}" for key in ("reg", "excess")),
            f"{figures['excess']['std_error']:.2g}",
            f"{each:.3g}",
        )
        for cell, each in zip(result["cells"], expected, strict=True)
        for figures in cell["models"].values()
    ]
    head = ("kernel of x", "rows", "ridge", "excess risk", "std. error", "expected")
    yield grid("Excess surrogate risk", head, rows)
    yield ""
    yield grid(
        "Slopes of its logarithm on that of the rows",
        ("kernel of x", "slope", "95 % interval", "expected", "upper bound"),
        [
            (
                verdict["scenario"],
                f"{verdict['slope']:.3f}",
                "{:.3f} to {:.3f}".format(*verdict["interval"]),
                f"{verdict['expected_slope']:.3f}",
                f"{verdict['theory']:.3f}",
            )
            for verdict in result["verdicts"]
        ],
        f"Means over {result['settings']['seeds']} draws. Expected: of squared bias and variance, "
        "to first order in 1 / n. Upper bound: over all laws of such eigenvalues, corollary 4.1 of "
        "Grünewälder et al. (2012).",
    )


def rates_picture(result: Result, path: Path) -> None:
    """Draw the excess risks of all draws, their means and what is expected, and upper bounds.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    verdicts = {verdict["scenario"]: verdict for verdict in result["verdicts"]}
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(verdicts), 3.4), layout="constrained")
        axes = figure.subplots(1, len(verdicts), squeeze=False)[0]
        for ax, (name, verdict) in zip(axes, verdicts.items(), strict=True):
            cells = [cell for cell in result["cells"] if cell["scenario"] == name]
            sizes = np.array([cell["rows"] for cell in cells], dtype=np.float64)
            excess = [cell["models"]["embedding"]["excess"] for cell in cells]
            for size, figures in zip(sizes, excess, strict=True):
                ax.plot(
                    [size] * len(figures["values"]),
                    figures["values"],
                    ".",
                    color="#999999",
                    ms=3,
                )
            means = np.array([figures["mean"] for figures in excess])
            low, high = verdict["interval"]
            label = f"mean, slope {verdict['slope']:.2f} ({low:.2f} to {high:.2f})"
            ax.plot(sizes, means, "o-", color=BLUE, ms=4, label=label)
            theory = means[0] * (sizes / sizes[0]) ** verdict["theory"]
            label = f"slope of the upper bound, {verdict['theory']:.2f}"
            ax.plot(sizes, theory, "--", color=PALETTE[1], label=label)
            label = f"expected, slope {verdict['expected_slope']:.2f}"
            ax.plot(sizes, verdict["expected"], "k:", label=label)
            ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="excess risk", title=name)
            ax.set_xticks(sizes, [f"{size:,.0f}" for size in sizes], minor=False)
            ax.minorticks_off()
            ax.legend(fontsize=8.5)
        figure.savefig(path, format="png", dpi=130)
