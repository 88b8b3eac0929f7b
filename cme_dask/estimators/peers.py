"""Methods that predict the law of one number: ours and those of other packages, behind one door.

Each is a function in ``METHODS``, from training rows to what answers at rows of x. Other packages'
methods are fitted in memory, and answer what :class:`cme_dask.passes.scores.Law` asks.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri
from sklearn.ensemble import HistGradientBoostingRegressor

from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.joint import JointDistribution
from cme_dask.numerics.folds import BY_ROWS, RowSample, relative_weights
from cme_dask.numerics.scoring import sorted_crps

Array = Any
QUANTILES = tuple(k / 20 for k in range(1, 20))
"""Levels of which boosting learns a model each."""

ATOMS = tuple((k + 0.5) / 200 for k in range(200))
"""Levels of the equally likely atoms that a quantile function is scored by."""

TREES, STEPS = 300, 500
"""Trees of a quantile forest, and steps of NGBoost."""

LEAVES = (1, 3, 10, 30, 100)
"""Least rows of a leaf of a quantile forest, of which one is chosen."""

_MOST_LABELS = 255  # bins of scikit-learn's boosting
_TRIAL_TREES = 60
_QUARTERS = 4  # of the rows, by one of which the leaves of a forest are chosen
_FOLDS = 5  # that residuals of the conditional normal law are cross-fitted in
_LEAST_VARIANCE = 1e-3  # that a squared residual counts as, over their mean


@dataclass(frozen=True, eq=False)
class Training:
    """What a method is fitted on.

    Attributes
    ----------
    sample
        All training rows, of x and of one numeric column of y, for methods that stream.
    rows
        At most so many of them in memory, for the others.
    threads
        Threads to use.
    seed
        Of what is random.
    """

    sample: Sample
    rows: RowSample
    threads: int = 1
    seed: int = 0

    @property
    def arrays(self) -> tuple[Array, Array, Array | None]:
        """Rows x (n, d) and y (n,) in memory, and weights (n,) of mean 1; None for equal ones."""
        x, y = self.rows.parts
        return x, y[:, 0], relative_weights(self.rows.importance)

    def folds(self, count: int) -> Array:
        """Folds (n,) of the rows in memory, whole units each, of which two at least hold rows.

        Where all units happen to be in one fold, folds are by row.
        """
        folds = self.rows.folds(self.sample.folding, count)
        return folds if np.ptp(folds) else self.rows.folds(BY_ROWS, count)

    @property
    def coded(self) -> list[int]:
        """Positions of the columns of x that hold codes of labels."""
        columns: Columns = self.sample.columns[0]
        return [i for i, is_coded in enumerate(columns.categorical) if is_coded]


@dataclass(frozen=True, eq=False)
class Answers:
    """What a fitted method says of y given x.

    Attributes
    ----------
    laws
        From rows of x, shape (b, d), to their laws.
    cells
        Atoms of a law, at most: the memory of answers depends on it.
    """

    laws: Callable[[Array], Any]
    cells: int = len(ATOMS)

    def __call__(self, x: Array) -> Any:
        """The laws at rows of x (b, d)."""
        return self.laws(x)


# Laws that other methods predict, one for each of b rows


@dataclass(frozen=True, eq=False)
class NormalLaw:
    """Normal laws of means (b,) and standard deviations (b,)."""

    mean: Array
    std: Array

    def expect(self, f: Sequence[str]) -> Array:
        """The mean of the only column, shape (b, 1)."""
        return self.mean[:, None]

    def quantile(self, q: Any, column: str | None = None) -> Array:
        """Quantiles of levels (k,), shape (b, k)."""
        return self.mean[:, None] + self.std[:, None] * ndtri(np.asarray(q))

    def crps(self, y: Array) -> Array:
        """Continuous ranked probability score at y (b, 1), shape (b,).

        Gneiting and Raftery (2007), (21): sigma (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)).
        """
        z = (y[:, 0] - self.mean) / self.std
        density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
        return self.std * (z * (2.0 * ndtr(z) - 1.0) + 2.0 * density - 1.0 / np.sqrt(np.pi))

    def log_pdf(self, y: Array, *, paired: bool = True) -> Array:
        """Logarithm of the density at y (b, 1), shape (b,)."""
        z = (y[:, 0] - self.mean) / self.std
        return -0.5 * z**2 - np.log(self.std * np.sqrt(2.0 * np.pi))


@dataclass(frozen=True, eq=False)
class QuantileLaw:
    """Laws whose quantiles are known at some levels (k,), shape (b, k), and linear in between.

    The outermost pieces go on to the levels 0 and 1. Quantiles that cross are sorted.
    """

    levels: Array
    values: Array

    def quantile(self, q: Any, column: str | None = None) -> Array:
        """Quantiles of levels (k,), shape (b, k)."""
        known, values = np.asarray(self.levels), np.sort(self.values, axis=1)
        q = np.asarray(q, dtype=np.float64)
        left = np.clip(np.searchsorted(known, q, side="right") - 1, 0, len(known) - 2)
        share = (q - known[left]) / (known[left + 1] - known[left])
        return (1.0 - share) * values[:, left] + share * values[:, left + 1]

    def expect(self, f: Sequence[str]) -> Array:
        """The mean of the only column, shape (b, 1)."""
        return self.quantile(ATOMS).mean(axis=1, keepdims=True)

    def crps(self, y: Array) -> Array:
        """Continuous ranked probability score at y (b, 1) of the atoms, shape (b,)."""
        atoms = self.quantile(ATOMS)
        return sorted_crps(np.full(atoms.shape, 1.0 / atoms.shape[1]), atoms, y[:, 0])


def _of_quantiles(models: Sequence[Any]) -> Answers:
    """The answers of a model for each level."""

    def laws(x: Array) -> QuantileLaw:
        return QuantileLaw(np.array(QUANTILES), np.column_stack([m.predict(x) for m in models]))

    return Answers(laws)


# The methods: a function each, from training rows to answers


def _joint(training: Training, location: Any = None) -> Answers:
    place = "synchronous" if training.threads == 1 else "threads"
    fit = JointDistribution(location=location, random_state=training.seed)
    fit.fit(training.sample, scheduler=place, workers=training.threads)
    model = fit.model_
    return Answers(model.conditional, model.y.cells.size if model.y.cells else len(ATOMS))


def _joint_boosting(training: Training) -> Answers:
    return _joint(training, HistGradientBoostingRegressor(random_state=training.seed))


def _quantile_forest(training: Training) -> Answers:
    """A forest whose rows of a leaf are chosen by the CRPS of units left out.

    The package's single row is best for many columns, and far from it for one or two.
    """
    from quantile_forest import RandomForestQuantileRegressor

    x, y, weights = training.arrays
    levels = list(ATOMS)

    def fitted(rows: Array, leaf: int, trees: int) -> Answers:
        forest = RandomForestQuantileRegressor(
            n_estimators=trees,
            min_samples_leaf=leaf,
            n_jobs=training.threads,
            random_state=training.seed,
        )
        forest.fit(x[rows], y[rows], sample_weight=None if weights is None else weights[rows])
        return Answers(lambda x: QuantileLaw(np.array(ATOMS), forest.predict(x, quantiles=levels)))

    folds = training.folds(_QUARTERS)
    few = folds == folds[0]
    rest = ~few

    def loss(leaf: int) -> float:
        scores = fitted(rest, leaf, _TRIAL_TREES)(x[few]).crps(y[few, None])
        return float(np.average(scores, weights=None if weights is None else weights[few]))

    leaves = [leaf for leaf in LEAVES if leaf == 1 or 10 * leaf <= rest.sum()]
    return fitted(few | rest, min(leaves, key=loss) if rest.any() else 1, TREES)


def _ngboost(training: Training) -> Answers:
    from ngboost import NGBRegressor
    from ngboost.distns import Normal

    boosting = NGBRegressor(
        Dist=Normal, n_estimators=STEPS, verbose=False, random_state=training.seed
    )
    x, y, weights = training.arrays
    boosting.fit(x, y, sample_weight=weights)

    def laws(x: Array) -> NormalLaw:
        law = boosting.pred_dist(x)
        return NormalLaw(law.loc, law.scale)

    return Answers(laws)


def _lightgbm(training: Training) -> Answers:
    from lightgbm import LGBMRegressor

    x, y, weights = training.arrays
    options: dict[str, Any] = {
        "objective": "quantile",
        "n_jobs": training.threads,
        "random_state": training.seed,
        "verbose": -1,
    }
    return _of_quantiles(
        [
            LGBMRegressor(alpha=level, **options).fit(
                x, y, sample_weight=weights, categorical_feature=training.coded or "auto"
            )
            for level in QUANTILES
        ]
    )


def binned_labels(columns: Columns) -> list[int]:
    """Positions of the columns of labels that scikit-learn's boosting takes as such: few enough."""
    return [
        columns.names.index(name)
        for name, labels in columns.categories.items()
        if len(labels) <= _MOST_LABELS
    ]


def _boosting(training: Training, **options: Any) -> HistGradientBoostingRegressor:
    return HistGradientBoostingRegressor(
        categorical_features=binned_labels(training.sample.columns[0]) or None,
        random_state=training.seed,
        **options,
    )


def _hist_boosting(training: Training) -> Answers:
    x, y, weights = training.arrays
    return _of_quantiles(
        [
            _boosting(training, loss="quantile", quantile=level).fit(x, y, weights)
            for level in QUANTILES
        ]
    )


def _normal(training: Training) -> Answers:
    """Means and variances by boosting, the variances from residuals of units left out.

    Boosting of logarithms of squared residuals is stable where some are nearly zero; its trees have
    few leaves with many rows each, as a square says little about a variance. A factor then makes
    the mean of the squared standardised residuals 1.
    """
    x, y, weights = training.arrays
    squares = np.empty(len(y))
    folds = training.folds(_FOLDS)
    for fold in np.unique(folds):
        left_out, rest = folds == fold, folds != fold
        model = _boosting(training).fit(
            x[rest], y[rest], None if weights is None else weights[rest]
        )
        squares[left_out] = (y[left_out] - model.predict(x[left_out])) ** 2
    whole = float(np.average(squares, weights=weights))
    if not whole > 0.0:
        raise DataError("normal: all residuals are zero, so that there is no normal law")
    logarithms = np.log(np.maximum(squares / whole, _LEAST_VARIANCE))
    few = {"max_leaf_nodes": 4, "min_samples_leaf": max(20, len(y) // 20), "learning_rate": 0.05}
    mean = _boosting(training).fit(x, y, weights)
    spread = _boosting(training, **few).fit(x, logarithms, weights)
    factor = np.average(squares / np.exp(spread.predict(x)), weights=weights)

    def laws(x: Array) -> NormalLaw:
        return NormalLaw(mean.predict(x), np.sqrt(factor * np.exp(spread.predict(x))))

    return Answers(laws)


@dataclass(frozen=True)
class Method:
    """One way of predicting the law of a number.

    Attributes
    ----------
    name
        What options and tables call it.
    about
        What it is, for the help.
    fit
        From training rows to answers.
    has_density
        Whether its laws have densities, and so a log score.
    streams
        Whether it takes all training rows, without holding them in memory.
    package
        What it needs: the name of an import, and that for pip; None for what is required anyway.
    """

    name: str
    about: str
    fit: Callable[[Training], Answers]
    has_density: bool = False
    streams: bool = False
    package: tuple[str, str] | None = None

    @property
    def missing(self) -> str | None:
        """A sentence that says how to install what is missing; None if all is there."""
        if self.package is None or importlib.util.find_spec(self.package[0]) is not None:
            return None
        return (
            f"{self.name} is left out, it needs {self.package[1]}: pip install {self.package[1]}, "
            "or install cme-dask[bench] for all of them"
        )


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "joint",
            "JointDistribution() without arguments, on all training rows",
            _joint,
            has_density=True,
            streams=True,
        ),
        Method(
            "joint-boosting",
            "the same with HistGradientBoosting as its location",
            _joint_boosting,
            has_density=True,
            streams=True,
        ),
        Method(
            "quantile-forest",
            f"a quantile forest of {TREES} trees, with the best of {len(LEAVES)} leaf sizes",
            _quantile_forest,
            package=("quantile_forest", "quantile-forest"),
        ),
        Method(
            "ngboost",
            f"natural gradient boosting of a normal law, {STEPS} steps",
            _ngboost,
            has_density=True,
            package=("ngboost", "ngboost"),
        ),
        Method(
            "lightgbm",
            f"LightGBM, a model for each of {len(QUANTILES)} quantiles",
            _lightgbm,
            package=("lightgbm", "lightgbm"),
        ),
        Method(
            "hist-boosting",
            f"scikit-learn's HistGradientBoosting, a model for each of {len(QUANTILES)} quantiles",
            _hist_boosting,
        ),
        Method(
            "normal",
            "a normal law whose mean and variance are HistGradientBoosting's",
            _normal,
            has_density=True,
        ),
    )
}
"""By their names, in the order of tables."""


def chosen_methods(names: Sequence[str] | None = None) -> tuple[list[Method], dict[str, str]]:
    """The methods of these names that can run here, and why the others are left out.

    Raises
    ------
    DataError
        On unknown names, or if no method is left.
    """
    requested = list(dict.fromkeys(METHODS if names is None else names))
    unknown = [name for name in requested if name not in METHODS]
    if unknown:
        raise DataError(f"unknown method {unknown[0]!r}: there are {', '.join(METHODS)}")
    missing = {name: text for name in requested if (text := METHODS[name].missing) is not None}
    present = [METHODS[name] for name in requested if name not in missing]
    if not present:
        reasons = "; ".join(missing.values())
        raise DataError(f"no method is left to compare: {reasons or 'name at least one'}")
    return present, missing
