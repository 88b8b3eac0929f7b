"""The step of a fit that settles how its pass computes."""

from numbers import Real
from typing import Any

import numpy as np

from cme_dask.chunked.blas import one_blas_thread
from cme_dask.errors import DataError
from cme_dask.numerics.guard import SAFE, TRIAL_ROWS, TRIALS, Arithmetic, Change, choose_arithmetic
from cme_dask.numerics.moments import MomentSpec
from cme_dask.storage.priority import RowSample

_WORTH = 32  # a pass over fewer than this many times the trial's rows is not worth a trial


def check_accuracy(accuracy: Any) -> float:
    """The accuracy as a number; DataError if it is negative or none."""
    real = isinstance(accuracy, Real) and not isinstance(accuracy, bool)
    if not real or not 0.0 <= float(accuracy) < np.inf:
        raise DataError(f"accuracy must be a number of at least 0, got {accuracy!r}")
    return float(accuracy)


def trial_rows(rows: RowSample, ranks: tuple[int, ...]) -> RowSample:
    """The rows on which faster arithmetic is tried."""
    return rows.prefix(max(TRIAL_ROWS, 2 * max(ranks)))


def settle_arithmetic(
    spec: MomentSpec, rows: RowSample, n_rows: int, accuracy: float, change: Change, cores: int
) -> tuple[MomentSpec, Arithmetic]:
    """The moments with the cheapest arithmetic that a trial on the row sample admits.

    Parameters
    ----------
    spec
        What the pass will compute.
    rows
        The trial rows.
    n_rows
        Rows of the pass; of few rows none are tried, and the safe form is taken.
    accuracy
        Largest change admitted; 0 takes the safe form.
    change
        What must not change, see :func:`choose_arithmetic`.
    cores
        How many may be tried at once; no more than two, whose sums take memory.
    """
    if accuracy == 0.0 or n_rows < _WORTH * len(rows):
        return spec, SAFE
    with one_blas_thread():
        chosen, _ = choose_arithmetic(spec, rows.parts, accuracy, change, min(cores, TRIALS))
    return chosen.applied(spec), chosen
