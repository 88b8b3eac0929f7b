"""Faster arithmetic for the moments, admitted where a trial shows that the answers stay.

Two shortcuts save work: to solve between blocks of pivots only (:class:`BlockSolve`, with one
block the solve comes last), and to multiply in float32. What they cost depends on kernel, pivots,
ridge and data, and worst-case bounds are too large by orders of magnitude to be of use. So before
the pass each is tried on rows of the row sample, and its answers are compared with those of the
safe form on the same rows: solve first, float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from cme_dask.kernels.evaluator import parallel_map
from cme_dask.numerics.basis import BlockSolve
from cme_dask.numerics.moments import MomentReduction, Moments, strip_moments
from cme_dask.numerics.problem import JointSolution

Array = Any
Change = Callable[[Moments], Callable[[Moments], float]]
"""From the safe moments of the trial rows to the change in others: what is compared is made once.
"""

TRIAL_ROWS = 2048
"""Rows of a trial, or twice the rank where that is more."""

TRIALS = 2
"""Trials at once: most of further ones would be needless, and each takes some sums of memory."""

_POINTS = 256  # at whose pairs density ratios are compared
_FRACTIONS = (
    (),
    (0.1,),
    (0.15,),
    (0.2,),
    (0.27,),
    (0.35,),
    (0.5,),
    (1 / 3, 2 / 3),
    (0.25, 0.5, 0.75),
)
_TAU = 1e-3  # change of tau, in tol, that is as bad as the accuracy
_SINGLE_COST = 0.55  # of a float32 product, in float64 ones
_CAST_COST = 50  # of a value that becomes float32, in operations: products of few don't pay for it
_SINGLE_LEAST = 1e-8  # relative error that float32 products have in any case


@dataclass(frozen=True)
class ComputeMode:
    """A way to compute the moments, and what it changed in the answers where it was tried.

    Attributes
    ----------
    fractions
        Borders between the blocks (see ``BlockSolve.between``); None if solved wholly.
    single
        Whether the products of the bases are float32.
    change
        Largest change against the safe form, NaN if it was not tried.
    name
        The way in words.
    """

    fractions: tuple[float, ...] | None = None
    single: bool = False
    change: float = float("nan")
    name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.fractions is None:
            solve = "solve first"
        elif not self.fractions:
            solve = "solve last"
        else:
            solve = f"solve between {len(self.fractions) + 1} blocks first"
        name = f"{solve}, {'float32' if self.single else 'float64'} products"
        object.__setattr__(self, "name", name)

    def applied(self, spec: MomentReduction) -> MomentReduction:
        """The same moments computed this way."""
        if self.fractions is None:
            solves: list[Any] = [None for _ in spec.features]
        else:
            solves = [BlockSolve.between(b.basis.factor, self.fractions) for b in spec.features]
        pairs = zip(spec.features, solves, strict=True)
        return replace(
            spec,
            features=tuple(replace(block, solve=solve) for block, solve in pairs),
            single=self.single,
        )


SAFE = ComputeMode()


def fastest_mode(
    spec: MomentReduction,
    parts: tuple[Array, ...],
    accuracy: float,
    change: Change,
    cores: int = 1,
) -> tuple[ComputeMode, tuple[ComputeMode, ...]]:
    """The cheapest arithmetic whose answers on trial rows change by ``accuracy`` at most.

    Parameters
    ----------
    spec
        What the pass will compute.
    parts
        Trial rows of each variable, shapes (T, d).
    accuracy
        Largest change admitted; the safe form is taken where nothing else is.
    change
        Compares the moments of a trial with the safe ones, see :data:`Change`.
    cores
        How many are tried at once.

    Returns
    -------
    chosen, refused
    """
    alone = replace(spec, n_folds=1)
    folds = np.zeros(len(parts[0]), dtype=np.uint8)
    tried: list[ComputeMode] = []

    def moments(arithmetic: ComputeMode) -> Moments:
        applied = arithmetic.applied(alone)
        # A shortcut that fails may do so loudly.
        with np.errstate() if arithmetic is SAFE else np.errstate(all="ignore"):
            return strip_moments(applied, parts, None, folds).means()

    def change_of(trial: Moments) -> float:
        with np.errstate(all="ignore"):
            return float(change_from_safe(trial))

    def admitted(option: ComputeMode, largest: float) -> bool:
        tried.append(replace(option, change=largest))
        return largest <= accuracy

    def first_admitted(options: Sequence[ComputeMode]) -> bool:
        for start in range(0, len(options), cores):
            some = options[start : start + cores]
            changes = parallel_map(lambda option: change_of(moments(option)), some, cores)
            if any(map(admitted, some, changes)):
                return True
        return False

    # Most often float32 fails whatever else is done: one trial is enough to know.
    float32 = [ComputeMode(single=True)] if accuracy > _SINGLE_LEAST else []
    safe, *others = parallel_map(moments, [SAFE, *float32], cores)
    change_from_safe = change(safe)
    single = any(map(admitted, float32, map(change_of, others)))
    del safe, others  # sums are large
    if first_admitted(_candidates(spec, single)):
        return tried[-1], tuple(tried[:-1])
    return SAFE, tuple(tried)


def _candidates(spec: MomentReduction, single: bool) -> list[ComputeMode]:
    """Shortcuts cheaper than the safe form, the cheapest first."""
    options = [ComputeMode(fractions) for fractions in _FRACTIONS]
    if single:
        options += [ComputeMode(fractions, single=True) for fractions in (*_FRACTIONS, None)]
    priced = [(_cost(spec, option), option) for option in options]
    most = _cost(spec, SAFE)
    return [option for cost, option in sorted(priced, key=lambda p: p[0]) if cost < most]


def _cost(spec: MomentReduction, arithmetic: ComputeMode) -> float:
    applied = arithmetic.applied(spec)
    solve = sum(block.solve_flops for block in applied.features)
    if arithmetic.single:
        return solve + applied.width**2 * _SINGLE_COST + sum(applied.ranks) * _CAST_COST
    return solve + applied.width**2


@dataclass(frozen=True, eq=False)
class JointChange:
    """Largest change of g at pairs of trial rows, and of E[f | z] there in standard deviations.

    Parameters
    ----------
    spec, parts
        What the pass will compute, and the trial rows.
    solve
        From moments to the solution of the fit.
    """

    spec: MomentReduction
    parts: tuple[Array, ...]
    solve: Callable[[Moments], JointSolution]

    def __call__(self, safe: Moments) -> Callable[[Moments], float]:
        """The change from these moments of the trial rows to others."""
        ratio, *answers = self._answers(safe)
        # An event that no trial row saw has no deviation, and must not change at all.
        scales = [  # of functions of y, given x, first
            np.sqrt(np.diag(safe.blocks[f"f({v})", f"f({v})"]))
            + 1e-6 * np.abs(safe.function_means(v))
            + np.finfo(np.float64).tiny
            for v in "yx"
        ]

        def change(tried: Moments) -> float:
            if not all(np.isfinite(tried.blocks[v, v]).all() for v in tried.traces):
                return np.inf
            other, *others = self._answers(tried)
            result = [np.abs(other - ratio).max()]
            for one, two, unit in zip(others, answers, scales, strict=True):
                result.append((np.abs(one - two).max(axis=0) / unit).max(initial=0.0))
            return float(np.max(result))

        return change

    def _answers(self, mean: Moments) -> tuple[Array, Array, Array]:
        solution = self.solve(mean)
        return self._ratio(solution), *(self._expectation(solution, mean, s) for s in (0, 1))

    @cached_property
    def _newton(self) -> list[Array]:
        pairs = zip(self.spec.features, self.parts, strict=True)
        return [block.basis(part[:_POINTS]) for block, part in pairs]

    def _ratio(self, solution: JointSolution) -> Array:
        psi_x = self._newton[0] @ solution.transform_x
        psi_y = self._newton[1] @ solution.transform_y
        return psi_x @ solution.coef.T @ psi_y.T

    def _expectation(self, solution: JointSolution, mean: Moments, given: int) -> Array:
        constant, slope = solution.answer(mean, given)
        transform = (solution.transform_x, solution.transform_y)[given]
        return constant + self._newton[given] @ (transform @ slope)


@dataclass(frozen=True)
class SpectrumChange:
    """Largest relative change of an eigenvalue of E[N N^T]; tau must stay, within 1e-3 tol.

    Eigenvalues below the rounding of the largest, eps m lam_max, are left out: no form has them.

    Parameters
    ----------
    tol
        Relative trace error aimed at.
    accuracy
        What will be admitted: a change of tau by 1e-3 tol counts as much.
    """

    tol: float
    accuracy: float

    def __call__(self, safe: Moments) -> Callable[[Moments], float]:
        """The change from these moments of the trial rows to others."""
        reference = np.linalg.eigvalsh(safe.blocks["x", "x"])
        seen = reference > np.finfo(np.float64).eps * len(reference) * reference[-1]

        def change_of(tried: Moments) -> float:
            if not np.isfinite(tried.blocks["x", "x"]).all():
                return np.inf
            tau = (
                abs(np.trace(tried.blocks["x", "x"]) - np.trace(safe.blocks["x", "x"]))
                / safe.traces["x"]
            )
            result = np.abs(
                np.linalg.eigvalsh(tried.blocks["x", "x"])[seen] / reference[seen] - 1.0
            )
            change = max(result.max(initial=0.0), self.accuracy * tau / (_TAU * self.tol))
            return float(change)

        return change_of
