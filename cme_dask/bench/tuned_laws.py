"""The self-tuned law on samples whose truth is known, beside what the truth would have chosen."""

import warnings
from typing import Any

import numpy as np

from cme_dask.bench.laws import TEST_ROWS, TEST_SEED
from cme_dask.bench.scenarios import SCENARIOS, Scenario
from cme_dask.constraints import Normalized
from cme_dask.errors import RankWarning, ToleranceWarning
from cme_dask.estimators.joint import JointDistribution
from cme_dask.kernels import Kernel
from cme_dask.learning.candidates import Search
from cme_dask.metrics import oracle_error
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.joint import JointSolver
from cme_dask.numerics.means import MeanMoments
from cme_dask.numerics.moments import MomentSpec, Side
from cme_dask.numerics.strip_moments import strip_moments

Array = Any
Figures = dict[str, float]

NOISE = 6
"""Columns that have nothing to do with y."""

_TOL, _MAX_RANK = 1e-5, 200


def judge_tuned(name: str, n: int, seed: int, residual: str | bool = "auto") -> Figures:
    """Figures of the estimator without arguments.

    ``least_error`` is the error (43) of the trial of its search that the truth would have chosen;
    ``noisy_error`` and ``noisy_crps`` are its own where six columns of noise were added to x;
    ``location`` is 1 where its laws are those of residuals.

    Parameters
    ----------
    name, n, seed
        Scenario, rows and seed.
    residual
        Of the estimator.
    """
    scenario = SCENARIOS[name]
    x, y = scenario.draw(n, seed)
    test = scenario.draw(TEST_ROWS, TEST_SEED + seed)
    truth = scenario.truth(test[0])
    estimator = _fitted(x, y, residual)
    found = _figures(estimator, scenario, y, test, truth)
    assert estimator.search_ is not None
    least = _least_error(estimator.search_, scenario, (x, y), test[0], truth)
    rng = np.random.default_rng([seed, 3])
    wide = [np.column_stack([p, rng.standard_normal((len(p), NOISE))]) for p in (x, test[0])]
    noisy = _fitted(wide[0], y, residual)
    with_noise = _figures(noisy, scenario, y, (wide[1], test[1]), truth)
    more = {"noisy_error": with_noise["error"], "noisy_crps": with_noise["crps"]}
    more["location"] = float(estimator.model_.residual is not None)
    return found | more | {"least_error": least, "seconds": estimator.search_.seconds}


def _fitted(x: Array, y: Array, residual: str | bool) -> JointDistribution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        warnings.simplefilter("ignore", ToleranceWarning)
        estimator = JointDistribution(residual=residual, random_state=0)
        return estimator.fit(x, y, scheduler="synchronous")


def _figures(
    estimator: JointDistribution,
    scenario: Scenario,
    y: Array,
    test: tuple[Array, Array],
    truth: Array,
) -> Figures:
    """Of the law at test points; the joint loss is that of its density ratio on the cells."""
    law, cells = estimator.conditional(test[0]), estimator.model_.y.cells
    assert cells is not None
    count = truth.shape[1]
    events = law.expect([lambda rows, j=j: scenario.events(rows)[:, j] for j in range(count)])
    spread = zip(law.numeric, y.std(axis=0), strict=True)
    scores = [law.crps(test[1], name) / deviation for name, deviation in spread]
    h = estimator.weights(test[0]) / cells.masses - 1.0
    joint = h[np.arange(len(h)), cells.support.assign(test[1])].mean()
    square, product = ((h * h) @ cells.masses).mean(), (h @ cells.masses).mean()
    return {
        "error": oracle_error(events, truth),
        "crps": float(np.mean(scores)),
        "minimum": float(events.min()),
        "mass": float(np.abs(events[:, -1] - 1.0).mean()),
        "loss": float(square - 2.0 * (joint - product)),
    }


def _least_error(
    search: Search, scenario: Scenario, rows: tuple[Array, Array], x: Array, truth: Array
) -> float:
    """Error (43) of the trial that the truth would have chosen."""
    bases: dict[Kernel, tuple[NewtonBasis, Array]] = {}
    events = scenario.events(rows[1])
    extended = rows[0], np.column_stack([rows[1], events])

    def side(i: int, kernel: Kernel) -> NewtonBasis:
        # The events are columns that the kernel of y does not see.
        seen = kernel if i == 0 else kernel.on(list(range(rows[1].shape[1])))
        if kernel not in bases:
            found = pivoted_cholesky(seen, extended[i], _TOL, _MAX_RANK)
            basis = NewtonBasis(seen, extended[i][found.pivots], found.factor)
            bases[kernel] = basis, basis(x) if i == 0 else x
        return bases[kernel][0]

    least = np.inf
    for trial in search.trials:
        candidate = search.candidate(trial)
        kernels = candidate.kernel_x, candidate.kernel_y
        sides = tuple(
            Side(side(i, kernel), tuple(map(str, range(extended[i].shape[1]))))
            for i, kernel in enumerate(kernels)
        )
        moments = strip_moments(
            MomentSpec(sides), extended, None, np.zeros(len(events), dtype=np.uint8)
        )
        mean = MeanMoments.of(moments, sides)
        solution = JointSolver(Normalized(), candidate.reg)(mean)
        constant, slope = solution.answer(mean, 0)
        q = events.shape[1]
        values = constant[-q:] + bases[kernels[0]][1] @ (solution.transform_x @ slope[:, -q:])
        least = min(least, oracle_error(values, truth))
    return float(least)
