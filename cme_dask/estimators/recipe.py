"""Checks of parameters, rows and kernels that estimators share, and their declared functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import sklearn.exceptions

from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.data.store import brief
from cme_dask.display import brief_repr
from cme_dask.errors import (
    ConstantColumnWarning,
    DataError,
    LengthScaleWarning,
    NotFittedError,
    warn,
)
from cme_dask.kernels import Kernel
from cme_dask.learning.candidates import TuningProgress
from cme_dask.learning.transforms import HEURISTIC_ROWS, constant_columns, default_kernel
from cme_dask.models.events import Event
from cme_dask.numerics.basis import Basis, Functions, LinearBasis, StackedBasis, ranks_of
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.folds import MAX_FOLDS, RowSample
from cme_dask.numerics.moments import FeatureBlock, Function
from cme_dask.numerics.scoring import ScoringFunctions
from cme_dask.numerics.support import SUPPORT_SIZE, Support, make_support
from cme_dask.passes.progress import Event as PassEvent
from cme_dask.passes.progress import StepBegan

Array = Any

SHORT_RANK = 500
"""Largest rank of a given kernel that is too short for the rows, unless ``max_rank`` is given."""

_MANY = 10  # names, of which no more are listed
_FEW = 20  # rows, of fewer nothing is said about a kernel
_UNRELATED, _SAME = 1e-3, 1e-10
_COVARIANCES = 1 << 21  # numbers in the covariances of all cells, at most
_GROWN = 1 << 22  # rows times squared columns of which cells are made: a second
_ROWS_PER_CELL = 8  # of which they are made at least


class NotFitted(NotFittedError, sklearn.exceptions.NotFittedError):  # type: ignore[misc]
    """Our error and scikit-learn's, so that both can be caught."""


@dataclass(frozen=True)
class PivotProgress:
    """How far the choice of pivots is."""

    variable: str
    rank: int
    residual_trace: float
    tol: float


FunctionsLike = Mapping[str, Function | str] | Sequence[str]
"""Functions to be declared: callables or events by name, or a list of events."""

Progress = Callable[[PivotProgress | PassEvent | TuningProgress | StepBegan], None]
"""What the parts of a fit report to, see :class:`cme_dask.estimators.steps.StepReports`."""


DENSE_POWER = 2.4
"""Of the rank: the measured time of dense algebra by fold."""

_LARGE = 500.0


def dense_cost(ranks: Sequence[float]) -> float:
    """Time of dense algebra on bases of these ranks, in that of one of rank 500."""
    return float(sum((rank / _LARGE) ** DENSE_POWER for rank in ranks))


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


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """DataError unless the value is one of those that are known."""
    if value not in known:
        raise DataError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_tol(name: str, tol: Any) -> None:
    """DataError unless this is a relative trace error in (0, 1)."""
    if not (isinstance(tol, Real) and 0.0 < float(tol) < 1.0):
        raise DataError(f"{name} must lie between 0 and 1, exclusively, got {tol!r}")


def check_accuracy(name: str, accuracy: Any) -> None:
    """DataError unless this is a number of at least 0."""
    real = isinstance(accuracy, Real) and not isinstance(accuracy, bool)
    if not real or not 0.0 <= float(accuracy) < np.inf:
        raise DataError(f"{name} must be a number of at least 0, got {accuracy!r}")


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """DataError unless the value is an integer within these bounds."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if whole and value >= least and (most is None or value <= most):
        return
    upto = "of at least" if most is None else "from"
    end = "" if most is None else f" to {most}"
    raise DataError(f"{name} must be an integer {upto} {least}{end}, got {value!r}")


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "tol": check_tol,
    "max_rank": partial(check_integer, least=1),
    "n_folds": partial(check_integer, least=1, most=MAX_FOLDS),
    "sample_size": partial(check_integer, least=2),
    "random_state": partial(check_integer, least=0, most=2**63 - 1),
    "accuracy": check_accuracy,
    "convergence": partial(check_choice, known=("raise", "warn")),
}
"""What parameters must be that several estimators share."""


def choose_kernel(kernel: Any, rows: RowSample, i: int, columns: Columns, name: str) -> Kernel:
    """The given kernel, checked against the columns of variable ``i``, or the default one."""
    if kernel is None or (isinstance(kernel, str) and kernel == "median"):
        warn_of_constants(rows, i, columns, "y" if name == "kernel_y" else "x")
        few = rows.prefix(HEURISTIC_ROWS)
        return default_kernel(rows.parts[i], rows.importance, few.parts[i], few.importance, columns)
    if not isinstance(kernel, Kernel):
        raise DataError(
            f"{name} must be a kernel of cme_dask.kernels (users' own: kernels.Custom), "
            f"got {kernel!r}"
        )
    kernel.check(len(columns.names))
    check_labels(kernel, columns, name)
    return kernel


def check_labels(kernel: Kernel, columns: Columns, name: str) -> None:
    """DataError if a numeric kernel would take codes of labels as numbers.

    Parameters
    ----------
    kernel
        A given kernel.
    columns
        Of its variable.
    name
        Of the parameter.
    """
    coded = [j for j, is_coded in enumerate(columns.categorical) if is_coded]
    wrong = [j for j in coded if kernel.measures(j)]
    if not wrong:
        return
    column = columns.names[wrong[0]]
    raise DataError(
        f"column {column!r} holds labels, whose codes {name}={brief(repr(kernel))} would take as "
        f"numbers: give kernels.Categorical(1.0).on({wrong[0]}) for it, times a numeric kernel "
        ".on(...) the other columns, or give no kernel, so that it is learned"
    )


def warn_of_constants(rows: RowSample, i: int, columns: Columns, variable: str) -> None:
    """Warn of the numeric columns of variable ``i`` that have one value in all sampled rows."""
    constant = constant_columns(rows.parts[i], rows.importance, columns.categorical)
    if not constant:
        return
    one = len(constant) == 1
    names = ", ".join(repr(columns.names[j]) for j in constant[:_MANY])
    more = f" and {len(constant) - _MANY} more" if len(constant) > _MANY else ""
    fate = "the model ignores " + ("it" if one else "them")
    if variable == "y":
        fate = "its law is a point" if one else "their laws are points"
    warn(
        f"column{'' if one else 's'} {names}{more} of {variable} {'is' if one else 'are'} constant "
        f"in all {len(rows):,} sampled rows: {fate}",
        ConstantColumnWarning,
    )


def warn_of_length(kernel: Kernel, points: Array, name: str) -> bool:
    """Warn if a given kernel is too short or too long for the rows; whether it is too short.

    A kernel that is too short sees nearly no row near another one, one that is too long sees no
    difference between rows.

    Parameters
    ----------
    kernel
        A given kernel.
    points
        Random rows, shape (k, d).
    name
        Of the parameter.

    Notes
    -----
    The kernel is too short if, for nine rows of ten, no correlation |k(x, z)| / sqrt(k(x, x)
    k(z, z)) with another row is above 1e-3. It is too long if the rows differ and all values
    k(x, z) are within 1e-10 of each other, as a fraction of the largest one; values, because
    correlations of linear kernels can be 1 between rows that these kernels tell apart.
    """
    if len(points) < _FEW:
        return False
    root = np.sqrt(np.maximum(np.asarray(kernel.diagonal(points), dtype=np.float64), 0.0))
    if not root.all():
        return False
    values = np.asarray(kernel(points, points), dtype=np.float64)
    same = np.ptp(values) <= _SAME * np.abs(values).max()
    correlations = np.abs(values) / root / root[:, None]
    np.fill_diagonal(correlations, 0.0)
    nearest = float(np.quantile(correlations.max(axis=1), 0.9))
    among = f"among {len(points):,} sampled rows"
    if nearest < _UNRELATED:
        warn(
            f"{name}={brief(repr(kernel))} is too short for the rows: {among}, nine of ten have no "
            f"other one at which the kernel is above {_UNRELATED:g}, so nothing can be learned "
            "from neighbours and every row would need a function of its own; give a length scale "
            f"of many times the distance of neighbouring rows, or {name}='median' (unless max_rank "
            f"says otherwise, the rank is limited to {SHORT_RANK})",
            LengthScaleWarning,
        )
        return True
    if same and np.ptp(points, axis=0).any():
        warn(
            f"{name}={brief(repr(kernel))} is too long for the rows: {among}, the kernel is the "
            "same for all pairs to ten digits, so the model sees no difference between them; give "
            f"a length scale in the units of the columns near their spread, or {name}='median'",
            LengthScaleWarning,
        )
    return False


def by_name(functions: FunctionsLike | None) -> Mapping[str, Function | str]:
    """Functions as users give them, by name; DataError unless they are that."""
    given = {} if functions is None else functions
    if isinstance(given, (list, tuple)) and all(isinstance(text, str) for text in given):
        given = dict(zip(given, given, strict=True))
    if not isinstance(given, Mapping):
        raise DataError(
            f"functions maps names to callables, got {functions!r}: give {{'name': f}}, or list "
            "events such as ['y0 > 0']"
        )
    return given


def declared(functions: FunctionsLike | None, columns: Columns) -> dict[str, Function]:
    """Declared functions by name; DataError unless they are that, and no columns."""
    given = by_name(functions) if functions else {}
    result: dict[str, Function] = {
        name: Event.parse(f, columns.names, columns.categories) if isinstance(f, str) else f
        for name, f in given.items()
    }
    for name, function in result.items():
        if not isinstance(name, str) or not callable(function):
            raise DataError(f"functions maps names to callables, got {name!r}: {function!r}")
        if name in columns.names:
            raise DataError(f"{name!r} is a column already: give the function another name")
    return result


def make_side(
    basis: Basis,
    columns: Columns,
    functions: FunctionsLike | None,
    rows: RowSample,
    i: int,
    events: ScoringFunctions | None = None,
) -> FeatureBlock:
    """The features of a variable, with shifts near the means of its functions."""
    side = FeatureBlock(basis, columns.names, declared(functions, columns), events=events)
    return replace(side, shift=rows.importance @ side.values(rows.parts[i]))


def make_cells(
    rows: RowSample,
    i: int,
    sample: Sample,
    functions: Mapping[str, Function],
    partition: Basis | None = None,
    *,
    size: int = SUPPORT_SIZE,
    support: Support | None = None,
) -> CellReduction:
    """What a pass sums by cell for the laws of variable ``i``.

    Parameters
    ----------
    rows
        The row sample.
    i
        0 for x, 1 for y.
    sample
        All rows.
    functions, partition
        Declared functions and the partition of unity of the variable.
    size
        Largest number of cells; of more than 45 columns fewer, since each has a covariance.
    support
        The cells, if there are some already.
    """
    part, part_of, n_rows = rows.parts[i], sample.part, float(sample.n_rows)
    if support is None:
        d = part.shape[1]
        size = max(min(size, _COVARIANCES // d**2), 1)
        few = part[: max(_GROWN // d**2, _ROWS_PER_CELL * size)]
        categorical = sample.columns[i].categorical
        support = make_support(few, rows.importance[: len(few)], size, categorical)
    if part_of is not None:
        n_rows *= part_of.expected_share
    # Each row of the sample stands for 1 / its chance to be drawn, up to a factor.
    counts = np.ones(len(rows))
    if not rows.complete:
        with np.errstate(all="ignore"):  # weights of any size; a rough number will do
            counts = rows.importance / rows.weights
            counts = np.nan_to_num(counts / np.median(counts), nan=1.0)
        counts = np.clip(counts, 1e-9, 1e9)
    return CellReduction.of(support, part, counts, n_rows, functions, partition)
