"""Scores of densities, of probabilities of labels, of quantiles and of intervals."""

from functools import partial
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.metrics.inputs import (
    between_zero_and_one,
    columns,
    finite,
    numbers,
    rowwise,
    sum_tolerance,
    without_nan,
)
from cme_dask.numerics.row_scores import (
    density_losses,
    interval_scores,
    log_losses,
    pinball_losses,
)

Array = Any


def log_score(probabilities: Any, labels: Any = None, *, least: float = 0.0) -> Array:
    r"""Log score of densities or of probabilities of labels, lower is better.

    .. math:: \mathrm{LogS}(p, y) = -\log p(y)

    Parameters
    ----------
    probabilities
        The density at the observation, shape (n,); or with ``labels`` the probabilities of all
        labels, shape (n, K), each row of sum 1.
    labels
        Positions of the observed labels among the K, integers from 0 on, shape (n,).
    least
        Probabilities and densities below this count as this. By default the score of an
        observation that was excluded is infinite.

    Returns
    -------
    scores : (n,), in nats; of densities they depend on the units of y

    Raises
    ------
    DataError
        If shapes don't fit, values are negative or not finite, probabilities don't add up to one,
        or a label is none of the K.

    Notes
    -----
    A law's own ``log_pdf`` reaches farther down than logarithms of its ``pdf``.

    Source: Good (1952), Journal of the Royal Statistical Society B 14, 107.
    """
    shares = numbers("probabilities", probabilities)
    if not (isinstance(least, (int, float)) and least >= 0.0):
        raise DataError(f"least must be a non-negative number, got {least!r}")
    if labels is None:
        if shares.ndim != 1:
            raise DataError(f"log_score takes densities (n,), or labels too, got {shares.shape}")
        return rowwise(partial(_log_density, least=least), shares, name="log")
    codes = numbers("labels", labels)
    check_labels("log_score", shares, codes)
    of_labels = partial(_log_labels, least=least, tolerance=sum_tolerance(probabilities))
    return rowwise(of_labels, shares, codes, name="log")


def pinball(quantiles: Any, levels: Any, y: Any) -> Array:
    r"""Pinball loss of quantiles, lower is better.

    .. math:: L_\tau(q, y) = (y - q) (\tau - 1\{y < q\})

    The quantile of level tau minimises its mean, and twice its integral over tau is the CRPS.

    Parameters
    ----------
    quantiles
        q, shape (n,) of one level, or (n, k).
    levels
        tau, a number or shape (k,), between 0 and 1.
    y
        The observations, shape (n,).

    Returns
    -------
    losses : of the shape of the quantiles, in the units of y

    Raises
    ------
    DataError
        If shapes don't fit, values are not finite, or levels are outside (0, 1).

    Notes
    -----
    Source: Koenker and Bassett (1978), Econometrica 46, 33.
    """
    taus = between_zero_and_one("levels", levels)
    q, y = numbers("quantiles", quantiles), numbers("y", y)
    if q.shape != (*y.shape, *taus.shape) or y.ndim != 1:
        raise DataError(
            "pinball takes quantiles (n, k), levels (k,) and y (n,), or quantiles (n,) of one "
            f"level, got shapes {q.shape}, {taus.shape} and {y.shape}"
        )
    return rowwise(partial(_pinball, levels=taus), q, y, name="pinball", tail=taus.shape)


def interval_score(lower: Any, upper: Any, y: Any, level: float = 0.9) -> Array:
    r"""Interval score (Winkler) of central intervals, lower is better.

    .. math:: S_\alpha(l, u, y) = u - l + \tfrac2\alpha \max(l - y, 0)
              + \tfrac2\alpha \max(y - u, 0), \qquad \alpha = 1 - \mathrm{level}

    Parameters
    ----------
    lower, upper
        Quantiles of the levels alpha / 2 and 1 - alpha / 2, shape (n,) or (n, d). An interval with
        an infinite end has an infinite score.
    y
        The observations, of the same shape.
    level
        Probability of the intervals, between 0 and 1.

    Returns
    -------
    scores : of the same shape, in the units of y

    Raises
    ------
    DataError
        If shapes differ, an end is NaN, y is not finite, a lower end exceeds its upper one, or the
        level is outside (0, 1).

    Notes
    -----
    It is the sum of the pinball losses of both ends times 2 / alpha.

    Source: Gneiting and Raftery (2007), Journal of the American Statistical Association 102, (43).
    """
    probability = between_zero_and_one("level", level)
    if probability.ndim:
        raise DataError(f"level must be one number, got {level}")
    return _of_intervals("interval_score", partial(interval_scores, level=level), lower, upper, y)


def coverage(lower: Any, upper: Any, y: Any) -> Array:
    """Whether intervals hold the observations, ends included: their mean is the coverage.

    Parameters
    ----------
    lower, upper
        Ends of the intervals, shape (n,) or (n, d); they may be infinite.
    y
        The observations, of the same shape.

    Returns
    -------
    covered : 1 or 0, of the same shape

    Raises
    ------
    DataError
        If shapes differ, an end is NaN, y is not finite, or a lower end exceeds its upper one.
    """
    return _of_intervals("coverage", _covered, lower, upper, y)


def width(lower: Any, upper: Any) -> Array:
    """Widths of intervals: of two laws with the same coverage, the one of narrower ones is sharper.

    Parameters
    ----------
    lower, upper
        Ends of the intervals, shape (n,) or (n, d); they may be infinite.

    Returns
    -------
    widths : of the same shape, in the units of y

    Raises
    ------
    DataError
        If shapes differ, an end is NaN, or a lower end exceeds its upper one.
    """
    return _of_intervals("width", _width, lower, upper)


def cde_loss(density: Any, grid: Any, y: Any) -> Array:
    r"""Loss of conditional densities on a grid, lower is better.

    .. math:: L(f, y) = \int f(z)^2 \, dz - 2 f(y)

    Up to a constant that no estimate changes, its mean is the squared distance to the true density
    in L2.

    Parameters
    ----------
    density
        One per row: values at the grid, shape (n, G), linear between them; or constants between
        neighbours, shape (n, G - 1), such as weights of atoms in these cells over the lengths of
        the cells.
    grid
        Ascending, shape (G,) with G of at least 2. The density is 0 outside.
    y
        The observations, shape (n,).

    Returns
    -------
    losses : (n,), in one over the units of y

    Raises
    ------
    DataError
        If shapes don't fit, values are not finite, densities are negative, or the grid does not
        ascend.

    Notes
    -----
    The integral is exact for these densities, which are not divided by their own integral.

    Source: Izbicki and Lee (2016), Journal of Computational and Graphical Statistics 25, 1297.
    """
    ends = finite("grid", grid)
    if ends.ndim != 1 or len(ends) < 2 or (np.diff(ends) <= 0.0).any():
        raise DataError("the grid must be two numbers at least, shape (G,), in ascending order")
    f, y = numbers("density", density), numbers("y", y)
    G = len(ends)
    if f.ndim != 2 or y.ndim != 1 or len(f) != len(y) or f.shape[1] not in (G, G - 1):
        raise DataError(
            f"cde_loss takes densities (n, {G}) at the grid or (n, {G - 1}) between its points, "
            f"and y (n,), got shapes {f.shape} and {y.shape}"
        )
    return rowwise(partial(_cde, grid=ends), f, y, name="cde")


def brier(probabilities: Any, events: Any) -> float:
    """Brier score: mean over rows of sum over events of (p - 1{event})^2, lower is better.

    Parameters
    ----------
    probabilities
        p, shape (n,) or (n, k).
    events
        Whether each happened, true or false or 0 or 1, of the same shape.

    Returns
    -------
    score : between 0 and k, for probabilities between 0 and 1

    Raises
    ------
    DataError
        If shapes differ, values are not finite, or events are neither 0 nor 1.

    Notes
    -----
    Of the classes of one variable it is the original score, twice that of one of two classes.
    Source: Brier (1950), Monthly Weather Review 78, (2).
    """
    happened = finite("events", events)
    if not np.isin(happened, (0.0, 1.0)).all():
        raise DataError("events must be true or false, or 0 or 1")
    return mean_square("brier", probabilities, happened)


def mean_square(name: str, one: Any, two: Any) -> float:
    """Mean over rows of squared distances between two arrays, (n,) or (n, q)."""
    one, two = finite(name, one), finite(name, two)
    if one.shape != two.shape or one.ndim not in (1, 2) or not len(one):
        raise DataError(
            f"{name} takes two arrays of one shape, (n,) or (n, q), got {one.shape} and {two.shape}"
        )
    return float(((one - two) ** 2).sum() / len(one))


def label_inputs(shares: Array, codes: Array, tolerance: float) -> tuple[Array, Array]:
    """Checked rows of probabilities (b, K), and labels (b,) as integers."""
    shares, codes = non_negative("probabilities", shares), finite("labels", codes)
    if (np.abs(shares.sum(axis=1) - 1.0) > tolerance).any():
        raise DataError("the probabilities of each row must add up to one")
    places = codes.astype(np.int64)
    wrong = (places != codes) | (places < 0) | (places >= shares.shape[1])
    if wrong.any():
        raise DataError(
            f"labels are integers from 0 to {shares.shape[1] - 1}, got {codes[wrong][0]:g}"
        )
    return shares, places


def non_negative(name: str, values: Array) -> Array:
    """Finite numbers; DataError on negative ones too."""
    array = finite(name, values)
    if (array < 0.0).any():
        raise DataError(f"{name}: negative values")
    return array


def check_labels(name: str, shares: Array, codes: Array) -> None:
    """DataError if these are no probabilities (n, K) and labels (n,)."""
    if shares.ndim != 2 or codes.ndim != 1 or len(shares) != len(codes):
        raise DataError(
            f"{name} takes probabilities (n, K) and labels (n,), got shapes {shares.shape} and "
            f"{codes.shape}"
        )


def _log_density(density: Array, least: float) -> Array:
    # A density is the probability of the only label.
    rows = np.zeros(len(density), dtype=np.int64)
    return log_losses(non_negative("probabilities", density)[:, None], rows, least)


def _log_labels(shares: Array, codes: Array, least: float, tolerance: float) -> Array:
    return log_losses(*label_inputs(shares, codes, tolerance), least)


def _pinball(quantiles: Array, y: Array, levels: Array) -> Array:
    q, seen = finite("quantiles", quantiles), finite("y", y)
    losses = pinball_losses(columns(q), levels.reshape(-1), seen)
    return losses.reshape(q.shape)


def _covered(lower: Array, upper: Array, y: Array) -> Array:
    return ((lower <= y) & (y <= upper)).astype(np.float64)


def _width(lower: Array, upper: Array) -> Array:
    return upper - lower


def _cde(density: Array, y: Array, grid: Array) -> Array:
    return density_losses(non_negative("density", density), grid, finite("y", y))


def _of_intervals(name: str, score: Any, lower: Any, upper: Any, *y: Any) -> Array:
    arrays = [numbers(f"{name}: ends and y", each) for each in (lower, upper, *y)]
    shapes = [each.shape for each in arrays]
    if len(set(shapes)) > 1 or len(shapes[0]) not in (1, 2):
        raise DataError(
            f"{name} takes arrays of one shape, (n,) or (n, d), got {', '.join(map(str, shapes))}"
        )
    return rowwise(partial(_interval, name, score), *arrays, name=name, tail=shapes[0][1:])


def _interval(name: str, score: Any, lower: Array, upper: Array, *y: Array) -> Array:
    lower, upper = (without_nan(f"{name}: ends", each) for each in (lower, upper))
    seen = [finite(f"{name}: y", each) for each in y]
    crossed = lower > upper
    if crossed.any():
        raise DataError(
            f"{name}: lower ends must not exceed upper ones, got {lower[crossed][0]:g} and "
            f"{upper[crossed][0]:g}"
        )
    empty = (lower == np.inf) | (upper == -np.inf)
    if empty.any():
        raise DataError(
            f"{name}: no number lies between {lower[empty][0]:g} and {upper[empty][0]:g}"
        )
    return score(lower, upper, *seen)
