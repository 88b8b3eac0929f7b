"""Random numbers that are functions of a row, or of the unit it belongs to, alone.

Folds, hold-outs and the priority sample must not depend on chunks, workers or order, so each row's
number is a hash of (salt, row), or of (salt, unit): the splitmix64 generator of Steele, Lea and
Flood (2014), started at the salt and advanced by the number.
"""

from typing import Any

import numpy as np

from cme_dask.errors import DataError

Array = Any

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_VALUE_SALT = (1 << 63) + 0x76616C75  # "valu"
_FOLD_SALT = (1 << 63) + 0x666F6C64  # "fold"; seeds of samples are below 2**63

MAX_FOLDS = 255


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def number_hash(salt: int, numbers: Array) -> Array:
    """Hash of each number, uniform on the 64-bit integers.

    Parameters
    ----------
    salt
        Distinguishes independent uses; any non-negative integer below 2**64.
    numbers
        64-bit integers without a sign, shape (n,).

    Returns
    -------
    uint64 array of shape (n,)
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        origin = _mix(np.array([salt], dtype=np.uint64) + _GAMMA)
        return _mix(_mix(origin + numbers * _GAMMA) + _GAMMA)


def value_hash(salt: int, rows: Array) -> Array:
    """Hash of the values of each row (n, d), uint64 of shape (n,): equal rows have equal ones."""
    found = np.zeros(len(rows), dtype=np.uint64)
    for j, column in enumerate(np.asarray(rows, dtype=np.float64).T):
        found += number_hash(salt + j, np.ascontiguousarray(column + 0.0).view(np.uint64))
    return found


def distinct_in_random_order(rows: Array) -> tuple[Array, Array]:
    """Positions of distinct rows (k,), and for each row (n,) which of them it equals.

    They are in an order that depends on their values alone and is as good as random: so rows that
    come twice count as one of twice the weight.
    """
    _, first, which = np.unique(
        value_hash(_VALUE_SALT, rows), return_index=True, return_inverse=True
    )
    return first, which.ravel()


def row_hash(salt: int, start: int, stop: int) -> Array:
    """Hash of each global row index in ``[start, stop)``, see :func:`number_hash`."""
    return number_hash(salt, np.arange(start, stop, dtype=np.uint64))


def unit_interval(hashes: Array) -> Array:
    """The hashes as numbers strictly between 0 and 1, float64."""
    return ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def fold_numbers(numbers: Array, n_folds: int) -> Array:
    """Fixed fold in ``[0, n_folds)`` of each number (a row, or its unit), as uint8.

    Raises
    ------
    DataError
        If ``n_folds`` is out of range.
    """
    if not 1 <= n_folds <= MAX_FOLDS:
        raise DataError(f"n_folds must lie between 1 and {MAX_FOLDS}, got {n_folds}")
    if n_folds == 1:
        return np.zeros(len(numbers), dtype=np.uint8)
    return (number_hash(_FOLD_SALT, numbers) % np.uint64(n_folds)).astype(np.uint8)


def fold_of_rows(start: int, stop: int, n_folds: int) -> Array:
    """Fixed fold number in ``[0, n_folds)`` of each global row, as uint8."""
    return fold_numbers(np.arange(start, stop, dtype=np.uint64), n_folds)


def priority_keys(seed: int, rows: Array, weights: Array | None = None) -> Array:
    """Priority of each global row: the k smallest keys are a random sample without replacement.

    ``u / 1`` for equal rows, where u in (0, 1) is the hash of the row; ``-log(u) / w`` with
    weights (Efraimidis and Spirakis, 2006), so that rows of the sample count equally. Rows of
    weight zero get an infinite key.

    Parameters
    ----------
    seed
        Of the sample.
    rows
        Global indices, shape (n,).
    weights
        Shape (n,), or None for equal ones.

    Returns
    -------
    float64 array of shape (n,)
    """
    u = unit_interval(number_hash(seed, rows.astype(np.uint64)))
    if weights is None:
        return u
    with np.errstate(divide="ignore", over="ignore"):
        keys = -np.log(u) / weights
    # Only a weight of zero excludes a row, however small the others are.
    return np.where(weights > 0, np.minimum(keys, np.finfo(np.float64).max), np.inf)
