"""The study of rates: how fast errors of embeddings, and of rules of operators, fall with rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks import rule_rates
from benchmarks.study import Study, StudyOptions
from cme_dask import ConditionalMeanEmbedding, kernels
from cme_dask.cli.tables import grid
from cme_dask.models.plots import BLUE, PALETTE, picture
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

LINEAR = "linear-gaussian"
"""The scenario of the rules of operators, on a law whose embeddings have closed forms."""


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(600)
_TERMS = 2000  # of the series of the scenario slow-decay
_BLOCK = 10_000


@dataclass(frozen=True)
class RatesOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = (*SCENARIOS, LINEAR)
    rows: tuple[int, ...] = (500, 2_000, 8_000, 32_000)
    known = (*SCENARIOS, LINEAR)


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """The squared errors of one draw: of an embedding the excess risk E |mu_n(x) - mu(x)|^2."""
    if name == LINEAR:
        return rule_rates.judge(n, seed)
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
    """Slopes of log error on log n over the draws, with 95 % intervals, and those of theory.

    Theory bounds the excess risk by a multiple of 1 / n for finite rank, and of (log n / n)^(2/3)
    for eigenvalues that fall as i^-2 (Grünewälder et al. 2012, corollary 4.1), and the squared
    error of the sum rule by one of 1 / n (Smooth operators, theorem 4.3). The bound is for the
    worst law; the slope that is expected of this one is that of its bias and variance.
    """
    result = []
    for name in dict.fromkeys(cell["scenario"] for cell in cells):
        mine = [cell for cell in cells if cell["scenario"] == name]
        sizes = [cell["rows"] for cell in mine]
        n = np.array(sizes, dtype=np.float64)
        for method in mine[0]["models"]:
            values = np.log([cell["models"][method]["excess"]["values"] for cell in mine])
            each = _slope(n, values)
            count = len(each)
            error = float(each.std(ddof=1) / np.sqrt(count)) if count > 1 else 0.0
            margin = float(student.ppf(0.975, max(count - 1, 1))) * error
            expected = _expected(name, method, sizes)
            bound = _bound(name, method, n)
            mean = float(each.mean())
            here = float(_slope(n, np.log(expected)[:, None])[0])
            theory = None if bound is None else float(_slope(n, np.log(bound)[:, None])[0])
            result.append(
                {
                    "scenario": name,
                    "method": method,
                    "slope": mean,
                    "interval": [mean - margin, mean + margin],
                    "theory": theory,
                    "no_slower": None if theory is None else mean - margin <= theory,
                    "expected": expected,
                    "expected_slope": here,
                    "as_expected": abs(mean - here) <= margin,
                }
            )
    return result


def _expected(name: str, method: str, sizes: Sequence[int]) -> list[float]:
    """The errors to first order in 1 / n."""
    if name != LINEAR:
        return [expected_excess(name, n) for n in sizes]
    population = rule_rates.Population(method)
    return [population.squared_error(n) for n in sizes]


def _bound(name: str, method: str, n: Array) -> Array | None:
    """What theory bounds the errors by, up to a factor; None where the papers have no rate."""
    if name == "slow-decay":
        return (np.log(n) / n) ** (2.0 / 3.0)
    return 1.0 / n if method in ("embedding", "sum-rule") else None


def _slope(n: Array, values: Array) -> Array:
    """Least-squares slopes on log n, shape (draws,), of values of shape (sizes, draws)."""
    log = np.log(n) - np.log(n).mean()
    return np.asarray(log @ values / (log @ log)) if len(n) > 1 else np.zeros(values.shape[1])


def rates_tables(result: Result) -> Iterator[Any]:
    """The errors, and their slopes."""
    verdicts = {(each["scenario"], each["method"]): each for each in result["verdicts"]}
    sizes: dict[str, list[int]] = {}
    for cell in result["cells"]:
        sizes.setdefault(cell["scenario"], []).append(cell["rows"])
    rows = [
        (
            cell["scenario"],
            method,
            f"{cell['rows']:,}",
            *(f"{figures[key]['mean']:.3g}" for key in ("reg", "excess")),
            f"{figures['excess']['std_error']:.2g}",
            f"{verdict['expected'][sizes[cell['scenario']].index(cell['rows'])]:.3g}",
            f"{figures['passes']['mean']:.3g}" if "passes" in figures else "",
        )
        for cell in result["cells"]
        for method, figures in cell["models"].items()
        for verdict in [verdicts[cell["scenario"], method]]
    ]
    head = ("law", "method", "rows", "ridge", "error", "std. error", "expected", "passes")
    yield grid(
        "Squared errors",
        head,
        rows,
        "Of an embedding the excess surrogate risk; of rules the squared distance to the embedding "
        "of the true law. Passes: reads of each chunk of a store.",
        text_columns=2,
    )
    yield ""
    yield grid(
        "Slopes of their logarithms on that of the rows",
        ("law", "method", "slope", "95 % interval", "expected", "upper bound"),
        [
            (
                verdict["scenario"],
                verdict["method"],
                f"{verdict['slope']:.3f}",
                "{:.3f} to {:.3f}".format(*verdict["interval"]),
                f"{verdict['expected_slope']:.3f}",
                "" if verdict["theory"] is None else f"{verdict['theory']:.3f}",
            )
            for verdict in result["verdicts"]
        ],
        f"Means over {result['settings']['seeds']} draws. Expected: of squared bias and variance, "
        "to first order in 1 / n. Upper bound: over all laws of such eigenvalues, corollary 4.1 of "
        "Grünewälder et al. (2012); of the sum rule, theorem 4.3 of Smooth operators.",
        text_columns=2,
    )


def rates_picture(result: Result, path: Path) -> None:
    """Draw the errors of all draws, their means and what is expected, and upper bounds.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    verdicts = result["verdicts"]
    columns = min(len(verdicts), 3)
    lines = -(-len(verdicts) // columns)
    with picture(path, 4.2 * columns, 3.4 * lines, dpi=130) as figure:
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for ax in axes[len(verdicts) :]:
            ax.set_visible(False)
        for ax, verdict in zip(axes, verdicts, strict=False):
            name, method = verdict["scenario"], verdict["method"]
            cells = [cell for cell in result["cells"] if cell["scenario"] == name]
            sizes = np.array([cell["rows"] for cell in cells], dtype=np.float64)
            excess = [cell["models"][method]["excess"] for cell in cells]
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
            if verdict["theory"] is not None:
                theory = means[0] * (sizes / sizes[0]) ** verdict["theory"]
                label = f"slope of the upper bound, {verdict['theory']:.2f}"
                ax.plot(sizes, theory, "--", color=PALETTE[1], label=label)
            label = f"expected, slope {verdict['expected_slope']:.2f}"
            ax.plot(sizes, verdict["expected"], "k:", label=label)
            title = name if method == "embedding" else method
            ax.set(xscale="log", yscale="log", xlabel="rows", ylabel="squared error", title=title)
            ax.set_xticks(sizes, [_short(size) for size in sizes], minor=False)
            ax.minorticks_off()
            ax.legend(fontsize=8.5)


def _short(size: float) -> str:
    """A number of rows that fits under an axis."""
    return f"{size:,.0f}" if size < 1e5 else f"{size:.0e}".replace("e+0", "e")


STUDY = Study("rates", RatesOptions, judge, slopes, rates_picture, rates_tables)
