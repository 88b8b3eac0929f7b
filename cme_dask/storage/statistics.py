"""Count, mean, standard deviation and range of columns, strip by strip."""

from typing import Any

import numpy as np

Array = Any


class Statistics:
    """Running statistics of d columns.

    Means and sums of squared deviations are joined strip by strip (Chan, Golub and LeVeque 1983),
    so they depend on where the strips end in the last digits only, and not at all if these are the
    same.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self._mean = np.zeros(width)
        self._squares = np.zeros(width)
        self._low = np.full(width, np.inf)
        self._high = np.full(width, -np.inf)

    def add(self, rows: Array) -> None:
        """Add a strip of rows, shape (n, d) with n > 0."""
        n = len(rows)
        columns = np.ascontiguousarray(rows.T)  # sums along memory are faster, and pairwise
        with np.errstate(over="ignore", invalid="ignore"):  # a variance may exceed the floats
            mean = columns.mean(axis=1)
            away = columns - mean[:, None]
            rest = away.mean(axis=1)  # what rounding left of the mean
            mean = mean + rest
            squares = np.einsum("ij,ij->i", away, away) - n * rest**2
            total = self.count + n
            step = mean - self._mean
            self._mean = self._mean + step * (n / total)
            self._squares = self._squares + squares + step**2 * (self.count * n / total)
        self.count = total
        self._low = np.minimum(self._low, columns.min(axis=1))
        self._high = np.maximum(self._high, columns.max(axis=1))

    @property
    def state(self) -> Array:
        """All of it, shape (5, d); see :meth:`restore`."""
        counts = np.full(len(self._mean), float(self.count))
        return np.stack([counts, self._mean, self._squares, self._low, self._high])

    def restore(self, state: Array) -> None:
        """Inverse of :attr:`state`."""
        counts, self._mean, self._squares, self._low, self._high = np.array(state)
        self.count = int(counts[0])

    def to_dicts(self) -> list[dict[str, float | int | None]]:
        """Per column: count, mean, std (with 1/n), min, max; None for what is no finite number."""
        with np.errstate(invalid="ignore"):
            deviation = np.sqrt(np.maximum(self._squares, 0.0) / max(self.count, 1))
        table = np.stack([self._mean, deviation, self._low, self._high], axis=1).tolist()
        return [
            {"count": self.count}
            | {
                name: value if np.isfinite(value) else None
                for name, value in zip(("mean", "std", "min", "max"), row, strict=True)
            }
            for row in table
        ]
