"""``MulticlassEmbedding``: a classifier with kernel and ridge learned by the Rademacher bound."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.config import ACCURACY, N_FOLDS, SAMPLE_SIZE
from cme_dask.data.batches import BatchReader
from cme_dask.data.sample import Sample
from cme_dask.data.sources import ArraySource, RowSource
from cme_dask.errors import DataError
from cme_dask.estimators.base import Declarations, check_choice, check_number
from cme_dask.estimators.classifiers import EmbeddingClassifier
from cme_dask.estimators.context import FitContext
from cme_dask.kernels import Delta, Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.rademacher import (
    OPTIMIZERS,
    BoundLearning,
    BoundOptions,
    LabelledRows,
    LearningState,
    held_out_loss,
    learn_by_bound,
)
from cme_dask.models.merging import FitSums
from cme_dask.numerics.embedding import check_ridges
from cme_dask.numerics.folds import Split

Array = Any

REG_START = 0.01
"""Ridge with which learning begins."""

_HELD_ROWS = 2048  # of the row sample at most, and as many that the fit to compare is made of
_LEAST_HELD = 20  # rows held out, with fewer of which learning does not end early
_HELD_SEED, _SEEDS = 7_919_731, 1 << 62  # apart from the splits of users
_COUNTED_ROWS = 1 << 18  # at once, when labels are counted


class MulticlassEmbedding(EmbeddingClassifier):
    r"""Classifier by the embedding of a label, its kernel learned by the Rademacher bound.

    The model is that of :class:`EmbeddingClassifier` with the kernel :math:`\delta` of labels:
    :math:`p_c(x) = \mathrm E[1\{Y = c\} | x]`, (5) of Hsu, Nock and Ramos (2018). What differs is
    how its kernel and ridge are learned: by gradient steps on their objective

    .. math:: q = \frac 1 n \sum_i -\log [p_{y_i}(x_i)]_\epsilon^1 + \tau r, \qquad
              r = \sqrt{\operatorname{tr}(V^T K V) \, \max_i k(x_i, x_i)},

    with :math:`V = (K + n \lambda)^{-1} Y`, on mini-batches read from where the rows lie. Then one
    pass over all rows makes the moments on the pivots, and the model. At parameters that were
    learned with it, q is an objective and no bound.

    Parameters
    ----------
    kernel_x : Kernel or "median", optional
        Kernel of x with which learning begins, of any composition: all its positive
        :attr:`parameters` are learned. Default: Gaussian, with a length scale for each numeric
        column, by the median heuristic, times a kernel of the categorical ones.
    reg : float, sequence of floats or schedule, optional
        Ridge lambda, as in :class:`ConditionalMeanEmbedding`: a number is kept fixed, and of
        several the final pass takes the one with the smallest held-out squared error of the labels.
        Default: learned with the kernel, from 0.01 on.
    complexity_weight : float, optional
        The multiplier tau of r. None for that of the bound, :math:`4 e / \sqrt b`, with b the rows
        of a batch that V is made of (the paper's 4 e lost the root). The authors found that smaller
        ones generalise better.
    epsilon : float
        Least probability in the loss, in (0, 1).
    batch_size : int
        Rows of a batch; with all rows or more, each step is on all rows.
    batch_validation : float
        Share of each batch on which the loss is taken, while V and r are made of the others, (13);
        0 for both of all rows, (12).
    optimizer : {"adam", "gradient"}
        How steps follow from gradients, in logarithms of the parameters.
    learning_rate : float
        Length of the steps.
    max_iter : int
        Largest number of steps; 0 keeps the kernel as it is.
    validation_fraction : float
        Share of rows that learning does not see, by the log loss of which it ends early and the
        best parameters are chosen; 0, or fewer than 20 such rows in the row sample: all steps are
        taken, and the last parameters. The final pass sees all rows.
    n_iter_no_change : int
        Evaluations of that loss, one after every 10 steps, without an improvement after which
        learning ends.
    class_weight : mapping of labels to numbers, or "balanced", optional
        What weights of rows are multiplied with, by label; ``"balanced"`` for n / (K n_c), which
        reads the labels once more.
    tol, max_rank, pivots, span, sample_size, n_folds, accuracy, random_state
        As in :class:`ConditionalMeanEmbedding`.

    Attributes
    ----------
    classes_ : (K,) array
        The labels, ascending; of a store in the order of its codes.
    search_ : BoundLearning
        The learned ``kernel`` and ``reg``, the held-out ``loss``, and the ``history`` of steps.
    n_iter_ : int
        Steps that were made.
    model_, basis_x_, basis_y_, reg_, path_, moments_, length_scales_, n_passes_, report_
        As in :class:`ConditionalMeanEmbedding`. Mini-batches are not counted as passes: their steps
        read at most ``max_iter * batch_size`` rows.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import MulticlassEmbedding
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(1_000, 2))
    >>> label = np.where(x[:, 0] + 0.5 * rng.normal(size=1_000) > 0, "up", "down")
    >>> model = MulticlassEmbedding(batch_size=200, max_iter=20, random_state=0).fit(x, label)
    >>> model.predict([[2.0, 0.0], [-2.0, 0.0]]).tolist()
    ['up', 'down']

    Notes
    -----
    A gradient that is not finite halves the last step and all later ones, with a warning in the
    log; ``search_.halved`` counts them. A fit with ``checkpoint`` goes on with the step it had come
    to, and ends with the same bits.

    Source: Hsu, Nock and Ramos (2018), Hyperparameter Learning for Conditional Mean Embeddings with
    Rademacher Complexity Bounds, ECML PKDD.
    """

    kernel_y = Delta()
    criterion = "squared"
    validation = "folds"
    method = "pivots"
    _ridge = REG_START
    _every = 10

    def __init__(
        self,
        *,
        kernel_x: Kernel | str | None = None,
        reg: float | Sequence[float] | str | None = None,
        complexity_weight: float | None = 0.01,
        epsilon: float = 1e-3,
        batch_size: int = 1_000,
        batch_validation: float = 0.5,
        optimizer: str = "adam",
        learning_rate: float = 0.1,
        max_iter: int = 200,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        class_weight: Mapping[Any, float] | str | None = None,
        tol: float | None = None,
        max_rank: int | None = None,
        pivots: Any = "sampled",
        span: float = 1.0,
        sample_size: int = SAMPLE_SIZE,
        n_folds: int = N_FOLDS,
        accuracy: float = ACCURACY,
        random_state: int | None = None,
    ) -> None:
        self.kernel_x = kernel_x
        self.reg = reg
        self.complexity_weight = complexity_weight
        self.epsilon = epsilon
        self.batch_size = batch_size
        self.batch_validation = batch_validation
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.class_weight = class_weight
        self.tol = tol
        self.max_rank = max_rank
        self.pivots = pivots
        self.span = span
        self.sample_size = sample_size
        self.n_folds = n_folds
        self.accuracy = accuracy
        self.random_state = random_state

    def _check(self) -> None:
        super()._check()
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_number("batch_size", self.batch_size, 2)
        check_number("max_iter", self.max_iter, 0)
        check_number("n_iter_no_change", self.n_iter_no_change, 1)
        for name in ("batch_validation", "validation_fraction"):
            check_number(name, getattr(self, name), 0, 0.9, whole=False)
        if self.complexity_weight is not None:
            check_number("complexity_weight", self.complexity_weight, 0, whole=False)
        for name in ("epsilon", "learning_rate"):
            check_number(name, getattr(self, name), 0, whole=False)
        if not 0.0 < self.epsilon < 1.0:
            raise DataError(f"epsilon must lie between 0 and 1, got {self.epsilon!r}")
        if not self.learning_rate > 0.0:
            raise DataError(f"learning_rate must be above 0, got {self.learning_rate!r}")
        if self.reg is not None and not isinstance(self.reg, str) and 0.0 in check_ridges(self.reg):
            raise DataError("reg must be above 0: learning factorises K + n reg")

    # The kernel, by the bound

    def _learns(self) -> bool:
        return self.max_iter > 0

    @property
    def _compares(self) -> bool:
        return self.reg is not None and np.ndim(self.reg) > 0

    @property
    def _regs(self) -> Array:
        return np.array([self._ridge]) if self.reg is None else super()._regs

    def _search(self, context: FitContext) -> FitContext:
        codes = np.arange(float(len(self._classes)))[:, None]
        x, y = context.pivots
        if y.mode == "sampled":  # labels that the row sample lacks, too
            y = replace(y, mode="given", points=codes)
        with one_blas_thread():
            learned = self._by_bound(context)
        self._ridge = learned.reg
        return replace(
            context,
            kernels=[learned.kernel, context.kernels[1]],
            pivots=(x, y),
            search=learned,
        )

    def _by_bound(self, context: FitContext) -> BoundLearning:
        """The kernel and the ridge, by Algorithm 1."""
        labels, rows, sample = len(self._classes), context.rows, context.sample
        given = self.reg is not None and np.ndim(self.reg) == 0 and not isinstance(self.reg, str)
        split = evaluate = None
        if self.validation_fraction:
            seed = (context.seed + _HELD_SEED) % _SEEDS
            split = Split(sample.folding, self.validation_fraction, seed, held_out=True)
            held = split.selects(rows.index, rows.units)
            if held.sum() < _LEAST_HELD:
                split = None
            else:
                seen, unseen = (
                    _usable(*(v[:_HELD_ROWS] for v in (*part.parts, part.importance)))
                    for part in (rows.only(~held), rows.only(held))
                )
                evaluate = partial(_held_out, seen, unseen, labels)
        options = BoundOptions(
            self.complexity_weight,
            self.epsilon,
            self.batch_validation,
            self.optimizer,
            self.learning_rate,
            self.max_iter,
            self.n_iter_no_change,
            self._every,
            learn_reg=not given,
        )
        checkpoint, state, save = context.executor.checkpoint, None, None
        if checkpoint is not None:
            states = checkpoint.states("learning", (LearningState,))
            state = states.latest()

            def save(reached: LearningState) -> None:
                states.save(reached.step, reached)

        return learn_by_bound(
            context.kernels[0],
            float(self.reg) if given else REG_START,  # type: ignore[arg-type]
            labels,
            partial(self._batches, sample, split, context.seed),
            options,
            held_out=evaluate,
            state=state,
            save=save,
            callback=context.progress,
        )

    def _batches(
        self, sample: Sample, split: Split | None, seed: int, epoch: int, start: int
    ) -> Iterator[tuple[int, LabelledRows]]:
        """Batches of an epoch without the rows held out, from a number on."""
        unseen = None if split is None else split.other
        reader = BatchReader(sample.sources, None, unseen, sample.units)
        size = min(self.batch_size, sample.n_rows)
        for batch in sample.batches(size, seed, epoch=epoch, start=start):
            order = np.argsort(batch.index)
            seen = np.empty(len(batch), dtype=bool)
            seen[order] = reader.belongs(batch.index[order])
            rows = _usable(*(values[seen] for values in (*batch.parts, batch.weights)))
            # What is left at the end of an epoch may be too few rows for a kernel.
            if len(rows.x) >= 2 and (batch.number == 0 or len(batch) > size // 2):
                yield batch.number, rows

    def _sums(self, functions: Declarations) -> FitSums:
        self._ridge = self.search_.reg
        return super()._sums(functions)

    def _become(self, measured: Any, fitted: dict[str, Any], *of_fit: Any) -> None:
        learned = fitted.get("search_") or self.search_
        about = fitted["model_"].about
        about["bound"] = {
            "steps": learned.steps,
            "halved": learned.halved,
            "loss": learned.loss if np.isfinite(learned.loss) else None,
        }
        fitted["n_iter_"] = learned.steps
        if self.reg is None:
            about["criterion"] = "the Rademacher bound"
        super()._become(measured, fitted, *of_fit)

    # Weights by label

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        return self._by_label(super()._open(X, Y, weights))

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        return self._by_label(super()._open_more(X, Y, weights))

    def _by_label(self, sample: Sample) -> Sample:
        """The rows with weights that are multiplied with those of their labels."""
        if self.class_weight is None:
            return sample
        codes = sample.sources[1]
        each = partial(_taken, self._label_weights(codes))
        source: RowSource = codes.map(each, 1)
        if sample.weights is not None:
            if not (isinstance(sample.weights, ArraySource) and isinstance(codes, ArraySource)):
                raise DataError(
                    "class_weight with weights of rows that are not in memory: multiply these with "
                    "the weights of the labels, and give class_weight=None"
                )
            both = sample.weights.read(0, sample.n_rows) * each(codes.read(0, sample.n_rows))
            source = ArraySource(both)
        return replace(sample, weights=source, row_sample=None)

    def _label_weights(self, codes: RowSource) -> Array:
        """The weight of each label, shape (K,)."""
        labels, given = self._classes.tolist(), self.class_weight
        if isinstance(given, str) and given == "balanced":
            counts = np.zeros(len(labels))
            for start in range(0, codes.shape[0], _COUNTED_ROWS):
                block = codes.read(start, min(start + _COUNTED_ROWS, codes.shape[0]))
                counts += np.bincount(block[:, 0].astype(np.int64), minlength=len(labels))
            return counts.sum() / np.maximum(len(labels) * counts, 1.0)
        if not isinstance(given, Mapping) or not set(given) <= set(labels):
            raise DataError(
                "class_weight must be 'balanced' or a mapping of labels to numbers, of "
                f"{', '.join(map(repr, labels[:10]))}, got {given!r}"
            )
        for label, weight in given.items():
            check_number(f"class_weight of {label!r}", weight, 0, whole=False)
        return np.array([float(given.get(label, 1.0)) for label in labels])


def _taken(weights: Array, codes: Array) -> Array:
    """The weight of each code, shape (b, 1)."""
    return weights[codes.astype(np.int64)]


def _usable(x: Array, codes: Array, weights: Array) -> LabelledRows:
    """The rows that count; those that are not finite are reported by the pass."""
    some = (weights > 0.0) & np.isfinite(x).all(axis=1) & np.isfinite(codes[:, 0])
    return LabelledRows(x[some], codes[some, 0].astype(np.int64), weights[some])


def _held_out(
    rows: LabelledRows, held: LabelledRows, labels: int, kernel: Kernel, reg: float
) -> float:
    return held_out_loss(kernel, reg, rows, held, labels)
