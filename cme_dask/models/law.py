"""The law of one variable given the other, at points, with all its queries."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cme_dask.data.columns import Columns, labels_have_no_mean
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import each_block
from cme_dask.models.conformal import conformal_ends
from cme_dask.models.events import (
    Event,
    FunctionsLike,
    declared,
    importable,
    looks_like_event,
)
from cme_dask.models.plots import plot_cdf, plot_density, plot_fan
from cme_dask.models.points import (
    Axis,
    FloatArray,
    Labels,
    check_levels,
    check_thresholds,
    function_values,
    name_of,
    no_event,
    query_points,
)
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.folds import number_hash, uniform
from cme_dask.numerics.smoothing import Smoothing, log_density

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel

Array = Any
Function = Callable[[Array], Array]

_DRAWN = 1 << 62  # salt of draws, above the seeds of samples
_TRUTH_ERROR = 1e-9  # of the mean of an event over a cell
_HELD = 1 << 22  # numbers of laws that are held from one query to the next, 32 MB
_AT_ONCE = 1 << 19  # numbers of laws that a query works on: they stay in cache
_LEAST_ROWS, _MOST_ROWS = 1024, 4096  # at once
_MANY_ROWS = 1 << 14  # of which twice as many go at once: fewer calls, and each thread has several


class ConditionalLaw:
    r"""The law of Y given X = x at points x_1, ..., x_n: a probability measure for each.

    Made by ``conditional`` of a model. Every answer is one of the same measure

    .. math:: Q_x = \sum_s w_s(x) P_s

    where P_s are the rows of cell s of y and w(x) are probabilities: the L2 projection of the
    signed density ratio onto densities, or the mixture of a coupling. Masses, means, covariances
    and declared functions of the cells come from all rows; distribution functions, quantiles,
    draws and other functions from up to 32 rows retained in each cell, so that they have a
    standard error of :math:`\sqrt{\sum_s w_s^2 \mathrm{Var}_s f / 32}`, and none where all rows of
    the cells are retained. With a location, the measure is one of atoms at mu(x) + e_s, brought to
    values that y can take; where the effective support of x is below 0.05 it is a mixture with the
    measure above, which takes over as the support nears 0.

    Answers are made in blocks of points: memory doesn't grow with n but for the answers. Points of
    pandas or xarray give answers with their labels.

    Parameters
    ----------
    model
        The model.
    reverse
        Whether it is the law of X given Y = y.
    points
        Rows of the given variable, shape (n, d).
    labels
        Of the answers.
    functions
        Functions of the answered variable by name, or a list of events, for later queries by name.
        They take the place of functions of the fit that have their names.
    """

    plot_fan, plot_density, plot_cdf = plot_fan, plot_density, plot_cdf

    def __init__(
        self,
        model: "JointModel",
        reverse: bool,
        points: Array,
        labels: Labels,
        functions: FunctionsLike | None = None,
    ) -> None:
        self.model, self.reverse, self.points = model, reverse, points
        self.given, self.answered = (model.y, model.x) if reverse else (model.x, model.y)
        self.functions = declared(functions, self.answered.columns) if functions else {}
        self._labels, self._law = labels, model.law(reverse)
        self._laws: dict[tuple[int, int], Any] = {}  # at blocks of points

    def __reduce__(self) -> Any:
        functions = importable(self.functions)
        return type(self), (self.model, self.reverse, self.points, self._labels, functions)

    @property
    def columns(self) -> Columns:
        """Columns of the variable that is answered."""
        return self.answered.columns

    @property
    def _given_columns(self) -> Columns | None:
        """Columns of the points, along which laws are drawn; None where points hold no columns."""
        return self.given.columns

    def __len__(self) -> int:
        """Number of points n."""
        return len(self.points)

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.points)

    @property
    def numeric(self) -> tuple[str, ...]:
        """The columns that hold numbers, which have means and quantiles."""
        return self.columns.numeric

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.columns.listed()} at {self.n:,} points"

    # Moments

    def mean(self) -> FloatArray:
        """E[Y | x], shape (n,), or (n, d) of several columns; in their units."""
        pick = list(self._positions().values())
        return self._columnwise("mean", self._fill(lambda at: self._law.mean(at)[:, pick]))

    def var(self) -> FloatArray:
        """Var[Y_j | x], shape (n,) or (n, d); units squared."""
        return self._columnwise("var", self._variances())

    def std(self) -> FloatArray:
        """Standard deviations, shape (n,) or (n, d); in the units of the columns."""
        return self._columnwise("std", np.sqrt(self._variances()))

    def cov(self) -> FloatArray:
        """Cov[Y | x], shape (n, d, d), positive semidefinite; products of units."""
        return self._labels.wrap(self._covariances(), "cov", *self._square())

    def corr(self) -> FloatArray:
        """Correlations, shape (n, d, d), between -1 and 1; 0 beside the diagonal of constants."""
        result = self._covariances()
        std = np.sqrt(np.einsum("nii->ni", result))
        scale = np.where(std > 0.0, std, 1.0)
        result = np.clip(result / scale[:, :, None] / scale[:, None, :], -1.0, 1.0)
        d = np.arange(result.shape[1])
        result[:, d, d] = 1.0
        return self._labels.wrap(result, "corr", *self._square())

    # Expectations and probabilities

    def expect(self, f: Any) -> FloatArray:
        """E[f(Y) | x] under the law.

        Parameters
        ----------
        f
            A column of numbers, a declared function, the text of an event (see
            :meth:`probability`), a function from rows (b, d) to (b,), or a list of these.

        Returns
        -------
        values : (n,), or (n, len(f)) for a list; in the units of f

        Raises
        ------
        DataError
            On unknown names, columns of labels, or functions that fail, or whose values have
            another shape or are not finite.
        """
        if isinstance(f, str) or callable(f):
            return self._labels.wrap(self._expectation(f), name_of(f))
        if not isinstance(f, Sequence):
            raise DataError(f"expect takes names, events and functions, got {f!r}")
        result = [self._expectation(one) for one in f]
        values = np.stack(result, axis=1) if result else np.empty((self.n, 0))
        return self._labels.wrap(values, "mean", ("function", [name_of(one) for one in f]))

    def probability(self, event: Any) -> FloatArray:
        """P(event | x), in [0, 1].

        Parameters
        ----------
        event
            Text, a declared event, a function from rows (b, d) to truth values (b,), or a list of
            these. A text compares columns with numbers, labels and each other, such as
            ``"y1 <= y2 - 0.5"``, ``"50 < y < 75"`` or ``"station in ('Dongsi', 'Tiantan')"``,
            joined by ``and``, ``or``, ``not`` and parentheses: see
            :meth:`cme_dask.models.events.Event.parse`.

        Returns
        -------
        values : (n,), or (n, k) for a list of k events

        Raises
        ------
        DataError
            On unknown columns or labels, or values that are no truth values.
        """
        if isinstance(event, str) or callable(event):
            return self._labels.wrap(self._chance(event), f"P({name_of(event)})")
        if not isinstance(event, Sequence):
            raise DataError(f"an event is a text or a function, or a list of these, got {event!r}")
        result = [self._chance(one) for one in event]
        values = np.stack(result, axis=1) if result else np.empty((self.n, 0))
        return self._labels.wrap(values, "P", ("event", [name_of(one) for one in event]))

    def predict_proba(self, column: str | None = None) -> FloatArray:
        """Probabilities of the labels of a categorical column, shape (n, labels), rows of sum 1.

        They are those of the law, which may exclude a label: classifiers give positive ones.

        Parameters
        ----------
        column
            Which one; default the only one.

        Raises
        ------
        DataError
            If there is no such column, or several.
        """
        labelled = list(self.columns.categories)
        if column is None and len(labelled) != 1:
            raise DataError(
                f"predict_proba needs one column of labels, there are {len(labelled)}: "
                "give column=, or ask for probability(event)"
            )
        name = labelled[0] if column is None else column
        (j,) = self.columns.positions([name])
        if name not in labelled:
            raise DataError(f"column {name!r} holds numbers: ask for probability(event)")
        labels = self.columns.categories[name]
        codes = np.arange(len(labels), dtype=np.float64)
        query = self._law.average(lambda y: (y[:, [j]] == codes).astype(np.float64))
        result = self._fill(query)
        return self._labels.wrap(result / result.sum(axis=1, keepdims=True), name, (name, labels))

    # Distribution functions and quantiles

    def cdf(self, t: Any, column: str | None = None, *, paired: bool = False) -> FloatArray:
        """P(Y <= t | x), in [0, 1].

        Parameters
        ----------
        t
            Thresholds of one column: a number, shape (k,) or (k, 1). Of several columns without
            ``column``, points of the numeric ones for P(Y_1 <= t_1, ..., Y_d <= t_d | x): shape
            (d,) or (k, d). Or a table with these columns by name.
        column
            One of several columns.
        paired
            One threshold for each x instead: shape (n,), or (n, d).

        Returns
        -------
        values : (n,) for one threshold or paired ones, (n, k) for several

        Raises
        ------
        DataError
            On shapes that don't fit, unknown columns, NaN, columns of labels, or a table in other
            units than the fit.
        """
        law, positions = self._law, self._positions(column)
        pick, several = list(positions.values()), len(positions) > 1
        t, single = check_thresholds(
            t, self.columns.only(tuple(positions)), self.n if paired else None
        )
        if several and paired:
            result = self._fill(law.orthant, t, columns=pick)
        elif several:
            result = self._fill(law.average(lambda y: _inside(y[:, pick], t)))
        elif paired:
            result = self._fill(law.below, t, column=pick[0])
        else:
            result = self._fill(law.below, t=t[:, 0], column=pick[0])
        return self._thresholded(np.clip(result, 0.0, 1.0), "cdf", t, single or paired, several)

    def quantile(self, q: Any, column: str | None = None) -> FloatArray:
        """Quantiles inf{t: P(Y_j <= t | x) >= q}, of each column by itself.

        Parameters
        ----------
        q
            Levels in [0, 1], a number or shape (k,).
        column
            One of several columns.

        Returns
        -------
        values : (n,), with several levels (n, k); of several columns (n, d), with several levels
            (n, k, d); in the units of the columns, ascending in q

        Raises
        ------
        DataError
            On levels outside [0, 1], or columns of labels.
        """
        levels, single = check_levels(q)
        positions = self._positions(column)
        names = tuple(positions)
        result = self._fill(self._law.quantile, levels=levels, columns=list(positions.values()))
        axes: list[Axis] = [("quantile", levels.tolist()), ("variable", names)]
        if len(names) == 1:
            result, axes = result[:, :, 0], axes[:1]
        if single:
            result, axes = result[:, 0], axes[1:]
        return self._labels.wrap(result, names[0] if len(names) == 1 else "quantile", *axes)

    def median(self, column: str | None = None) -> FloatArray:
        """The quantile of level 1/2, shape (n,) or (n, d).

        Parameters
        ----------
        column
            One of several columns.
        """
        return self.quantile(0.5, column)

    def interval(
        self, level: float = 0.9, column: str | None = None, conformal: bool = False
    ) -> tuple[FloatArray, FloatArray]:
        """Lower and upper ends of the central intervals of this probability.

        Parameters
        ----------
        level
            Probability, between 0 and 1.
        column
            One of several columns.
        conformal
            Choose the law's own level by held-out rows, so that new rows are covered also where the
            kernels are wrong: see :mod:`cme_dask.models.conformal` for the guarantee.

        Returns
        -------
        lower, upper : (n,) or (n, d) each; infinite at levels that the rows can't tell

        Raises
        ------
        DataError
            As :meth:`quantile`; with ``conformal``, if the model has no conformity scores.
        """
        check_levels(level)
        if np.ndim(level):
            raise DataError(f"an interval has one level, got {level!r}: ask for one at a time")
        if not conformal:
            low, high = (1.0 - level) / 2.0, (1.0 + level) / 2.0
            return self.quantile(low, column), self.quantile(high, column)
        positions = self._positions(column)
        ends = conformal_ends(self, level, positions, self._quantiles_at)
        return self._of_columns(positions, ends[0]), self._of_columns(positions, ends[1])

    def crps(self, y: Any, column: str | None = None) -> FloatArray:
        """Continuous ranked probability score at observed y, shape (n,), lower is better.

        See :func:`cme_dask.metrics.crps`; that of all atoms of the law.

        Parameters
        ----------
        y
            Observation at each point, shape (n, d), or a table with the columns by name.
        column
            One of several columns; default the mean over those that hold numbers.

        Returns
        -------
        scores : (n,), in the unit of the column

        Raises
        ------
        DataError
            On wrong columns or NaN, another number of rows, or columns of labels.
        """
        points, positions = self._points(y, True), self._positions(column)
        result = np.zeros(self.n)
        for position in positions.values():
            result += self._fill(self._law.crps, points[:, position], column=position)
        return self._labels.wrap(result / len(positions), "crps")

    # Densities

    def density_ratio(self, y: Any, *, paired: bool = False) -> FloatArray:
        """dQ_x / dP_Y: how much likelier y is given x than overall; no unit.

        Constant on each cell of y. With a location, whose atoms move with x, the quotient of both
        smoothed densities.

        Parameters
        ----------
        y
            Points of Y, shape (k, d), or a table with the columns by name.
        paired
            One point for each x instead: shape (n, d).

        Returns
        -------
        values : (n, k), or (n,) if paired

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        points = self._points(y, paired)
        ratio = self._law.ratio(points)
        if ratio is not None:
            each = (np.arange(self.n),) if paired else ()
            result = self._fill(ratio, *each)
        else:
            with np.errstate(over="ignore"):
                result = np.exp(self._log_pdf(points, paired) - self._log_marginal(points, paired))
        return self._at_points(result, "density_ratio", paired)

    def pdf(self, y: Any, *, paired: bool = False, bandwidth: Any = None) -> FloatArray:
        """Density against the Lebesgue measure, smoothed; one over the units of the columns.

        Each cell is spread, with a bandwidth that depends on how many cells share the law and on
        the number of columns: in one column as Student's t with four degrees of freedom, in several
        as a normal density, and a share is the normal one with the moments of the law. The density
        has the mean and the covariance of the law and integrates to one; see
        :func:`cme_dask.numerics.smoothing.log_density`. A law with a location in normal scores is
        smoothed in scores without kinks, where it has these moments. Where y is bounded or
        semi-discrete, a law with a location has them only nearly: its atoms are brought within the
        bounds, but not to single values, and spread as if y had neither.

        Parameters
        ----------
        y, paired
            As for :meth:`density_ratio`.
        bandwidth
            Standard deviation of normal noise to smooth by instead, one or one per column, in
            their units. Of a law with a location in normal scores it is in those of the scores, and
            does not apply far from the data, where the law is not one of moved residuals.

        Returns
        -------
        values : (n, k), or (n,) if paired

        Raises
        ------
        DataError
            On wrong columns, NaN, bandwidths that are not positive, or a variable with labels.
        """
        points = self._points(y, paired)
        return self._at_points(np.exp(self._log_pdf(points, paired, bandwidth)), "pdf", paired)

    def log_pdf(self, y: Any, *, paired: bool = False, bandwidth: Any = None) -> FloatArray:
        """Logarithm of the density; minus infinity where that is below any number.

        Its arguments: see :meth:`pdf`.
        """
        points = self._points(y, paired)
        return self._at_points(self._log_pdf(points, paired, bandwidth), "log_pdf", paired)

    # Draws and what the law is made of

    def sample(
        self, size: int | None = None, *, random_state: int = 0, first: int = 0
    ) -> FloatArray:
        """Draws of Y given x: rows of the data, or moved residuals.

        The draws at a point depend on the seed and on its number alone.

        Parameters
        ----------
        size
            Draws at each point; default one, without an axis of its own.
        random_state
            Seed, a non-negative integer.
        first
            Number of the first point.

        Returns
        -------
        values : (n, size), of several columns (n, size, d); in their units. Of columns of labels
            NumPy's answers hold the codes, that is positions in ``columns.categories[name]``;
            pandas' and xarray's hold the labels.

        Raises
        ------
        DataError
            On sizes or seeds that are no non-negative integers.
        """
        count = 1 if size is None else size
        for name, value in (("size", count), ("random_state", random_state), ("first", first)):
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not (whole and 0 <= value < _DRAWN):
                raise DataError(f"{name} must be a non-negative integer, got {value!r}")
        d = len(self.columns.names)

        def block(at: Any, numbers: Array) -> Array:
            # A stream of draws for each point, from a salt of its own.
            start = number_hash(_DRAWN + int(random_state), numbers)[:, None]
            u = uniform(_DRAWN, start + np.arange(count, dtype=np.uint64))
            return self._law.draw(at, u)

        numbers = int(first) + np.arange(self.n, dtype=np.uint64)
        result = self._fill(block, numbers, held=4 * count * d)
        axes: list[Axis] = [("draw", range(int(count))), ("variable", self.columns.names)]
        if d == 1:
            result, axes = result[:, :, 0], axes[:1]
        if size is None:
            result, axes = result[:, 0], axes[1:]
        return self._labels.draws(result, self.columns, *axes)

    def weights(self) -> FloatArray:
        """Probabilities w of the components of the law, shape (n, S): non-negative, sum 1.

        Those of the cells of y; of a law with a location those of the residuals' cells, and after
        them those of the cells of y, which have mass only where the effective support is below
        0.05.
        """
        return self._fill(self._law.weights)

    def mixture_weights(self) -> FloatArray:
        """Weights of a coupling's components, shape (n, m): non-negative, sum 1.

        Raises
        ------
        DataError
            If the model is no coupling.
        """
        mixture = self._law.mixture
        if mixture is None:
            raise DataError("only laws of a coupling are mixtures of components: ask for weights()")
        return self._fill(lambda weights: weights, at=mixture)

    def effective_support(self) -> FloatArray:
        """How near each x is to the data, from 0 to 1, shape (n,).

        The share ``|N(x)|^2 / k(x, x)`` of the kernel's section at x that the pivots span; for a
        coupling, the largest k(x, p) relative to its value at a landmark. Where it nears 0 the law
        tends to the marginal law, also of a model with a location; for a coupling, to that of the
        nearest landmark.
        """
        result = self._fill(lambda share: share, at=self.given.basis.newton.support)
        return self._labels.wrap(result, "effective_support")

    # What the queries share

    def _quantiles_at(self, rows: Array, levels: Array, columns: Sequence[int]) -> FloatArray:
        """Quantiles at some of the points, by their positions (b,), shape (b, k, len(columns))."""
        law = self
        if len(rows) < len(self.points):
            points, labels = self.points[rows], Labels()
            law = type(self)(self.model, self.reverse, points, labels, self.functions)
        return law._fill(law._law.quantile, levels=levels, columns=columns)

    def _fill(
        self,
        query: Callable[..., Array],
        *rows: Array,
        held: int = 0,
        at: Function | None = None,
        threads: bool = True,
        **arguments: Any,
    ) -> FloatArray:
        """Answers at all points, block by block, of which each holds so many numbers per point.

        The query takes the law at the points of a block, or what ``at`` makes of them, and the
        rows of these arrays, one for each point, that belong to them. Its other arguments are the
        same in all blocks.
        """
        n, result = len(self.points), None
        most = max(min(_HELD // max(self._law.held, held, 1), _MOST_ROWS), 1)
        least = _LEAST_ROWS if n < _MANY_ROWS else 2 * _LEAST_ROWS
        step = min(most, max(_AT_ONCE // max(self._law.held, held, 1), least))

        def fill(here: slice) -> None:
            nonlocal result
            if at is None and n <= most:  # evaluated once for all queries
                if (there := self._laws.get((here.start, step))) is None:
                    there = self._laws[here.start, step] = self._law.at(self.points[here])
            else:
                there = (at or self._law.at)(self.points[here])
            part = query(there, *(each[here] for each in rows), **arguments)
            if result is None:
                result = np.empty((n, *part.shape[1:]))
            result[here] = part

        fill(slice(0, min(step, n)))  # which gives the shape, also for no points
        if n > step:
            each_block(fill, n, step, start=step, threads=threads)
        return cast(FloatArray, result)

    def _positions(self, column: str | None = None) -> dict[str, int]:
        """Positions of the columns of numbers by name, or of the requested one."""
        columns = self.answered.columns
        every = zip(columns.names, range(len(columns.names)), strict=True)
        result = {name: j for name, j in every if name not in columns.categories}
        if not result:
            raise labels_have_no_mean(columns.names[0], columns)
        if column is None:
            return result
        if not isinstance(column, str):
            raise DataError(f"column must be the name of one column, got {column!r}")
        if column not in result:
            columns.positions([column])  # names it if there is none
            raise labels_have_no_mean(column, columns)
        return {column: result[column]}

    def _covariances(self) -> FloatArray:
        pick = list(self._positions().values())
        index = np.ix_(pick, pick)
        return self._fill(lambda at: self._law.covariance(at)[:, *index])

    def _variances(self) -> FloatArray:
        result: FloatArray = np.einsum("nii->ni", self._covariances())
        return result

    def _columnwise(self, name: str, values: Array) -> FloatArray:
        if values.shape[1] == 1:
            return self._labels.wrap(values[:, 0], self.numeric[0])
        return self._labels.wrap(values, name, ("variable", self.numeric))

    def _of_columns(self, names: Iterable[str], values: Array) -> FloatArray:
        if values.shape[1] == 1:
            return self._labels.wrap(values[:, 0], next(iter(names)))
        return self._labels.wrap(values, "quantile", ("variable", tuple(names)))

    def _square(self) -> tuple[Axis, Axis]:
        return ("variable", self.numeric), ("with", self.numeric)

    def _chance(self, event: Any) -> FloatArray:
        """Shape (n,)."""
        if not (isinstance(event, str) or callable(event)):
            raise DataError(f"an event is a text or a function, got {event!r}")
        return np.clip(self._expectation(event, truth=True), 0.0, 1.0)

    def _expectation(self, f: Any, truth: bool = False) -> FloatArray:
        """Shape (n,)."""
        if isinstance(f, str) and not truth and f in self.columns.names:
            j = self._positions(f)[f]
            return self._fill(lambda at: self._law.mean(at)[:, j])
        known = isinstance(f, str) and f not in self.functions
        query = self._law.declared(f) if known else None
        if query is not None and truth:
            values = self._cells.functions[:, self._cells.names.index(f)]
            if values.min() < -_TRUTH_ERROR or values.max() > 1.0 + _TRUTH_ERROR:
                raise no_event(f)
        if query is None:
            function = self._function(f)
            query = self._law.average(
                lambda y: function_values(function, y, name_of(f), truth=truth)[:, None]
            )
        return self._fill(query, threads=False)[:, 0]  # functions of users may not bear them

    def _function(self, f: Any) -> Function:
        if not isinstance(f, str):
            function: Function = f
            return function
        if f in self.functions:
            return self.functions[f]
        texts = self.model.about.get("events", {}).get("x" if self.reverse else "y", {})
        if f in self._cells.names and f not in texts and not looks_like_event(f):
            raise DataError(
                f"laws that are moved to a location need the declared function {f!r} itself, and "
                "models hold the texts of events alone, no functions of Python: give it again, "
                f"conditional(..., functions={{{f!r}: f}}), or ask for expect(f)"
            )
        known = [*self.columns.names, *filter(self._law.declared, self._cells.names)]
        return Event.of(texts.get(f, f), self.columns, known, ": give the function itself")

    def _points(self, y: Any, paired: bool) -> Array:
        points = query_points(y, self.answered, "x" if self.reverse else "y")
        if paired and len(points) != self.n:
            raise DataError(
                f"paired points of y are one for each x: {self.n:,} expected, got {len(points):,}"
            )
        return points

    @property
    def _cells(self) -> CellStatistics:
        """Cells of all rows of the answered variable: its marginal law."""
        assert self.answered.cells is not None
        return self.answered.cells

    def _log_pdf(self, points: Array, paired: bool, bandwidth: Any = None) -> Array:
        near = self.model if self.reverse else self.model.answering
        # In normal scores a bandwidth has no size in y, in which laws far from the data are.
        moved = None if near is self.model else self.model.residual
        in_units = moved is None or moved.transform is None
        far = self._smoothing(self.model, bandwidth if in_units else None)
        query = self._law.log_density(self._smoothing(near, bandwidth), far)
        if paired:
            return self._fill(query, points, paired=True)
        return self._fill(query, y=points, paired=False)

    def _log_marginal(self, points: Array, paired: bool) -> Array:
        """Logarithm of the smoothed density of the marginal, shape (n, 1) or (1, k)."""
        cells, smoothing = self._cells, self._smoothing(self.model, None)
        result = log_density(
            cells.masses[None], cells.means, cells.covariances, points, smoothing, paired=False
        )
        return result.T if paired else result

    def _smoothing(self, model: "JointModel", bandwidth: Any) -> Smoothing:
        """How laws of this model, in its own coordinates, are smoothed."""
        if len(self.numeric) < len(self.columns.names):
            raise DataError(
                "a variable with labels has no density against the Lebesgue measure: ask for "
                "density_ratio or probability"
            )
        d = len(self.columns.names)
        smoothing = Smoothing(_spread(model, self.reverse), int(self.model.about["rows"]))
        if bandwidth is None:
            return smoothing
        try:
            result = np.broadcast_to(np.asarray(bandwidth, dtype=np.float64), (d,))
        except (TypeError, ValueError):
            result = np.zeros(d)
        if not (np.isfinite(result).all() and (result > 0.0).all()):
            raise DataError(f"bandwidth must be one positive number, or {d}, got {bandwidth!r}")
        return replace(smoothing, bandwidth=result)

    def _at_points(self, values: Array, name: str, paired: bool) -> FloatArray:
        if paired:
            return self._labels.wrap(values[:, 0], name)
        return self._labels.wrap(values, name, ("point", range(values.shape[1])))

    def _thresholded(
        self, values: Array, name: str, t: Array, single: bool, several: bool
    ) -> FloatArray:
        if single:
            return self._labels.wrap(values[:, 0], name)
        labels = range(values.shape[1]) if several else t[:, 0].tolist()
        return self._labels.wrap(values, name, ("point" if several else "threshold", labels))


def _inside(y: Array, t: Array) -> Array:
    """Whether rows y (b, d) are at most t (k, d) in all columns, shape (b, k)."""
    return np.asarray((y[:, None, :] <= t[None]).all(axis=2), dtype=np.float64)


def _spread(model: "JointModel", reverse: bool) -> Array:
    """Standard deviations of the columns given the other variable, from held-out errors."""
    answered = model.x if reverse else model.y
    cells, names = answered.cells, answered.columns.names
    assert cells is not None
    centre, total = cells.masses @ cells.means, cells.variances
    held_out = model.about.get("held_out", {}).get("y" if reverse else "x", {})
    errors = np.array([held_out.get(name, {}).get("error", np.inf) for name in names])
    eps = np.finfo(np.float64).eps
    # Values near the centre are rounded to about eps times it, so to the square of that here.
    least = eps * total + (eps * centre) ** 2
    least[least == 0.0] = eps  # of a column of zeros
    return np.sqrt(np.maximum(np.minimum(errors, total), least))
