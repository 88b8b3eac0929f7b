"""The kernel of categorical columns."""

import math
from dataclasses import dataclass
from typing import Any

from array_api_compat import device

from cme_dask.kernels.base import Array
from cme_dask.kernels.into import Scratch, into, take_into
from cme_dask.kernels.sections import Sections
from cme_dask.kernels.stationary import Stationary

_MOST = 1e30  # of 1 / l^2: exp(-1e30) is zero already, and sums over columns stay finite


@dataclass(frozen=True)
class Categorical(Stationary):
    r"""The kernel of categorical columns: a Gaussian of their one-hot codes.

    .. math:: k(x, z) = \exp\Bigl(-\sum_j [x_j \ne z_j] / l_j^2\Bigr)

    One-hot codes of two different levels are at squared distance 2. As l goes to 0 the kernel
    tends to :class:`Delta`; as l grows it ignores the column.

    Parameters
    ----------
    length_scale
        l > 0, no unit: one number for all columns, or one per column.

    Notes
    -----
    Levels are any numbers; they count as equal if they are exactly so.
    """

    def measures(self, column: int) -> bool:
        """False: it asks whether values are equal."""
        return False

    # A function k(., z_j) depends on the level of z_j only. So a row of values per level is made
    # and copied to all functions of that level: on blocks of 2,048 x 200 with 4 columns of 12
    # levels this took 0.7 ms, comparing all pairs 1.9 ms, one product of one-hot codes 1.3 ms.
    def _sections(self, xp: Any, Z: Array) -> Sections:
        return self._by_level(xp, Z, 1.0, [math.exp(f) for f in self._far(Z)], "multiply")

    def _log_sections(self, xp: Any, Z: Array) -> Sections:
        return self._by_level(xp, Z, 0.0, self._far(Z), "add")

    def _far(self, Z: Array) -> list[float]:
        """Log k of two different levels, for each column."""
        each, d = self.length_scale, Z.shape[1]
        scales = each if isinstance(each, tuple) else (each,) * d
        return [-min((1.0 / scale) * (1.0 / scale), _MOST) for scale in scales]

    def _by_level(
        self, xp: Any, Z: Array, equal: float, far: list[float], combine: str
    ) -> Sections:
        levels = [xp.unique_inverse(Z[:, j]) for j in range(Z.shape[1])]
        scratch = Scratch()

        def write(X: Array, out: Array) -> None:
            place = device(out)
            same = xp.asarray(equal, dtype=out.dtype, device=place)
            for j, (values, which) in enumerate(levels):
                other = xp.asarray(far[j], dtype=out.dtype, device=place)
                rows = xp.where(values[:, None] == X[None, :, j], same, other)
                if j == 0:
                    take_into(xp, out, rows, which)
                else:
                    part = scratch.like(xp, out)
                    take_into(xp, part, rows, which)
                    into(xp, out, combine, out, part)

        return Sections.of_blocks(write)
