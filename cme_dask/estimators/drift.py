"""``drift_report``: new rows beside the law that a saved model holds, in one pass over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.errors import DataError
from cme_dask.estimators.base import CHECKS, check_choice
from cme_dask.estimators.hypotheses import METHODS, RESAMPLES, no_mixture
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.models.answers import ConditionalExpectation
from cme_dask.models.drift import ColumnDrift, DriftReport, ExpectationDrift
from cme_dask.models.embedding import EmbeddedVariable, EmbeddingModel
from cme_dask.models.joint import JointModel, Variable
from cme_dask.numerics.basis import LinearBasis, NewtonBasis, StackedBasis
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.drift import (
    ColumnSections,
    Comparison,
    FeatureSums,
    RowValues,
    adjusted,
    compare,
    conditional_terms,
    fit_ratio,
)
from cme_dask.numerics.independence import MIN_FOLDS, sign_flip_pvalue
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, Moments, MomentSums
from cme_dask.numerics.weighted import WeightedMeans, WeightedMoments
from cme_dask.passes.driver import FitKeywords, options_of, with_run_options
from cme_dask.passes.held_out import rows_of
from cme_dask.reductions import Reduction, run

Array = Any

FOLDS = 16
"""Folds of the new rows, by default."""

_LEAST_ROWS = 30


@with_run_options
def drift_report(
    model: Any,
    X: Any,
    Y: Any = None,
    *,
    weights: Any = None,
    method: str = "auto",
    n_folds: int = FOLDS,
    n_resamples: int = RESAMPLES,
    random_state: int | None = None,
    **keywords: Unpack[FitKeywords],
) -> DriftReport:
    r"""Compare new rows with the law that a model was fitted on.

    Drift of x, drift of y and drift of y given x are distinguished: the laws of x and of y by

    .. math:: \| \mathrm E_Q N - \mathrm E_P N \|^2

    in the bases of the model, and y given x by the residuals of one regression of the basis
    functions and columns of y on x over both sets of rows. The model holds the moments of P, so
    that one pass over the new rows suffices, and none over those of the fit. Of a mean of several
    models they are those of the best one.

    Parameters
    ----------
    model
        A fitted joint distribution, conditional mean embedding or classifier of these, or its
        model.
    X, Y, weights
        New rows with the columns of the model: of x and y, or of x alone; as in
        :func:`cme_dask.score`. Folds of a ``Sample`` say which rows depend on each other.
    method
        How p-values of x, y and columns are computed, as in :func:`cme_dask.two_sample_test`;
        ``"auto"``: by the bootstrap if rows have weights, or fold by groups or times.
    n_folds, n_resamples
        Folds of the new rows, and random signs of the bootstrap. That of y given x is always one.
    random_state
        Seed of random signs; default 0.
    **keywords
        As in :class:`RunOptions`.

    Returns
    -------
    DriftReport

    Raises
    ------
    DataError
        On other models, rows with other columns or labels or fewer than 30, or as
        :func:`cme_dask.two_sample_test`.
    ResourceError
        If memory would not suffice; nothing has been read then.

    Notes
    -----
    Sources: Gretton et al. (2012), A kernel two-sample test, section 5; Kanamori, Hido and
    Sugiyama (2009), for the density ratio. The test of y given x compares two regressions at the
    new rows as Chow (1960) does, in feature space.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(500, 1))
    >>> fit = JointDistribution(kernel_x=kernels.Gaussian(1.0), kernel_y=kernels.Gaussian(1.0))
    >>> report = drift_report(fit.fit(x, x**2), x[:200] + 1.0)
    >>> report.x.pvalue < 1e-6
    True
    """
    fitted = getattr(model, "model_", model)
    if not isinstance(fitted, (JointModel, EmbeddingModel)):
        raise DataError(
            "drift_report takes a fitted joint distribution, conditional mean embedding or "
            f"classifier of these, got {type(model).__name__}"
        )
    check_choice("method", method, METHODS)
    CHECKS["n_folds"]("n_folds", n_folds)
    CHECKS["max_rank"]("n_resamples", n_resamples)
    CHECKS["random_state"]("random_state", random_state or 0)
    reference = _Reference(fitted)
    sample = rows_of(fitted, X, Y, weights)
    if method == "auto":
        independent = sample.weights is None and sample.folding.by == "rows"
        method = "chi2" if independent and not reference.dependent else "bootstrap"
    elif method == "chi2" and (sample.weights is not None or reference.weighted):
        raise no_mixture()
    variables = "xy"[: len(sample.columns)]
    sections = {name: reference.sections(name) for name in variables}
    reductions: list[Reduction[Any, Any]] = [reference.moments(variables, n_folds)]
    reductions += reference.alone(sections, n_folds)
    (sums, *alone), report = run(sample, reductions, options_of(keywords, FitKeywords))
    if report.rows < _LEAST_ROWS:
        raise DataError(
            f"at least {_LEAST_ROWS} rows are needed to test for drift, got {report.rows}"
        )
    with one_blas_thread():
        seed = random_state or 0
        made = _Comparisons(reference, sums, alone, sections, method, n_resamples, seed)
        return made.report(sample, report.seconds)


@dataclass(frozen=True, eq=False)
class _Reference:
    """What a model holds of the law of its rows, in the basis of its first member."""

    model: JointModel | EmbeddingModel

    @cached_property
    def sums(self) -> MomentSums:
        """Sums over the rows by fold."""
        return self.model.moment_sums()

    @cached_property
    def mean(self) -> Moments:
        """Means over all rows."""
        return self.sums.means()

    @property
    def dependent(self) -> bool:
        """Whether rows of the fit had weights, or folded by groups or times."""
        return self.weighted or self.folded

    @property
    def weighted(self) -> bool:
        """Whether rows of the fit had weights."""
        weights = self.sums.weights * self.sums.n_rows / self.mean.weight
        return not np.allclose(weights, self.sums.rows, rtol=1e-9)

    @property
    def folded(self) -> bool:
        """Whether rows of the fit folded by groups or times."""
        return bool(self.model.about.get("fold_by", "rows") != "rows")

    def variable(self, name: str) -> Variable | EmbeddedVariable:
        return self.model.x if name == "x" else self.model.y

    def basis(self, name: str) -> Any:
        return self.variable(name).basis.newton.parts[0]

    def labels(self, name: str) -> tuple[int, ...]:
        """Number of labels of each column, 0 of columns of numbers."""
        columns = self.variable(name).columns
        return tuple(len(columns.categories.get(each, ())) for each in columns.names)

    def cells(self, name: str) -> CellStatistics | None:
        """Those of a joint distribution."""
        return getattr(self.variable(name), "cells", None)

    def sections(self, name: str) -> ColumnSections | None:
        """Functions of each column alone; None if the model holds no rows to average them over.

        Also None if rows fold by groups or times: the model does not hold the folds of its rows.
        """
        cells = self.cells(name)
        if cells is None or self.folded:
            return None
        return ColumnSections.of(cells, self.labels(name))

    @property
    def numeric(self) -> list[int]:
        """Positions of the columns of y that hold numbers."""
        return [j for j, count in enumerate(self.labels("y")) if not count]

    def moments(self, variables: str, n_folds: int) -> MomentReduction:
        """Moments of the new rows, of the same functions and with the same shifts."""
        blocks = []
        for name in variables:
            names = self.variable(name).columns.names
            shift = self.mean.shifts[name][: len(names)]
            blocks.append(FeatureBlock(self.basis(name), names, shift=shift))
        return MomentReduction(tuple(blocks), n_folds)

    def alone(
        self, sections: Mapping[str, ColumnSections | None], n_folds: int
    ) -> list[WeightedMoments]:
        """Sections of columns; and E[y | x] and the columns of y, less their means before."""
        numeric, model = self.numeric, self.model
        values: dict[str, tuple[Any, ...]] = {"x": (), "y": ()}
        if numeric:
            centre = self.means("y")[numeric]
            names = [model.y.columns.names[j] for j in numeric]
            answers = model.x.answers if isinstance(model, JointModel) else model.answers
            values["x"] = (_Expected(names, answers, model.x.basis, centre),)
            values["y"] = (_Centred(tuple(numeric), centre),)
        bases = []
        for name, each in sections.items():
            functions = values[name] if each is None else (each, *values[name])
            count = 0 if each is None else sum(each.sizes)
            bases.append(RowValues(functions, count + len(numeric)))
        return [WeightedMoments(tuple(bases), ({"1": _ones},), n_folds)] if bases[0].rank else []

    def features(self, name: str) -> FeatureSums:
        """Sums of the basis functions."""
        return FeatureSums.of_block(self.sums, name)

    def means(self, name: str) -> Array:
        """Means of the columns over the rows of the fit."""
        return self.mean.function_means(name)[: len(self.variable(name).columns.names)]

    def deviations(self, name: str) -> Array:
        """Standard deviations of the columns over the rows of the fit."""
        return _deviations(self.mean, name)[: len(self.variable(name).columns.names)]


def _deviations(mean: Moments, name: str) -> Array:
    f = f"f({name})"
    squares = np.diag(mean.blocks[f, f]) - mean.means[f] ** 2
    return np.sqrt(np.maximum(squares, 0.0))


@dataclass(frozen=True, eq=False)
class _Comparisons:
    """Everything that the report says, from the moments of both sets of rows."""

    reference: _Reference
    sums: MomentSums
    alone: Sequence[WeightedMeans]
    sections: Mapping[str, ColumnSections | None]
    method: str
    n_resamples: int
    seed: int

    def report(self, sample: Sample, seconds: float) -> DriftReport:
        reference, has_y = self.reference, "y" in self.sections
        before = {name: reference.features(name) for name in self.sections}
        after = {name: FeatureSums.of_block(self.sums, name) for name in self.sections}
        laws = {name: self._compare(before[name], after[name]) for name in self.sections}
        given, pvalues, note = self._given()
        notes = [note] if note else []
        if self.sections["x"] is None:
            reason = (
                "Rows of the fit fold by groups or times"
                if reference.folded
                else "The model holds no rows"
            )
            notes.append(
                f"{reason}: columns of numbers are compared by their means alone, those of labels "
                "not by themselves."
            )
        ratio = fit_ratio(before["x"], after["x"])
        basis = reference.basis("x")
        spanned = isinstance(basis, NewtonBasis)
        if not spanned:
            notes.append("A coupling has no basis on pivots: its density ratio can't be used.")
        trace = reference.model.about["trace_error"]["x"] if spanned else None
        return DriftReport(
            laws["x"],
            laws.get("y"),
            given,
            self._columns(),
            self._expectations(pvalues, has_y),
            (int(reference.model.about["rows"]), self.sums.n_rows),
            (trace, self.sums.means().trace_error[0] if spanned else None),
            ratio.effective,
            self.method,
            tuple(notes),
            seconds,
            ratio,
            basis,
        )

    def _compare(self, before: FeatureSums, after: FeatureSums) -> Comparison:
        return compare(before, after, self.method, self.n_resamples, self.seed)

    def _given(self) -> tuple[Comparison | None, dict[int, float], str]:
        """The test of y given x, p-values by column of y, and why it was not made."""
        sums, columns = self.reference.sums, self.reference.model.y.columns
        if "y" not in self.sections:
            return None, {}, "There are no new rows of y: drift of y was not tested."
        if len(sums.held_out_folds) < 2:
            return None, {}, "Drift of y given x was not tested: the fit kept no folds."
        if np.count_nonzero(self.sums.weights > 0.0) < MIN_FOLDS:
            folds = f"the new rows lie in fewer than {MIN_FOLDS} folds"
            return None, {}, f"Drift of y given x was not tested: {folds}."
        terms = conditional_terms(sums, self.sums, len(columns.names))
        rank = terms.shape[2] - len(columns.names)

        def pvalue(part: Array) -> float:
            return sign_flip_pvalue(part.reshape(len(terms), -1), self.n_resamples, self.seed)

        every = terms[:, :, :rank]
        total = Comparison(
            float((every.sum(axis=0) ** 2).sum()), float((every**2).sum()), pvalue(every)
        )
        each = {j: pvalue(terms[:, :, rank + j]) for j in self.reference.numeric}
        return total, each, ""

    def _columns(self) -> tuple[ColumnDrift, ...]:
        reference, rows, mean = self.reference, [], self.sums.means()
        for name, sections in self.sections.items():
            columns = reference.variable(name).columns
            before, after, places = self._functions_of_columns(name, sections)
            (first, _), (second, _) = before.means(), after.means()
            old = reference.means(name), reference.deviations(name)
            new = mean.function_means(name), _deviations(mean, name)
            for j, (column, place) in enumerate(zip(columns.names, places, strict=True)):
                labels = columns.categories.get(column)
                if labels and sections is None:
                    continue
                rows.append(
                    (
                        column,
                        name,
                        None if labels else (float(old[0][j]), float(old[1][j])),
                        None if labels else (float(new[0][j]), float(new[1][j])),
                        self._compare(before.only(place), after.only(place)).pvalue,
                        tuple(labels or sections.centres(j).tolist()) if sections else (),
                        tuple((second - first)[place].tolist()) if sections else (),
                    )
                )
        pvalues = adjusted(np.array([row[4] for row in rows]))
        return tuple(
            ColumnDrift(*row[:5], float(pvalue), *row[5:])
            for row, pvalue in zip(rows, pvalues, strict=True)
        )

    def _functions_of_columns(
        self, name: str, sections: ColumnSections | None
    ) -> tuple[FeatureSums, FeatureSums, list[slice]]:
        """Sums of the functions of columns before and after, and where those of each column are."""
        if sections is None:
            before, after = (
                FeatureSums.of_block(sums, f"f({name})")
                for sums in (self.reference.sums, self.sums)
            )
            return before, after, [slice(j, j + 1) for j in range(len(self.reference.labels(name)))]
        cells = self.reference.cells(name)
        assert cells is not None  # sections are made from them
        before = FeatureSums.of_cells(cells, sections, self.sums.n_folds)
        after = FeatureSums.of(self.alone[0].weights, self._alone, name, self.sums.n_rows)
        return before, after.only(slice(0, sum(sections.sizes))), sections.places

    def _alone(self, fold: int | None = None) -> Moments:
        (mean,) = self.alone[0].means(fold=fold).values()
        return mean

    def _expectations(
        self, pvalues: Mapping[int, float], has_y: bool
    ) -> tuple[ExpectationDrift, ...]:
        reference, numeric = self.reference, self.reference.numeric
        if not numeric:
            return ()
        centre = reference.means("y")[numeric]
        names = [reference.model.y.columns.names[j] for j in numeric]
        mean, last = self._alone(), slice(-len(numeric), None)
        expected = mean.means["x"][last]
        result: list[dict[str, Any]] = [
            {"name": name, "before": float(c), "expected": float(c + e)}
            for name, c, e in zip(names, centre, expected, strict=True)
        ]
        if has_y:
            seen, weights = mean.means["y"][last], self.sums.weights / self.sums.weights.sum()
            folds = [self._alone(int(f)) for f in np.flatnonzero(weights > 0.0)]
            gaps = np.stack([each.means["y"][last] - each.means["x"][last] for each in folds])
            gaps = weights[weights > 0.0, None] * (gaps - (seen - expected))
            errors = np.sqrt((gaps**2).sum(axis=0) * len(gaps) / max(len(gaps) - 1, 1))
            square = np.diag(mean.blocks["y", "y"])[last] + np.diag(mean.blocks["x", "x"])[last]
            square = square - 2.0 * np.diag(mean.blocks["y", "x"][last, last])
            held_out = reference.model.about.get("held_out", {}).get("x", {})
            for i, (j, each) in enumerate(zip(numeric, result, strict=True)):
                error = held_out.get(each["name"], {}).get("error")
                each |= {
                    "after": float(centre[i] + seen[i]),
                    "std_error": float(errors[i]),
                    "error_before": None if error is None else float(np.sqrt(error)),
                    "error_after": float(np.sqrt(max(square[i], 0.0))),
                    "pvalue": pvalues.get(j),
                }
        return tuple(ExpectationDrift(**each) for each in result)


def _ones(rows: Array) -> Array:
    return 0.0 * rows[:, 0] + 1.0


@dataclass(frozen=True, eq=False)
class _Expected:
    """E[f | x] at rows x (n, d), less means; shape (n, len(names))."""

    names: list[str]
    answers: ConditionalExpectation
    basis: LinearBasis | StackedBasis
    centre: Array

    def __call__(self, rows: Array) -> Array:
        values: Any = self.answers.expect(self.names, self.basis, rows, False)
        return values - self.centre


@dataclass(frozen=True, eq=False)
class _Centred:
    """Some columns of rows (n, d), less means."""

    columns: tuple[int, ...]
    centre: Array

    def __call__(self, rows: Array) -> Array:
        return rows[:, list(self.columns)] - self.centre
