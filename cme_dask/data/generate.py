"""The joint paper's three-dimensional normal sample, streamed to a store of any size."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from cme_dask.config import SCENARIOS
from cme_dask.data.atomic import check_room
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError

Array = Any

COLUMNS = (Columns(("x",)), Columns(("y1", "y2")))
"""What the generated columns are called."""

_BATCH = 1 << 18


@dataclass(frozen=True)
class Normal3:
    """Y = (Z_1, Z_2), X = Z_3 of a centred normal Z with variances 1/25 (joint paper, section 7).

    Parameters
    ----------
    scenario
        A key of ``cme_dask.config.SCENARIOS``.
    """

    scenario: str = "medium"

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise DataError(
                f"scenario must be one of {', '.join(SCENARIOS)}, got {self.scenario!r}"
            )

    @property
    def covariance(self) -> Array:
        """Covariance of (Y1, Y2, X), shape (3, 3)."""
        a, b, c = SCENARIOS[self.scenario]
        return np.array([[1.0, a, b], [a, 1.0, c], [b, c, 1.0]]) / 25.0

    def batches(self, rows: int, seed: int) -> Iterator[tuple[Array, Array]]:
        """Batches (x, y) of shapes (b, 1), (b, 2); batch i has a generator of its own."""
        root = np.linalg.cholesky(self.covariance)
        for number, start in enumerate(range(0, rows, _BATCH)):
            rng = np.random.default_rng([seed, number])
            z = rng.standard_normal((min(_BATCH, rows - start), 3)) @ root.T
            yield z[:, 2:], z[:, :2]

    def conditional(self, x: Array) -> tuple[Array, Array]:
        """Mean (n, 2) and covariance (2, 2) of Y given X = x."""
        cov = self.covariance
        slope = cov[:2, 2] / cov[2, 2]
        return np.outer(x, slope), cov[:2, :2] - np.outer(slope, cov[:2, 2])

    def probability(self, x: Array, shift: float) -> Array:
        """P(Y1 <= Y2 - shift | X = x), the events of (40), shape (n,)."""
        mean, cov = self.conditional(x)
        spread = np.sqrt(cov[0, 0] + cov[1, 1] - 2 * cov[0, 1])
        return np.asarray(norm.cdf((mean[:, 1] - mean[:, 0] - shift) / spread))


def write_normal3(
    path: str | os.PathLike[str],
    rows: int,
    *,
    scenario: str = "medium",
    seed: int = 0,
    chunk_rows: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write ``rows`` draws to a sample store; ``progress`` is called with the rows so far."""
    if rows < 2:
        raise DataError(f"at least 2 rows are needed, got {rows}")
    check_room(path, 8 * sum(len(columns.names) for columns in COLUMNS) * rows, f"{rows:,} rows")
    law = Normal3(scenario)
    with writing_sample(
        path,
        COLUMNS,
        chunk_rows=chunk_rows,
        expected_rows=rows,
        seed=seed,
        overwrite=overwrite,
    ) as writer:
        for x, y in law.batches(rows, seed):
            writer.append(x, y)
            if progress is not None:
                progress(writer.n_rows)
