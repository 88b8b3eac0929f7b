"""The types of a search for kernels: options, candidates, bounds, results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from cme_dask.display import brief_repr
from cme_dask.errors import DataError
from cme_dask.kernels import Categorical, Gaussian, Kernel, Matern, Transform, TransformedKernel
from cme_dask.kernels.length_scales import IGNORED, SCALES, WIDEST
from cme_dask.learning.transforms import constant_columns, learn_transform
from cme_dask.numerics.problem import Regularization
from cme_dask.numerics.reduction import MemoryPlan
from cme_dask.numerics.scoring import ScoringFunctions

# What a search for kernels looks for: its options, candidates, scores and result


Array = Any

FORMS = ("standard", "scores")
"""Coordinates of numeric columns: in standard deviations, or normal scores."""

_ALIKE = 0.99  # correlation of columns in both forms from which one of them is enough

TREES = ("boosting", "shallow", "forest")
"""Regression trees that may be the location of y."""

EVALUATIONS = 30
"""Pairs of kernels that are tried along gradients, unless a number is given."""

CRITERIA = ("auto", "joint+crps", "joint", "crps", "validation")

T = TypeVar("T")


class TrialMemory(Protocol):
    """What trials gave in an earlier start of the same fit, by a key that tells them apart."""

    def get(self, key: Any) -> Any:
        """What the trial gave, or None."""

    def put(self, key: Any, value: Any) -> None:
        """Retain what the trial gave."""

    def flush(self) -> None:
        """Write what is not written yet."""


class TrialsHere(dict[Any, Any]):
    """A memory of trials in this process."""

    put = dict.__setitem__

    def flush(self) -> None:
        """Nothing is written."""


class Over(Exception):
    """What is made ahead is not needed any more."""


@dataclass(frozen=True)
class AheadTrials:
    """A memory of trials that are made ahead: it raises :class:`Over` as soon as that is over.

    Attributes
    ----------
    memory
        Where they are found again.
    over
        Whether it is.
    """

    memory: TrialMemory
    over: Callable[[], bool]

    def get(self, key: Any) -> Any:
        """What the trial gave, or None."""
        if self.over():
            raise Over
        return self.memory.get(key)

    def put(self, key: Any, value: Any) -> None:
        """Retain what the trial gave."""
        self.memory.put(key, value)

    def flush(self) -> None:
        """Write what is not written yet."""
        self.memory.flush()


def recalled(memory: TrialMemory | None, key: Any, trial: Callable[[], T]) -> T:
    """What a trial gives; from memory, where it was made before."""
    if memory is None:
        return trial()
    value: T | None = memory.get(key)
    if value is None:
        value = trial()
        memory.put(key, value)
    return value


@dataclass(frozen=True)
class Tuning:
    """How kernels and ridge are searched.

    Parameters
    ----------
    criterion : {"auto", "joint+crps", "joint", "crps", "validation"}
        Held-out joint loss, sliced CRPS, or the sum of both, each relative to the gain of the best
        candidate on independence. ``auto`` is ``joint+crps`` for one column of y and ``crps`` for
        more, where the joint loss is noisy: it depends on the few places where g is large.
        In the place of the sliced CRPS ``validation`` takes (41) of the joint paper, the squared
        error of the declared functions of y.
    rows
        Rows of the row sample that the search sees.
    max_rank
        Pivots of each basis in the search.
    evaluations
        Pairs of kernels that are tried after the grid, each with the gradient of its score, at
        most; default 30. 0 and 1 refine nothing: the grid alone is tried then. Ridges of the form
        ``"single"`` have no gradients. Then the default is 40, and 5 more for each of up to 24
        columns; of more columns those that matter least share a factor of their length scales, and
        no more than there are length scales, and two, refine nothing.
    finalists
        Candidates whose moments are made of all rows; default: as many as are averaged.
    averaged
        Best of them whose density ratios are averaged. A mean of several takes longer, and its laws
        are hardly better: docs/tuning.md has figures.
    trees
        Regression trees that are compared with the ridge regression as the location of y:
        ``"boosting"``, ``"shallow"`` (boosting of trees of four leaves) and ``"forest"``, or none,
        ``()``.
    """

    criterion: str = "auto"
    rows: int = 2048
    max_rank: int = 200
    evaluations: int | None = None
    finalists: int | None = None
    averaged: int = 1
    trees: tuple[str, ...] = TREES

    def settled(self, columns_y: int) -> "Tuning":
        """The same search with the criterion that ``auto`` stands for.

        Parameters
        ----------
        columns_y
            Number of columns of y.

        Returns
        -------
        Tuning
        """
        if self.criterion != "auto":
            return self
        return replace(self, criterion="joint+crps" if columns_y == 1 else "crps")

    @property
    def n_finalists(self) -> int:
        """How many candidates have their moments made of all rows."""
        return self.averaged if self.finalists is None else self.finalists

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise DataError(
                f"criterion must be one of {', '.join(CRITERIA)}, got {self.criterion!r}"
            )
        names: Any = self.trees
        if isinstance(names, str) or not isinstance(names, Sequence) or set(names) - set(TREES):
            raise DataError(f"trees must be a list of names among {TREES}, got {names!r}")
        object.__setattr__(self, "trees", tuple(names))
        least = {"rows": 50, "max_rank": 2, "evaluations": 0, "finalists": 1, "averaged": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if name in ("evaluations", "finalists") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise DataError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.n_finalists < self.averaged:
            raise DataError(
                f"averaged must be at most finalists, got {self.averaged} of {self.n_finalists}: "
                "raise finalists, or leave it out"
            )


@dataclass(frozen=True)
class KernelPoint:
    """Kernel of one variable: its transform and a length scale for each mapped column.

    The scale of a column that the kernel ignores is ``IGNORED``. The form is ``"given"``, without
    scales, for a kernel that is not learned. Of numeric columns the kernel is a Matern kernel of
    this smoothness, or Gaussian (None).
    """

    form: str
    scales: tuple[float, ...] = ()
    smoothness: float | None = None

    @property
    def free(self) -> list[int]:
        """Positions of the columns that are not ignored."""
        return [j for j, scale in enumerate(self.scales) if scale < IGNORED]

    def scaled(self, factors: Sequence[float]) -> "KernelPoint":
        """With other length scales within the bounds of these; ignored columns stay ignored."""
        scales = np.asarray(self.scales)
        seen, (low, high) = scales < IGNORED, SCALES
        within = ((scales >= low) & (scales <= high))[seen].all()
        bounds = SCALES if within else WIDEST
        scales = np.where(seen, np.clip(scales * factors, *bounds), scales)
        return replace(self, scales=tuple(scales.tolist()))


@dataclass(frozen=True, eq=False)
class VariableKernels:
    """From points of a search to kernels of one variable; holds none of its rows.

    Attributes
    ----------
    categorical
        Which columns hold codes of categories.
    given
        The kernel, where it is not learned.
    maps
        Transforms by their form, where it is.
    """

    categorical: tuple[bool, ...]
    given: Kernel | None
    maps: dict[str, Transform]

    def inner(self, point: KernelPoint) -> Kernel:
        """The kernel of mapped rows."""
        if point.form == "given":
            assert self.given is not None
            return self.given
        numeric: Callable[[tuple[float, ...]], Kernel] = Gaussian
        if point.smoothness is not None:
            numeric = partial(Matern, nu=point.smoothness)
        kernels: list[Kernel] = []
        used = point.free or range(len(self.categorical))  # a kernel of constants is one, too
        for kind, coded in ((numeric, False), (Categorical, True)):
            at = [j for j in used if self.categorical[j] == coded]
            if at:
                kernel = kind(tuple(point.scales[j] for j in at))
                kernels.append(kernel if len(at) == len(self.categorical) else kernel.on(at))
        return kernels[0] if len(kernels) == 1 else kernels[0] * kernels[1]

    def parameters(self, point: KernelPoint) -> list[int]:
        """Positions of the columns whose length scales are the kernel's parameters, in order."""
        return sorted(point.free, key=lambda j: self.categorical[j])

    def kernel(self, point: KernelPoint) -> Kernel:
        """The kernel of rows as they are."""
        inner = self.inner(point)
        return inner if point.form == "given" else TransformedKernel(inner, self.maps[point.form])


@dataclass(eq=False)
class SearchedVariable:
    """One variable of the search: its rows in each form of coordinates."""

    rows: Array
    weights: Array
    categorical: tuple[bool, ...]
    given: Kernel | None
    maps: dict[str, Transform] = field(default_factory=dict)
    constant: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.given is None:
            for form in FORMS:
                self.maps[form] = learn_transform(self.rows, self.weights, self.categorical, form)
            self.constant = tuple(constant_columns(self.rows, self.weights, self.categorical))
        self.values = {form: map_rows(self.rows) for form, map_rows in self.maps.items()}
        self.values["given"] = self.rows
        self.forms = tuple(self.maps)[: 1 if self._alike() else 2] or ("given",)

    def _alike(self) -> bool:
        """Whether the second form is nearly a linear function of the first, column by column.

        Kernels of one are then nearly kernels of the other. Categories have no scores.
        """
        if not self.maps:
            return True
        varying = [
            j for j, coded in enumerate(self.categorical) if not coded and j not in self.constant
        ]
        weights = self.weights / self.weights.sum()
        one, two = (self.values[form][:, varying] for form in FORMS)
        one, two = one - weights @ one, two - weights @ two
        spread = np.sqrt((weights @ one**2) * (weights @ two**2))
        return bool((weights @ (one * two) >= _ALIKE * spread).all())

    def start(self, form: str, scale: float) -> KernelPoint:
        """One length scale for all varying numeric columns, larger the more there are."""
        if form == "given":
            return KernelPoint(form)
        numeric = len(self.categorical) - sum(self.categorical) - len(self.constant)
        each = [
            IGNORED if j in self.constant else 1.0 if coded else float(np.sqrt(numeric))
            for j, coded in enumerate(self.categorical)
        ]
        return KernelPoint(form, tuple(each)).scaled([scale] * len(each))

    @property
    def kernels(self) -> VariableKernels:
        """What makes kernels of points, without the rows."""
        return VariableKernels(self.categorical, self.given, self.maps)


@dataclass(frozen=True)
class TrialResult:
    """A candidate and its held-out losses.

    Attributes
    ----------
    x, y
        The kernels.
    reg
        The best ridge for them.
    joint, crps
        Held-out joint loss, and sliced CRPS over that of independence, or what is in its place.
    score
        What was minimised: 0 for independence, about -1 or -2 for the best.
    stage
        Where it came up: ``grid``, ``columns``, ``refine``; ``widen`` beyond the first bounds,
        ``rougher`` with Matern kernels of x, ``ignore`` with columns left out that nothing was lost
        by. After a search on fewer rows: its best, ``shortlist``, and the best of these moved on
        all rows, ``rescale``, where gradients are not known.
    """

    x: KernelPoint
    y: KernelPoint
    reg: float
    joint: float
    crps: float
    score: float
    stage: str

    __repr__ = brief_repr


@dataclass(frozen=True)
class TuningProgress:
    """How far the search for kernels is: trials of this stage, at most, and the best score.

    The score is None as long as no kernels were found that are better than independence. The ranks
    are those of the best kernels so far on the rows of the search, of x first. ``later`` are the
    trials of the stages that follow, at most. ``losses`` are held-out losses of the candidates
    since the last report, each with its best ridge: of several losses the first.
    """

    stage: str
    done: int
    most: int
    score: float | None
    ranks: tuple[int, ...] = ()
    later: int = 0
    losses: tuple[float, ...] = ()

    @property
    def best(self) -> str:
        """The best score, to be appended to a text."""
        return "" if self.score is None else f", best score {self.score:.3f}"


@dataclass(frozen=True)
class Score:
    """What a joint loss and a sliced CRPS (less that of independence) add up to.

    Each is taken over what the best candidate gains on independence, and weighted by the inverse
    variance of that gain over the folds: the noisier loss counts less. Independence has 0, the best
    of both -2 (-1 for a criterion that is one of them).

    Attributes
    ----------
    joint, crps
        Factors of the two.
    """

    joint: float = 1.0
    crps: float = 1.0

    def __call__(self, joint: Array, crps: Array) -> Array:
        """The score."""
        return self.joint * joint + self.crps * crps

    @classmethod
    def of(cls, criterion: str, gains: Sequence[float], errors: Sequence[float]) -> "Score":
        """From the gains of the best candidates and their standard errors: joint, CRPS."""
        # Of what is in the place of the sliced CRPS the gain is what counts, too.
        requested = ["joint" in criterion, criterion != "joint"]
        # Where nothing is gained independence is best, and any unit does.
        gained = np.maximum(gains, 1e-12)
        precision = (gained / np.maximum(errors, 1e-6 * gained)) ** 2 * requested
        factors = sum(requested) * precision / precision.sum() / gained
        return cls(float(factors[0]), float(factors[1]))


@dataclass(frozen=True, eq=False)
class KernelChoice:
    """What a finalist is made of."""

    kernel_x: Kernel
    kernel_y: Kernel
    reg: Regularization
    trial: TrialResult

    __repr__ = brief_repr


@dataclass(frozen=True, eq=False)
class Search:
    """The result of a search for the kernels of a joint distribution.

    Attributes
    ----------
    trials
        All candidates, in the order in which they were tried.
    finalists
        The best ones that differ, best first.
    functions
        The functions of y whose errors are compared, such as the events of the sliced CRPS.
    score
        Of a joint loss and a sliced CRPS.
    seconds
        What it took.
    kernels
        From points of x and y to kernels.
    reg
        The ridge, where it was given.
    form
        Of the ridges that were compared: ``reg_form`` of the estimator.
    criterion
        What was minimised.
    memory
        Predicted peak.
    """

    trials: tuple[TrialResult, ...]
    finalists: tuple[KernelChoice, ...]
    functions: ScoringFunctions
    score: Score
    seconds: float
    kernels: tuple[VariableKernels, VariableKernels] = field(repr=False)
    reg: Regularization | None
    form: str
    criterion: str
    memory: MemoryPlan | None = None

    __repr__ = brief_repr

    def candidate(self, trial: TrialResult) -> KernelChoice:
        """What a trial is made of.

        Parameters
        ----------
        trial
            One of ``trials``.
        """
        x, y = self.kernels
        reg = Regularization(trial.reg, trial.reg, self.form) if self.reg is None else self.reg
        return KernelChoice(x.kernel(trial.x), y.kernel(trial.y), reg, trial)
