"""Ranges of basis functions over all rows, in one pass: what certificates may rest on."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cme_dask.chunked.driver import Executor
from cme_dask.chunked.passes import run_over_rows
from cme_dask.chunked.plan import Run
from cme_dask.chunked.strips import Reading, strips_of
from cme_dask.numerics.basis import LinearBasis
from cme_dask.numerics.blocks import BLOCK
from cme_dask.numerics.folding import BY_ROWS
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample

Array = Any


def observed_ranges(
    sample: Sample, bases: Sequence[LinearBasis], executor: Executor
) -> tuple[Array, ...]:
    """Lowest and highest values of psi over the rows of positive weight, in one pass.

    Parameters
    ----------
    sample
        The rows.
    bases
        A basis for each variable.
    executor
        Where to run.

    Returns
    -------
    ranges : for each variable, shape (2, k)
    """
    job = partial(_ranges_of_run, bases=tuple(bases))
    found: tuple[Array, ...] = run_over_rows(
        sample.fold_by(BY_ROWS), executor, job, _wider, name="psi-ranges"
    )
    return found


def _ranges_of_run(
    _: None, run: Run, reading: Reading, *sources: RowSource, bases: tuple[LinearBasis, ...]
) -> tuple[Array, ...]:
    ranges = tuple(np.array([[np.inf], [-np.inf]]).repeat(basis.rank, axis=1) for basis in bases)
    for strip in strips_of(run, reading, sources):
        strip.check()
        for first in range(0, len(strip), BLOCK):
            here = slice(first, first + BLOCK)
            kept = slice(None) if strip.weights is None else strip.weights[here] > 0.0
            for held, basis, part in zip(ranges, bases, strip.parts, strict=True):
                psi = basis(part[here][kept])
                np.minimum(held[0], psi.min(axis=0, initial=np.inf), out=held[0])
                np.maximum(held[1], psi.max(axis=0, initial=-np.inf), out=held[1])
    return ranges


def _wider(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    pairs = zip(a, b, strict=True)
    return tuple(
        np.stack([np.minimum(one[0], two[0]), np.maximum(one[1], two[1])]) for one, two in pairs
    )
