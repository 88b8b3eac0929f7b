"""Proper scores of laws and of conditional expectations, and the criteria of the joint paper.

Scores of observations take NumPy arrays, or Dask arrays with chunks of rows, and return one number
per row of the same kind; :func:`mean` of these has a standard error. Lower is better, in all but
``coverage``. Dask arrays are checked for NaN when they are computed.
"""

from cme_dask.metrics.atoms import crps, energy_score, pit
from cme_dask.metrics.predictions import (
    brier,
    cde_loss,
    coverage,
    interval_score,
    log_score,
    pinball,
    width,
)
from cme_dask.metrics.scorers import (
    crps_scorer,
    log_score_scorer,
    oracle_error,
    validation_error,
)
from cme_dask.metrics.summaries import calibration_error, mean
from cme_dask.numerics.crossval import held_out_loss, held_out_losses

__all__ = [
    "brier",
    "calibration_error",
    "cde_loss",
    "coverage",
    "crps",
    "crps_scorer",
    "energy_score",
    "held_out_loss",
    "held_out_losses",
    "interval_score",
    "log_score",
    "log_score_scorer",
    "mean",
    "oracle_error",
    "pinball",
    "pit",
    "validation_error",
    "width",
]
