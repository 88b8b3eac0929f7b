"""``DriftReport``: how the law of new rows differs from the one that a model was fitted on."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cme_dask.errors import DataError, printable
from cme_dask.models.plots import BLUE, PALETTE, picture
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.drift import Comparison, RatioFit
from cme_dask.numerics.operators import LEAST_EFFECTIVE, Expansion

Array = Any

LEVEL = 0.05
"""Adjusted p-values below it count as drift."""

_LEAST_MEAN = 0.5  # of a density ratio, whose mean is 1 where the model saw rows
_PANELS = 11  # columns that a picture shows, at most


@dataclass(frozen=True)
class ColumnDrift:
    """The law of one column by itself, before and after.

    Attributes
    ----------
    name, variable
        The column, and the variable ``"x"`` or ``"y"`` to which it belongs.
    before, after
        Mean and standard deviation, in the unit of the column; None of labels.
    pvalue
        Of equal laws of this column.
    adjusted
        The same by Holm's method over all columns of the report.
    values
        Values of the column, or its labels, at which the witness is evaluated; none where the model
        holds no rows.
    witness
        Mean of kernel sections after less that before: positive where there are more rows now. Of
        labels the differences of their shares.
    """

    name: str
    variable: str
    before: tuple[float, float] | None
    after: tuple[float, float] | None
    pvalue: float
    adjusted: float
    values: tuple[Any, ...]
    witness: tuple[float, ...]

    @property
    def moved(self) -> bool:
        """Whether the adjusted p-value is below 0.05."""
        return self.adjusted < LEVEL


@dataclass(frozen=True)
class ExpectationDrift:
    """The mean of a column of y: before, as it should be after by the model, and after.

    Attributes
    ----------
    name
        The column.
    before, expected, after
        Mean over the rows of the fit, mean of E[y | x] over the new rows x (the expectation under
        covariate shift), and mean over the new rows; in the unit of the column. Without new rows
        of y, ``after`` and what follows from it is None.
    std_error
        Of after - expected, by the folds.
    error_before, error_after
        Root mean squared errors of E[y | x] on held-out rows of the fit, and on the new rows.
    pvalue
        Of an unchanged E[y | x]; None where it was not tested.
    """

    name: str
    before: float
    expected: float
    after: float | None = None
    std_error: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    pvalue: float | None = None


@dataclass(frozen=True, eq=False)
class DriftReport:
    """How the law of new rows differs from the one that a model was fitted on.

    Made by :func:`cme_dask.drift_report`.

    Attributes
    ----------
    x, y
        Squared distances of the laws of x and of y (MMD), each with its mean if there is no drift
        and its p-value. ``y`` is None without new rows of y.
    y_given_x
        Likewise of residuals of y given x: whether the regressions of y on x are still right.
        None where it was not tested, see ``notes``.
    columns
        Each column by itself.
    expectations
        The means of the columns of y that hold numbers, and what the model makes of the new x.
    rows
        Number of rows of the fit, and of new rows.
    trace_errors
        Share of the kernel of x that the basis of the model misses, over the rows of the fit and
        over the new ones: large where new rows lie outside the support.
    effective
        Effective sample size of the density ratio of x, as a share of the rows of the fit.
    method
        How p-values were computed, ``"chi2"`` or ``"bootstrap"``.
    notes
        Sentences on tests that were not made, and why.
    seconds
        Wall time of the pass over the new rows.
    """

    x: Comparison
    y: Comparison | None
    y_given_x: Comparison | None
    columns: tuple[ColumnDrift, ...]
    expectations: tuple[ExpectationDrift, ...]
    rows: tuple[int, int]
    trace_errors: tuple[float | None, float | None]
    effective: float
    method: str
    notes: tuple[str, ...]
    seconds: float
    _ratio: RatioFit = field(repr=False)
    _basis: NewtonBasis = field(repr=False)

    def ratio(self) -> Expansion:
        """The non-negative density ratio r = dQ/dP of new rows x to those of the fit.

        :meth:`Sample.reweight` makes a sample with these weights, on which a fit is the one under
        covariate shift.

        Raises
        ------
        DataError
            If its effective sample size is below one percent of the rows of the fit, or its mean
            below one half, since the new rows lie outside the support.
        """
        mean, share = self._ratio.mean, self.effective
        if share < LEAST_EFFECTIVE or mean < _LEAST_MEAN:
            raise DataError(
                f"the effective sample size of the density ratio is {share:.2%} of the rows of the "
                f"fit (at least {LEAST_EFFECTIVE:.0%} are needed) and its mean is {mean:.2f} (it "
                "should be 1): the new rows lie where the fit had few; fit again with rows from "
                "there"
            )
        return Expansion(self._basis, self._ratio.slope, 1.0, non_negative=True)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        comparisons = {"x": self.x, "y": self.y, "y_given_x": self.y_given_x}
        return {
            **{name: c and c._asdict() for name, c in comparisons.items()},
            "columns": [asdict(each) | {"moved": each.moved} for each in self.columns],
            "expectations": [asdict(each) for each in self.expectations],
            "rows": list(self.rows),
            "trace_errors": list(self.trace_errors),
            "effective": self.effective,
            "ratio_mean": self._ratio.mean,
            "method": self.method,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def __repr__(self) -> str:
        laws = (("x", self.x), ("y", self.y), ("y given x", self.y_given_x))
        lines = [f"{name:<10} p = {law.pvalue:.3g}" for name, law in laws if law is not None]
        moved = ", ".join(each.name for each in self.columns if each.moved)
        lines += [f"{'moved':<10} {printable(moved) or 'no column'}"]
        lines += [f"{'ratio':<10} effective sample size {self.effective:.1%} of the rows"]
        rows = " -> ".join(f"{count:,}" for count in self.rows)
        return "\n  ".join([f"DriftReport ({rows} rows)", *lines])

    def plot(self, path: Any = None) -> Any:
        """Draw the witness of each column, and the means of the columns of y.

        The witness of a column is the change of the mean of kernel sections at each value: above
        zero there are more rows now than before, below it fewer.

        Parameters
        ----------
        path
            PNG file to write; default none.

        Returns
        -------
        figure : matplotlib.figure.Figure

        Raises
        ------
        ResourceError
            If matplotlib is not installed.
        """
        drawn = [column for column in self.columns if column.values]
        shown = sorted(drawn, key=lambda each: each.pvalue)[:_PANELS]
        count = len(shown) + bool(self.expectations)
        wide = min(count, 4)
        tall = -(-count // wide)
        with picture(path, 3.1 * wide, 2.5 * tall + 0.4, dpi=130) as figure:
            axes = figure.subplots(tall, wide, squeeze=False).ravel()
            for ax, column in zip(axes, shown, strict=False):
                _witness(ax, column)
            if self.expectations:
                _means(axes[len(shown)], self.expectations)
            for ax in axes[count:]:
                ax.set_axis_off()
            laws = (("x", self.x), ("y", self.y), ("y given x", self.y_given_x))
            title = ", ".join(f"{name}: p = {law.pvalue:.2g}" for name, law in laws if law)
            figure.suptitle(title, fontsize=10)
        return figure


def _witness(ax: Any, column: ColumnDrift) -> None:
    colour = PALETTE[1] if column.moved else BLUE
    values, witness = list(column.values), np.array(column.witness)
    if column.before is None:
        ax.barh(range(len(values)), witness, color=colour)
        ax.set_yticks(range(len(values)), [str(value) for value in values])
        ax.axvline(0.0, color="k", lw=0.6)
        ax.set_xlabel("change of the share of rows")
    else:
        ax.plot(values, witness, "o-", ms=3, color=colour)
        ax.fill_between(values, witness, alpha=0.2, color=colour, lw=0)
        ax.axhline(0.0, color="k", lw=0.6)
        ax.set(xlabel=column.name, ylabel="more rows now (> 0)")
    ax.set_title(f"{column.name}: p = {column.pvalue:.2g}", fontsize=9.5)


def _means(ax: Any, expectations: tuple[ExpectationDrift, ...]) -> None:
    """Means after, and expected ones, less those before, in held-out errors or standard units."""
    places = np.arange(len(expectations))
    for i, each in enumerate(expectations):
        scale = each.error_before or 1.0
        ax.plot((each.expected - each.before) / scale, i, "o", color=BLUE, ms=6)
        if each.after is not None:
            ax.plot((each.after - each.before) / scale, i, "s", color=PALETTE[1], ms=6)
    ax.axvline(0.0, color="k", lw=0.6)
    ax.set_yticks(places, [each.name for each in expectations])
    ax.set(ylim=(len(places) - 0.5, -0.5), xlabel="change, in errors of E[y | x]")
    labels = ["expected under the shift of x", "seen"]
    ax.legend(ax.lines[: 1 + (expectations[0].after is not None)], labels, fontsize=7.5)
    ax.set_title("means of y", fontsize=9.5)
