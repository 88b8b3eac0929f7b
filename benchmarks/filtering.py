"""The study of filters: sum rule, Bayes' rule and filter beside Kalman's and particle filters."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.signal import lfilter
from scipy.stats import norm, t

from benchmarks.study import Study, StudyOptions
from cme_dask import KernelBayesFilter, kernels
from cme_dask.cli.tables import grid
from cme_dask.errors import RankWarning
from cme_dask.models.plots import BLUE, PALETTE, picture

Array = Any
Result = dict[str, Any]

DECAY, NOISE = 0.9, 0.5
"""Of the linear model: x' = 0.9 x + sqrt(0.19) e of variance 1, y = x + 0.5 e."""

STEP, DRIVE, JITTER, BLUR = 0.2, 0.3, 0.05, 0.2
"""Of the pendulum: steps in seconds, noise of velocity and angle, and of the observed sine. With a
drive of 0.5 it would turn over, so that the angle is not stationary."""

SCALES = (1.0, 1.0 / 2.0, 1.0 / 3.0)
"""Length scales of the states of the pendulum that are compared, as shares of the medians."""

COMPARED = 100_000
"""Rows on which they are compared."""

SEQUENCES, LENGTH, BURN = 100, 60, 10
"""Sequences that are filtered, their steps, and steps that do not count."""

PARTICLES = (10, 30, 100, 300, 1000, 3000)
REFERENCE = 10_000
SCENARIOS = "linear", "pendulum"


@dataclass(frozen=True)
class FilteringOptions(StudyOptions):
    """What to study."""

    scenarios: tuple[str, ...] = SCENARIOS
    rows: tuple[int, ...] = (1000, 10_000, 100_000)
    seeds: int = 5
    known = SCENARIOS


@dataclass(frozen=True)
class Process:
    """A hidden process: its first states, a step, what is observed, its estimator.

    Attributes
    ----------
    first, move
        From a generator and a shape, or states, to states of shape (..., d).
    observe
        From a generator and states to observations (..., 1).
    likelihood
        From states and observations to densities, up to a factor.
    estimator
        From states, observations and trajectories to the estimator, not yet fitted.
    """

    first: Callable[[Any, tuple[int, ...]], Array]
    move: Callable[[Any, Array], Array]
    observe: Callable[[Any, Array], Array]
    likelihood: Callable[[Array, Array], Array]
    estimator: Callable[[Array, Array, Array], KernelBayesFilter]


def _swing(rng: Any, state: Array) -> Array:
    angle, velocity = state[..., 0], state[..., 1]
    force = -4.0 * np.sin(angle) - 0.5 * velocity
    noise = rng.normal(size=state.shape)
    velocity = velocity + STEP * force + DRIVE * noise[..., 1]
    return np.stack([angle + STEP * velocity + JITTER * noise[..., 0], velocity], axis=-1)


def _at_rest(rng: Any, shape: tuple[int, ...]) -> Array:
    state = 0.1 * rng.normal(size=(*shape, 2))
    for _ in range(100):  # until it has forgotten where it began
        state = _swing(rng, state)
    return state


def _sharpest(x: Array, y: Array, group: Array) -> KernelBayesFilter:
    """The filter whose kernel of states gives the smallest held-out loss of next states."""
    few = slice(0, COMPARED)
    made = [
        KernelBayesFilter(
            kernels.Gaussian((0.6 * scale, 1.2 * scale)),
            kernels.Gaussian(0.3),
            tol=1e-4,
            max_rank=400,
            random_state=0,
        )
        for scale in SCALES
    ]
    losses = []
    for each in made:
        with warnings.catch_warnings(action="ignore", category=RankWarning):
            fit = each.fit(x[few], y[few], group=group[few], scheduler="synchronous")
        losses.append(fit.losses_["transition"].min())
    return made[int(np.argmin(losses))]


PROCESSES = {
    "linear": Process(
        lambda rng, shape: rng.normal(size=(*shape, 1)),
        lambda rng, x: DECAY * x + np.sqrt(1.0 - DECAY**2) * rng.normal(size=x.shape),
        lambda rng, x: x + NOISE * rng.normal(size=x.shape),
        lambda x, y: np.exp(-0.5 * ((y - x) / NOISE)[..., 0] ** 2),
        # More rows resolve more: the bases grow, and ridges fall by their held-out losses.
        lambda x, y, group: KernelBayesFilter(
            kernels.Gaussian(1.0),
            kernels.Gaussian(1.0),
            tol=min(1e-3, 1.0 / len(x)),
            support_size=300,
            random_state=0,
        ),
    ),
    "pendulum": Process(
        _at_rest,
        _swing,
        lambda rng, x: np.sin(x[..., :1]) + BLUR * rng.normal(size=x[..., :1].shape),
        lambda x, y: np.exp(-0.5 * ((y - np.sin(x[..., :1])) / BLUR)[..., 0] ** 2),
        _sharpest,
    ),
}


def training(name: str, n: int, rng: Any) -> tuple[Array, Array, Array]:
    """States and observations of n rows, and the trajectory of each row."""
    process = PROCESSES[name]
    if name == "linear":
        noise = np.sqrt(1.0 - DECAY**2) * rng.normal(size=n)
        noise[0] /= np.sqrt(1.0 - DECAY**2)
        x = lfilter([1.0], [1.0, -DECAY], noise)[:, None]
        return x, process.observe(rng, x), np.zeros(n, dtype=np.int64)
    count = max(n // 1000, 1)
    x = simulated(process, rng, count, n // count)
    x = np.swapaxes(x, 0, 1).reshape(-1, x.shape[-1])
    return x, process.observe(rng, x), np.repeat(np.arange(count), n // count)


def simulated(process: Process, rng: Any, count: int, length: int) -> Array:
    """States of some sequences, shape (length, count, d)."""
    x = [process.first(rng, (count,))]
    while len(x) < length:
        x.append(process.move(rng, x[-1]))
    return np.stack(x)


def judge(name: str, n: int, seed: int) -> dict[str, Result]:
    """Errors of the rules and of filters, and CPU time of a step of a sequence in microseconds."""
    rng = np.random.default_rng([seed, n])
    process = PROCESSES[name]
    x, y, group = training(name, n, rng)
    begin = time.process_time()
    fit = process.estimator(x, y, group).fit(x, y, group=group, scheduler="synchronous")
    seconds, rank = time.process_time() - begin, float(fit.model_.basis.rank)
    result = {"fit": {"seconds": seconds, "passes": float(fit.n_passes_), "rank": rank}}
    del x, y, group
    if name == "linear":
        result |= rules(fit)
    truth = simulated(process, rng, SEQUENCES, LENGTH)
    seen = process.observe(rng, truth)
    # Sequences one after the other, as a table.
    table = np.swapaxes(seen, 0, 1).reshape(-1, 1)
    which = np.repeat(np.arange(SEQUENCES), LENGTH)
    begin = time.process_time()
    law = fit.filter(table, group=which)
    spent = time.process_time() - begin
    means = np.reshape(law.mean(), (SEQUENCES, LENGTH, -1)).swapaxes(0, 1)
    if name == "linear":
        best = kalman(seen[..., 0])[..., None]
    else:
        best = particles(process, rng, seen, REFERENCE)
    steps = SEQUENCES * LENGTH
    result["kernel Bayes filter"] = _errors(means, best, truth, spent / steps)
    result["reference"] = _errors(best, best, truth, np.nan) | {"microseconds": 0.0}
    for count in PARTICLES:
        begin = time.process_time()
        estimate = particles(process, rng, seen, count)
        spent = time.process_time() - begin
        result[f"{count} particles"] = _errors(estimate, best, truth, spent / steps)
    return result


def _errors(means: Array, best: Array, truth: Array, seconds: float) -> Result:
    """Of the first column: to the truth and to the best filter, root mean square."""
    far, off = ((means - each)[BURN:, :, 0] for each in (truth, best))
    return {
        "rmse": float(np.sqrt((far**2).mean())),
        "excess": float(np.sqrt((off**2).mean())),
        "microseconds": 1e6 * seconds,
    }


def rules(fit: KernelBayesFilter) -> dict[str, Result]:
    """Errors against closed forms: of means, and of probabilities to lie below some thresholds."""
    levels = np.linspace(0.05, 0.95, 19)
    points, thresholds = norm.ppf(levels)[:, None], norm.ppf(levels)
    gain = 1.0 / (1.0 + NOISE**2)
    ahead = fit.filter(
        np.full((len(points), 1), np.nan), group=np.arange(len(points)), previous=points
    )
    after = fit.filter(points * np.sqrt(1.0 + NOISE**2), group=np.arange(len(points)))
    exact = {
        "sum rule": (ahead, DECAY * points, np.sqrt(1.0 - DECAY**2)),
        "Bayes' rule": (
            after,
            gain * points * np.sqrt(1.0 + NOISE**2),
            NOISE * np.sqrt(gain),
        ),
    }
    result = {}
    for rule, (law, mean, deviation) in exact.items():
        below = law.cdf(thresholds) - norm.cdf((thresholds - mean) / deviation)
        error = law.mean() - mean[:, 0]
        result[rule] = {
            "mean": float(np.sqrt((error**2).mean())),
            "probability": float(np.sqrt((below**2).mean())),
        }
    return result


# References in NumPy


def kalman(y: Array) -> Array:
    """Means of the exact filter of the linear model, shape (T, B)."""
    mean, variance, means = np.zeros(y.shape[1]), 1.0, []
    for i, seen in enumerate(y):
        if i:
            mean, variance = DECAY * mean, DECAY**2 * variance + 1.0 - DECAY**2
        gain = variance / (variance + NOISE**2)
        mean, variance = mean + gain * (seen - mean), (1.0 - gain) * variance
        means.append(mean)
    return np.stack(means)


def particles(process: Process, rng: Any, y: Array, count: int) -> Array:
    """Means of a bootstrap particle filter, shape (T, B, d), for all sequences at once."""
    sequences = y.shape[1]
    state = process.first(rng, (sequences, count))
    means, rows = [], np.arange(sequences)[:, None]
    for i, seen in enumerate(y):
        if i:
            state = process.move(rng, state)
        weights = process.likelihood(state, seen[:, None]) + 1e-300
        weights /= weights.sum(axis=1, keepdims=True)
        means.append((weights[..., None] * state).sum(axis=1))
        # Systematic resampling; rows are kept apart by their number.
        places = (np.arange(count) + rng.uniform(size=(sequences, 1))) / count
        ends = np.cumsum(weights, axis=1)
        ends /= ends[:, -1:]
        chosen = np.searchsorted((ends + rows).ravel(), (places + rows).ravel())
        chosen = np.minimum(chosen.reshape(sequences, count) - rows * count, count - 1)
        state = np.take_along_axis(state, chosen[..., None], axis=1)
    return np.stack(means)


# What follows


def slopes(cells: Sequence[Result]) -> list[Result]:
    """Of each rule, slope of log error on log n and its 95 % band; of each filter, its rivals."""
    result: list[Result] = []
    linear = [cell for cell in cells if cell["scenario"] == "linear"]
    for rule in ("sum rule", "Bayes' rule"):
        for kind in ("mean", "probability"):
            if len(linear) > 1:
                result.append({"rule": rule, "of": kind} | _slope(linear, rule, kind))
    for cell in cells:
        models = cell["models"]
        own, best = (models[each] for each in ("kernel Bayes filter", "reference"))
        error = own["excess"]["mean"]
        equal = [c for c in PARTICLES if models[f"{c} particles"]["excess"]["mean"] <= error]
        rival = models[f"{equal[0]} particles"]["microseconds"]["mean"] if equal else None
        result.append(
            {
                "scenario": cell["scenario"],
                "rows": cell["rows"],
                "rmse_ratio": own["rmse"]["mean"] / best["rmse"]["mean"],
                "particles_of_equal_error": equal[0] if equal else None,
                "microseconds": own["microseconds"]["mean"],
                "particles_microseconds": rival,
            }
        )
    return result


def _slope(cells: Sequence[Result], rule: str, kind: str) -> Result:
    """Least squares through the logarithms of the errors of all draws."""
    draws = [
        (np.log(cell["rows"]), np.log(error))
        for cell in cells
        for error in cell["models"][rule][kind]["values"]
    ]
    x, y = np.transpose(draws)
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    residual = y - y.mean() - slope * x
    free = len(x) - 2
    if free < 1:
        return {"slope": slope, "low": None, "high": None}
    error = float(np.sqrt(residual @ residual / free / (x @ x)) * t.ppf(0.975, free))
    return {"slope": slope, "low": slope - error, "high": slope + error}


def filtering_tables(result: Result) -> Iterator[Any]:
    """Errors and times, and the slopes."""
    rows = [
        (
            cell["scenario"],
            f"{cell['rows']:,}",
            method,
            *(f"{each[key]['mean']:.4g}" for key in ("rmse", "excess", "microseconds")),
        )
        for cell in result["cells"]
        for method, each in cell["models"].items()
        if "rmse" in each
    ]
    names = ("process", "rows", "filter", "RMSE", "to the best filter", "µs per step")
    yield grid("Filters", names, rows, f"Means of {result['settings']['seeds']} draws.")
    rates = [
        (
            each["rule"],
            each["of"],
            f"{each['slope']:.3f}",
            "" if each["low"] is None else f"{each['low']:.3f} to {each['high']:.3f}",
        )
        for each in result["verdicts"]
        if "rule" in each
    ]
    if rates:
        yield grid("Errors against n", ("rule", "of", "slope", "95 % band"), rates)


def filtering_picture(result: Result, path: Path) -> None:
    """Draw the errors of the rules against n, and those of filters against their time.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    names = list(dict.fromkeys(cell["scenario"] for cell in result["cells"]))
    with picture(path, 3.6 * (1 + len(names)), 3.2, dpi=130) as figure:
        rates, *others = figure.subplots(1, 1 + len(names), squeeze=False)[0]
        linear = [cell for cell in result["cells"] if cell["scenario"] == "linear"]
        for color, rule in zip((BLUE, PALETTE[1]), ("sum rule", "Bayes' rule"), strict=True):
            for style, kind in (("o-", "mean"), ("s--", "probability")):
                errors = [cell["models"][rule][kind]["mean"] for cell in linear]
                sizes = [cell["rows"] for cell in linear]
                rates.loglog(sizes, errors, style, color=color, ms=4, label=f"{rule}, {kind}")
        rates.set(xlabel="rows", ylabel="error to the closed form", title="rules, linear")
        if linear:
            rates.legend(fontsize=7.5)
        for ax, name in zip(others, names, strict=True):
            label: str | None = "kernel Bayes filter, by rows"
            for cell in (cell for cell in result["cells"] if cell["scenario"] == name):
                models = cell["models"]
                own = models["kernel Bayes filter"]
                place = own["microseconds"]["mean"], own["excess"]["mean"]
                ax.loglog(*place, "o", color=BLUE, label=label)
                label = None
                ax.annotate(f" {cell['rows']:,}", place, fontsize=7.5)
            rivals = [models[f"{count} particles"] for count in PARTICLES]
            places = [each["microseconds"]["mean"] for each in rivals]
            errors = [each["excess"]["mean"] for each in rivals]
            ax.loglog(places, errors, "s-", color=PALETTE[1], ms=4, label="particles")
            ax.set(xlabel="µs per step of a sequence", ylabel="RMS to the best filter", title=name)
            ax.legend(fontsize=8)


STUDY = Study("filtering", FilteringOptions, judge, slopes, filtering_picture, filtering_tables)
