"""How often intervals around conditional expectations hold the truth, and why they miss it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cme_dask.bench.scenarios import SCENARIOS
from cme_dask.errors import RankWarning, ToleranceWarning
from cme_dask.estimators.joint import JointDistribution
from cme_dask.numerics.validation import interval_factor

Array = Any

LEVEL = 0.95
"""Level of the intervals."""

_POINTS = 20
_FOLDS = 10


@dataclass(frozen=True)
class Coverage:
    """Fits of independent samples of a known law, and how often their intervals are right.

    Attributes
    ----------
    scenario
        The law.
    rows
        Rows of each sample.
    kernels
        ``"learned"`` or ``"median"``.
    fits
        Number of samples.
    """

    scenario: str
    rows: int
    kernels: str
    fits: int

    def prepare(self) -> Callable[[], Callable[[], dict[str, Any]]]:
        """Nothing is made before."""
        return self._run

    def _run(self) -> Callable[[], dict[str, Any]]:
        law = SCENARIOS[self.scenario]
        x = np.sort(law.draw(4 * _POINTS, 12345)[0], axis=0)[2::4]
        truth = law.truth(x)[:, :-1]
        given = None if self.kernels == "learned" else self.kernels
        functions = {f"event{j}": partial(_event, law.events, j) for j in range(truth.shape[1])}
        values, errors = [], []
        for seed in range(self.fits):
            fit = JointDistribution(kernel_x=given, kernel_y=given, n_folds=_FOLDS, residual=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RankWarning)
                warnings.simplefilter("ignore", ToleranceWarning)
                fit.fit(*law.draw(self.rows, seed), functions=functions, scheduler="synchronous")
            value, error = fit.expect(list(functions), x, return_std=True)
            values.append(value)
            errors.append(error)
        return partial(coverage, np.array(values), np.array(errors), truth, _FOLDS)


def coverage(values: Array, errors: Array, truth: Array, folds: int) -> dict[str, Any]:
    """What share of intervals holds the truth, and what holds the mean of all estimates.

    Parameters
    ----------
    values, errors
        Estimates and standard errors of independent samples, shapes (R, n, q).
    truth
        Shape (n, q).
    folds
        Of the standard errors.

    Returns
    -------
    dict
        ``two``: coverage of the truth by 2 standard errors; ``t``: by the t quantile; ``lowest``:
        the same at the worst point; ``variance``: coverage of the mean of all estimates by the t
        quantile, which is what intervals without bias would have; ``bias``: the root mean square of
        the bias over that of the standard deviation.
    """
    factor, count = interval_factor(folds, LEVEL), len(values)
    off = np.abs(values - truth)
    hit = off <= factor * errors
    mean = values.mean(axis=0)
    # An estimate is part of the mean: its distance from it is too small by this factor.
    own = np.abs(values - mean) * np.sqrt(count / (count - 1))
    return {
        "two": float((off <= 2.0 * errors).mean()),
        "t": float(hit.mean()),
        "lowest": float(hit.mean(axis=0).min()),
        "variance": float((own <= factor * errors).mean()),
        "bias": float(np.sqrt(((mean - truth) ** 2).mean() / values.var(axis=0, ddof=1).mean())),
    }


def _event(events: Callable[[Array], Array], j: int, y: Array) -> Array:
    return events(y)[:, j]
