"""``GrowingEstimator``: rows that ``partial_fit`` adds to a fit, their checks and their report."""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from cme_dask.data.columns import Columns, counted_names
from cme_dask.data.missing import completed
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, ToleranceWarning, warn
from cme_dask.estimators.base import Declarations, Estimator, Measured, note_missing
from cme_dask.estimators.context import FitContext
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.models.events import FunctionsLike, LocalFunction, by_name
from cme_dask.models.merging import FitSums
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.moments import Function, MomentReduction, MomentSums
from cme_dask.numerics.rows import MissingValues
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.run import run_pass
from cme_dask.passes.sources import recoded

_WORSE = 2.0  # times the trace error of the earlier rows, beyond which a refit is advised


class GrowingEstimator(Estimator):
    """An estimator to whose fit rows can be added: its ``partial_fit`` hands them to ``_grow``.

    A subclass gives the sums over its rows (``_sums``), and what follows from these and the sums
    over new rows (``_of_both``).
    """

    @abstractmethod
    def _sums(self, functions: Declarations) -> FitSums:
        """Sums over the rows of the fit, with these functions; DataError where there are none."""

    @abstractmethod
    def _of_both(
        self, earlier: FitSums, new: Measured, sample: Sample, *, alone: bool
    ) -> tuple[Measured, dict[str, Any]]:
        """Sums and fitted attributes of earlier rows and new ones, or of new ones ``alone``."""

    def _grow(
        self, X: Any, Y: Any, weights: Any, functions: Declarations, options: RunOptions
    ) -> Self:
        """Add rows to the fitted model, in one pass over them; all of it or nothing."""
        begin = time.perf_counter()
        self._check()
        sample = self._open_more(X, Y, weights)
        measured, fitted, _ = self._grown(self._sums(functions), sample, options)
        self._become(measured, fitted, begin)
        return self

    def _open_more(self, X: Any, Y: Any, weights: Any) -> Sample:
        """The rows of a later call."""
        return self._open(X, Y, weights)

    def _grown(
        self, earlier: FitSums, sample: Sample, options: RunOptions, alone_from: int | None = None
    ) -> tuple[Measured, dict[str, Any], Sample]:
        """A fit of earlier rows and new ones, in the bases and cells of the earlier.

        Parameters
        ----------
        earlier
            Sums over the earlier rows.
        sample
            The new ones. They are numbered after the earlier ones, but for parts of a split, whose
            rows keep the numbers that they have in their table.
        options
            Where to run.
        alone_from
            The number of the first new row, for a fit of the new rows alone.

        Returns
        -------
        measured, fitted
            Sums, and attributes by name.
        sample
            The new rows as they were read.
        """
        known = earlier.about.get("missing")
        x, *others = earlier.columns
        sample = on_columns(sample, (x.given, *others))
        if known is not None or getattr(self, "missing", "error") == "drop":
            sample = completed(sample, x)
        sample = sample.fold_by(earlier.about.get("fold_by", "rows"))
        executor = options.executor()
        with self._reported(options.progress, executor, sample) as progress:
            seed = self.random_state or 0
            rows, passes = sample_rows(sample, self.sample_size, seed, executor, least=1)
            context = FitContext(
                sample,
                rows,
                kernels=(),
                pivots=(),
                functions=[side.functions for side in earlier.sides],
                seed=0,
                n_folds=earlier.moments.n_folds,
                executor=executor,
                progress=progress,
                passes=passes,
                seconds=0.0,
                solver=earlier.solver,
            )
            spec, mode = self._in_mode(context, MomentReduction(earlier.sides, context.n_folds))
            n_rows = sample.expected_rows * rows.complete_share
            cells = tuple(
                CellReduction.of(rows, i, n_rows, spec.n_folds, s.support, s.functions, s.partition)
                for i, s in enumerate(earlier.specs)
            )
            after = 0 if sample.part is not None else earlier.next_row
            sample = replace(sample, first_row=after if alone_from is None else alone_from)
            (moments, *sums), report = run_pass(sample, [spec, *cells], executor, progress)
        info = new_rows(earlier, moments)
        new = Measured(earlier.sides, moments, cells, tuple(sums), mode, report, passes + 1)
        with one_blas_thread():
            both, fitted = self._of_both(earlier, new, sample, alone=alone_from is not None)
        about = fitted["model_"].about
        about["new_rows"] = info
        if report.missing is not None:
            policy = "drop" if known is None else known["policy"]
            before = None if alone_from is not None else known
            note_missing(about, report.missing, sample, policy=policy, earlier=before)
            if policy == "impute":
                _warn_of_left_out(x, report.missing)
        return both, fitted, sample


def _warn_of_left_out(x: Columns, missing: MissingValues) -> None:
    """Warn of columns of x whose missing values the fit has not learned to fill in."""
    fills = {} if x.imputation is None else x.imputation.fills
    lost = [
        f"{name!r} ({missing.columns[name]:,} rows)"
        for name in x.given.names
        if name in missing.columns and name not in fills
    ]
    if lost:
        warn(
            f"rows that lack a value of column {', '.join(lost)} are left out: the first call saw "
            "none that is missing there, and has learned nothing to fill in; fit earlier and new "
            "rows together, so that these are filled in",
            UserWarning,
        )


class MomentEstimator(GrowingEstimator):
    """An estimator whose attributes follow from the moments of its rows (``_solve``)."""

    @abstractmethod
    def _solve(self, sample: Sample, measured: Measured) -> dict[str, Any]:
        """From moments to fitted attributes, by name."""

    def _run(self, context: FitContext, sample: Sample) -> tuple[Measured, dict[str, Any]]:
        """The passes, and everything after them: sums, and fitted attributes by name."""
        measured = self._measure(context)
        with one_blas_thread():
            fitted = self._solve(sample, measured)
        bases = [fitted[name] for name in self._bases]
        context.warn_of_trace([(basis.trace_error, basis.rank) for basis in bases])
        return measured, fitted

    def _of_both(
        self, earlier: FitSums, new: Measured, sample: Sample, *, alone: bool
    ) -> tuple[Measured, dict[str, Any]]:
        """Sums and fitted attributes of earlier rows and new ones, or of new ones ``alone``."""
        moments, passes = earlier.moments + new.moments, self.n_passes_ + new.passes
        both = new._replace(moments=moments, passes=passes)
        return both, self._solve(sample, both)


def new_rows(earlier: FitSums, new: MomentSums) -> dict[str, Any]:
    """How well the pivots of a fit span rows that were added to it, as JSON values.

    Parameters
    ----------
    earlier
        Sums over the earlier rows.
    new
        Moments of the new ones.

    Returns
    -------
    info : dict
        ``rows``, and ``trace_error`` by variable: that over the new rows, relative to their trace.

    Warns
    -----
    ToleranceWarning
        If it is above ``tol``, and more than twice that over the earlier rows.
    """
    if any(side.basis.partition is not None for side in earlier.sides):
        return {"rows": new.n_rows}  # partitions of unity leave no trace
    tol, sums = float(earlier.about["tol"]), (earlier.moments, new, earlier.moments + new)
    before, now, total = (moments.means().trace_error for moments in sums)
    for i, (variable, side) in enumerate(zip("xy", earlier.sides, strict=False)):
        if now[i] > _WORSE * max(before[i], tol):
            warn(
                f"{variable}: trace error {now[i]:.2e} over the new rows at rank "
                f"{side.basis.rank}, {total[i]:.2e} over all rows, tol is {tol:g}: the pivots, "
                "which are those of the first rows, do not span the new ones; to choose them anew, "
                "fit earlier and new rows together",
                ToleranceWarning,
            )
    errors = {v: float(error) for v, error in zip("xy", now, strict=False)}
    return {"rows": new.n_rows, "trace_error": errors}


def functions_of_first_call(
    known: Mapping[str, Function], given: FunctionsLike | None
) -> dict[str, Function]:
    """The functions of the first call; DataError if others are given by name.

    One that is given again takes the place of what a pickle could not hold.
    """
    named = by_name(given)
    check_same_names(known, named)
    return {
        name: named.get(name, function) if isinstance(function, LocalFunction) else function  # type: ignore[misc] # text is parsed later
        for name, function in known.items()
    }


def check_same_names(known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """DataError if functions are given, and not by the names of the first call."""
    if given and set(given) != set(known):
        raise different_functions(known, given)


def different_functions(known: Mapping[str, Any], given: Mapping[str, Any]) -> DataError:
    """Other functions than those of the fit."""
    names, others = (", ".join(map(repr, each)) or "none" for each in (known, given))
    return DataError(
        f"the model was fitted with the functions {names}, given are {others}: give the same "
        "ones, or none"
    )


def on_columns(sample: Sample, columns: Sequence[Columns]) -> Sample:
    """The rows with the columns of a fit: by name, or by position where they have no names.

    Names that only count the columns, as pandas does, are none; nor is that of a single column of
    y, where the fit had none for it.

    Raises
    ------
    DataError
        If columns are missing, hold labels that the fit has not seen, or are in other units.
    """
    selected: list[Sequence[str] | None] = []
    for variable, result, known in zip("xy", sample.columns, columns, strict=False):
        default, ours = (
            Columns.default(variable, len(columns.names)).names for columns in (result, known)
        )
        same = len(result.names) == len(known.names)
        alone = variable == "y" and same and known.names == ("y0",)
        unnamed = alone or result.names in (default, counted_names(len(default)))
        # Default names of an array of another width mean other columns.
        named = set(known.names) <= set(result.names) and (same or known.names != ours)
        if not named and not (unnamed and same):
            raise DataError(
                f"the fit had columns {known.listed()} of {variable}, these rows have "
                f"{result.listed()}: give the same ones"
            )
        selected.append(known.names if named and result.names != known.names else None)
        for name, mine in zip(known.names, known.names if named else result.names, strict=True):
            _check_alike(name, known, mine, result)
    return recoded(sample.select(*selected), columns[: len(sample.columns)])


def _check_alike(name: str, known: Columns, mine: str, given: Columns) -> None:
    """DataError if a column holds labels in one place alone."""
    if (mine in given.categories) != (name in known.categories):
        labels = [
            columns.labels(column) if column in columns.categories else "numbers"
            for column, columns in ((mine, given), (name, known))
        ]
        raise DataError(
            f"the labels of column {name!r} are {labels[0]}, in the fit they were {labels[1]}"
        )
