"""``MulticlassEmbedding``: a classifier with kernel and ridge learned by the Rademacher bound."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cme_dask.config import ACCURACY, HELD_ROWS, N_FOLDS, SAMPLE_SIZE
from cme_dask.data.batches import BatchReader, batches
from cme_dask.data.sample import Sample
from cme_dask.data.sources import ProductSource
from cme_dask.errors import DataError
from cme_dask.estimators.base import Declarations, Measured, check_choice, check_number
from cme_dask.estimators.classifiers import EmbeddingClassifier, taken
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.planning import FitPlan
from cme_dask.kernels import Delta, Features, Kernel, Linear, Network
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.autodiff import description
from cme_dask.learning.networks import coordinates_of
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.learning.rademacher import (
    OPTIMIZERS,
    BoundLearning,
    BoundOptions,
    LabelledRows,
    LearningState,
    held_out_loss,
    learn_by_bound,
    left_out_losses,
    shrunk,
)
from cme_dask.learning.transforms import HEURISTIC_ROWS, default_kernel
from cme_dask.models.answers import class_name
from cme_dask.models.merging import FitSums
from cme_dask.models.ridge_path import RidgePath
from cme_dask.numerics.basis import Basis, FeatureBasis, NewtonBasis
from cme_dask.numerics.embedding import check_ridges, refits_at
from cme_dask.numerics.folds import Split
from cme_dask.numerics.labels import learn_label_calibration, nearest_shares, positive
from cme_dask.numerics.reduction import MemoryPlan
from cme_dask.passes.lazy import lazy_rows
from cme_dask.passes.run import extent_of
from cme_dask.passes.sources import DaskSource

Array = Any

REG_START = 0.01
"""Ridge with which learning begins."""

_RATE, _NETWORK_RATE = 0.1, 0.003
_HELD_ROWS = 2048  # of the row sample at most, and as many that the fit to compare is made of
_LEAST_HELD = 20  # rows held out, with fewer of which learning does not end early
_POOL_COPIES = 3  # of rows that wait for their batch: as read, in order, and joined to earlier ones
_STEP_ARRAYS, _HELD_ARRAYS = 8, 5  # as large as the Gram matrix of a batch, and of rows held out
_COUNTED_ROWS = 1 << 18  # at once, when labels are counted
_CHOICE_ROWS = 1000  # of leave-one-out estimates, by which learned kernels are shrunk
_HELD_SEED, _SEEDS = 7_919_731, 1 << 62  # apart from the splits of users


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
        ``parameters`` are learned. ``"median"``: Gaussian, with a length scale for each numeric
        column, by the median heuristic, times a kernel of the categorical ones. Default: this one,
        or the same on the normal scores of numeric columns, whichever has the smaller log loss of
        calibrated leave-one-out estimates at 1,000 rows of the row sample. Of a
        :class:`cme_dask.kernels.Network` the weights are learned, with the extra ``nn``; its
        features, like those of any other :class:`cme_dask.kernels.Features`, are the basis of x in
        the place of functions on pivots, and learning is Algorithm 2.
    reg : float, sequence of floats or schedule, optional
        Ridge lambda, as in :class:`ConditionalMeanEmbedding`: a number is kept fixed. Several, by
        default 19 from 1e-9 to 1, are compared after the pass, by the log loss of calibrated
        probabilities at rows of the row sample, each by a fit without its fold. The ridge that is
        learned with the kernel is one for as many rows as a batch has.
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
    optimizer : {"adam", "gradient"} or GradientTransformation
        How steps follow from gradients, in logarithms of the parameters and, of a network, in its
        weights; or an optimiser of optax, such as ``optax.adam(1e-3)``.
    learning_rate : float, optional
        Length of the steps. Default: 0.1, for networks 0.003; a factor of 1 for those of optax.
    max_iter : int
        Largest number of steps; 0 keeps the kernel as it is.
    validation_fraction : float
        Share of rows that learning does not see, by the log loss of which it ends early and the
        best parameters are chosen; 0, or fewer than 20 such rows in the row sample: all steps are
        taken, and the last parameters. The final pass sees all rows.
    n_iter_no_change : int
        Evaluations of that loss, one after every 10 steps, without an improvement after which
        learning ends.
    shrinkage : bool
        Whether the learned kernel is one between the first and that of the last steps: 0, 1/3, 2/3
        or all of the way in logarithms of the parameters, by the log loss of calibrated
        leave-one-out estimates at 1,000 rows of the row sample. Many length scales fit noise
        where rows are few.
    calibration : bool
        Whether probabilities are calibrated by these held-out estimates, see
        :class:`cme_dask.numerics.labels.LabelCalibration`. They have the same order without.
    class_weight : mapping of labels to numbers, or "balanced", optional
        What weights of rows are multiplied with, by label; ``"balanced"`` for n / (K n_c), which
        reads the labels once more, and which later calls of ``partial_fit`` refuse.
    tol, max_rank, pivots, span, sample_size, n_folds, accuracy, missing, random_state
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
    to, and ends with the same bits. Mini-batches are drawn from whole chunks, so that an epoch
    reads each chunk once: learned parameters depend on the chunks of x and of the labels.

    Later calls of ``partial_fit`` keep the kernel, the ridge and the calibration of the first, and
    ``path_`` is that of its rows.

    Source: Hsu, Nock and Ramos (2018), Hyperparameter Learning for Conditional Mean Embeddings with
    Rademacher Complexity Bounds, ECML PKDD.
    """

    kernel_y = Delta()
    criterion = "squared"
    validation = "folds"
    method = "pivots"
    _ridge: float | None = None  # where none are compared
    _calibrated: dict[str, Any] | None = None
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
        optimizer: Any = "adam",
        learning_rate: float | None = None,
        max_iter: int = 200,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        shrinkage: bool = True,
        calibration: bool = True,
        class_weight: Mapping[Any, float] | str | None = None,
        missing: str = "error",
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
        self.shrinkage = shrinkage
        self.calibration = calibration
        self.class_weight = class_weight
        self.missing = missing
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
        if not hasattr(self.optimizer, "update"):  # of optax
            check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("shrinkage", self.shrinkage, (True, False))
        check_number("batch_size", self.batch_size, 2)
        check_number("max_iter", self.max_iter, 0)
        check_number("n_iter_no_change", self.n_iter_no_change, 1)
        for name in ("batch_validation", "validation_fraction"):
            check_number(name, getattr(self, name), 0, 0.9, whole=False)
        if self.complexity_weight is not None:
            check_number("complexity_weight", self.complexity_weight, 0, whole=False)
        check_number("epsilon", self.epsilon, 0, whole=False)
        if not 0.0 < self.epsilon < 1.0:
            raise DataError(f"epsilon must lie between 0 and 1, got {self.epsilon!r}")
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, 0, whole=False)
            if not self.learning_rate > 0.0:
                raise DataError(f"learning_rate must be above 0, got {self.learning_rate!r}")
        if self.reg is not None and not isinstance(self.reg, str) and 0.0 in check_ridges(self.reg):
            raise DataError("reg must be above 0: learning factorises K + n reg")

    @property
    def _fingerprints(self) -> dict[str, Any]:
        # Those that Dask makes of the closures of optax differ from process to process.
        return {"optimizer": description(self.optimizer)}

    # The kernel, by the bound

    def _learns(self) -> bool:
        return self.max_iter > 0

    @property
    def _compares(self) -> bool:
        folds = self.reg is not None or self.n_folds > 1
        return folds and self._ridge is None and super()._compares

    @property
    def _regs(self) -> Array:
        return super()._regs if self._ridge is None else np.array([self._ridge])

    def _search(self, context: FitContext) -> FitContext:
        codes = np.arange(float(len(self._classes)))[:, None]
        x, y = context.pivots
        if y.mode == "sampled":  # labels that the row sample lacks, too
            y = replace(y, mode="given", max_rank=None, points=codes)
        begin, memory = time.perf_counter(), self._learning_memory(context)
        with one_blas_thread():
            context = self._started(context)
            learned = self._by_bound(context)
            if self.shrinkage and learned.steps:
                learned = self._shrunk(context, learned)
        self._ridge = learned.reg if self.reg is None and self.n_folds < 2 else None
        return replace(
            context,
            kernels=[learned.kernel, context.kernels[1]],
            pivots=(x, y),
            search=replace(learned, memory=memory, seconds=time.perf_counter() - begin),
        )

    def _learning_memory(self, context: FitContext) -> MemoryPlan:
        """What learning needs; ResourceError if there is less."""
        reader, rows = BatchReader.of(context.sample), context.sample.n_rows
        size = min(self.batch_size, rows)
        shuffled = min(rows, reader.together(size) * reader.block) + size
        held = min(_HELD_ROWS, len(context.rows)) if self.validation_fraction else 0
        dense = max(_STEP_ARRAYS * size**2, _HELD_ARRAYS * held**2)
        return context.executor.check_alone(
            "learning of the kernel",
            _POOL_COPIES * shuffled * reader.row_bytes + 8 * dense,
            extent_of(context.sample, context.executor).in_memory + context.choice_cost(1).held,
            f"a batch_size below {size:,}, or chunks of fewer than {reader.block:,} rows",
        )

    def _started(self, context: FitContext) -> FitContext:
        """With the first kernel of columns as they are or of their normal scores, by default."""
        rows, columns = context.rows, context.sample.columns[0]
        if self.kernel_x is not None or not self._learns() or all(columns.categorical):
            return context
        few = rows.prefix(HEURISTIC_ROWS)
        parts = rows.parts[0], rows.importance, few.parts[0], few.importance
        kernels = [context.kernels[0], default_kernel(*parts, columns, "scores")]
        choice = self._choice(context)
        best = min(kernels, key=lambda kernel: float(left_out_losses(kernel, *choice).min()))
        return replace(context, kernels=[best, context.kernels[1]])

    def _shrunk(self, context: FitContext, learned: BoundLearning) -> BoundLearning:
        """The kernel between the first one and the learned one, and its ridge."""
        chosen = shrunk(context.kernels[0], learned.kernel, *self._choice(context))
        return replace(learned, kernel=chosen.kernel, reg=chosen.reg, share=chosen.share)

    def _choice(self, context: FitContext) -> tuple[LabelledRows, int, Array]:
        """The rows, number of labels and ridges by which kernels are compared."""
        few = context.rows.prefix(_CHOICE_ROWS)
        rows, labels = _usable(few.parts[0], few.parts[1], few.importance), len(self._classes)
        return rows, labels, np.array([self.reg]) if self._keeps_ridge else np.array(REGS)

    @property
    def _keeps_ridge(self) -> bool:
        """Whether the ridge is given as a number, and not learned."""
        return self.reg is not None and np.ndim(self.reg) == 0 and not isinstance(self.reg, str)

    def _by_bound(self, context: FitContext) -> BoundLearning:
        """The kernel and the ridge, by Algorithm 1."""
        labels, rows, sample = len(self._classes), context.rows, context.sample
        given = self._keeps_ridge
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
            self._rate(context.kernels[0]),
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
            coordinates=partial(coordinates_of, rows.parts[0], rows.importance, context.seed),
        )

    def _rate(self, kernel: Kernel) -> float:
        if self.learning_rate is not None:
            return float(self.learning_rate)
        if not isinstance(self.optimizer, str):
            return 1.0
        return _NETWORK_RATE if isinstance(kernel, Network) else _RATE

    def _landmarks(self, context: FitContext) -> list[Basis] | None:
        """Of features, these themselves as the basis of x, and all labels as pivots of y."""
        kernel, kernel_y = context.kernels
        if not isinstance(kernel, Features) or context.pivots[0].mode != "sampled":
            return None
        basis = FeatureBasis(kernel, len(context.sample.columns[0].names))
        codes = np.arange(float(len(self._classes)))[:, None]
        return [basis, NewtonBasis.from_points(kernel_y, codes)]

    def _batches(
        self, sample: Sample, split: Split | None, seed: int, epoch: int, start: int
    ) -> Iterator[tuple[int, LabelledRows]]:
        """Batches of an epoch without the rows held out, from a number on."""
        reader = BatchReader.of(sample, None if split is None else split.other)
        size = min(self.batch_size, sample.n_rows)
        for batch in batches(reader, size, seed, epoch=epoch, start=start):
            rows = _usable(batch.x, batch.y, batch.weights)
            # What is left at the end of an epoch may be too few rows for a kernel.
            if len(rows.x) >= 2 and (batch.number == 0 or len(batch) > size // 2):
                yield batch.number, rows

    # The ridge and the calibration, by rows that refits have not seen

    def _planned(self, context: FitContext, *others: Any) -> FitPlan:
        plan = super()._planned(context, *others)
        return replace(plan, memory=plan.memory.or_tighter(context.search.memory))

    def _measure(self, context: FitContext) -> Measured:
        measured = super()._measure(context)
        report = measured.report
        memory = report.memory.or_tighter(context.search.memory)
        measured = measured._replace(report=report._replace(memory=memory))
        self._calibrated = None
        if not measured.moments.held_out_folds or not (self._compares or self.calibration):
            return measured
        with one_blas_thread():
            losses, errors, calibrations = self._held_out(context, measured)
        if self.calibration:
            self._calibrated = calibrations[int(losses.argmin())]
        return measured._replace(left_out=(losses, errors)) if self._compares else measured

    def _held_out(
        self, context: FitContext, measured: Measured
    ) -> tuple[Array, Array, list[dict[str, Any]]]:
        """By ridge the log loss at rows of the row sample, its error, and the calibration."""
        moments, (x, y), rows = measured.moments, measured.sides, context.rows.prefix(HELD_ROWS)
        folds = rows.folds(context.sample.folding, moments.n_folds)
        held = np.isin(folds, moments.held_out_folds) & (rows.importance > 0.0)
        points, codes = (values[held] for values in rows.parts)
        codes, share = codes[:, 0].astype(np.int64), rows.importance[held]
        share = share / share.sum()
        refits = refits_at(moments, x.basis(points), folds[held])
        labels = [y.names.index(class_name(code)) for code in range(len(self._classes))]
        ridges = self._regs if self._compares else [self._given_ridge(moments)]
        losses, errors, calibrations = [], [], []
        for reg in ridges:
            signed = refits(reg)[:, labels]
            plain = positive(nearest_shares(signed), moments.n_rows)
            before = -np.log(plain[np.arange(len(codes)), codes])
            calibration, calibrated = learn_label_calibration(signed, codes, share)
            gain, std = _mean_and_error(before - calibrated, share)
            calibrations.append(
                {
                    "kept": True,
                    "exponents": [calibration.scale, calibration.power],
                    "gain": gain,
                    "std": std,
                    "rows": len(codes),
                }
            )
            loss, error = _mean_and_error(calibrated if self.calibration else before, share)
            losses.append(loss)
            errors.append(error)
        return np.array(losses), np.array(errors), calibrations

    def _path(self, measured: Measured) -> RidgePath | None:
        path = super()._path(measured)
        return path and replace(path, criterion="log")

    def _solve(self, sample: Sample, measured: Measured) -> dict[str, Any]:
        fitted = super()._solve(sample, measured)
        about = fitted["model_"].about
        if self._ridge is not None:
            about["criterion"] = "the Rademacher bound"
        if self._calibrated is not None:
            about["calibration"] = self._calibrated
        return fitted

    def _of_both(
        self, earlier: FitSums, new: Measured, sample: Sample, *, alone: bool
    ) -> tuple[Measured, dict[str, Any]]:
        both, fitted = super()._of_both(earlier, new, sample, alone=alone)
        # The ridge stays that of the first call, and so does how it was chosen.
        about = fitted["model_"].about
        about |= {name: earlier.about[name] for name in ("criterion", "losses")}
        return both, fitted | {"path_": self.path_, "losses_": self.losses_}

    def _sums(self, functions: Declarations) -> FitSums:
        self._ridge, self._calibrated = self.reg_, self.model_.about.get("calibration")
        return super()._sums(functions)

    def _become(self, measured: Any, fitted: dict[str, Any], *of_fit: Any) -> None:
        learned = fitted.get("search_") or self.search_
        about = fitted["model_"].about
        about["bound"] = {
            "steps": learned.steps,
            "halved": learned.halved,
            "share": learned.share,
            "loss": learned.loss if np.isfinite(learned.loss) else None,
        }
        fitted["n_iter_"] = learned.steps
        super()._become(measured, fitted, *of_fit)

    # Weights by label

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        return self._by_label(super()._open(X, Y, weights))

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        if isinstance(self.class_weight, str):
            raise DataError(
                f"class_weight={self.class_weight!r} counts the labels of all rows, and a call of "
                "partial_fit sees the new ones alone: give a mapping of labels to numbers, or fit "
                "all rows at once"
            )
        return self._by_label(super()._open_more(X, Y, weights))

    def _by_label(self, sample: Sample) -> Sample:
        """The rows with weights that are multiplied with those of their labels."""
        if self.class_weight is None:
            return sample
        if self.missing == "drop":
            sample = sample.drop_missing()
        codes, given = sample.sources[1], sample.weights
        source = codes.map(partial(_taken, self._label_weights(sample)), 1)
        if given is not None and (source.dask_array is given.dask_array is None):
            source = ProductSource(given, source)
        elif given is not None:
            source = DaskSource(lazy_rows(given, 1) * lazy_rows(source, 1))
        return replace(sample, weights=source, row_sample=None)

    def _label_weights(self, sample: Sample) -> Array:
        """The weight of each label in the order of the codes of these rows, shape (K,)."""
        labels, given = self._classes.tolist(), self.class_weight
        if isinstance(given, str) and given == "balanced":
            counts = _label_counts(sample, len(labels))
            return counts.sum() / np.maximum(len(labels) * counts, 1.0)
        if not isinstance(given, Mapping) or not set(given) <= set(labels):
            raise DataError(
                "class_weight must be 'balanced' or a mapping of labels to numbers, of "
                f"{', '.join(map(repr, labels[:10]))}, got {given!r}"
            )
        for label, weight in given.items():
            check_number(f"class_weight of {label!r}", weight, 0, whole=False)
        by_text = {str(label): float(given.get(label, 1.0)) for label in labels}
        (texts,) = sample.columns[1].categories.values()  # a later store may have other codes
        return np.array([by_text.get(text, 1.0) for text in texts])


def _label_counts(sample: Sample, labels: int) -> Array:
    """Rows with each label, of those that the sample counts, shape (K,)."""
    codes, reader, counts = sample.sources[1], BatchReader.of(sample), np.zeros(labels)
    step = -(-_COUNTED_ROWS // reader.block) * reader.block  # whole chunks
    for start in range(0, sample.n_rows, step):
        index = np.arange(start, min(start + step, sample.n_rows))
        index = index[reader.belongs(index)]
        if sample.dropping:
            block = reader.read(index).without_missing().reads[1][:, 0]
        else:
            block = codes.read(start, min(start + step, sample.n_rows))[index - start, 0]
        counts += np.bincount(block[np.isfinite(block)].astype(np.int64), minlength=labels)
    return counts


def _taken(weights: Array, codes: Array) -> Array:
    """The weight of each code, shape (b, 1); none of a label that is missing."""
    return np.nan_to_num(taken(codes, weights))


def _usable(x: Array, codes: Array, weights: Array) -> LabelledRows:
    """The rows that count; those that are not finite are reported by the pass."""
    some = (weights > 0.0) & np.isfinite(x).all(axis=1) & np.isfinite(codes[:, 0])
    return LabelledRows(x[some], codes[some, 0].astype(np.int64), weights[some])


def _mean_and_error(values: Array, share: Array) -> tuple[float, float]:
    """Mean of values at rows with weights of sum 1, and its standard error."""
    mean = float(share @ values)
    return mean, float(np.sqrt(share**2 @ (values - mean) ** 2))


def _held_out(
    rows: LabelledRows, held: LabelledRows, labels: int, kernel: Kernel, reg: float
) -> float:
    if isinstance(kernel, Features):
        rows, held = (part._replace(x=kernel.features(np, part.x)) for part in (rows, held))
        kernel = Linear()
    return held_out_loss(kernel, reg, rows, held, labels)
