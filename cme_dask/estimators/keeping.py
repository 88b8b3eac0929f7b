"""Fits whose passes are kept in a checkpoint."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from cme_dask.chunked.checkpoints import Checkpoint, keeping
from cme_dask.chunked.fingerprints import about_run
from cme_dask.storage.sample import Sample


def kept_fit(
    estimator: Any,
    sample: Sample,
    given: Mapping[str, Any],
    checkpoint: str | os.PathLike[str] | None,
    shard: tuple[int, int] | None = None,
) -> AbstractContextManager[Checkpoint | None]:
    """The checkpoint of a fit, begun or gone on with; None where none is asked for.

    Parameters
    ----------
    estimator
        Whose parameters, with the rows and what else is ``given``, the fit depends on.
    sample, given
        Rows, and functions.
    checkpoint, shard
        As in :meth:`JointDistribution.fit`, and so are the errors.
    """

    def about() -> dict[str, dict[str, str]]:
        parameters = estimator.get_params(deep=False)
        parameters.pop("convergence", None)  # no sum depends on it
        return about_run(type(estimator).__name__, parameters, sample, given)

    return keeping(checkpoint, about, shard)
