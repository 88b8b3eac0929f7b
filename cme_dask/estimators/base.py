"""``Estimator``: the steps of every fit, from rows over one pass to fitted attributes.

An estimator names its variables (a kernel for each), the moments that its pass makes, and how it
solves for its attributes. The base opens the rows, reads the row sample, settles kernels and
pivots, makes the pass, reports its progress and its time, and plans.
"""

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import sklearn.exceptions
from sklearn.base import BaseEstimator, RegressorMixin

from cme_dask.config import MAX_RANK, MISSING
from cme_dask.data.arrow import is_dataset
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.display import brief_repr
from cme_dask.errors import DataError, NonFiniteValues, NotFittedError, remedy
from cme_dask.estimators.context import (
    SHORT_RANK,
    FitContext,
    Pivots,
    Progress,
    choose_kernel,
    warn_of_length,
)
from cme_dask.estimators.given_location import check_location
from cme_dask.estimators.planning import (
    Choices,
    FitPlan,
    FurtherPass,
    Other,
    choose,
    plan_fit,
)
from cme_dask.estimators.steps import reported
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.candidates import Tuning
from cme_dask.learning.transforms import HEURISTIC_ROWS
from cme_dask.models.answers import r_squared
from cme_dask.models.events import FunctionsLike, declared
from cme_dask.models.merging import added_missing
from cme_dask.models.points import FloatArray, is_out_of_core, query_points
from cme_dask.models.relevance import LengthScales
from cme_dask.numerics.basis import Basis, Functions, LinearBasis, StackedBasis, ranks_of
from cme_dask.numerics.cells import CellReduction, CellSums
from cme_dask.numerics.folds import MAX_FOLDS, RowSample
from cme_dask.numerics.moments import FeatureBlock, Function, MomentReduction, MomentSums
from cme_dask.numerics.precision import (
    SAFE,
    TRIAL_ROWS,
    TRIALS,
    Change,
    ComputeMode,
    fastest_mode,
)
from cme_dask.numerics.rows import MissingValues
from cme_dask.numerics.values import check_support
from cme_dask.passes.driver import Executor, RunOptions
from cme_dask.passes.fit import imputed_rows, sample_rows
from cme_dask.passes.run import PassReport, run_pass
from cme_dask.passes.sources import open_sample

log = logging.getLogger("cme_dask.run")

Array = Any
Declarations = Mapping[str, FunctionsLike | None]
"""Declared functions by the name of their parameter: ``functions`` of y, ``functions_x`` of x."""

_WORTH = 32  # a pass over fewer than this many times the trial's rows is not worth a trial


# Checks of parameters


def check_choice(name: str, value: Any, known: tuple[str | bool, ...]) -> None:
    """DataError unless the value is one of those that are known."""
    if not isinstance(value, (str, bool)) or value not in known:
        raise DataError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


def check_tol(name: str, tol: Any) -> None:
    """DataError unless this is a relative trace error in (0, 1)."""
    if not (isinstance(tol, Real) and 0.0 < float(tol) < 1.0):
        raise DataError(f"{name} must lie between 0 and 1, exclusively, got {tol!r}")


def check_number(
    name: str, value: Any, least: float, most: float = math.inf, *, whole: bool = True
) -> None:
    """DataError unless the value is a finite number, an integer if ``whole``, in these bounds."""
    number = isinstance(value, (int, np.integer) if whole else Real)
    if number and not isinstance(value, bool) and value < math.inf and least <= value <= most:
        return
    noun = "an integer" if whole else "a number"
    bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    raise DataError(f"{name} must be {noun} {bounds}, got {value!r}")


def check_tuning(name: str, value: Any) -> None:
    """DataError unless the value holds the options of a search for kernels."""
    if not isinstance(value, Tuning):
        raise DataError(f"{name} must be a cme_dask.Tuning, got {value!r}")


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "tol": check_tol,
    "max_rank": partial(check_number, least=1),
    "n_folds": partial(check_number, least=1, most=MAX_FOLDS),
    "sample_size": partial(check_number, least=2, most=2**63 - 1),
    "support_size": partial(check_number, least=0),
    "random_state": partial(check_number, least=0, most=2**63 - 1),
    "accuracy": partial(check_number, least=0, whole=False),
    "convergence": partial(check_choice, known=("raise", "warn")),
    "residual": partial(check_choice, known=("auto", True, False)),
    "calibration": partial(check_choice, known=("auto", True, False)),
    "conformal": partial(check_choice, known=("auto", True, False)),
    "location": check_location,
    "support": check_support,
    "missing": partial(check_choice, known=MISSING),
    "tuning": check_tuning,
}
"""What parameters must be that several estimators share."""


# The steps of a fit


@dataclass(frozen=True, eq=False)
class FittedBasis:
    """A basis with what the pass measured of it.

    Attributes
    ----------
    newton
        Newton basis on the pivots, or partition of unity on the landmarks.
    spectral
        Basis orthogonal in L2 as well, with eigenvalues lam.
    trace_error
        Relative trace error tau over all rows, with their weights; None for partitions of unity,
        which approximate no kernel.
    """

    newton: Functions
    spectral: LinearBasis | StackedBasis
    trace_error: float | None

    __repr__ = brief_repr

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of pivots of each member of an averaged model, best first; else that of one."""
        return ranks_of(self.newton)

    @property
    def rank(self) -> int:
        """Number of pivots m; of an averaged model the largest of a member."""
        return max(self.ranks)

    @property
    def pivots(self) -> Array:
        """Pivots, shape (m, d); of an averaged model those of all members, one after the other."""
        return self.newton.points


class Measured(NamedTuple):
    """What a moment pass made of the rows.

    Attributes
    ----------
    sides, moments
        The variables on their bases, and the sums over the rows by fold.
    specs, cells
        Cells of x and of y, and the sums over their rows; empty without laws.
    arithmetic
        How the moments were computed.
    report
        How the pass went.
    passes
        Passes over the rows, with those of the row sample and of the pivots.
    left_out
        Leave-one-out losses of all ridges and their standard errors, where a pass made them.
    """

    sides: tuple[FeatureBlock, ...]
    moments: MomentSums
    specs: tuple[CellReduction, ...]
    cells: tuple[CellSums, ...]
    arithmetic: ComputeMode
    report: PassReport
    passes: int
    left_out: tuple[Array, Array] | None = None


def origin(sample: Sample) -> dict[str, Any]:
    """What a model says of the rows that it was fitted on."""
    return {
        "location": sample.location,
        "fold_by": str(sample.folding),
        "part": None if sample.part is None else sample.part.to_dict(),
        # Rows of weight 0 have numbers too, but the sums do not count them.
        **({} if sample.weights is None else {"next_row": sample.first_row + sample.n_rows}),
    }


def note_missing(
    about: dict[str, Any],
    missing: MissingValues,
    sample: Sample,
    *,
    policy: str,
    earlier: Mapping[str, Any] | None = None,
) -> None:
    """Add to the description of a fit how many values its rows lacked, and what became of these.

    Parameters
    ----------
    about
        The description.
    missing
        What the pass over the rows counted.
    sample
        The rows.
    policy
        ``"drop"`` or ``"impute"``.
    earlier
        What a fit to which these rows were added says of its own.
    """
    columns = sample.columns[0]
    filled: dict[str, float | str] = {}
    if columns.imputation is not None:
        for name, value in columns.imputation.fills.items():
            labels = columns.categories.get(name)
            filled[name] = value if labels is None else labels[int(value)]
    total = {
        "policy": policy,
        "rows": missing.dropped,
        "columns": missing.columns,
        "filled": filled,
    }
    about["missing"] = total if earlier is None else added_missing([dict(earlier), total])
    about["next_row"] = sample.first_row + sample.n_rows  # where rows that are added begin
    text = f"{missing.dropped:,}"
    log.info("left out %s rows that lack a value", text, extra={"event": "missing", **total})


class NotFitted(NotFittedError, sklearn.exceptions.NotFittedError):  # type: ignore[misc]
    """Our error and scikit-learn's, so that both can be caught."""


class Unfitted:
    """What stands in the place of the model before a fit: reading it is an error."""

    def __get__(self, estimator: Any, kind: type) -> Self:
        if estimator is None:
            return self
        raise NotFitted(f"this {kind.__name__} is not fitted: call fit first")


class Estimator(BaseEstimator, ABC):  # type: ignore[misc]
    """The base of all estimators.

    A subclass declares ``_kernels``, checks its parameters (``_check``), opens rows (``_open``),
    says what faster arithmetic must not change (``_change``), and makes the pass and what follows
    it (``_run``). Its ``fit`` and ``plan`` hand what they were given to ``_fit`` and ``_plan``.
    """

    _kernels: ClassVar[dict[str, str]]
    """The parameter that holds the kernel of each variable, and what messages call it."""

    _learned: ClassVar[tuple[str, ...]] = ()
    """The parameters whose kernels are learned where they are not given."""

    _several: ClassVar[bool] = False
    """Whether several kernels of its only variable may be given, to be compared on all rows."""

    _successive: ClassVar[bool] = False
    """Whether rows are steps of trajectories."""

    _required: ClassVar[tuple[str, ...]] = (
        *("sample_size", "support_size", "n_folds", "accuracy"),
        *("convergence", "residual", "calibration", "conformal", "missing"),
    )
    """Parameters that have no None."""

    _bases: ClassVar[tuple[str, ...]] = ("basis_x_", "basis_y_")
    """The attributes that hold the fitted bases."""

    _fingerprints: Any = MappingProxyType({})
    """What a checkpoint knows parameters by that are no plain values, by their names."""

    tol: float | None
    max_rank: int | None
    pivots: Any
    span: float
    sample_size: int
    random_state: int | None
    model_: Any = Unfitted()
    n_passes_: int
    arithmetic_: ComputeMode
    report_: PassReport
    _sides: tuple[FeatureBlock, ...]

    # What a subclass states

    def _check(self) -> None:
        """DataError on parameters outside their range."""
        for name, check in CHECKS.items():
            value = getattr(self, name, None)
            if value is not None or (hasattr(self, name) and name in self._required):
                check(name, value)

    @abstractmethod
    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows."""

    @abstractmethod
    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        """The passes, and everything after them: sums, and fitted attributes by name."""

    def _change(
        self, spec: MomentReduction, trial: RowSample, rows: RowSample, accuracy: float, solver: Any
    ) -> Change | None:
        """What faster arithmetic must not change on trial rows; None if none is tried."""
        return None

    def _search(self, context: FitContext) -> FitContext:
        """The context with the kernels that are learned."""
        return context

    def _landmarks(self, context: FitContext) -> Sequence[Any] | None:
        """Bases that take the place of those on pivots."""
        return None

    def _cells(self, context: FitContext, bases: Sequence[Basis] = ()) -> tuple[CellReduction, ...]:
        """Cells whose rows the pass sums."""
        return ()

    def _learns(self) -> bool:
        """Whether kernels are learned."""
        return any(getattr(self, name) is None for name in self._learned)

    def _steps(self, sample: Sample, *, plans: bool) -> dict[str, Any]:
        """The steps of a fit, as arguments of :func:`cme_dask.estimators.steps.reported`."""
        return {"learned": self._learns()}

    @property
    def _default_rank(self) -> int | None:
        """The largest rank where ``max_rank`` is None; None where ``tol`` alone decides."""
        return MAX_RANK

    # What the base does with it

    def _fit(
        self, X: Any, Y: Any, weights: Any, functions: Declarations, options: RunOptions
    ) -> Self:
        """Fit, and take over the attributes when all has gone well."""
        begin = time.perf_counter()
        self._check()
        sample = self._open(X, Y, weights)
        if getattr(self, "missing", "error") == "drop":
            sample = sample.drop_missing()
        parameters = {**self.get_params(deep=False), **self._fingerprints}
        parameters.pop("convergence", None)  # no sum depends on it
        try:
            with (
                options.opened(
                    type(self).__name__, {**parameters, **functions}, sample
                ) as executor,
                self._reported(options.progress, executor, sample) as progress,
            ):
                context = self._context(sample, functions, executor, progress)
                if context.imputed:
                    sample = context.sample
                with one_blas_thread():
                    measured, fitted = self._run(context, sample)
        except NonFiniteValues as error:
            raise self._advised(error) from error
        if measured.report.missing is not None:
            note_missing(
                fitted["model_"].about,
                measured.report.missing,
                sample,
                policy="impute" if context.imputed else "drop",
            )
        self._become(measured, fitted, begin, (X, Y, sample))
        return self

    def _plan(
        self, X: Any, Y: Any, weights: Any, functions: Declarations, options: RunOptions
    ) -> FitPlan:
        """What :meth:`_fit` would do and take."""
        self._check()
        sample = self._open(X, Y, weights)
        if getattr(self, "missing", "error") == "drop":
            sample = sample.drop_missing()
        executor = options.executor()
        try:
            with self._reported(options.progress, executor, sample, plans=True) as progress:
                return self._planned(self._context(sample, functions, executor, progress))
        except NonFiniteValues as error:
            raise self._advised(error) from error

    def _planned(
        self,
        context: FitContext,
        others: Sequence[Other] = (),
        further: FurtherPass | None = None,
    ) -> FitPlan:
        """The plan; ``others`` are further kernels that the pass compares."""
        return plan_fit(context, self._choices(context, others), further)

    def _choices(self, context: FitContext, others: Sequence[Other] = ()) -> Choices:
        """What the fit chooses before its pass."""
        specify, cells = partial(self._in_mode, context), partial(self._cells, context)
        return choose(context, specify, self._landmarks, cells, others)

    def _become(
        self,
        measured: Measured,
        fitted: dict[str, Any],
        begin: float,
        given: tuple[Any, Any, Sample] | None = None,
    ) -> None:
        """Take over fitted attributes; of a first fit, with what scikit-learn asks of columns."""
        self.__dict__.update(fitted)
        self.n_passes_, self.arithmetic_ = measured.passes, measured.arithmetic
        self.report_ = measured.report._replace(seconds=time.perf_counter() - begin)
        if given is None:
            return
        X, _, sample = given
        columns = sample.columns[0]
        names = columns.names if columns.imputation is None else columns.given.names
        self.n_features_in_ = len(names)
        if hasattr(X, "columns") and all(isinstance(name, str) for name in X.columns):
            self.feature_names_in_ = np.array(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        self._adopt(*given)

    def _adopt(self, X: Any, Y: Any, sample: Sample) -> None:
        """Keep what queries need to know of the rows that a first fit was given."""

    def _advised(self, error: NonFiniteValues) -> NonFiniteValues:
        """The error, which of missing values names what leaves them out."""
        text = f"{error}"  # not str(error), which has the remedy in Python alone
        if error.missing and self._successive:  # rows that follow a gap would close it
            text = (
                f"{error.statement}: fill these values, or fit open_sample(...).drop_missing(), "
                "which leaves out the pairs of rows that lack one"
            )
        elif error.missing and hasattr(self, "missing"):
            values = "missing='drop' or 'impute'", "--missing drop or --missing impute"
            text = f"{text}, or fit with {remedy(*values)}"
        elif error.missing:
            text = f"{text}{remedy(', or fit open_sample(...).drop_missing()', '')}"
        return NonFiniteValues(text, error.missing, error.statement)

    def _reported(
        self, progress: Any, executor: Executor, sample: Sample, *, plans: bool = False
    ) -> AbstractContextManager[Progress | None]:
        """What the parts of a fit report to."""
        if progress is None and executor.client is None:
            return nullcontext()
        name = None if plans else type(self).__name__
        columns = [len(columns.names) for columns in sample.columns[: len(self._kernels)]]
        steps = self._steps(sample, plans=plans)
        return reported(progress, executor, sample.n_rows, columns, name=name, **steps)

    def _context(
        self,
        sample: Sample,
        functions: Declarations,
        executor: Executor,
        progress: Progress | None,
    ) -> FitContext:
        """The row sample read, the kernels settled."""
        begin = time.perf_counter()
        seed = self.random_state or 0
        imputed = getattr(self, "missing", "error") == "impute"
        if imputed:  # columns of x are only known when the row sample is
            sample, rows, passes = imputed_rows(sample, self.sample_size, seed, executor)
        declarations = functions.get("functions_x"), functions.get("functions")
        of_each = [
            declared(each, columns) if each else {}
            for each, columns in zip(declarations, sample.columns, strict=False)
        ]
        names = tuple(self._kernels.values())
        bounds = self.tol, self.max_rank, self._default_rank
        pivots = Pivots.of_each(self.pivots, names, sample.columns, *bounds, self.span, seed)
        if not imputed:
            rows, passes = sample_rows(sample, self.sample_size, seed, executor)
        kernels, short = [], False
        made: list[Kernel] = []
        for i, name in enumerate(self._kernels):
            given = getattr(self, name)
            several = self._several and isinstance(given, (list, tuple))
            made = []
            for kernel in given if several else [given]:
                made.append(choose_kernel(kernel, rows, i, sample.columns[i], name))
                if isinstance(kernel, Kernel) and pivots[i].mode != "given":
                    points = rows.prefix(HEURISTIC_ROWS).parts[i]
                    short = warn_of_length(made[-1], points, name) or short
            kernels.append(made[0])
        if short and pivots[0].max_rank is None:  # its cost is that of the cube of the rank
            pivots = tuple(replace(each, max_rank=SHORT_RANK) for each in pivots)
        context = FitContext(
            sample,
            rows,
            kernels,
            pivots,
            of_each,
            seed,
            getattr(self, "n_folds", 1),
            executor,
            progress,
            passes,
            time.perf_counter() - begin,
            candidates=tuple(made[1:]),
            imputed=imputed,
        )
        return self._search(context)

    def _in_mode(
        self, context: FitContext, spec: MomentReduction, solver: Any = None
    ) -> tuple[MomentReduction, ComputeMode]:
        """The moments with the cheapest arithmetic that a trial on the row sample admits."""
        rows, n_rows = context.rows, context.sample.n_rows
        accuracy = getattr(self, "accuracy", 0.0)
        if accuracy is None:
            accuracy = 0.1 * float(np.sqrt(2.0 / n_rows))  # of an eigenvalue's sampling error
        trial = rows.prefix(max(TRIAL_ROWS, 2 * max(spec.ranks)))
        if accuracy == 0.0 or n_rows < _WORTH * len(trial):
            return spec, SAFE
        cores = min(context.executor.function_threads, TRIALS)  # the sums of each take memory
        with one_blas_thread():
            change = self._change(spec, trial, rows, accuracy, solver or context.solver)
            if change is None:
                return spec, SAFE
            mode, _ = fastest_mode(spec, trial.parts, accuracy, change, cores)
        return mode.applied(spec), mode

    def _measure(self, context: FitContext) -> Measured:
        """The moment pass, made again where sampled pivots turn out to have missed too much."""
        landmarks = self._landmarks(context)
        bases, rounds, _ = (
            context.bases(context.kernels) if landmarks is None else (landmarks, [], set())
        )
        passes, cells = context.passes, self._cells(context, bases)
        sums: tuple[CellSums, ...] = ()
        for topped_up in (False, True):
            spec, mode = self._in_mode(context, context.moments_on(bases))
            run = run_pass if topped_up else context.run_pass
            (moments, *summed), report = run(
                context.sample,
                [spec] if topped_up else [spec, *cells],
                context.executor,
                context.progress,
                around=context.choice_cost(max(spec.ranks)),
            )
            passes, sums = passes + 1, sums if topped_up else tuple(summed)
            if topped_up or landmarks is not None:
                break
            more, further = context.topped_up(bases, moments.means().trace_error)
            rounds = [*rounds, *further]
            if more is None:
                break
            bases = more
        for each in rounds:
            report = report._replace(memory=report.memory.or_tighter(each.memory))
        passes += len(rounds)
        return Measured(spec.features, moments, cells, sums, mode, report, passes)

    # What fitted estimators have in common

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the fitted model to a folder, see ``save`` of the model."""
        self.model_.save(path, overwrite=overwrite)


# The scikit-learn side of estimators that predict means


def given_rows(Y: Any, y: Any, weights: Any, sample_weight: Any) -> tuple[Any, Any]:
    """The rows of y and the weights, by whichever names they were given.

    Raises
    ------
    DataError
        If both names of one of them were used.
    """
    if Y is not None and y is not None:
        raise DataError("Y and y are two names of the same argument: give one of them")
    if weights is not None and sample_weight is not None:
        raise DataError("weights and sample_weight are the same: give one of them")
    return y if Y is None else Y, sample_weight if weights is None else weights


def names_of(f: Any, declared: Mapping[str, Function]) -> Any:
    """The same question with declared callables replaced by their names."""
    by_id = {id(function): name for name, function in declared.items()}
    if callable(f):
        return by_id.get(id(f), f)
    if isinstance(f, str) or not isinstance(f, Iterable):
        return f
    return [by_id.get(id(g), g) for g in f]


class MeanRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A regressor that predicts conditional means of y; ``score`` is their R^2.

    Estimators give ``_means(X)``, shape (n, d_Y).
    """

    def predict(self, X: Any) -> FloatArray:
        """E[Y | x], shape (n,) if the fit was given y of that shape, else (n, d_Y).

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives a Dask array; nothing is computed then.

        Raises
        ------
        DataError
            On wrong columns or NaN, or if a column of y holds labels.
        """
        labels = tuple(self.model_.y.columns.categories)
        if labels:
            raise DataError(
                f"column {labels[0]!r} holds labels, which have no mean: ask for "
                "probabilities, or fit a JointClassifier"
            )
        means = self._means(X)
        means = means if is_out_of_core(X) else np.asarray(means)
        if means.ndim == 1 + len(self._shape):
            return cast(FloatArray, means)
        return cast(FloatArray, means[:, None] if self._shape else means[:, 0])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 of the predicted means, the mean over the columns of y; higher is better.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name.
        y
            What was observed there, shape (n,) or (n, d_Y), or a table with the columns by name.
        sample_weight
            Weights of the rows, shape (n,).

        Raises
        ------
        DataError
            As :meth:`predict`, on wrong columns or missing values of y, if the shapes differ, or if
            weights are negative or all zero.
        """
        means = self.predict(X)
        observed = query_points(y, self.model_.y, "y", observed=True)
        return r_squared(observed, means, sample_weight)

    @property
    def length_scales_(self) -> LengthScales:
        """Length scale and relevance of each column, of the fitted model."""
        scales: LengthScales = self.model_.length_scales
        return scales

    @property
    def columns_x(self) -> Columns:
        """Columns of x: names, units, and labels of those that hold labels."""
        result: Columns = self.model_.x.columns
        return result

    @property
    def columns_y(self) -> Columns:
        """Columns of y: names, units, and labels of those that hold labels."""
        result: Columns = self.model_.y.columns
        return result

    @abstractmethod
    def _means(self, X: Any) -> Array:
        """Conditional means of y, shape (n, d_Y)."""

    def _open(self, X: Any, Y: Any, weights: Any) -> Sample:
        sample = open_sample(X, Y, weights=weights)
        if len(sample.sources) != 2:
            raise DataError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: it "
                "needs rows of x and of y: give Y, or a store"
            )
        return sample

    def _adopt(self, X: Any, Y: Any, sample: Sample) -> None:
        """Keep the shape of predictions."""
        ndim = getattr(Y, "ndim", None)
        if ndim is None:  # None and paths have none, and those of a Dataset are by variable
            ndim = 2 if is_dataset(Y) else np.asarray(Y).ndim
        count = len(sample.columns[1].names)
        self._shape = () if count == 1 and ndim < 2 else (count,)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        tags.input_tags.allow_nan = getattr(self, "missing", "error") == "impute"
        return tags
