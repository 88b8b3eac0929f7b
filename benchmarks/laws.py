"""Every model of a conditional law on one sample whose truth is known."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from benchmarks.coverage import SCENARIOS, Scenario
from cme_dask.constraints import (
    Certified,
    Constraint,
    Coupling,
    Normalized,
    Pointwise,
    Unconstrained,
)
from cme_dask.errors import RankWarning, ToleranceWarning
from cme_dask.estimators.joint import JointDistribution
from cme_dask.kernels import Gaussian, Kernel
from cme_dask.learning.candidates import Search
from cme_dask.learning.landmarks import choose_landmarks
from cme_dask.metrics import crps, oracle_error
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.crossval import PairMeans, held_out_loss
from cme_dask.numerics.embedding import ConditionalEmbedding, surrogate_losses
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.measure import project
from cme_dask.numerics.moments import (
    FeatureBlock,
    MomentReduction,
    Moments,
    MomentSums,
    strip_moments,
)
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.problem import BasisBounds, JointSolution, JointSolver, Regularization
from cme_dask.numerics.support import make_support

# Every model of a conditional law on one sample whose truth is known, tuned as a user would


Array = Any
Figures = dict[str, float]

TOL, MAX_RANK, FOLDS = 1e-5, 200, 5
SCALES = (0.2, 0.35, 0.6, 1.0, 1.8)
"""Length scales in standard deviations."""
REGS = tuple(Regularization(r, r) for r in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0))
"""Two-sided ridges, the same for x and y."""
COUPLING_SCALES = (0.1, 0.2, 0.35, 0.6)
COUPLING_REGS = tuple(Regularization(r, r) for r in (1.0, 1e-1, 1e-2, 1e-3, 1e-4))
CELLS, TEST_ROWS, TEST_SEED = 1000, 1000, 1_000_000
_LANDMARKS = 64
_POINTWISE = 100


@dataclass(frozen=True)
class Choice:
    """Length scales of x and y in standard deviations, the ridge, and the held-out loss there."""

    scale_x: float
    scale_y: float
    reg: Regularization
    loss: float


class Sample:
    """A scaled training sample with bases and moments by length scale, each made once.

    Parameters
    ----------
    name, n, seed
        Scenario, rows and seed.
    """

    def __init__(self, name: str, n: int, seed: int) -> None:
        self.scenario = SCENARIOS[name]
        raw = self.scenario.draw(n, seed)
        self.scales = tuple(part.std(axis=0) for part in raw)
        self.parts = tuple(part / scale for part, scale in zip(raw, self.scales, strict=True))
        self.folds = fold_of_rows(0, n, FOLDS)
        self._bases: dict[tuple[int, float, bool], Any] = {}
        self._moments: dict[
            tuple[float, float, bool], tuple[MomentSums, tuple[FeatureBlock, FeatureBlock]]
        ] = {}

    def basis(self, side: int, scale: float, partition: bool = False) -> Any:
        """The basis of a side at a length scale."""
        key = (side, scale, partition)
        if key not in self._bases:
            rows, kernel = self.parts[side], Gaussian(scale)
            if partition:
                count = min(_LANDMARKS, len(rows) // 4)
                weights = np.full(len(rows), 1.0 / len(rows))
                points = choose_landmarks(kernel, rows, weights, count, "kmeans", 0)
                self._bases[key] = PartitionBasis(kernel, points)
            else:
                result = pivoted_cholesky(kernel, rows, TOL, MAX_RANK)
                self._bases[key] = NewtonBasis(kernel, rows[result.pivots], result.factor)
        return self._bases[key]

    def moments(
        self, scale_x: float, scale_y: float, partition: bool = False
    ) -> tuple[MomentSums, tuple[FeatureBlock, FeatureBlock]]:
        """Moments by fold, with the events as functions of y."""
        key = (scale_x, scale_y, partition)
        if key not in self._moments:
            d_x, d_y = (part.shape[1] for part in self.parts)
            x = FeatureBlock(self.basis(0, scale_x, partition), tuple(f"x{j}" for j in range(d_x)))
            y = FeatureBlock(
                self.basis(1, scale_y, partition),
                tuple(f"y{j}" for j in range(d_y)),
                {f"event {j}": _Event(self, j) for j in range(self.n_events)},
            )
            spec = MomentReduction((x, y), FOLDS)
            self._moments[key] = strip_moments(spec, self.parts, None, self.folds), (x, y)
        return self._moments[key]

    @cached_property
    def n_events(self) -> int:
        """Number of events."""
        return int(self.events(self.parts[1][:1]).shape[1])

    def events(self, y: Array) -> Array:
        """Indicators of the events at scaled y, shape (n, q)."""
        return self.scenario.events(y * self.scales[1])

    @cached_property
    def support(self) -> tuple[Any, Array]:
        """Cells of y, and their masses over the rows."""
        rows = self.parts[1]
        cells = make_support(rows, np.full(len(rows), 1.0 / len(rows)), CELLS)
        counts = np.bincount(cells.assign(rows), minlength=cells.size)
        return cells, counts / counts.sum()

    @cached_property
    def cell_events(self) -> Array:
        """Shares of the rows of each cell at which the events happen, shape (S, q)."""
        rows, cells = self.parts[1], self.support[0]
        which, events = cells.assign(rows), self.events(rows)
        sums = np.stack([np.bincount(which, e, minlength=cells.size) for e in events.T], axis=1)
        counts = np.bincount(which, minlength=cells.size)[:, None]
        overall = np.tile(events.mean(axis=0), (cells.size, 1))
        return np.divide(sums, counts, out=overall, where=counts > 0)


@dataclass(frozen=True)
class _Event:
    """One event as a declared function."""

    sample: Sample
    number: int

    def __call__(self, y: Array) -> Array:
        return self.sample.events(y)[:, self.number]


def ridge_path(
    solver: JointSolver, mean: Moments, regs: Sequence[Regularization]
) -> Iterator[JointSolution]:
    """Solutions at one ridge after the other; iterations start from the last."""
    solution = None
    for reg in regs:
        solution = solver._replace(reg=reg).solve(mean, solution)
        yield solution


def tune(sample: Sample, constraint: Constraint) -> Choice:
    """Scales and ridge with the smallest joint loss on held-out folds."""
    best: Choice | None = None
    for scale_x, scale_y in product(SCALES, SCALES):
        moments, sides = sample.moments(scale_x, scale_y)
        bounds = BasisBounds(tuple(side.basis.bound for side in sides))  # type: ignore[arg-type]
        losses = np.zeros(len(REGS))
        solver = JointSolver(constraint, REGS[0], bounds)
        for rest, held in moments.split_folds():
            unseen: PairMeans | None = None
            for i, solution in enumerate(ridge_path(solver, rest, REGS)):
                # Eigenbases don't depend on the ridge.
                unseen = unseen or PairMeans.of(held).transformed(
                    solution.transform_x, solution.transform_y
                )
                losses[i] += unseen.loss(solution.coef) / FOLDS
        i = int(losses.argmin())
        if best is None or losses[i] < best.loss:
            best = Choice(scale_x, scale_y, REGS[i], float(losses[i]))
    assert best is not None
    return best


def tune_coupling(sample: Sample) -> Choice:
    """Likewise for the coupling, on one fold; ridges descend, each starts from the last."""
    best: Choice | None = None
    for scale_x, scale_y in product(COUPLING_SCALES, COUPLING_SCALES):
        moments, _ = sample.moments(scale_x, scale_y, partition=True)
        rest, held = next(moments.split_folds())
        solver = JointSolver(Coupling(tol=1e-4), COUPLING_REGS[0])
        path = ridge_path(solver, rest, COUPLING_REGS)
        for reg, solution in zip(COUPLING_REGS, path, strict=True):
            loss = held_out_loss(held, solution)
            if best is None or loss < best.loss:
                best = Choice(scale_x, scale_y, reg, loss)
    assert best is not None
    return best


# The models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """Fresh rows of a scenario, scaled like the sample, and the truth there."""

    x: Array
    y: Array
    truth: Array
    cell: Array

    @classmethod
    def of(cls, sample: Sample, seed: int) -> "Test":
        """Rows that no fit has seen."""
        raw = sample.scenario.draw(TEST_ROWS, seed)
        x, y = (part / scale for part, scale in zip(raw, sample.scales, strict=True))
        return cls(x, y, sample.scenario.truth(raw[0]), sample.support[0].assign(y))


def clip(ratio: Array, masses: Array) -> Array:
    """Clip and renormalise: v max(g, 0) over its sum, and v where nothing is positive.

    For comparison with :func:`cme_dask.numerics.measure.project`: it can be farther from the truth
    than g was. Shapes are those of the projection.
    """
    above = np.maximum(ratio, 0.0)
    above[~(above[:, masses > 0] > 0).any(axis=1)] = 1.0
    above = above * masses
    return np.asarray(above / above.sum(axis=1, keepdims=True))


def judge(name: str, n: int, seed: int) -> dict[str, Figures]:
    """Figures of every model on one sample, by the model's name."""
    sample = Sample(name, n, seed)
    test = Test.of(sample, TEST_SEED + seed)
    result: dict[str, Figures] = {}
    for constraint in (Unconstrained(), Normalized(), Certified()):
        choice = tune(sample, constraint)
        solution, sides, mean = _solution(sample, choice, constraint)
        ratio = _ratio(solution, sides, sample, test)
        signed = _expected(solution, sides, mean, sample, test)
        label = constraint.name
        result[label] = _figures(sample, test, ratio, signed, choice)
        if label == "certified":
            continue
        masses = sample.support[1]
        for law, weights in (
            ("clipped", clip(ratio, masses)),
            ("projected", project(ratio, masses)[0]),
        ):
            result[f"{label}, {law}"] = _of_law(sample, test, weights, choice)
        if label == "normalized":
            result["pointwise"] = _pointwise(sample, test, choice)
            result["traditional"] = _traditional(sample, test, choice)
    choice = tune_coupling(sample)
    solution, sides, mean = _solution(sample, choice, Coupling(tol=1e-5), partition=True)
    ratio = _ratio(solution, sides, sample, test)
    signed = _expected(solution, sides, mean, sample, test)
    result["coupling"] = _figures(sample, test, ratio, signed, choice)
    result["traditional, (41)"] = _traditional_validated(sample, test, choice)
    return result


def _solution(
    sample: Sample, choice: Choice, constraint: Constraint, partition: bool = False
) -> tuple[JointSolution, tuple[FeatureBlock, FeatureBlock], Moments]:
    moments, sides = sample.moments(choice.scale_x, choice.scale_y, partition)
    mean = moments.means()
    newton = None
    if isinstance(constraint, Pointwise):
        points = [
            np.concatenate([s.basis.points, p])[:_POINTWISE]
            for s, p in zip(sides, sample.parts, strict=True)
        ]
        newton = sides[0].basis(points[0]), sides[1].basis(points[1])
    bounds = BasisBounds((sides[0].basis.bound, sides[1].basis.bound), newton)
    return JointSolver(constraint, choice.reg, bounds).solve(mean), sides, mean


def _ratio(
    solution: JointSolution, sides: tuple[FeatureBlock, FeatureBlock], sample: Sample, test: Test
) -> Array:
    """The signed ratio g(x_i, y_s) at test points and cells."""
    x = sides[0].basis(test.x) @ solution.transform_x
    y = sides[1].basis(sample.support[0].points) @ solution.transform_y
    return solution.base + x @ solution.coef.T @ y.T


def _expected(
    solution: JointSolution,
    sides: tuple[FeatureBlock, FeatureBlock],
    mean: Moments,
    sample: Sample,
    test: Test,
) -> Array:
    """E[t(Y) | x] from exact moments, shape (n, q)."""
    constant, slope = solution.answer(mean, 0)
    values = constant + (sides[0].basis(test.x) @ solution.transform_x) @ slope
    return np.asarray(values[:, -sample.n_events :])


def _figures(sample: Sample, test: Test, ratio: Array, events: Array, choice: Choice) -> Figures:
    """Of a model with ratio g, whose probabilities of the events are given."""
    cells, masses = sample.support
    # Signed weights add up to one but for the cells, and for what a model gets wrong.
    weights = ratio * masses / (ratio @ masses)[:, None]
    h = ratio - 1.0
    product_mean, square = (h @ masses).mean(), ((h * h) @ masses).mean()
    joint = h[np.arange(len(h)), test.cell].mean()
    return {
        "error": oracle_error(events, test.truth),
        "crps": float(crps(weights, cells.points, test.y).mean()),
        "minimum": float(events.min()),
        "mass": float(np.abs(events[:, -1] - 1.0).mean()),
        "loss": float(square - 2.0 * (joint - product_mean)),
        "scale_x": choice.scale_x,
        "scale_y": choice.scale_y,
        "reg": choice.reg.x,
    }


def _of_law(sample: Sample, test: Test, weights: Array, choice: Choice) -> Figures:
    """Of a law on the cells, shape (n, S); events are averaged over the rows of each cell."""
    return _figures(sample, test, weights / sample.support[1], weights @ sample.cell_events, choice)


def _pointwise(sample: Sample, test: Test, choice: Choice) -> Figures:
    solution, sides, mean = _solution(sample, choice, Pointwise())
    ratio = _ratio(solution, sides, sample, test)
    return _figures(sample, test, ratio, _expected(solution, sides, mean, sample, test), choice)


def _traditional(sample: Sample, test: Test, choice: Choice) -> Figures:
    """The embedding (42): scale of x and ridge by the surrogate loss, which can't choose k_Y."""
    regs = [reg.x for reg in REGS]
    best: tuple[float, float, float] | None = None
    for scale in SCALES:
        moments, _ = sample.moments(scale, choice.scale_y)
        losses, shares = surrogate_losses(moments, regs)
        mean = shares @ losses
        i = int(mean.argmin())
        best = min(best or (np.inf, 0.0, 0.0), (float(mean[i]), scale, regs[i]))
    assert best is not None
    return _embedded(sample, test, choice, best[1], best[2])


def _traditional_validated(sample: Sample, test: Test, choice: Choice) -> Figures:
    """The embedding (42): scale of x and ridge by (41), the squared error of the events."""
    regs = [reg.x for reg in REGS]
    best: tuple[float, float, float] | None = None
    for scale in SCALES:
        moments, _ = sample.moments(scale, choice.scale_y)
        for reg in regs:
            errors, weight = 0.0, 0.0
            for rest, held in moments.split_folds():
                slope = ConditionalEmbedding.of(rest, reg).functions(rest)
                flat = np.zeros(slope.shape[1])
                error = held.squared_error("x", "y", flat, slope)
                errors += held.weight * error[-sample.n_events :].sum()
                weight += held.weight
            best = min(best or (np.inf, 0.0, 0.0), (float(errors / weight), scale, reg))
    assert best is not None
    return _embedded(sample, test, choice, best[1], best[2])


def _embedded(sample: Sample, test: Test, choice: Choice, scale: float, reg: float) -> Figures:
    """The embedding at a scale of x and a ridge."""
    moments, sides = sample.moments(scale, choice.scale_y)
    mean = moments.means()
    embedding, newton = ConditionalEmbedding.of(mean, reg), sides[0].basis
    rows, (cells, masses) = sample.parts, sample.support
    weights = np.full(len(rows[0]), 1.0 / len(rows[0]))
    slopes = embedding.cells(newton(rows[0]), weights, cells.assign(rows[1]), cells.size)
    values = newton(test.x)
    events = (values @ embedding.functions(mean))[:, -sample.n_events :]
    used = Choice(scale, choice.scale_y, Regularization(reg, reg), choice.loss)
    return _figures(sample, test, (values @ slopes) / masses, events, used)


# The self-tuned law on samples whose truth is known, beside what the truth would have chosen


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
    result = _figures_tuned_laws(estimator, scenario, y, test, truth)
    assert estimator.search_ is not None
    least = _least_error(estimator.search_, scenario, (x, y), test[0], truth)
    rng = np.random.default_rng([seed, 3])
    wide = [np.column_stack([p, rng.standard_normal((len(p), NOISE))]) for p in (x, test[0])]
    noisy = _fitted(wide[0], y, residual)
    with_noise = _figures_tuned_laws(noisy, scenario, y, (wide[1], test[1]), truth)
    more = {"noisy_error": with_noise["error"], "noisy_crps": with_noise["crps"]}
    more["location"] = float(estimator.model_.residual is not None)
    return result | more | {"least_error": least, "seconds": estimator.search_.seconds}


def _fitted(x: Array, y: Array, residual: str | bool) -> JointDistribution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        warnings.simplefilter("ignore", ToleranceWarning)
        estimator = JointDistribution(residual=residual, random_state=0)
        return estimator.fit(x, y, scheduler="synchronous")


def _figures_tuned_laws(
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
            result = pivoted_cholesky(seen, extended[i], _TOL, _MAX_RANK)
            basis = NewtonBasis(seen, extended[i][result.pivots], result.factor)
            bases[kernel] = basis, basis(x) if i == 0 else x
        return bases[kernel][0]

    least = np.inf
    for trial in search.trials:
        candidate = search.candidate(trial)
        kernels = candidate.kernel_x, candidate.kernel_y
        sides = tuple(
            FeatureBlock(side(i, kernel), tuple(map(str, range(extended[i].shape[1]))))
            for i, kernel in enumerate(kernels)
        )
        moments = strip_moments(
            MomentReduction(sides), extended, None, np.zeros(len(events), dtype=np.uint8)
        )
        mean = moments.means()
        solution = JointSolver(Normalized(), candidate.reg).solve(mean)
        constant, slope = solution.answer(mean, 0)
        q = events.shape[1]
        values = constant[-q:] + bases[kernels[0]][1] @ (solution.transform_x @ slope[:, -q:])
        least = min(least, oracle_error(values, truth))
    return float(least)
