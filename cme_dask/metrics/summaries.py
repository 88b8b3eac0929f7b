"""Means of scores with standard errors, and calibration errors."""

from functools import partial
from typing import Any

import numpy as np

from cme_dask.config import N_FOLDS
from cme_dask.data.arrow import unmasked
from cme_dask.errors import DataError, ZeroWeights
from cme_dask.metrics.inputs import columns, finite, is_lazy, numbers, rowwise, sum_tolerance
from cme_dask.metrics.predictions import check_labels, label_inputs, non_negative
from cme_dask.numerics.folds import BY_ROWS, EXACT, Folding, check_groups
from cme_dask.numerics.labels import missing_labels
from cme_dask.numerics.row_scores import LABEL_BINS, PIT_LEVELS, label_deviations, pit_deviations
from cme_dask.numerics.scoring import Estimate, ScoreSums

Array = Any


def mean(scores: Any, weights: Any = None, units: Any = None) -> Estimate | list[Estimate]:
    r"""Weighted mean of scores, with its standard error over blocks of rows.

    .. math:: \bar s = \frac{\sum_i w_i s_i}{\sum_i w_i}

    Parameters
    ----------
    scores
        One per row, shape (n,), or several, (n, k); NumPy or Dask.
    weights
        w of the rows, non-negative, shape (n,); default equal ones.
    units
        Numbers, names or dates of what each row belongs to, such as its station or the first day of
        its week, shape (n,); of Dask arrays numbers. Rows of one unit are in one block. By default
        each row is a unit of its own.

    Returns
    -------
    estimate : with ``value`` and ``std``; of k scores a list of k

    Raises
    ------
    DataError
        If shapes don't fit, values are not finite, units are missing, weights are negative, or all
        are zero.

    Notes
    -----
    Units are assigned to 10 blocks by a hash, as the folds of a fit are, and the standard error is
    that of the jackknife over these: it is NaN with fewer than two of them. Dask arrays are
    computed, and only the sums of each block are held here.
    """
    values = numbers("scores", scores)
    if values.ndim not in (1, 2):
        raise DataError(f"mean takes scores (n,) or (n, k), got shape {values.shape}")
    single = values.ndim == 1
    sums = _sums("mean", _scores, [values], 1 if single else values.shape[1], weights, units)
    result = [sums.mean_loss(loss) for loss in range(sums.losses.shape[1])]
    return result[0] if single else result


def calibration_error(
    probabilities: Any,
    labels: Any = None,
    *,
    weights: Any = None,
    units: Any = None,
    bins: int | None = None,
) -> Estimate:
    r"""Calibration error of laws, from their PIT, or of probabilities of labels; 0 is best.

    Of probability integral transforms u_i it is the mean absolute difference of their distribution
    function from the uniform one, at the levels k / B:

    .. math:: \frac1{B - 1} \sum_{k=1}^{B-1} \Bigl| \sum_i w_i 1\{u_i \le k / B\} - k / B \Bigr|,
              \qquad \sum_i w_i = 1

    Of labels it is the expected calibration error of the likeliest one: over B bins of equal width
    by its probability p_i,

    .. math:: \sum_b \Bigl| \sum_{i \in b} w_i (p_i - 1\{\text{it is the label of } i\}) \Bigr|

    Parameters
    ----------
    probabilities
        Values of :func:`pit`, shape (n,), between 0 and 1; or with ``labels`` the probabilities of
        all labels, shape (n, K), each row of sum 1.
    labels
        Positions of the observed labels among the K, integers from 0 on, shape (n,).
    weights, units
        As of :func:`mean`.
    bins
        B, by default 20 for the PIT and 15 for labels.

    Returns
    -------
    estimate : with ``value`` and its standard error ``std``

    Raises
    ------
    DataError
        If shapes don't fit, values are outside [0, 1] or not finite, probabilities don't add up to
        one, a label is none of the K, or there are fewer than two bins.

    Notes
    -----
    With few rows the error is above 0 for true laws, too.

    Source: of labels Guo, Pleiss, Sun and Weinberger (2017), International Conference on Machine
    Learning; of laws Kuleshov, Fenner and Ermon (2018), the same conference, with absolute
    differences in the place of squares.
    """
    shares = numbers("probabilities", probabilities)
    if bins is not None and not (isinstance(bins, (int, np.integer)) and bins >= 2):
        raise DataError(f"bins must be an integer of at least 2, got {bins!r}")
    if labels is None:
        if shares.ndim != 1:
            raise DataError(
                "calibration_error takes values of pit (n,), or labels too, got shape "
                f"{shares.shape}"
            )
        levels = PIT_LEVELS if bins is None else tuple(k / bins for k in range(1, bins))
        of_pit = partial(_pit, levels=np.asarray(levels))
        sums = _sums("calibration", of_pit, [shares], len(levels), weights, units)
        return sums.deviation(range(len(levels)))
    codes, count = numbers("labels", labels), LABEL_BINS if bins is None else bins
    check_labels("calibration_error", shares, codes)
    of_labels = partial(_labels, bins=count, tolerance=sum_tolerance(probabilities))
    sums = _sums("calibration", of_labels, [shares, codes], count, weights, units)
    return sums.deviation(range(count))


def _sums(
    name: str, losses: Any, arrays: list[Array], width: int, weights: Any, units: Any
) -> ScoreSums:
    """Sums of losses, which take blocks of the arrays and return (b, width), by blocks of units."""
    beside = []
    if weights is not None:
        beside.append(numbers("weights", weights))
    if units is not None:
        beside.append(_unit_numbers(units))
    shapes = [each.shape for each in beside]
    if any(shape != arrays[0].shape[:1] for shape in shapes):
        raise DataError(
            f"weights and units have one value for each of {arrays[0].shape[0]} rows, got shapes "
            f"{', '.join(map(str, shapes))}"
        )
    block = partial(
        _block_sums, losses, len(arrays), weights=weights is not None, units=units is not None
    )
    table = rowwise(
        block,
        *arrays,
        *beside,
        name=name,
        tail=(N_FOLDS, 2 + width),
        numbered=True,
        summed=True,
    )
    table = np.asarray(table)  # computed here
    rows, weight = table[:, 0].astype(np.int64), table[:, 1]
    if not weight.sum() > 0.0:
        raise ZeroWeights() if weights is not None else DataError("there are no rows to score")
    none = np.zeros((N_FOLDS, 0))
    return ScoreSums(rows, weight, none, none, table[:, 2:])


def _unit_numbers(units: Any) -> Array:
    """A number for each row that is equal where the units are: of names and dates their order."""
    values = numbers("units", units) if is_lazy(units) else np.asarray(unmasked(units))
    if is_lazy(values) or values.ndim != 1:
        return values
    missing = np.isnat(values) if values.dtype.kind in "mM" else missing_labels(values)
    if missing.any():
        raise DataError(
            f"units must name one for each row, but {missing.sum():,} (first at row "
            f"{missing.argmax()}) are missing: drop these rows"
        )
    if values.dtype.kind in "biuf" and (np.abs(values.astype(np.float64)) < EXACT).all():
        return numbers("units", values)
    try:
        return np.unique(values, return_inverse=True)[1].astype(np.float64)
    except TypeError as error:
        raise DataError(
            "units of several types can't be compared: give all of them as text"
        ) from error


def _block_sums(losses: Any, count: int, *arrays: Array, weights: bool, units: bool) -> Array:
    """Rows, weight and sums of losses of each block of units, shape (1, N_FOLDS, 2 + width)."""
    values = losses(*arrays[:count])
    *beside, rows = arrays[count:]
    w = non_negative("weights", beside[0]) if weights else None
    if units:
        numbers_of_units = finite("units", beside[-1])
        check_groups(numbers_of_units, "units")
        folds = Folding("group").folds(rows, {"group": numbers_of_units}, N_FOLDS)
    else:
        folds = BY_ROWS.folds(rows, {}, N_FOLDS)
    sums = ScoreSums.of(np.empty((len(values), 0)), values, w, folds, N_FOLDS)
    return np.column_stack([sums.rows, sums.weight, sums.losses])[None]


def _scores(values: Array) -> Array:
    return columns(finite("scores", values))


def _pit(values: Array, levels: Array) -> Array:
    u = non_negative("pit", values)
    if (u > 1.0).any():
        raise DataError(f"values of pit lie between 0 and 1, got {u.max():g}")
    return pit_deviations(u, u, levels)


def _labels(shares: Array, codes: Array, bins: int, tolerance: float) -> Array:
    return label_deviations(*label_inputs(shares, codes, tolerance), bins)
