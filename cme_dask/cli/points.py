"""Laws at the stated points of a job, beside held-out and nearby rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from cme_dask.cli.fitting import CLASSIFIERS, estimator_of, events_of
from cme_dask.cli.schema import CurveSection, FitSection, IngestSection, Job, PointSection
from cme_dask.cli.scoring import LEVEL
from cme_dask.data.columns import Columns
from cme_dask.data.layout import Cyclic, Layout, make_layout
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.models.events import Event
from cme_dask.models.joint import JointModel
from cme_dask.models.points import query_points
from cme_dask.numerics.rows import NearestRows, Neighbours
from cme_dask.passes.driver import Executor
from cme_dask.passes.run import run_pass

Array = Any
Result = dict[str, Any]

_CURVE_POINTS = 73
_CURVE_LEVELS = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
NEAR = 1.0
"""Rows are near if they are at most so many standard deviations away, all of them."""

_OTHER_LABEL = 1e-120  # the unit of codes: rows with another label are farther than any others
_SAME_LABELS = 0.5 / _OTHER_LABEL  # the distance within which rows have the labels of a point


@dataclass(frozen=True, eq=False)
class Curve:
    """Points along a column.

    Attributes
    ----------
    section
        The curve of the job.
    at
        Values of the column, ascending.
    points
        Values of the stored columns of x at each.
    """

    section: CurveSection
    at: Array
    points: tuple[dict[str, float | str], ...]


@dataclass(frozen=True, eq=False)
class Questions:
    """The questions of a job, checked against its columns before any work.

    Attributes
    ----------
    columns
        Of x and of y; labels are known once there is a sample.
    events
        Events of y by their text.
    shown
        Names of the functions to report.
    points
        Values of the stored columns of x at each stated point.
    curves
        Laws along columns of x.
    """

    columns: tuple[Columns, Columns]
    events: dict[str, Event]
    shown: list[str]
    points: tuple[dict[str, float | str], ...]
    curves: tuple[Curve, ...] = ()

    @classmethod
    def of(cls, job: Job) -> "Questions":
        """DataError on unknown columns or functions, and on options of the fit that don't fit."""
        layout = None if job.ingest is None else layout_of(job.ingest)
        columns = _columns(layout)
        try:
            estimator_of(columns, job.fit)
        except DataError as error:
            raise DataError(f"fit.{error}") from error
        events = events_of(columns, job.fit)[1]
        known = [*columns[1].numeric, *events]
        shown = job.report.functions or known
        unknown = [name for name in shown if name not in known]
        if unknown:
            raise DataError(
                f"report.functions: unknown {', '.join(map(repr, unknown))}, there are "
                f"{', '.join(map(repr, known))}"
            )
        if job.fit.estimator != "joint":
            if job.report.points or job.report.curves:
                raise DataError(
                    "report.points, report.curves: laws come from the estimator joint, and the job "
                    f"fits {job.fit.estimator}"
                )
            if job.evaluate is not None and not known and job.fit.estimator not in CLASSIFIERS:
                raise DataError("evaluate: y has neither numbers nor events to score")
        points = tuple(_stored(point, columns[0], layout) for point in job.report.points)
        curves = tuple(_curve(curve, job, columns, layout) for curve in job.report.curves)
        return cls(columns, events, shown, points, curves)

    def with_labels(self, sample: Sample, options: FitSection) -> "Questions":
        """The same with the labels that the data turned out to have; DataError on others."""
        columns = cast(tuple[Columns, Columns], sample.columns)
        for name in columns[0].categories:
            known = columns[0].categories[name]
            for label in {point[name] for point in self.points} - set(known):
                raise DataError(
                    f"report.points: column {name!r} has no label {label!r}, there are "
                    f"{', '.join(map(repr, known))}"
                )
        return replace(self, columns=columns, events=events_of(columns, options)[1])

    def rows(self, model: JointModel) -> Array:
        """The points as the model takes them, shape (p, d_X)."""
        return _table(self.points, self.columns[0], model, "report.points")

    def values(self, name: str, y: Array) -> Array:
        """A function at rows of y."""
        names = self.columns[1].names
        return y[:, names.index(name)] if name in names else self.events[name](y)


def _curve(
    section: CurveSection, job: Job, columns: tuple[Columns, Columns], layout: Layout | None
) -> Curve:
    """A curve with its points; DataError on unknown points, columns or events."""
    known = {point.name: point for point in job.report.points}
    if section.point not in known:
        raise DataError(
            f"report.curves: unknown point {section.point!r}, there are "
            f"{', '.join(map(repr, known)) or 'none'}"
        )
    point, y = known[section.point], columns[1]
    if not isinstance(point.x.get(section.along), float | int):
        raise DataError(
            f"report.curves: {section.along!r} must be one of the numbers that {point.name!r} "
            f"gives: {', '.join(k for k, v in point.x.items() if not isinstance(v, str))}"
        )
    if section.of is not None and (section.of not in y.names or section.of in y.categories):
        raise DataError(f"report.curves: {section.of!r} is no column of y that holds numbers")
    if section.event is not None:
        Event.parse(section.event, y.names, y.categories)
    at = np.linspace(section.low, section.high, _CURVE_POINTS)
    moved = (
        point.model_copy(update={"x": {**point.x, section.along: float(value)}}) for value in at
    )
    return Curve(section, at, tuple(_stored(one, columns[0], layout) for one in moved))


def _table(
    points: Sequence[Mapping[str, float | str]], x: Columns, model: JointModel, name: str
) -> Array:
    """Points as the model takes them, shape (p, d_X)."""
    if not points:
        return np.empty((0, len(x.names)))
    table = {key: [point[key] for point in points] for key in x.names}
    return query_points(table, model.x, name)


def along_curves(questions: Questions, model: JointModel) -> list[Result]:
    """JSON form of the laws along columns: quantiles, and probabilities of events."""
    result = []
    for curve in questions.curves:
        if model.y.cells is None:
            break
        section = curve.section
        points = _table(curve.points, questions.columns[0], model, "report.curves")
        law = model.conditional(points)
        one: Result = {**section.model_dump(), "at": curve.at.tolist()}
        if section.of is not None:
            one["levels"] = list(_CURVE_LEVELS)
            one["quantiles"] = law.quantile(_CURVE_LEVELS, column=section.of).tolist()
        if section.event is not None:
            one["probability"] = law.probability(section.event).tolist()
        result.append(one)
    return result


def layout_of(section: IngestSection) -> Layout:
    """Which columns the store of a job has."""
    return make_layout(
        section.x,
        section.y,
        weights=section.weights,
        group=section.group,
        time=section.time,
        categorical=section.categorical,
        datetime=section.datetime,
        cyclic=section.cyclic,
    )


def _columns(layout: Layout | None) -> tuple[Columns, Columns]:
    if layout is not None:
        return layout.columns({}, dict.fromkeys(layout.categorical, ()))
    from cme_dask.data import generate

    x, y = generate.COLUMNS
    return x, y


def _stored(point: PointSection, x: Columns, layout: Layout | None) -> dict[str, float | str]:
    """The stored columns of a point, which may be given by the columns that they are made from."""
    values = dict(point.x)
    required = list(x.names)
    for feature in () if layout is None else layout.x:
        if not isinstance(feature, Cyclic):
            continue
        given = values.pop(feature.column, None)
        if isinstance(given, float | int):
            parts = feature(np.array([float(given)]))
            values |= {n: float(v[0]) for n, v in zip(feature.names, parts, strict=True)}
        at = required.index(feature.names[0])
        required[at : at + 2] = [feature.column]
    if set(values) != set(x.names):
        raise DataError(
            f"report.points: {point.name!r} must give {', '.join(required)}, "
            f"it gives {', '.join(point.x) or 'nothing'}"
        )
    return values


def nearest(
    questions: Questions, points: Array, count: int, sample: Sample, executor: Executor
) -> Neighbours | None:
    """The rows nearest to the stated points, in standardised x with the same labels; one pass."""
    if not len(points):
        return None
    # Standard deviations over the row sample are precise enough to choose neighbours by. Constant
    # columns have none, though rounding may say otherwise; they are as far from every row.
    assert sample.row_sample is not None
    rows = sample.row_sample.parts[0]
    scale = np.where((rows == rows[0]).all(axis=0), 1.0, rows.std(axis=0))
    scale = np.where(sample.columns[0].categorical, _OTHER_LABEL, scale)
    nearest = NearestRows(points, min(count, sample.n_rows), scale)
    result: Neighbours
    (result,), _ = run_pass(sample, [nearest], executor)
    return result


def compare(
    job: Job,
    questions: Questions,
    model: JointModel,
    points: Array,
    near: Neighbours | None,
    reliability: Mapping[str, Sequence[Result]],
) -> Result:
    """Laws at the stated points, beside held-out rows and the nearest rows.

    The held-out rows are those of the same bin of predictions. The nearest rows are evidence only
    where they are near, and only those with the labels of the point.

    Parameters
    ----------
    job, questions, model, points
        The questions, and the rows of x.
    near
        The nearest rows to each point; None without points.
    reliability
        Bins of predictions by function, as of :func:`cme_dask.cli.scoring.evaluate`.
    """
    if near is None:
        return {"points": [], "neighbours": {"k": 0, "passes": 0}}
    law, names = model.conditional(points), questions.shown
    means = np.asarray(law.expect(names))
    support = np.asarray(law.effective_support())
    tail = 0.5 * (1.0 - LEVEL)
    ends = {
        name: np.asarray(law.quantile([tail, 1.0 - tail], column=name))
        for name in names
        if name not in questions.events
    }
    rows = []
    for i, point in enumerate(job.report.points):
        alike = near.distance[i] < _SAME_LABELS
        functions = {
            name: {
                "event": name in questions.events,
                "mean": float(means[i, j]),
                "interval": [float(e) for e in ends[name][i]] if name in ends else None,
                "held_out": _bin_of(float(means[i, j]), reliability.get(name, ())),
                **_empirical(questions.values(name, near.y[i][alike]), near.weights[i][alike]),
            }
            for j, name in enumerate(names)
        }
        farthest = float(near.distance[i][alike][-1]) if alike.any() else None
        rows.append(
            {
                "name": point.name,
                "x": point.x,
                "effective_support": float(support[i]),
                "nearest_rows": int(alike.sum()),
                "farthest": farthest,
                "near": farthest is not None and farthest <= NEAR,
                "functions": functions,
            }
        )
    return {
        "points": rows,
        "level": LEVEL,
        "neighbours": {"k": near.index.shape[1], "passes": 1, "near": NEAR},
    }


def _bin_of(value: float, bins: Sequence[Result]) -> Result | None:
    """The bin that a prediction is in; None if there is none, or no row in it."""
    for one in bins:
        low, high = one["low"], one["high"]
        inside = (low is None or value >= low) and (high is None or value < high)
        if inside and one["seen"]["value"] is not None:
            return {key: one[key] for key in ("share", "predicted", "seen")}
    return None


def _empirical(values: Array, weights: Array) -> dict[str, float | None]:
    """Weighted mean, and its standard error sqrt(sum w^2 (v - mean)^2) / sum w.

    None without rows; one row has no error.
    """
    if not len(values):
        return {"nearest_mean": None, "nearest_std": None}
    share = weights / weights.max()  # squares of the weights may leave the range
    share = share / share.sum()
    mean = share @ values
    return {
        "nearest_mean": float(mean),
        "nearest_std": float(np.sqrt(share**2 @ (values - mean) ** 2)) if len(values) > 1 else None,
    }
