r"""Conformal intervals of a joint model: their scores, from held-out rows or from new ones.

``conditional(x).interval(L, conformal=True)`` is the law's own central interval of another level,
which held-out rows choose: the least one that holds the share L of them. Where y lies beyond all
atoms of its law, the interval is the range of the law and a margin on both sides, so that laws of
any kernel can be corrected, also of a wrong one. A score s(x, y) orders the values of y, and an
interval holds those whose score is at most a quantile of the scores of held-out rows, see
``cme_dask.numerics.conformal.ConformalScores``. Intervals are nested in L, and each column has
its own.

What they guarantee is an average over x: of new rows, the share L lies within. At a single x it may
be more or less.

- *Rows that the fit has not seen* (:meth:`cme_dask.models.joint.JointModel.conformalized`, split
  conformal prediction): if these n rows and a new one are exchangeable, the new one is covered with
  a probability of at least L, for any law and any n.
- *Rows of the folds* (a fit with ``conformal=True``): each row of the row sample, at most 4,000, is
  scored by the law of a refit without its fold, and the intervals are those of the fit of all rows.
  That is cross-conformal prediction, whose coverage is about L where the rows are exchangeable and
  the law hardly changes when a fold is left out. There is no bound for any law: that of CV+, 1 - 2
  (1 - L) (Barber, Candès, Ramdas and Tibshirani 2021, Annals of Statistics 49, 486), holds for
  intervals that combine the refits themselves. Kernels, pivots and cells have seen all rows. The
  limit shows where kernels are so short that laws sit on single neighbours, and more rows make them
  worse: of 1,000 fits to 60 rows, intervals of the levels 0.8, 0.9 and 0.95 covered 0.77, 0.87 and
  0.93, and with scores of unseen rows 0.83, 0.91 and 0.97. Kernels that are too long, or too short
  in x alone, lost nothing.

Scores within the labels of a column of x (``conformal_by``, ``by``) turn the average over x into
one over the rows of each label, such as those of a station: each has its own scores. A label of n
rows tells levels up to n / (n + 1), and one without rows tells none.

Rows of time series are not exchangeable. Folds by time or group take care that a row is scored by
laws that have not seen its neighbours, but the guarantee is then one for exchangeable units, of
which there are fewer. With weights, the new row is drawn with a probability proportional to its
weight.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cme_dask.data.columns import Columns, labels_have_no_mean
from cme_dask.errors import DataError, remedy
from cme_dask.models.points import query_points
from cme_dask.numerics.conformal import ConformalScores, conformity, law_tails

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel
    from cme_dask.models.law import ConditionalLaw


Array = Any

FOLDS = (
    "approximate, from refits without each fold: intervals of level L cover about the share L of "
    "exchangeable rows, where the refits resemble the fit of all rows"
)
SPLIT = (
    "exact, from rows that the fit has not seen: intervals of level L cover a new row with a "
    "probability of at least L, if it is exchangeable with those rows"
)
"""What ``about["conformal"]["guarantee"]`` says of scores of held-out folds, and of new rows."""

_ROWS = 1 << 11  # scored at once


def conformal_scores(
    model: "JointModel", scores: Array, weights: Array, x: Array, by: str | None
) -> ConformalScores:
    """Quantiles of scores (n, q) of the numeric columns of y, from rows with weights (n,).

    Parameters
    ----------
    model
        The model.
    scores, weights
        Of the rows.
    x
        The rows of x, shape (n, d).
    by
        The column of labels of x within which they are compared; None: all together.
    """
    names = model.y.columns.numeric
    scales = column_scales(model)
    positions = [model.y.columns.names.index(name) for name in names]
    learned = ConformalScores.learn(scores, weights, names, scales[positions])
    if by is None:
        return learned
    columns = model.x.columns
    codes = x[:, columns.names.index(by)]
    return learned.within(by, columns.categories[by], codes, scores, weights)


def check_by(by: Any, columns: Columns) -> None:
    """DataError unless it is a column of labels of x."""
    if not isinstance(by, str) or by not in columns.categories:
        labelled = ", ".join(map(repr, columns.categories)) or "none"
        raise DataError(
            "conformal intervals cover within the labels of a column of x that holds labels "
            f"({labelled}), got {by!r}"
        )


def column_scales(model: "JointModel") -> Array:
    """Standard deviations of the columns of y, shape (d,); 1 of constant ones."""
    assert model.y.cells is not None
    scales = np.sqrt(model.y.cells.variances)
    return np.where(scales > 0.0, scales, 1.0)


def conformal_ends(
    law: "ConditionalLaw",
    level: Any,
    positions: Mapping[str, int],
    quantiles: Callable[[Array, Array, Sequence[int]], Array],
) -> tuple[Array, Array]:
    """Lower and upper ends of conformal intervals of columns of y, shapes (n, q).

    Parameters
    ----------
    law
        Of y given x.
    level
        Of the intervals, a number in [0, 1].
    positions
        Of the columns, by name.
    quantiles
        Of the laws at some points, shape (b, k, 1): by their positions (b,), for levels (k,) and
        the position of one column.

    Raises
    ------
    DataError
        If the model has no scores, there are several levels, or the law is one of x.
    """
    if np.ndim(level) > 0:
        raise DataError(f"a conformal interval has one level, got {level!r}")
    if law.reverse:
        raise DataError("conformal intervals are those of y given x, this is a law of x given y")
    scores = getattr(law.model, "conformal", None)
    if scores is None:
        raise DataError(
            "this model has no conformity scores of held-out rows: fit all rows at once with "
            + remedy("conformal=True", "--conformal yes")
            + " and at least 2 folds, or take model.conformalized(X, Y) on rows that the fit has "
            "not seen"
        )
    ends = np.empty((2, len(law.points), len(positions)))
    for rows, own in _scored(law, scores):
        for place, (name, j) in enumerate(positions.items()):
            score = own.threshold(float(level), name)
            inner, margin = min(score, 1.0), max(score - 1.0, 0.0) * own.scales[name]
            levels = np.array([1.0 - inner, 1.0 + inner]) / 2.0
            ends[:, rows, place] = quantiles(rows, levels, [j])[:, :, 0].T
            ends[:, rows, place] += [[-margin], [margin]]
    return ends[0], ends[1]


def _scored(
    law: "ConditionalLaw", scores: ConformalScores
) -> Iterator[tuple[Array, ConformalScores]]:
    """Positions of points, with the scores that their intervals are made of."""
    if scores.by is None:
        yield np.arange(len(law.points)), scores
        return
    columns = law.given.columns
    codes = law.points[:, columns.names.index(scores.by)]
    for code in np.unique(codes):
        # -1 is a label that the fit has not seen: no row has it.
        label = columns.categories[scores.by][int(code)] if code >= 0.0 else None
        yield np.flatnonzero(codes == code), scores.of_label(label)


def conformalized(
    model: "JointModel", X: Any, Y: Any, weights: Any = None, by: str | None = None
) -> "JointModel":
    """The model with conformity scores of rows that it has not seen.

    See :meth:`cme_dask.models.joint.JointModel.conformalized`.
    """
    columns = model.y.columns
    if not columns.numeric:
        raise labels_have_no_mean(columns.names[0], columns)
    if by is not None:
        check_by(by, model.x.columns)
    law = model.law()
    missing = "missing" in model.about
    x, y = (
        query_points(rows, variable, name, missing=missing)
        for rows, variable, name in ((X, model.x, "X"), (Y, model.y, "Y"))
    )
    try:
        shares = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"weights must be numbers, one for each row, got {weights!r}") from error
    if not len(x) == len(y) > 0 or shares.shape != (len(x),):
        raise DataError(
            f"conformalized takes as many rows of X as of Y, and weights: got {len(x):,} and "
            f"{len(y):,} rows, and weights of shape {shares.shape}"
        )
    if not (np.isfinite(shares).all() and (shares >= 0.0).all() and shares.any()):
        raise DataError("weights must be finite and non-negative, and one of them positive")
    positive = (shares > 0.0) & ~(np.isnan(x).any(axis=1) | np.isnan(y).any(axis=1))
    x, y, shares = x[positive], y[positive], shares[positive]
    if not len(x):
        raise DataError("every row of positive weight lacks a value: give rows that lack none")
    scales, names = column_scales(model), columns.numeric
    scores = np.empty((len(x), len(names)))
    for start in range(0, len(x), _ROWS):
        here = slice(start, start + _ROWS)
        at = law.at(x[here])
        for place, name in enumerate(names):
            j = columns.names.index(name)
            tails = law_tails(law, at, y[here, j], j)
            scores[here, place] = conformity(tails, y[here, j], scales[j])
    learned = conformal_scores(model, scores, shares, x, by)
    info = {"rows": len(x), "folds": 0, "fold_by": None, "guarantee": SPLIT}
    return replace(model, about=model.about | {"conformal": info | learned.to_dict()})
