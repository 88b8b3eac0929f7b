"""Random numbers that are functions of the global row index alone.

Folds, hold-outs and the priority sample must not depend on chunks, workers or order, so each row's
number is a hash of (salt, row): the splitmix64 generator of Steele, Lea and Flood (2014), started
at the salt and advanced by the row.
"""

from typing import Any

import numpy as np

from cme_dask.errors import DataError

Array = Any

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_FOLD_SALT = (1 << 63) + 0x666F6C64  # "fold"; seeds of samples are below 2**63

MAX_FOLDS = 255


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def row_hash(salt: int, start: int, stop: int) -> Array:
    """Hash of each global row index in ``[start, stop)``, uniform on the 64-bit integers.

    Parameters
    ----------
    salt
        Distinguishes independent uses; any non-negative integer below 2**64.
    start, stop
        Global row range.

    Returns
    -------
    uint64 array of shape (stop - start,)
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        origin = _mix(np.array([salt], dtype=np.uint64) + _GAMMA)
        rows = np.arange(start, stop, dtype=np.uint64)
        return _mix(_mix(origin + rows * _GAMMA) + _GAMMA)


def fold_of_rows(start: int, stop: int, n_folds: int) -> Array:
    """Fixed fold number in ``[0, n_folds)`` of each global row, as uint8."""
    if not 1 <= n_folds <= MAX_FOLDS:
        raise DataError(f"n_folds must lie between 1 and {MAX_FOLDS}, got {n_folds}")
    if n_folds == 1:
        return np.zeros(stop - start, dtype=np.uint8)
    return (row_hash(_FOLD_SALT, start, stop) % np.uint64(n_folds)).astype(np.uint8)


def priority_keys(seed: int, start: int, stop: int, weights: Array | None = None) -> Array:
    """Priority of each global row: the k smallest keys are a random sample without replacement.

    ``u / 1`` for equal rows, where u in (0, 1) is the hash of the row; ``-log(u) / w`` with
    weights (Efraimidis and Spirakis, 2006), so that rows of the sample count equally. Rows of
    weight zero get an infinite key.

    Returns
    -------
    float64 array of shape (stop - start,)
    """
    u = ((row_hash(seed, start, stop) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    if weights is None:
        return u
    with np.errstate(divide="ignore", over="ignore"):
        keys = -np.log(u) / weights
    # Only a weight of zero excludes a row, however small the others are.
    return np.where(weights > 0, np.minimum(keys, np.finfo(np.float64).max), np.inf)
