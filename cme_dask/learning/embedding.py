"""The kernel of x of a conditional mean embedding, learned from the row sample."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from cme_dask.errors import DataError
from cme_dask.kernels import Kernel
from cme_dask.kernels.length_scales import IGNORED, SCALES, WIDEST
from cme_dask.learning.candidates import (
    KernelPoint,
    at_bounds,
    ignored_columns,
    long_columns,
    without,
)
from cme_dask.learning.losses import ScreenedRows, ScreenedSide, screened_folds
from cme_dask.learning.search import GRID, SearchedVariable
from cme_dask.numerics.embedding import FoldLoss, squared_loss, surrogate_loss
from cme_dask.numerics.resources import one_blas_thread

Array = Any

LOSSES: dict[str, FoldLoss] = {"surrogate": surrogate_loss, "squared": squared_loss}
"""Held-out losses by the name of the criterion."""

REGS = tuple(10.0 ** (p / 2) for p in range(-18, 1))
"""Ridges r that are compared: lambda = n r."""

SEARCH_ROWS, SEARCH_RANK = 4096, 200
"""Rows of the row sample that the search sees, and pivots of each basis in it."""

_OFF = 8.0  # a column's length scale is made so much longer to see if it is needed
_DIGITS, _LOSS_DIGITS = 2, 7  # of logarithms of length scales, and of losses


@dataclass(frozen=True, eq=False)
class EmbeddingSearch:
    """What a search found.

    Attributes
    ----------
    kernel
        The kernel of x.
    reg
        The best ridge with it on the row sample.
    loss
        Held-out loss there.
    trials
        Number of kernels tried.
    seconds
        What it took.
    """

    kernel: Kernel
    reg: float
    loss: float
    trials: int
    seconds: float


def search_embedding(
    parts: tuple[Array, Array],
    weights: Array,
    folds: Array,
    kernel_y: Kernel,
    categorical: tuple[bool, ...],
    functions: Array,
    *,
    criterion: str,
    regs: Array,
    tol: float,
    callback: Callable[[str, int, int, float], None] = lambda stage, done, most, best: None,
) -> EmbeddingSearch:
    """Search transforms and length scales of the kernel of x by cross-validation.

    A grid of shared length scales in every form of transform; then each column with a much longer
    one; then all together (``scipy.optimize``, COBYQA), between wider bounds where the best lies at
    one; columns without which nothing is lost are ignored.

    Parameters
    ----------
    parts
        Rows of x and y of the row sample, shapes (n, d).
    weights
        Of the rows, sum 1, shape (n,).
    folds
        Fold number of each row, shape (n,).
    kernel_y
        The kernel of y, of the surrogate loss.
    categorical
        Which columns of x are codes of categories.
    functions
        Functions of y at the rows, shape (n, q), of the squared error.
    criterion
        ``"surrogate"`` or ``"squared"``.
    regs
        Ridges, shape (R,).
    tol
        Relative trace error that the bases aim at.
    callback
        Told the stage, the trials in it so far and at most, and the best loss.

    Raises
    ------
    DataError
        If fewer than two folds have rows.
    """
    begin = time.perf_counter()
    if len(np.unique(folds)) < 2:
        raise DataError(
            "kernels are learned on held-out folds, and the row sample has rows of one only: give "
            "kernel_x, more rows or more folds"
        )
    x = SearchedVariable(parts[0], weights, categorical, None)
    y = SearchedVariable(parts[1], weights, (False,) * parts[1].shape[1], kernel_y)
    rows = ScreenedRows(weights, folds, functions)
    search = _Search(x, y, rows, LOSSES[criterion], regs, tol)
    with one_blas_thread():
        best = _grid(search, callback)
        best = _columns(search, best, callback)
        _refine(search, best, callback)
        point = _without_unneeded(search, search.best)
        if at_bounds(point.scales):
            _refine(search, point, callback, "widen", WIDEST)
            point = _without_unneeded(search, min(point, search.best, key=search))
    loss, reg = search.found[point]
    seconds = time.perf_counter() - begin
    return EmbeddingSearch(x.kernels.kernel(point), reg, loss, len(search.found), seconds)


class _Search:
    """Losses of kernels of x, each made once."""

    def __init__(
        self,
        x: SearchedVariable,
        y: SearchedVariable,
        rows: ScreenedRows,
        loss: FoldLoss,
        regs: Array,
        tol: float,
    ) -> None:
        self.x, self.found = x, dict[KernelPoint, tuple[float, float]]()
        self._rows, self._loss, self._regs, self._tol = rows, loss, regs, tol
        self._y = self._side(y, y.start("given", 1.0))

    @property
    def best(self) -> KernelPoint:
        """The kernel with the smallest loss so far."""
        return min(self.found, key=lambda point: self.found[point][0])

    def _side(self, variable: SearchedVariable, point: KernelPoint) -> ScreenedSide:
        values = variable.values[point.form][self._rows.order]
        return ScreenedSide(
            self._rows, variable.kernels.inner(point), values, self._tol, SEARCH_RANK
        )

    def __call__(self, point: KernelPoint) -> float:
        """The loss with the best ridge."""
        if point not in self.found:
            folds = screened_folds(self._rows, self._side(self.x, point), self._y)
            shares = self._rows.shares / self._rows.shares.sum()
            losses = shares @ np.stack([self._loss(f.rest, f.held, self._regs) for f in folds])
            best = int(losses.argmin())
            self.found[point] = round(float(losses[best]), _LOSS_DIGITS), float(self._regs[best])
        return self.found[point][0]


SearchCallback = Callable[[str, int, int, float], None]


def _grid(search: _Search, callback: SearchCallback) -> KernelPoint:
    points = [search.x.start(form, scale) for form in search.x.forms for scale in GRID]
    for done, point in enumerate(points, 1):
        search(point)
        callback("grid", done, len(points), min(loss for loss, _ in search.found.values()))
    return min(points, key=search)


def _columns(search: _Search, best: KernelPoint, callback: SearchCallback) -> KernelPoint:
    """Columns whose length scale had better be much longer, one after the other."""
    free = best.free
    for done, j in enumerate(free if len(free) > 1 else [], 1):
        tried = best.scaled([_OFF if i == j else 1.0 for i in range(len(best.scales))])
        best = min(best, tried, key=search)
        callback("columns", done, len(free), search(best))
    return best


def _without_unneeded(search: _Search, point: KernelPoint) -> KernelPoint:
    """The kernel without columns that it does as well without."""
    scales = point.scales
    candidates = long_columns(scales, (slice(None),))
    ignored = ignored_columns(scales, candidates, lambda s: search(replace(point, scales=s)))
    return replace(point, scales=without(scales, ignored))


def _refine(
    search: _Search,
    start: KernelPoint,
    callback: SearchCallback,
    stage: str = "refine",
    bounds: tuple[float, float] = SCALES,
) -> None:
    """All length scales together, from the best so far; ignored columns stay ignored."""
    all_scales = np.asarray(start.scales)
    active = all_scales < IGNORED
    if not active.any():
        return
    most = 20 + 5 * int(active.sum())
    done, best = 0, np.inf

    def objective(logarithms: Array) -> float:
        nonlocal done, best
        # Rounded: then a path does not follow the last bits of the rows.
        scales = all_scales.copy()
        scales[active] = np.exp(np.round(logarithms, _DIGITS))
        loss = search(KernelPoint(start.form, tuple(scales.tolist())))
        done, best = done + 1, min(best, loss)
        callback(stage, done, most, best)
        return loss

    minimize(
        objective,
        np.log(np.clip(all_scales[active], *bounds)),
        method="COBYQA",
        bounds=[(np.log(bounds[0]), np.log(bounds[1]))] * int(active.sum()),
        options={"maxfev": most, "initial_tr_radius": 0.5, "final_tr_radius": 0.05},
    )
