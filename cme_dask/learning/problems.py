"""The problems of searches for kernels: losses of joint distributions and of embeddings."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError

from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.candidates import (
    EVALUATIONS,
    Score,
    Search,
    SearchedVariable,
    TrialMemory,
    TrialResult,
    Tuning,
)
from cme_dask.learning.losses import (
    ScreenedRows,
    ScreenedSide,
    screened_gradient,
    screened_losses,
    screened_means,
)
from cme_dask.learning.search import (
    REFINED,
    SearchCallback,
    SearchProblem,
    search,
)
from cme_dask.numerics.crossval import Losses, over_folds
from cme_dask.numerics.embedding import FoldLoss, squared_loss, surrogate_loss
from cme_dask.numerics.moments import Function
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.scoring import ScoringFunctions, declared, make_thresholds

Array = Any

REGS = tuple(10.0**p for p in (-7, -6, -5, -4, -3, -2, -1, 0))
"""Ridges of joint distributions, the same for both variables."""

FIRST = 500, 100, 3
"""Rows, rank and folds of what is searched first."""

_MUCH = 1.5  # times this rank: a problem of fewer rows is as fast to search as a smaller one first
_ROWS_PER_PIVOT, _LEAST_RANK = 3, 30  # few rows tell kernels of high rank no better from others

Estimated = tuple[Array, Array]
"""Means over the folds for each ridge, and their standard errors."""


@dataclass(frozen=True, eq=False)
class JointProblem(SearchProblem):
    """Held-out joint loss, and sliced CRPS or squared errors of declared functions.

    Attributes
    ----------
    functions
        The functions of y at the rows.
    regs
        The ridges that are compared.
    criterion
        Which of the losses count, see :class:`Tuning`.
    per_pivot
        Rows for each pivot among which pivots are chosen.
    """

    functions: ScoringFunctions
    regs: Sequence[Regularization]
    criterion: str
    per_pivot: int = 2

    relative = True
    rougher = True

    @property
    def ridge_by_ridge(self) -> bool:
        """Where each ridge has linear systems of its own."""
        return all(reg.form == "two-sided" and min(reg.x, reg.y) > 0.0 for reg in self.regs)

    @property
    def ridges(self) -> int:
        """Number of ridges that are compared."""
        return len(self.regs)

    def losses(self, x: ScreenedSide, y: ScreenedSide, among: slice) -> tuple[Array, Array]:
        """Joint loss and sliced CRPS."""
        losses = screened_losses(self.rows, x, y, self.regs[among])
        joint, crps = estimated(losses, self.rows.shares, self.functions)
        return np.stack([joint[0], crps[0]]), np.stack([joint[1], crps[1]])

    def gradient(
        self, x: ScreenedSide, y: ScreenedSide, ridge: int, score_of: Callable[..., Array]
    ) -> list[list[float]]:
        """By :func:`screened_gradient`."""
        assert isinstance(score_of, Score)
        events = np.zeros(self.rows.events.shape[1])
        events[-len(self.functions) :] = score_of.crps * self.functions.scores
        learned = self.variables[0].given is None, self.variables[1].given is None
        factors = score_of.joint, events
        try:
            return screened_gradient(self.rows, (x, y), self.regs[ridge], factors, learned)
        except LinAlgError:  # losses are those of eigenbases then
            return [[], []]

    def smaller(self) -> SearchProblem:
        """The same problem on fewer rows, of lower rank and in fewer folds."""
        count, rank, folds = FIRST
        rows = self.rows
        if len(rows.order) <= count and self.max_rank <= _MUCH * rank:
            return self
        few = rows.prefix(count, folds)
        if len(few.slices) < 2:
            return self
        # Gradients lead nowhere where pivots change from one kernel to the next.
        per_pivot = 1 if self.ridge_by_ridge else self.per_pivot
        return replace(self, rows=few, max_rank=min(rank, self.max_rank), per_pivot=per_pivot)

    def scoring(self, losses: Array, errors: Array) -> Score:
        """Each loss over what the best candidate gains by it; 0 for independence."""
        best = losses.argmin(axis=1)
        gains = [-float(each[at]) for each, at in zip(losses, best, strict=True)]
        spreads = [float(each[at]) for each, at in zip(errors, best, strict=True)]
        return Score.of(self.criterion, gains, spreads)


def estimated(
    losses: Losses, weights: Array, functions: ScoringFunctions
) -> tuple[Estimated, Estimated]:
    """Joint loss, and sliced CRPS less that of independence, for each ridge.

    Parameters
    ----------
    losses
        Of F folds: arrays whose first axis is the fold.
    weights
        Of the folds, shape (F,).
    functions
        Of the sliced CRPS, the last of those in the losses.
    """
    q = len(functions)
    gained = losses.squared[..., -q:] - losses.baseline[:, None, -q:]
    return over_folds(weights, losses.joint), over_folds(weights, gained @ functions.scores)


@one_blas_thread()
def search_joint(
    parts: tuple[Array, Array],
    weights: Array,
    folds: Array,
    given: tuple[Kernel | None, Kernel | None],
    categorical: tuple[tuple[bool, ...], tuple[bool, ...]],
    *,
    functions: Mapping[str, Function] | None = None,
    reg: Regularization | None = None,
    form: str = "two-sided",
    options: Tuning | None = None,
    tol: float = 1e-5,
    seed: int = 0,
    callback: SearchCallback | None = None,
    memory: TrialMemory | None = None,
    cores: int = 1,
) -> Search:
    """Search the kernels of a joint distribution, see :func:`cme_dask.learning.search.search`.

    Parameters
    ----------
    parts
        Rows of x and y of the row sample, shapes (n, d).
    weights
        Of the rows, sum 1, shape (n,).
    folds
        Fold number of each row, shape (n,).
    given
        Kernels that are not learned, None for those that are.
    categorical
        Which columns are codes of categories, for each variable.
    functions
        Declared functions of y by name, for ``criterion="validation"``.
    reg
        The ridge, if it is not learned.
    form
        Of the ridges that are compared, if it is learned.
    options
        How to search.
    tol
        Relative trace error that the bases aim at.
    seed
        Of the directions of the sliced CRPS.
    callback
        Called with how far it is.
    memory
        Of trials that an earlier start of the same fit has made.
    cores
        Threads of the search.

    Raises
    ------
    DataError
        If fewer than two folds have rows, or functions that are needed are missing.
    """
    begin, options = time.perf_counter(), (options or Tuning()).settled(parts[1].shape[1])
    scoring: ScoringFunctions = (
        declared(functions, parts[1], weights)
        if options.criterion == "validation"
        else make_thresholds(parts[1], weights, categorical[1], seed)
    )
    x, y = map(SearchedVariable, parts, (weights, weights), categorical, given)
    rows = ScreenedRows(weights, folds, scoring(parts[1]))
    if reg is not None:
        regs = [reg]
    elif form == "single":  # r of both sides is about r^2 of the product
        regs = [Regularization(r**2, r**2, form) for r in REGS]
    else:
        regs = [Regularization(r, r, form) for r in REGS]
    rank = min(options.max_rank, max(len(weights) // _ROWS_PER_PIVOT, _LEAST_RANK))
    problem = JointProblem((x, y), rows, tol, rank, scoring, regs, options.criterion)
    if problem.ridge_by_ridge and len(weights) <= FIRST[0]:
        problem = replace(problem, per_pivot=1)
    most = options.evaluations
    if most is None and problem.ridge_by_ridge:
        most = EVALUATIONS
    elif most is None:
        most = 40 + 5 * min(sum(part.shape[1] for part in parts), REFINED)
    tried, best = search(
        problem,
        callback,
        evaluations=most,
        widening=most // 2,
        finalists=options.n_finalists,
        memory=memory,
        cores=cores,
    )
    results = {}
    for pair, stage in tried.stages.items():
        scores = tried.scores(pair, stage)
        at = int(scores.argmin())
        joint, crps = map(float, tried.losses[pair][0][:, at])
        reg_of = regs[tried.ridges[pair] + at].x
        results[pair] = TrialResult(*pair, reg_of, joint, crps, float(scores[at]), stage)
    score, trials = tried.score_of, tuple(results.values())
    assert isinstance(score, Score)
    seconds = time.perf_counter() - begin
    result = Search(
        trials, (), scoring, score, seconds, (x.kernels, y.kernels), reg, form, options.criterion
    )
    return replace(result, finalists=tuple(result.candidate(results[pair]) for pair in best))


# The kernel of x of a conditional mean embedding


LOSSES: dict[str, FoldLoss] = {"surrogate": surrogate_loss, "squared": squared_loss}
"""Held-out losses of embeddings by the name of the criterion."""

EMBEDDING_REGS = tuple(10.0 ** (p / 2) for p in range(-18, 1))
"""Ridges r of embeddings that are compared: lambda = n r."""

SEARCH_ROWS, SEARCH_RANK = 4096, 200
"""Rows of the row sample that the search of an embedding sees, and pivots of each basis in it."""


@dataclass(frozen=True, eq=False)
class EmbeddingSearch:
    """The result of a search.

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


@dataclass(frozen=True, eq=False)
class EmbeddingProblem(SearchProblem):
    """A held-out loss of embeddings, for each of the ridges."""

    loss: FoldLoss
    regs: Array

    @property
    def ridges(self) -> int:
        """Number of ridges that are compared."""
        return len(self.regs)

    def losses(self, x: ScreenedSide, y: ScreenedSide, among: slice) -> tuple[Array, Array]:
        """The loss; its errors don't count, since it is the only one."""
        means = screened_means(self.rows, x, y)
        each = np.stack([self.loss(rest, held, self.regs[among]) for rest, held in means])
        mean = self.rows.shares / self.rows.shares.sum() @ each
        return mean[None, :], np.zeros((1, len(mean)))


@one_blas_thread()
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
    callback: SearchCallback | None = None,
    memory: TrialMemory | None = None,
    cores: int = 1,
) -> EmbeddingSearch:
    """Search the kernel of x of an embedding, see :func:`cme_dask.learning.search.search`.

    Parameters
    ----------
    parts, weights, folds, tol, callback, memory, cores
        As in :func:`search_joint`.
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
    """
    begin = time.perf_counter()
    x = SearchedVariable(parts[0], weights, categorical, None)
    y = SearchedVariable(parts[1], weights, (False,) * parts[1].shape[1], kernel_y)
    rows = ScreenedRows(weights, folds, functions)
    problem = EmbeddingProblem((x, y), rows, tol, SEARCH_RANK, LOSSES[criterion], regs)
    most = 20 + 5 * min(len(categorical) - len(x.constant), REFINED)
    tried, (best,) = search(
        problem,
        callback,
        evaluations=most,
        widening=most,
        finalists=1,
        memory=memory,
        cores=cores,
    )
    (loss,), _ = tried.losses[best]
    at, seconds = int(loss.argmin()), time.perf_counter() - begin
    return EmbeddingSearch(
        x.kernels.kernel(best[0]), float(regs[at]), float(loss[at]), len(tried.stages), seconds
    )
