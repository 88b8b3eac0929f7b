"""Kernel sections solved for, wholly or in part, with matrix products alone.

The rows of K(p, .) become the Newton basis N = R^-1 K(p, .) by forward substitution in blocks of
pivots. It can also stop half way: *between* blocks each kernel section loses what the earlier
blocks explain of it, but within a block nothing is solved,

    C_b = K_b - sum_{a < b} W_ba C_a,   W_ba = R_ba R_aa^-1,   N_b = R_bb^-1 C_b,

and R_bb^-1 is applied to sums of products once, at the end of a pass. With one block, C = K and
the whole solve comes last; that halves the work and loses |R^-1|^2 in the sums, while a few blocks
lose only the square of each block's own range of residuals.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from scipy.linalg import solve_triangular

from cme_dask.kernels.into import Scratch, lower_product, subtract_product

Array = Any

_BLOCK = 48  # pivots per step of a whole solve: measured, 32 to 64 differ by a few per cent


@dataclass(frozen=True)
class Elimination:
    """How far the kernel sections at m pivots are solved for.

    Parameters
    ----------
    edges
        Borders of the blocks, from 0 to m.
    solved
        Whether each block is solved as well: the rows are the Newton basis (*solve first*).
    """

    edges: tuple[int, ...]
    solved: bool

    @classmethod
    def whole(cls, rank: int) -> "Elimination":
        """The Newton basis itself."""
        return cls((*range(0, rank, _BLOCK), rank), solved=True)

    @classmethod
    def between(cls, factor: Array, fractions: tuple[float, ...]) -> "Elimination":
        """Blocks cut where log R_jj has fallen by these fractions of its whole fall."""
        fall = np.minimum.accumulate(np.log(np.diag(factor)))
        levels = fall[0] + np.array(fractions) * (fall[-1] - fall[0])
        cuts = np.searchsorted(-fall, -levels, side="right")
        inner = sorted({int(c) for c in cuts if 0 < c < len(fall)})
        return cls((0, *inner, len(fall)), solved=False)

    @property
    def blocks(self) -> list[slice]:
        """The blocks of pivots."""
        return [slice(a, b) for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]

    @property
    def flops(self) -> int:
        """Operations per row of the data."""
        sizes = [(b.start, b.stop - b.start) for b in self.blocks]
        return sum(size * (2 * start + size * self.solved) for start, size in sizes)

    def prepare(self, factor: Array, like: Array) -> Callable[[Array], None]:
        """The elimination as a function that works in place on kernel sections, shape (m, n).

        Parameters
        ----------
        factor
            R, lower-triangular, shape (m, m).
        like
            An array of the library and on the device of the sections.
        """
        xp = array_namespace(like)
        scratch = Scratch()
        steps = [
            (target, source, xp.asarray(matrix, device=device(like)))
            for target, source, matrix in self._steps(factor)
        ]

        def run(sections: Array) -> None:
            for target, source, matrix in steps:
                out = sections[target, :]
                if source is None:
                    lower_product(xp, matrix, out, scratch)
                else:
                    subtract_product(xp, out, matrix, sections[source, :], scratch)

        return run

    def _steps(self, factor: Array) -> list[tuple[slice, slice | None, Array]]:
        """Target, source, matrix: take matrix @ source from the target, or apply it to itself."""
        if self.solved:
            return list(_solving(factor, self.blocks))
        steps: list[tuple[slice, slice | None, Array]] = []
        for block in self.blocks[1:]:
            weights = np.array(factor[block, : block.start])
            for before in self.blocks:
                if before.stop <= block.start:
                    weights[:, before] = solve_triangular(
                        factor[before, before], weights[:, before].T, lower=True, trans="T"
                    ).T
            steps.append((block, slice(0, block.start), weights))
        return steps

    def finish(self, factor: Array, rows: Array) -> None:
        """Solve within the blocks, in place: what is still to do to rows of shape (m, k)."""
        if self.solved:
            return
        for block in self.blocks:
            rows[block] = solve_triangular(factor[block, block], rows[block], lower=True)


def _solving(factor: Array, blocks: list[slice]) -> Iterator[tuple[slice, slice | None, Array]]:
    """Forward substitution by halves: then most of it is products of large matrices."""
    if len(blocks) == 1:
        (block,) = blocks
        own = factor[block, block]
        inverse = solve_triangular(own, np.eye(len(own)), lower=True)
        yield block, None, np.ascontiguousarray(inverse)
        return
    half = len(blocks) // 2
    first, second = blocks[:half], blocks[half:]
    source = slice(first[0].start, first[-1].stop)
    target = slice(second[0].start, second[-1].stop)
    yield from _solving(factor, first)
    yield target, source, np.ascontiguousarray(factor[target, source])
    yield from _solving(factor, second)
