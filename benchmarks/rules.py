"""The picture of operators: what each rule learns from rows, beside the truth."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.run import write_result
from cme_dask import JointDistribution, PivotedCholesky, kernels, open_sample, operators
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.models.plots import BLUE, PALETTE, picture

Array = Any
Result = dict[str, Any]

ROWS = 20_000
SEED = 0
OUTPUTS = ("operators.json", "operators.png")
SCHEMA_VERSION = 1

NOISE, PRIOR_MEAN, PRIOR_SPREAD = 0.5, 0.5, 0.7
"""x is standard normal, y = x + 0.5 e, and x has mean 0.5 and deviation 0.7 under the prior."""

AT = np.linspace(-2.0, 2.0, 41)
_DIGITS = 6


def run_rules(n_rows: int, out: Path | None, *, overwrite: bool, progress: ProgressLines) -> Result:
    """Learn every operator, compare it with the truth; write JSON and a picture, if asked to."""
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    begin = time.time()
    panels = [*_panels(n_rows)]
    result: Result = {
        "kind": "operators",
        "schema_version": SCHEMA_VERSION,
        "seconds": time.time() - begin,
        "machine": describe_machine(),
        "settings": {"rows": n_rows},
        "panels": panels,
        "files": [],
    }
    if out is not None:
        write_result(result, out, OUTPUTS, rules_picture, progress)
    return result


def _panels(n_rows: int) -> Iterator[Result]:
    """Each rule of operators: values at some points as learned, and the truth."""
    rng = np.random.default_rng(SEED)
    x, noise, z = rng.normal(size=(3, n_rows, 1))
    y, z = x + NOISE * noise, PRIOR_MEAN + PRIOR_SPREAD * z
    gaussian = kernels.Gaussian(1.0)
    space_x, space_y = (
        operators.Space.of(PivotedCholesky(gaussian, tol=1e-7).fit(rows)) for rows in (x, y)
    )
    at, t = AT[:, None], AT
    functions: dict[str, Any] = {"f": _wave, "1 / g": operators.Reciprocal(_valley)}
    P = operators.measure(open_sample(x, y), space_x, space_y, functions_x=functions)
    Q = operators.measure(open_sample(z), space_x)
    E = P.conditional_expectation()

    times, over = P.multiplication("f"), P.multiplication("1 / g")
    yield _panel("multiplication, f h", times(_bump)(at), _wave(at) * _bump(at))
    yield _panel("quotient, h / g", over(_bump)(at), _bump(at) / _valley(at))
    C = operators.composition(open_sample(x), _fold, space_x, space_y)
    yield _panel("composition, h(φ(x))", C(_bump)(at), _bump(_fold(at)))
    truth = np.exp(-2.0 * NOISE**2) * np.cos(2.0 * t)
    yield _panel("conditional expectation, E[cos 2Y | x]", E(_cosine)(at), truth)
    later = y + NOISE * rng.normal(size=y.shape)
    again = operators.measure(open_sample(y, later), space_y, space_y).conditional_expectation()
    truth = np.exp(-4.0 * NOISE**2) * np.cos(2.0 * t)
    yield _panel("product, E[ E[cos 2Z | Y] | x]", (E @ again)(_cosine)(at), truth)

    spread = PRIOR_SPREAD**2 + NOISE**2  # the variance of y under the prior
    truth = np.exp(-((t - PRIOR_MEAN) ** 2) / (2.0 * (1.0 + spread))) / np.sqrt(1.0 + spread)
    yield _panel("sum rule (adjoint), law of y under Q", E.T(Q.mean())(at), truth)
    joint = (E.T @ Q.covariance())(space_x.embed(at))(at)
    cov = np.full((2, 2), PRIOR_SPREAD**2) + np.diag([1.0, 1.0 + NOISE**2])
    d = np.stack(np.meshgrid(t, t, indexing="ij"), axis=-1) - PRIOR_MEAN
    truth = np.exp(-np.einsum("ijk,kl,ijl->ij", d, np.linalg.inv(cov), d) / 2.0)
    yield _panel("chain rule, law of (x, y) under Q", joint, truth / np.sqrt(np.linalg.det(cov)))

    # E_Q[exp(-(X - t)^2 / 2) cos 2Y]: first over X given Y = y, or first over Y given X = x.
    first = (E.T @ Q.covariance())(space_x.embed(at)).inner(space_y.interpolate(_cosine))
    second = (Q.covariance() @ E)(_cosine)(at)
    precision = 1.0 / PRIOR_SPREAD**2 + 1.0
    centre = (PRIOR_MEAN / PRIOR_SPREAD**2 + t) / precision
    mass = np.exp(-((t - PRIOR_MEAN) ** 2) / (2.0 * (1.0 + PRIOR_SPREAD**2)))
    mass /= np.sqrt(1.0 + PRIOR_SPREAD**2)
    wave = np.exp(-2.0 * NOISE**2 - 2.0 / precision) * np.cos(2.0 * centre)
    orders = {"over X, then over Y": first, "over Y, then over X": second}
    yield _panel("Fubini, E[k(X, t) cos 2Y] under Q", orders, mass * wave)

    (reweighted,) = operators.kernel_bayes(
        open_sample(x, y), Q.mean(), P, reg=1e-4, reg_posterior=1e-8
    )
    quotient = operators.bayes(E, Q, open_sample(y))
    truth = PRIOR_MEAN + PRIOR_SPREAD**2 / spread * (t - PRIOR_MEAN)
    posterior_means = {
        "kernel_bayes": reweighted(_first)(at),
        "bayes, smoothed": quotient(_first)(at),
    }
    yield _panel("Bayes' rule, E[X | y] under Q", posterior_means, truth)
    fit = JointDistribution(
        kernel_x=gaussian, kernel_y=gaussian, reg=1e-4, residual=False, random_state=0
    ).fit(x, y)
    exact = operators.change_prior(fit, z).conditional(Y=at).mean()
    weights = operators.reweighting(P.joint_ratio(1e-4), z[:1000])
    by_weights = {"reweighting": weights.expect(_first, at), "change_prior": exact}
    yield _panel("Bayes' rule by weights ≥ 0, E[X | y]", by_weights, truth)
    ratio = P.density_ratio(Q, 1e-3, non_negative=True)
    truth = np.exp(t**2 / 2.0 - (t - PRIOR_MEAN) ** 2 / (2.0 * PRIOR_SPREAD**2)) / PRIOR_SPREAD
    yield _panel("density ratio, dQ / dP", ratio(at), truth)
    weighted = operators.measure(open_sample(x), space_x, functions_x={"r": ratio})
    R = weighted.change_of_measure("r")
    means = {"learned": R.T(weighted.mean())(at), "under P": weighted.mean()(at)}
    yield _panel("change of measure, E k(X, t) under Q", means, mass)


def _first(x: Array) -> Array:
    return x[:, 0]


def _bump(x: Array) -> Array:
    return np.exp(-(x[:, 0] ** 2) / 2.0)


def _wave(x: Array) -> Array:
    return np.sin(2.0 * x[:, 0])


def _valley(x: Array) -> Array:
    return 0.5 + x[:, 0] ** 2


def _fold(x: Array) -> Array:
    return 2.0 * np.sin(x)


def _cosine(y: Array) -> Array:
    return np.cos(2.0 * y[:, 0])


def _panel(title: str, learned: Array | dict[str, Array], truth: Array) -> Result:
    """A rule beside the truth; several curves by name."""
    curves = learned if isinstance(learned, dict) else {"learned": learned}

    def values(each: Array) -> Any:
        return np.round(np.asarray(each).reshape(truth.shape), _DIGITS).tolist()

    return {
        "title": title,
        "truth": values(truth),
        "curves": {name: values(each) for name, each in curves.items()},
        "errors": {
            name: float(np.sqrt(np.mean((each.reshape(truth.shape) - truth) ** 2)))
            for name, each in curves.items()
        },
    }


def rules_tables(result: Result) -> Iterator[Any]:
    """The root mean squared error of each rule."""
    rows = [
        (panel["title"], name, f"{error:.4f}", f"{np.ptp(panel['truth']):.2f}")
        for panel in result["panels"]
        for name, error in panel["errors"].items()
    ]
    yield grid(
        "Operators beside the truth",
        ("rule", "", "error", "range"),
        rows,
        f"Root mean squared errors at points from -2 to 2, of {result['settings']['rows']:,} rows, "
        "beside the range of the true values.",
        text_columns=2,
    )


def rules_picture(result: Result, path: Path) -> None:
    """Draw a panel for each rule.

    Parameters
    ----------
    result
        JSON form of the study.
    path
        PNG file to write.
    """
    with picture(path, 12.4, 8.2, dpi=100, **{"axes.titlesize": 9.5, "font.size": 9.0}) as figure:
        for ax, panel in zip(figure.subplots(3, 4).flat, result["panels"], strict=True):
            truth = np.array(panel["truth"])
            ax.set_title(panel["title"])
            if truth.ndim == 2:
                levels = np.linspace(0.1, 0.9, 5) * truth.max()
                learned = np.array(panel["curves"]["learned"])
                ax.contour(
                    AT, AT, truth.T, levels, colors="#333333", linestyles=":", linewidths=2.0
                )
                ax.contour(AT, AT, learned.T, levels, colors=BLUE, linewidths=1.1)
                continue
            for color, (name, values) in zip(
                (BLUE, PALETTE[1]), panel["curves"].items(), strict=False
            ):
                ax.plot(AT, values, color=color, lw=1.6, label=name)
            ax.plot(AT, truth, color="#333333", ls=":", lw=2.2, label="truth")
            ax.legend(fontsize=8.0)
