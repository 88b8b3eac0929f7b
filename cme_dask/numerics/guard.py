"""Faster arithmetic for the moments, admitted where a trial shows that the answers stay.

Two shortcuts save work: to solve between blocks of pivots only (:class:`Elimination`, with one
block the solve comes last), and to multiply in float32. What they cost depends on kernel, pivots,
ridge and data, and worst-case bounds are too large by orders of magnitude to be of use. So before
the pass each is tried on rows of the row sample, and its answers are compared with those of the
safe form on the same rows: solve first, float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cme_dask.numerics.elimination import Elimination
from cme_dask.numerics.joint import JointSolution
from cme_dask.numerics.moments import MeanMoments, MomentSpec

Array = Any
Change = Callable[[MeanMoments, MeanMoments], float]

TRIAL_ROWS = 2048
"""Rows of a trial, or twice the rank where that is more."""

_POINTS = 256  # at whose pairs density ratios are compared
_FRACTIONS = ((), (0.2,), (0.27,), (0.35,), (0.5,), (1 / 3, 2 / 3), (0.25, 0.5, 0.75))
_TAU_WEIGHT = 1e-2  # an accuracy of 1e-5 lets tau change by 1e-3 tol
_SINGLE_COST = 0.55  # of a float32 product, in float64 ones
_SINGLE_LEAST = 1e-8  # relative error that float32 products have in any case


@dataclass(frozen=True)
class Arithmetic:
    """A way to compute the moments, and what it changed in the answers where it was tried.

    Attributes
    ----------
    fractions
        Borders between the blocks (see :meth:`Elimination.between`); None if solved wholly.
    single
        Whether the products of the bases are float32.
    change
        Largest change against the safe form, NaN if it was not tried.
    """

    fractions: tuple[float, ...] | None = None
    single: bool = False
    change: float = float("nan")

    @property
    def name(self) -> str:
        """In words."""
        if self.fractions is None:
            solve = "solve first"
        elif not self.fractions:
            solve = "solve last"
        else:
            solve = f"solve between {len(self.fractions) + 1} blocks first"
        return f"{solve}, {'float32' if self.single else 'float64'} products"

    def applied(self, spec: MomentSpec) -> MomentSpec:
        """The same moments computed this way."""
        if self.fractions is None:
            forms = [Elimination.whole(side.basis.rank) for side in spec.sides]
        else:
            forms = [Elimination.between(s.basis.factor, self.fractions) for s in spec.sides]
        pairs = zip(spec.sides, forms, strict=True)
        return replace(
            spec,
            sides=tuple(replace(side, elimination=form) for side, form in pairs),
            single=self.single,
        )


SAFE = Arithmetic()


def choose_arithmetic(
    spec: MomentSpec, parts: tuple[Array, ...], accuracy: float, change: Change
) -> tuple[Arithmetic, tuple[Arithmetic, ...]]:
    """The cheapest arithmetic whose answers on trial rows change by ``accuracy`` at most.

    Parameters
    ----------
    spec
        What the pass will compute.
    parts
        Trial rows of each side, shapes (T, d).
    accuracy
        Largest change admitted; the safe form is taken where nothing else is.
    change
        Compares the moments of a trial with the safe ones.

    Returns
    -------
    chosen, refused
    """
    alone = replace(spec, n_folds=1)
    folds = np.zeros(len(parts[0]), dtype=np.uint8)

    def moments(arithmetic: Arithmetic) -> MeanMoments:
        applied = arithmetic.applied(alone)
        return MeanMoments.of(applied.strip(parts, None, folds), applied.sides)

    safe = moments(SAFE)
    tried: list[Arithmetic] = []

    def admitted(arithmetic: Arithmetic) -> bool:
        with np.errstate(all="ignore"):  # a shortcut that fails may do so loudly
            found = float(change(moments(arithmetic), safe))
        tried.append(replace(arithmetic, change=found))
        return found <= accuracy

    # Most often float32 fails whatever else is done: one trial is enough to know.
    single = accuracy > _SINGLE_LEAST and admitted(Arithmetic(single=True))
    for arithmetic in _candidates(spec, single):
        if admitted(arithmetic):
            return tried[-1], tuple(tried[:-1])
    return SAFE, tuple(tried)


def _candidates(spec: MomentSpec, single: bool) -> list[Arithmetic]:
    """Shortcuts cheaper than the safe form, the cheapest first."""
    options = [Arithmetic(fractions) for fractions in _FRACTIONS]
    if single:
        options += [Arithmetic(fractions, single=True) for fractions in (*_FRACTIONS, None)]
    priced = [(_cost(spec, option), option) for option in options]
    most = _cost(spec, SAFE)
    return [option for cost, option in sorted(priced, key=lambda p: p[0]) if cost < most]


def _cost(spec: MomentSpec, arithmetic: Arithmetic) -> float:
    applied = arithmetic.applied(spec)
    solve = sum(side.eliminated.flops for side in applied.sides)
    return solve + applied.width**2 * (_SINGLE_COST if arithmetic.single else 1.0)


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

    spec: MomentSpec
    parts: tuple[Array, ...]
    solve: Callable[[MeanMoments], JointSolution]

    def __call__(self, tried: MeanMoments, safe: MeanMoments) -> float:
        """The change between two moments of the trial rows."""
        if not all(np.isfinite(gram).all() for gram in tried.gram):
            return np.inf
        both = [(self.solve(mean), mean) for mean in (tried, safe)]
        ratios = [self._ratio(solution) for solution, _ in both]
        found = [np.abs(ratios[0] - ratios[1]).max()]
        square = np.diag(safe.function_gram)
        means = np.concatenate(safe.function_mean)
        # An event that no trial row saw has no deviation, and must not change at all.
        scale = np.sqrt(square) + 1e-6 * np.abs(means) + np.finfo(np.float64).tiny
        count = len(safe.function_mean[0])
        for given, here in ((0, slice(count, None)), (1, slice(0, count))):
            answers = [self._expectation(solution, mean, given) for solution, mean in both]
            found.append((np.abs(answers[0] - answers[1]) / scale[here]).max(initial=0.0))
        return float(np.max(found))

    @cached_property
    def _newton(self) -> list[Array]:
        pairs = zip(self.spec.sides, self.parts, strict=True)
        return [side.basis(part[:_POINTS]) for side, part in pairs]

    def _ratio(self, solution: JointSolution) -> Array:
        psi_x = self._newton[0] @ solution.transform_x
        psi_y = self._newton[1] @ solution.transform_y
        return psi_x @ solution.coef.T @ psi_y.T

    def _expectation(self, solution: JointSolution, mean: MeanMoments, given: int) -> Array:
        constant, slope = solution.answer(mean, given)
        transform = (solution.transform_x, solution.transform_y)[given]
        return constant + self._newton[given] @ (transform @ slope)


@dataclass(frozen=True)
class SpectrumChange:
    """Largest relative change of an eigenvalue of E[N N^T], and of tau in hundreds of ``tol``.

    Eigenvalues below the rounding of the largest, eps m lam_max, are left out: no form has them.
    """

    tol: float

    def __call__(self, tried: MeanMoments, safe: MeanMoments) -> float:
        """The change between two moments of the trial rows."""
        if not np.isfinite(tried.gram[0]).all():
            return np.inf
        trace = abs(np.trace(tried.gram[0]) - np.trace(safe.gram[0])) / safe.trace[0]
        change = float(_TAU_WEIGHT * trace / self.tol)
        lam, reference = (np.linalg.eigvalsh(mean.gram[0]) for mean in (tried, safe))
        seen = reference > np.finfo(np.float64).eps * len(reference) * reference[-1]
        return max(change, float(np.abs(lam[seen] / reference[seen] - 1.0).max(initial=0.0)))
