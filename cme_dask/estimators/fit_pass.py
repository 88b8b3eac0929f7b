"""The pass of a fit, apart from what precedes and follows it: so that two fits can share one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from cme_dask.data.sample import Sample
from cme_dask.estimators.context import FitContext
from cme_dask.numerics.given_location import BesideResiduals
from cme_dask.numerics.location import Residuals
from cme_dask.numerics.reduction import Cost, OfParts, Reduction
from cme_dask.passes.run import PassReport, run_pass

First = TypeVar("First")
Second = TypeVar("Second")
Made = TypeVar("Made")
Next = TypeVar("Next")


@dataclass(frozen=True, eq=False)
class FitPass(Generic[Made]):
    """A fit that has prepared its pass over the rows.

    Attributes
    ----------
    context
        What the fit had before.
    reductions
        What its pass computes.
    around
        What the client needs before and after the pass, and holds meanwhile.
    finish
        From their results, and the report of the pass, to what the fit makes of them.
    """

    context: FitContext
    reductions: Sequence[Reduction[Any, Any]]
    around: Cost
    finish: Callable[[Sequence[Any], PassReport], Made]

    def run(self) -> Made:
        """Make the pass, and finish."""
        context = self.context
        return self.finish(
            *run_pass(
                context.sample,
                self.reductions,
                context.executor,
                context.progress,
                around=self.around,
            )
        )

    def then(self, function: Callable[[Made], Next]) -> "FitPass[Next]":
        """The same pass, with a function of what the fit makes of it."""

        def finish(results: Sequence[Any], report: PassReport) -> Next:
            return function(self.finish(results, report))

        return FitPass(self.context, self.reductions, self.around, finish)


def beside_residuals(sample: Sample, residuals: Residuals) -> Sample:
    """Rows (x, y, x', e) of rows (x, y): for a pass of a fit to them and of one to residuals."""
    return replace(sample, residuals=BesideResiduals(residuals))


def of_both(
    plain: Sequence[Reduction[Any, Any]], moved: Sequence[Reduction[Any, Any]]
) -> list[Reduction[Any, Any]]:
    """The reductions of a fit to (x, y) and of one to (x', e), of rows (x, y, x', e)."""
    return [*(OfParts(one, 0) for one in plain), *(OfParts(one, 2) for one in moved)]


def run_both(
    plain: FitPass[First],
    moved: FitPass[Second],
    residuals: Residuals,
    between: Callable[[], None],
) -> tuple[First, Second]:
    """Make one pass for two fits: one to the rows, and one to residuals of them.

    Parameters
    ----------
    plain, moved
        The fits.
    residuals
        What the second one is fitted to, of the rows of the first.
    between
        Called when the first fit has finished.
    """
    context = plain.context
    results, report = run_pass(
        beside_residuals(context.sample, residuals),
        of_both(plain.reductions, moved.reductions),
        context.executor,
        context.progress,
        around=plain.around + moved.around,
        named=context.sample,
    )
    count = len(plain.reductions)
    first = plain.finish(results[:count], report)
    between()
    return first, moved.finish(results[count:], report)
