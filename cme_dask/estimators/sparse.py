"""``SparseEmbedding``: a conditional mean embedding on few points, in one pass over the rows."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import nnls

from cme_dask.config import ACCURACY, N_FOLDS, SAMPLE_SIZE
from cme_dask.data.sample import Sample
from cme_dask.errors import ConvergenceError, ConvergenceWarning, DataError, remedy, warn
from cme_dask.estimators.base import Measured, check_choice, check_number, check_tol
from cme_dask.estimators.embedding_fit import EmbeddingEstimator
from cme_dask.kernels import Kernel
from cme_dask.models.embedding import EmbeddingModel
from cme_dask.models.points import FloatArray
from cme_dask.models.ridge_path import within_one_error
from cme_dask.models.sparse import Function, SparseModel, SparsePath
from cme_dask.numerics.embedding import ConditionalEmbedding, held_out_curve
from cme_dask.numerics.sparse import (
    PENALTIES,
    Penalty,
    SparseProblem,
    held_out_losses,
    sparse_path,
)

Array = Any

MAX_RANK = 100
"""Candidate points of each variable, unless ``max_rank`` says otherwise."""

_MOST = float(np.finfo(np.float64).max)
_FOLD_TOL = 1e-5  # relative duality gap on folds, far below the errors of their losses


class SparseEmbedding(EmbeddingEstimator):
    r"""Conditional mean embedding on few points (Grünewälder et al. 2012, section 5).

    .. math:: \min_M \Bigl\| \sum_{ij} (M - W)_{ij} k_X(x_i, \cdot) k_Y(y_j, \cdot) \Bigr\|^2
              + \gamma \, \Omega(M),

    where W gives the dense embedding. The candidates x_i and y_j are its pivots: all rows of a
    small table, if ``tol`` is small enough. One pass makes the moments from which the dense
    embedding, the path of all gamma and its cross-validation follow. The result is a signed measure
    on few points, which answers any function of y.

    Parameters
    ----------
    penalty : {"l1", "rows", "columns", "rows-and-columns"}
        :math:`\Omega`: few coefficients; few points of x; few points of y; few of both, by
        :math:`n_Y \sum_i |M_{i\cdot}| + n_X \sum_j |M_{\cdot j}|`.
    gamma : float or sequence of floats, optional
        Weights of the penalty, in (0, gamma_max], where gamma_max is the smallest one that leaves
        no point. Default: ``n_gammas`` of them. The largest of several whose held-out loss is
        within one standard error of the smallest is chosen.
    n_gammas, gamma_ratio : int, float
        Their number, and the smallest over gamma_max; they are spaced evenly in the logarithm.
    relax : bool
        Whether the coefficients that are not zero are solved again without the penalty, which
        shrinks them (relaxed lasso, Meinshausen 2007): those nearest to W on the same support. Of
        groups that are all pairs of the retained points; of ``"l1"`` it is the retained
        coefficients. Gamma is then chosen by the held-out losses of these.
    gap : float
        Duality gap of each solution relative to its objective.
    max_iter : int
        Steps of the solver for each gamma at most; with ``relax`` as many again of the refit, which
        mostly takes two.
    convergence : {"raise", "warn"}
        What happens where they do not suffice.
    kernel_x, kernel_y, tol, reg, pivots, span, sample_size, n_folds
        Of the dense embedding, as in :class:`ConditionalMeanEmbedding`.
    criterion : {"surrogate", "squared"}
        Likewise; the surrogate loss by default, since any function of y may be asked for.
    accuracy, missing, random_state
        Likewise.
    max_rank : int, optional
        Largest number of pivots, which are the candidate points, of each variable; default 100.

    Attributes
    ----------
    model_ : SparseModel
        The frozen model: queries without data or Dask.
    path_ : SparsePath
        Coefficients, errors (16) and (17) and held-out losses for each gamma; ``plot`` draws it.
    gamma_ : float
        The weight that was chosen.
    sparsity_ : float
        Share of the coefficients that are zero.
    points_x_, points_y_ : arrays
        The retained points, shapes (k_X, d_X) and (k_Y, d_Y).
    dense_ : EmbeddingModel
        The dense embedding.
    n_iter_ : int
        Steps of the solver for the gamma that took most.
    basis_x_, basis_y_, reg_, losses_, moments_, n_passes_, report_
        Of the dense embedding, as in :class:`ConditionalMeanEmbedding`.

    Notes
    -----
    With all rows as pivots W is the dense embedding of all rows. With fewer pivots its distance to
    that embedding is at most

    .. math:: \kappa_Y \Bigl( \kappa_X \frac{\sqrt{\tau_X}}{r} + \frac{\sqrt{\tau_Y}}{2 \sqrt r}
              \Bigr), \quad \kappa^2 = \mathrm E k(Z, Z),

    with the relative trace errors tau, which ``tol`` bounds: it falls like the square root of
    ``tol``, and so do the errors of the distances (16) and of the root of the objectives (17).

    The solver needs no floor under the ridge or under the eigenvalues of Gram matrices: its systems
    have a ridge of their own, which leaves the solution alone, and the duality gap certifies it.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import SparseEmbedding, kernels
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(2_000, 1))
    >>> y = np.sin(x) + 0.3 * rng.normal(size=x.shape)
    >>> model = SparseEmbedding(penalty="columns", kernel_x=kernels.Gaussian(1.0), max_rank=20)
    >>> cosine = model.fit(x, y).expect(lambda y: np.cos(y[:, 0]), [[0.0]])
    >>> bool(abs(cosine[0] - 0.95) < 0.05)
    True
    """

    model_: SparseModel
    path_: SparsePath
    dense_: EmbeddingModel

    def __init__(
        self,
        *,
        penalty: str = "l1",
        gamma: float | Sequence[float] | None = None,
        n_gammas: int = 20,
        gamma_ratio: float = 1e-3,
        relax: bool = False,
        gap: float = 1e-8,
        max_iter: int = 500,
        convergence: str = "raise",
        kernel_x: Kernel | str | None = None,
        kernel_y: Kernel | str = "median",
        tol: float | None = None,
        max_rank: int | None = None,
        reg: float | None = None,
        criterion: str = "surrogate",
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        n_folds: int = N_FOLDS,
        accuracy: float = ACCURACY,
        missing: str = "error",
        random_state: int | None = None,
    ) -> None:
        self.penalty = penalty
        self.gamma = gamma
        self.n_gammas = n_gammas
        self.gamma_ratio = gamma_ratio
        self.relax = relax
        self.gap = gap
        self.max_iter = max_iter
        self.convergence = convergence
        self.kernel_x = kernel_x
        self.kernel_y = kernel_y
        self.tol = tol
        self.max_rank = max_rank
        self.reg = reg
        self.criterion = criterion
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.n_folds = n_folds
        self.accuracy = accuracy
        self.missing = missing
        self.random_state = random_state

    def expect(self, f: Function | Sequence[Function] | None = None, X: Any = None) -> FloatArray:
        """E[f | x] of any functions f of y, see :meth:`SparseModel.expect`."""
        return self.model_.expect(f, X)

    def model_at(self, position: int) -> SparseModel:
        """The model of another gamma of the path.

        Parameters
        ----------
        position
            Position in ``path_.gammas``.

        Raises
        ------
        DataError
            If the path has no such position.
        """
        check_number("position", position, 0, len(self.path_.gammas) - 1)
        return _model(self.path_, position, self.dense_)

    @property
    def _default_rank(self) -> int:
        return MAX_RANK

    def _check(self) -> None:
        super()._check()
        check_choice("penalty", self.penalty, PENALTIES)
        check_choice("relax", self.relax, (False, True))
        check_number("n_gammas", self.n_gammas, 1)
        check_number("max_iter", self.max_iter, 1)
        check_tol("gap", self.gap)
        check_tol("gamma_ratio", self.gamma_ratio)
        if len(self._gammas(np.inf)) != 1 and self.n_folds < 2:
            raise DataError("gamma is chosen on held-out folds: give one gamma, or n_folds >= 2")

    def _gammas(self, top: float) -> Array:
        """Weights of the penalty, descending; DataError unless they lie in (0, top]."""
        if self.gamma is None:
            return top * self.gamma_ratio ** (np.arange(1, self.n_gammas + 1) / self.n_gammas)
        try:
            gammas = np.unique(np.asarray(self.gamma, dtype=np.float64))[::-1]
        except (TypeError, ValueError):
            gammas = np.empty(0)
        largest = min(top * (1.0 + 1e-9), _MOST)
        if not (gammas.size and gammas[-1] > 0.0 and gammas[0] <= largest):
            most = f"{top:.6g}" if np.isfinite(top) else "gamma_max"
            raise DataError(f"gamma must lie in (0, {most}], got {self.gamma!r}")
        return gammas

    def _solve(self, sample: Sample, measured: Measured) -> dict[str, Any]:
        fitted = super()._solve(sample, measured)
        moments, reg, dense = measured.moments, fitted["reg_"], fitted["model_"]
        factors = [side.basis.factor for side in measured.sides]
        penalty = Penalty.of(self.penalty, (len(factors[0]), len(factors[1])))
        mean = moments.means()
        target = ConditionalEmbedding.of(mean, reg).operator(mean)
        problem = SparseProblem(factors[0], factors[1], target, penalty)
        gammas = self._gammas(problem.gamma_max)
        solved = list(sparse_path(problem, gammas, self.gap, self.max_iter, self.relax))
        tol = max(self.gap, _FOLD_TOL)
        loss = partial(held_out_losses, problem, reg, tol, self.max_iter, self.relax)
        losses = errors = np.full(2, np.nan)
        if self.n_folds > 1:
            losses, errors = held_out_curve(moments, loss, gammas, "gamma")
        path = SparsePath(
            self.penalty,
            self.relax,
            gammas,
            problem.gamma_max,
            coefs=np.stack([state.point for state, _ in solved]),
            distances=np.array([np.linalg.norm(state.residual) for state, _ in solved]),
            objectives=np.array([state.objective for state, _ in solved]),
            gaps=np.array([state.gap for state, _ in solved]),
            steps=np.array([steps for _, steps in solved]),
            losses=losses[:-1],
            errors=errors[:-1],
            dense_distance=float(np.linalg.norm(target)),
            dense_loss=float(losses[-1]),
            chosen=int(within_one_error(losses[:-1], errors[:-1])[0]) if len(gammas) > 1 else 0,
        )
        self._check_gaps(path)
        model = _model(path, path.chosen, dense)
        return fitted | {
            "model_": model,
            "dense_": dense,
            "path_": path,
            "n_iter_": max(1, int(path.steps.max())),
            "gamma_": float(gammas[path.chosen]),
            "sparsity_": float(np.mean(path.coefs[path.chosen] == 0.0)),
            "points_x_": model.points_x,
            "points_y_": model.points_y,
        }

    def _check_gaps(self, path: SparsePath) -> None:
        """ConvergenceError, or a warning, for the first solution that missed its gap."""
        for gap, gamma in zip(path.gaps, path.gammas, strict=True):
            if gap <= self.gap:
                continue
            message = (
                f"the {'relaxed ' * path.relax}path of the penalty {self.penalty} ended with "
                f"relative duality gap {gap:.1e} at gamma={gamma:.3g} after "
                f"max_iter={self.max_iter} steps, the requested gap is {self.gap:.1e}: allow more "
                "steps, raise gap, gamma_ratio or the ridge, or lower the rank"
            )
            if self.convergence == "raise":
                hint = remedy("; convergence='warn' keeps such a path", "")
                raise ConvergenceError(message + hint)
            warn(message, ConvergenceWarning)
            break


def _model(path: SparsePath, position: int, dense: EmbeddingModel) -> SparseModel:
    """The model of one gamma of the path."""
    coef = path.coefs[position]
    rows, columns = (np.flatnonzero((coef != 0.0).any(axis=axis)) for axis in (1, 0))
    about = {
        "penalty": path.penalty,
        "relax": path.relax,
        "gamma": float(path.gammas[position]),
        "gamma_by": "held-out loss" if len(path.gammas) > 1 else "hand",
        "distance": float(path.distances[position] / path.dense_distance),
        "candidates": list(coef.shape),
    }
    mean = dense.moment_sums().means().means["y"]
    return SparseModel(
        replace(dense.x, basis=dense.x.basis.on_pivots(rows)),
        replace(dense.y, basis=dense.y.basis.on_pivots(columns)),
        np.ascontiguousarray(coef[np.ix_(rows, columns)]),
        dense.about | about,
        _nearest_law(dense.y.basis.newton.factor[columns], mean),
    )


def _nearest_law(newton: Array, mean: Array) -> Array:
    """Weights >= 0 of sum one of points whose mean embedding is nearest to that of all rows.

    Parameters
    ----------
    newton
        N_Y at the points, shape (k, m).
    mean
        E N_Y over all rows, shape (m,).
    """
    if not len(newton):
        return np.zeros(0)
    heavy = 1e4 * np.linalg.norm(newton, axis=1).max()  # of the sum of the weights
    weights, _ = nnls(np.vstack([newton.T, np.full(len(newton), heavy)]), np.append(mean, heavy))
    return np.asarray(weights / weights.sum())
