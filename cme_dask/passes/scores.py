"""Scores of predictions over the rows of a sample, in one pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cme_dask.config import N_FOLDS
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ZeroWeights
from cme_dask.numerics.folds import RowSample
from cme_dask.numerics.moments import Function
from cme_dask.numerics.row_scores import LABEL_BINS, PIT_LEVELS
from cme_dask.numerics.scoring import Estimate, Scores, ScoreSums
from cme_dask.passes.driver import Executor
from cme_dask.passes.fit import PrioritySample
from cme_dask.passes.losses import (
    BINNED,
    INTERVAL,
    LIKELIEST,
    MASS,
    Law,
    Loss,
    Prediction,
    ScoreReduction,
)
from cme_dask.passes.progress import Listener
from cme_dask.passes.run import PassReport, run_pass

Array = Any

_SAMPLE_SEED = 0


@dataclass(frozen=True)
class Bin:
    """Rows for which about as much was predicted.

    Attributes
    ----------
    low, high
        The predictions were from ``low`` up to, not including, ``high``; infinite at the ends.
    share
        Of the weight of all rows.
    predicted
        Mean of the predictions; NaN in a bin without rows.
    seen
        Mean of the target, with its standard error over blocks of rows.
    """

    low: float
    high: float
    share: float
    predicted: float
    seen: Estimate


@dataclass(frozen=True)
class LabelScores:
    """Scores of the probabilities of a column of labels.

    Attributes
    ----------
    accuracy
        Share of the rows with the likeliest label.
    log_loss
        Mean of minus the logarithm of the probability of the label that was seen, in nats;
        probabilities below 1e-15 count as that.
    brier
        Mean of the squared distance between the probabilities of all labels and the label that was
        seen, from 0 to 2.
    calibration_error
        Expected calibration error of the likeliest label: the absolute difference between its
        probability and how often it is seen, in 15 bins of equal width by its probability,
        averaged over the rows. With few rows it is above 0 for true probabilities, too.
    """

    accuracy: Estimate
    log_loss: Estimate
    brier: Estimate
    calibration_error: Estimate


@dataclass(frozen=True)
class ScoreReport:
    """Scores on the rows of a sample.

    Attributes
    ----------
    scores
        By name of the prediction, then by target.
    crps
        By name of the law: continuous ranked probability score, mean over the numeric columns of y.
    coverage
        By name of the law, then by numeric column of y: share of the rows within the central
        interval, whose mass it should be.
    interval_mass
        By name of the law, then by numeric column of y: mean probability that the laws give to
        their central intervals: the level, and more where y takes few values, since the interval
        holds its ends.
    report
        What the pass did.
    reliability
        By name of the law, then by target: bins of what was predicted.
    labels
        By name of the law, then by column of labels.
    width, interval_score
        By name of the law, then by numeric column of y: mean width and mean interval score of the
        central intervals, in the unit of the column.
    pinball
        By name of the law, then by numeric column of y, then by level of the quantile.
    calibration_error
        By name of the law, then by numeric column of y: mean absolute difference between the
        distribution function of the probability integral transform and the uniform one, at the
        levels 0.05, 0.1, ..., 0.95. Ties are treated as if the transform were randomised.
    log_score
        By name of the law: mean of minus the logarithm of the density, in nats; densities below
        the smallest positive float64 count as that.
    energy_score
        By name of the law: energy score of the numeric columns, from 64 draws of each law, without
        bias. The noise of the draws is part of the standard error.
    pit
        By name of the law, then by numeric column of y: shares of the rows whose probability
        integral transform lies in [0, 0.05], (0.05, 0.1], ..., (0.95, 1]; ties as above.
    label_bins
        By name of the law, then by column of labels: bins of the likeliest label's probability.
    confusion
        By name of the law, then by column of few labels: mean probability of label j over the rows
        with label i, K times K; NaN for labels that no row has.
    rows
        A few of the rows, if they were asked for.
    """

    scores: dict[str, dict[str, Scores]]
    crps: dict[str, Estimate]
    coverage: dict[str, dict[str, Estimate]]
    report: PassReport = field(repr=False)
    reliability: dict[str, dict[str, tuple[Bin, ...]]] = field(default_factory=dict)
    labels: dict[str, dict[str, LabelScores]] = field(default_factory=dict)
    interval_mass: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    width: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    interval_score: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    pinball: dict[str, dict[str, dict[float, Estimate]]] = field(default_factory=dict)
    calibration_error: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    log_score: dict[str, Estimate] = field(default_factory=dict)
    energy_score: dict[str, Estimate] = field(default_factory=dict)
    pit: dict[str, dict[str, tuple[Estimate, ...]]] = field(default_factory=dict)
    label_bins: dict[str, dict[str, tuple[Bin, ...]]] = field(default_factory=dict)
    confusion: dict[str, dict[str, tuple[tuple[float, ...], ...]]] = field(default_factory=dict)
    rows: RowSample | None = None


def score_pass(
    sample: Sample,
    predictions: Mapping[str, Prediction],
    executor: Executor,
    *,
    functions: Mapping[str, Function] | None = None,
    laws: Mapping[str, Law] | None = None,
    n_blocks: int = N_FOLDS,
    rows: int = 0,
    progress: Listener | None = None,
) -> ScoreReport:
    """Scores of predictions and laws over all rows of a sample (of a part), in one pass.

    Parameters
    ----------
    sample
        Rows of x and y: for honest scores, those that no model was fitted on.
    predictions
        By name, what is to be scored.
    executor
        Where to run, and the memory that is there.
    functions
        Functions of y by name, such as events; each takes rows (b, d_Y) and returns (b,).
    laws
        Laws by name.
    n_blocks
        Blocks of rows for the standard errors, by ``sample.folding``: with folds by time or
        group these know that neighbours are alike.
    rows
        How many of the rows are taken along, at most: a random sample without replacement.
    progress
        Called when a task has ended.

    Raises
    ------
    DataError
        On unknown targets, predictions of the wrong shape or that are not finite, unusable values,
        or a part without rows of positive weight.
    StoreError
        On damaged chunks.
    ResourceError
        If the memory does not suffice; no row has been read then.

    Notes
    -----
    The bits do not depend on chunks, tasks or scheduler: rows are predicted in blocks that depend
    on the sample alone, and sums follow the tree of all passes.
    """
    plan = _checked(sample, predictions, functions or {}, laws or {}, n_blocks)
    beside = [PrioritySample(rows, _SAMPLE_SEED)] if rows else []
    (sums, *taken), report = run_pass(sample, [plan, *beside], executor, progress)
    if not sums.weight.sum() > 0.0:
        raise ZeroWeights()
    scores: dict[str, dict[str, Scores]] = {name: {} for name in plan.predictions}
    for loss, (name, target) in enumerate(plan.pairs):
        scores[name][target] = sums.scores(plan.names.index(target), loss)
    for name, law in plan.laws.items():
        if law.targets:
            scores[name] = {}
    places = {loss: at for at, loss in enumerate(plan.law_losses, start=len(plan.pairs))}
    whole: dict[str, dict[str, Estimate]] = {kind: {} for kind in ("crps", "log score", "energy")}
    by_column: dict[str, dict[str, dict[str, Estimate]]] = {kind: {} for kind in INTERVAL}
    pinball: dict[str, dict[str, dict[float, Estimate]]] = {}
    for of, at in places.items():
        if of.kind in whole:
            whole[of.kind][of.law] = sums.mean_loss(at)
        elif of.kind in by_column:
            by_column[of.kind].setdefault(of.law, {})[of.of] = sums.mean_loss(at)
        elif of.kind == "pinball":
            level = plan.laws[of.law].levels[of.bin]
            pinball.setdefault(of.law, {}).setdefault(of.of, {})[level] = sums.mean_loss(at)
        elif of.kind == "squared":
            scores[of.law][of.of] = sums.scores(plan.names.index(of.of), at)
    reliability = {
        name: {
            target: tuple(
                _bin(sums, [places[Loss(name, kind, target, i)] for kind in BINNED])(
                    *([-np.inf, *edges, np.inf][i : i + 2])
                )
                for i in range(len(edges) + 1)
            )
            for target, edges in law.edges.items()
        }
        for name, law in plan.laws.items()
        if law.edges
    }
    labels = {
        name: {column: _label_scores(sums, places, name, column) for column in plan.labelled}
        for name, law in plan.laws.items()
        if law.labels and plan.labelled
    }
    calibration = {
        name: {column: _deviation(sums, places, name, "pit", column) for column in plan.numeric}
        for name, law in plan.laws.items()
        if law.calibration and plan.numeric
    }
    return ScoreReport(
        scores,
        whole["crps"],
        by_column["coverage"],
        report,
        reliability,
        labels,
        interval_mass=by_column[MASS],
        width=by_column["width"],
        interval_score=by_column["interval"],
        pinball=pinball,
        calibration_error=calibration,
        log_score=whole["log score"],
        energy_score=whole["energy"],
        pit={
            name: {column: _pit_shares(sums, places, name, column) for column in plan.numeric}
            for name in calibration
        },
        label_bins={
            name: {column: _likeliest(sums, places, name, column) for column in plan.labelled}
            for name in labels
            if plan.laws[name].label_bins
        },
        confusion={
            name: {
                column: _confusion(sums, places, name, column, count)
                for column, count in plan.labelled.items()
                if plan.confused(column)
            }
            for name in labels
            if plan.laws[name].label_bins
        },
        rows=taken[0] if taken else None,
    )


def _pit_shares(
    sums: ScoreSums, places: Mapping[Loss, int], law: str, column: str
) -> tuple[Estimate, ...]:
    """Shares of the rows between neighbouring levels of the probability integral transform."""
    count = len(PIT_LEVELS)
    at = [places[Loss(law, "pit", column, i)] for i in range(count)]
    return tuple(
        sums.linear(
            {at[i]: float(sign * count) for i, sign in ((k, 1), (k - 1, -1)) if 0 <= i < count},
            1.0 / (count + 1),
        )
        for k in range(count + 1)
    )


def _likeliest(
    sums: ScoreSums, places: Mapping[Loss, int], law: str, column: str
) -> tuple[Bin, ...]:
    """Bins of the likeliest label's probability, and how often that label was seen."""
    bins = []
    for i in range(LABEL_BINS):
        inside, hits = (places[Loss(law, kind, column, i)] for kind in LIKELIEST)
        share, seen = sums.mean_loss(inside).value, sums.ratio(hits, inside)
        above = sums.mean_loss(places[Loss(law, "calibration", column, i)]).value
        predicted = seen.value + above / share if share > 0.0 else np.nan
        bins.append(Bin(i / LABEL_BINS, (i + 1) / LABEL_BINS, share, predicted, seen))
    return tuple(bins)


def _confusion(
    sums: ScoreSums, places: Mapping[Loss, int], law: str, column: str, count: int
) -> tuple[tuple[float, ...], ...]:
    """Mean probabilities by the label that was seen, in rows of sum 1."""
    at = [places[Loss(law, "confusion", column, i)] for i in range(count**2)]
    total = sums.total().losses[0, at].reshape(count, count)
    weight = total.sum(axis=1, keepdims=True)
    shares = np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0.0)
    return tuple(map(tuple, shares.tolist()))


def _deviation(
    sums: ScoreSums, places: Mapping[Loss, int], law: str, kind: str, column: str
) -> Estimate:
    """Sum of the absolute means of what is summed in several bins, or at several levels."""
    return sums.deviation(
        [at for of, at in places.items() if (of.law, of.kind, of.of) == (law, kind, column)]
    )


def _label_scores(
    sums: ScoreSums, places: Mapping[Loss, int], law: str, column: str
) -> LabelScores:
    """Of the probabilities of the labels of a column."""
    accuracy, log_loss, brier = (
        sums.mean_loss(places[Loss(law, kind, column)]) for kind in ("accuracy", "log", "brier")
    )
    calibration = _deviation(sums, places, law, "calibration", column)
    return LabelScores(accuracy, log_loss, brier, calibration)


def _bin(sums: ScoreSums, places: list[int]) -> Callable[[float, float], Bin]:
    """From the ends of a bin to it, from the places of its share, predictions and targets."""
    share, predicted, _ = (sums.mean_loss(place).value for place in places)
    seen = sums.ratio(places[2], places[0])
    mean = predicted / share if share > 0.0 else np.nan
    return lambda low, high: Bin(low, high, share, mean, seen)


def _checked(
    sample: Sample,
    predictions: Mapping[str, Prediction],
    functions: Mapping[str, Function],
    laws: Mapping[str, Law],
    n_blocks: int,
) -> ScoreReduction:
    if len(sample.sources) != 2:
        raise DataError("scores need rows of x and of y: give y, or a store that holds both")
    if not predictions and not laws:
        raise DataError("there is nothing to score: give a prediction or a law")
    columns = sample.columns[1].names
    twice = [name for name in functions if name in columns]
    if twice:
        raise DataError(f"{twice[0]!r} is a column already: give the function another name")
    names = (*columns, *functions)
    unknown = [t for p in predictions.values() for t in p.targets if t not in names]
    if unknown:
        raise DataError(f"unknown target {unknown[0]!r}: there are {', '.join(map(repr, names))}")
    for name, law in laws.items():
        if law.level is not None and not 0.0 < law.level < 1.0:
            raise DataError(
                f"the level of the law {name!r} must lie between 0 and 1, got {law.level}"
            )
        if not all(0.0 < level < 1.0 for level in law.levels):
            raise DataError(
                f"levels of quantiles of the law {name!r} must lie between 0 and 1, got "
                f"{', '.join(map(str, law.levels))}"
            )
    labelled = {name: len(each) for name, each in sample.columns[1].categories.items()}
    numeric = tuple(name for name in columns if name not in labelled)
    for law in laws.values():
        _check_targets(law, (*numeric, *functions))
    return ScoreReduction(
        dict(predictions), dict(laws), dict(functions), names, numeric, labelled, n_blocks
    )


def _check_targets(law: Law, known: tuple[str, ...]) -> None:
    """DataError on targets of a law that are no numbers, or on bins of something else."""
    unknown = [target for target in law.targets if target not in known]
    if unknown:
        raise DataError(f"unknown target {unknown[0]!r}: there are {', '.join(map(repr, known))}")
    for target, edges in law.edges.items():
        if target not in law.targets or (np.diff(edges) <= 0.0).any():
            raise DataError(
                f"bins of {target!r} need one of the targets and ascending borders, got {edges}"
            )
