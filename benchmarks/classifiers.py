"""Probabilities of a label by every method, on one sample whose truth is known.

Figure 5 of the joint paper (section 7): Z is a three-dimensional normal vector, x = (Z_1, Z_2), and
P(sgn Z_3 = 1 | x) is asked. Every method has the same length scales of x and ridges to choose from,
and chooses by the logistic loss -log P on a validation sample as large as the training sample;
``self-tuned`` is ``JointDistribution()``, which cross-validates on the training sample alone.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from scipy.special import expit
from scipy.stats import norm

from benchmarks.laws import ridge_path
from cme_dask.constraints import Certified, Constraint, Coupling, Normalized, Unconstrained
from cme_dask.data.generate import Normal3
from cme_dask.errors import RankWarning, ToleranceWarning
from cme_dask.estimators.joint import JointDistribution
from cme_dask.kernels import Delta, Gaussian
from cme_dask.learning.landmarks import choose_landmarks
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.embedding import ConditionalEmbedding
from cme_dask.numerics.logistic import LogisticProblem, LogisticSums, solve_logistic
from cme_dask.numerics.measure import project
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, Moments, strip_moments
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.problem import BasisBounds, JointSolver, Regularization

Array = Any
Figures = dict[str, float]
Predict = Callable[[Array], Array]
"""From points (b, 2) to P(Y > 0 | x), shape (b,); for signed models it may leave [0, 1]."""

Candidates = Callable[["Training"], Iterator[Predict]]

TEST_ROWS, VALIDATION_SEED, TEST_SEED = 1000, 1_000_000, 2_000_000
TOL, MAX_RANK = 1e-5, 150
SCALES = (0.35, 0.6, 1.0, 1.8, 3.2, 5.6)
"""Length scales of x in standard deviations."""
SCALES_Y = (0.35, 0.6, 1.0, 1.8)
"""Those of Z_3, for the methods that see more of it than its sign."""
REGS = tuple(10.0**p for p in range(-6, 2))
COUPLING_SCALES, COUPLING_SCALES_Y = (0.35, 0.6, 1.0), (0.35, 0.6)
COUPLING_REGS = (1.0, 1e-1, 1e-2, 1e-3)
FLOOR = 1e-3
"""Least probability that the logistic loss sees: signed models may give less than none."""

_CELLS = 100
_ROUNDING = 1e-12
_LANDMARKS = 32


@dataclass(frozen=True, eq=False)
class Draw:
    """A sample: points, the third coordinate, and P(Y > 0 | x)."""

    x: Array
    y: Array
    truth: Array

    @classmethod
    def of(cls, scenario: str, n: int, seed: int) -> "Draw":
        """Rows of a scenario of ``cme_dask.config.SCENARIOS``, in standard deviations."""
        law = Normal3(scenario)
        cov = law.covariance * 25.0
        last, first = next(law.batches(n, seed))
        x, y = 5.0 * first, 5.0 * last[:, 0]
        slope = np.linalg.solve(cov[:2, :2], cov[:2, 2])
        return cls(x, y, norm.cdf(x @ slope / np.sqrt(1.0 - slope @ cov[:2, 2])))

    @property
    def labels(self) -> Array:
        """Whether Y > 0, shape (n,)."""
        return self.y > 0.0


class Training:
    """A training sample, its bases and moments made once.

    Parameters
    ----------
    draw
        The sample.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.shares = np.full(len(draw.y), 1.0 / len(draw.y))
        self.newton = cache(self._newton)
        self.partition = cache(self._partition)

    def rows(self, i: int) -> Array:
        """Of x, of Z_3, and of the codes of its sign, shapes (n, d)."""
        return (self.draw.x, self.draw.y[:, None], self.draw.labels[:, None].astype(float))[i]

    def cells(self, labels: bool) -> tuple[Array, Array]:
        """Points and masses of the labels, or of bins of Z_3 that end at zero."""
        if labels:
            share = self.draw.labels.mean()
            return np.array([0.0, 1.0]), np.array([1.0 - share, share])
        edges = np.quantile(self.draw.y, np.linspace(0.0, 1.0, _CELLS + 1)[1:-1])
        cells = np.asarray(np.searchsorted(np.unique([*edges, 0.0]), self.draw.y))
        counts, sums = np.bincount(cells), np.bincount(cells, self.draw.y)
        seen = counts > 0
        return sums[seen] / counts[seen], counts[seen] / counts.sum()

    def _newton(self, i: int, scale: float) -> NewtonBasis:
        rows = self.rows(i)
        kernel = Delta() if i == 2 else Gaussian(scale)
        result = pivoted_cholesky(kernel, rows, TOL, MAX_RANK)
        return NewtonBasis(kernel, rows[result.pivots], result.factor)

    def _partition(self, i: int, scale: float) -> PartitionBasis:
        kernel, rows = Gaussian(scale), self.rows(i)
        count = min(_LANDMARKS, len(rows) // 4)
        points = choose_landmarks(kernel, rows, self.shares, count, "kmeans", 0)
        return PartitionBasis(kernel, points)

    def moments(
        self, bases: tuple[Any, Any], i: int = 1
    ) -> tuple[Moments, tuple[FeatureBlock, FeatureBlock]]:
        """Of x and of variable ``i``, with the event Y > 0 as the last function."""
        x = FeatureBlock(bases[0], ("x0", "x1"))
        y = FeatureBlock(bases[1], ("y",), {"positive": _positive})
        rows = self.rows(0), self.rows(i)
        folds = np.zeros(len(rows[0]), dtype=np.uint8)
        moments = strip_moments(MomentReduction((x, y)), rows, None, folds)
        return moments.means(), (x, y)


def _positive(rows: Array) -> Array:
    return rows[:, 0] > 0.0


# The methods -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Linear:
    """a + N(x)^T b."""

    basis: Any
    slope: Array
    constant: float = 0.0

    def __call__(self, x: Array) -> Array:
        return np.asarray(self.constant + self.basis(x) @ self.slope)


@dataclass(frozen=True, eq=False)
class _Projected:
    """Weight of the positive cells of the law nearest to the ratio 1 + N(x)^T right."""

    basis: Any
    right: Array
    masses: Array
    positive: Array

    def __call__(self, x: Array) -> Array:
        weights = project(1.0 + self.basis(x) @ self.right, self.masses)[0]
        return np.asarray(weights[:, self.positive].sum(axis=1))


@dataclass(frozen=True, eq=False)
class _Logistic:
    """1 / (1 + exp(-[N(x), 1]^T odds))."""

    basis: Any
    odds: Array

    def __call__(self, x: Array) -> Array:
        return np.asarray(expit(self.basis(x) @ self.odds[:-1] + self.odds[-1]))


@dataclass(frozen=True)
class Joint:
    """Density ratios of x and Z_3, or of x and its sign; as a law, or by signed expectations."""

    constraint: Constraint
    labels: bool = False
    law: bool = False

    def __call__(self, training: Training) -> Iterator[Predict]:
        """The candidates."""
        i = 2 if self.labels else 1
        points, masses = training.cells(self.labels)
        regs = [Regularization(r, r) for r in REGS]
        for scale_x, scale_y in product(SCALES, SCALES_Y[:1] if self.labels else SCALES_Y):
            x, y = training.newton(0, scale_x), training.newton(i, scale_y)
            mean, _ = training.moments((x, y), i)
            at_points = y(points[:, None])
            solver = JointSolver(self.constraint, regs[0], BasisBounds((x.bound, y.bound)))
            for result in ridge_path(solver, mean, regs):
                if self.law:
                    right = result.coef.T @ (at_points @ result.transform_y).T
                    yield _Projected(x, result.transform_x @ right, masses, points > 0.0)
                else:
                    constant, slope = result.answer(mean, 0)
                    yield _Linear(x, result.transform_x @ slope[:, -1], constant[-1])


def _coupling(training: Training) -> Iterator[Predict]:
    regs = [Regularization(r, r) for r in COUPLING_REGS]
    for scale_x, scale_y in product(COUPLING_SCALES, COUPLING_SCALES_Y):
        x, y = training.partition(0, scale_x), training.partition(1, scale_y)
        mean, _ = training.moments((x, y))
        for result in ridge_path(JointSolver(Coupling(tol=1e-4), regs[0]), mean, regs):
            constant, slope = result.answer(mean, 0)
            yield _Linear(x, result.transform_x @ slope[:, -1], constant[-1])


def _traditional(training: Training) -> Iterator[Predict]:
    for scale in SCALES:
        x = training.newton(0, scale)
        mean, _ = training.moments((x, training.newton(2, 1.0)), 2)
        for reg in REGS:
            yield _Linear(x, ConditionalEmbedding.of(mean, reg).functions(mean)[:, -1])


def _logistic(training: Training) -> Iterator[Predict]:
    rows, codes = training.rows(0), training.draw.labels.astype(np.intp)
    for scale in SCALES:
        x = training.newton(0, scale)
        sections = np.vstack([x.kernel(x.points, rows), np.ones(len(codes))])
        features = np.column_stack([x(rows), np.ones(len(codes))])
        gram = features.T @ features / len(codes)
        sums = partial(_logistic_sums, sections, codes)
        for reg in REGS:
            problem = LogisticProblem(x.factor, gram, 2, reg)
            newton = solve_logistic(problem, sums, tol=1e-4, max_iter=200).newton
            yield _Logistic(x, newton[:, 1] - newton[:, 0])


def _logistic_sums(sections: Array, codes: Array, coefficients: Array) -> LogisticSums:
    return LogisticSums.of(sections, codes, None, coefficients)


@dataclass(frozen=True, eq=False)
class _SelfTuned:
    """Probability of the declared event under the law that a user gets without arguments."""

    law: JointDistribution

    def __call__(self, x: Array) -> Array:
        return np.asarray(self.law.conditional(x).probability("positive"))


def _self_tuned(training: Training) -> Iterator[Predict]:
    """One candidate: it cross-validates on the training sample alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        warnings.simplefilter("ignore", ToleranceWarning)
        law = JointDistribution(random_state=0)
        law.fit(
            training.rows(0),
            training.rows(1),
            functions={"positive": _positive},
            scheduler="synchronous",
        )
    yield _SelfTuned(law)


METHODS: dict[str, Candidates] = {
    "self-tuned": _self_tuned,
    "constrained": Joint(Normalized(), law=True),
    "constrained, labels only": Joint(Normalized(), labels=True, law=True),
    "certified": Joint(Certified()),
    "coupling": _coupling,
    "unconstrained": Joint(Unconstrained()),
    "traditional": _traditional,
    "kernel logistic": _logistic,
}
"""Candidates of each method. The laws see Z_3 unless they are of labels only."""

TRUTH = "truth"


def judge(scenario: str, n: int, seed: int) -> dict[str, Figures]:
    """Figures of every method, and of the true probabilities, on one draw.

    Parameters
    ----------
    scenario, n, seed
        Correlations, rows of the training and of the validation sample, and seed.
    """
    training = Training(Draw.of(scenario, n, seed))
    unseen = Draw.of(scenario, n, VALIDATION_SEED + seed)
    test = Draw.of(scenario, TEST_ROWS, TEST_SEED + seed)
    result = {TRUTH: _figures(test.truth, test)}
    for name, candidates in METHODS.items():
        best = min(candidates(training), key=lambda predict: _loss(predict(unseen.x), unseen))
        result[name] = _figures(best(test.x), test)
    return result


def _loss(probability: Array, draw: Draw) -> float:
    """Logistic loss -log P, of probabilities of at least ``FLOOR``."""
    own = np.where(draw.labels, probability, 1.0 - probability)
    return float(-np.log(np.clip(own, FLOOR, 1.0)).mean())


def _figures(probability: Array, test: Draw) -> Figures:
    own = np.where(test.labels, probability, 1.0 - probability)
    return {
        "deviation": float(np.abs(probability - test.truth).mean()),
        "perfect": float(np.abs(1.0 - own).mean()),
        "loss": _loss(probability, test),
        "wrong": float((own <= 0.5).mean()),
        "outside": float((np.abs(probability - 0.5) > 0.5 + _ROUNDING).mean()),
    }
