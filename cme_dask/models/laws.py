"""What laws at points are made of, from a joint model's weights to their blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cme_dask.data.columns import Columns, labels_have_no_mean
from cme_dask.errors import DataError
from cme_dask.models.events import Event, importable
from cme_dask.models.points import Axis, FloatArray, Labels
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.blending import BlendedMeasure, near_data, project
from cme_dask.numerics.calibration import Calibration, Levels
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.joint import StackedNewton
from cme_dask.numerics.measure import CellMeasure, Law, ShiftedMeasure
from cme_dask.numerics.smoothing import Smoothing

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel


# Arguments of queries on laws: checked, and brought to one shape


Array = Any


def check_levels(q: Any) -> tuple[Array, bool]:
    """Levels in [0, 1], shape (k,), and whether there was a single number."""
    try:
        levels = np.asarray(q, dtype=np.float64)
    except (TypeError, ValueError):
        levels = np.array(np.nan)
    if levels.ndim > 1 or not ((levels >= 0.0) & (levels <= 1.0)).all():
        raise DataError(f"levels must be numbers from 0 to 1, got {q!r}")
    return np.atleast_1d(levels), levels.ndim == 0


def check_thresholds(t: Any, d: int, several: bool, paired: int | None) -> tuple[Array, bool]:
    """Thresholds, shape (k, d), and whether there was a single one.

    Parameters
    ----------
    t
        A number or shape (k,) for one column; of ``several`` shape (d,) or (k, d).
    d
        Number of columns.
    several
        Whether each threshold is a row of numbers.
    paired
        Number of points with one threshold each; None if each goes with all points.
    """
    try:
        values = np.asarray(t, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"thresholds must be numbers: {error}") from error
    # Shape of one threshold, and of as many as are expected.
    one = (d,) if several else ()
    single = values.ndim == len(one)
    count = values.shape[0] if values.ndim == len(one) + 1 else 1
    fits = (
        values.shape in (one, (count, *one)) if paired is None else values.shape == (paired, *one)
    )
    if not fits:
        expected = f"({d},) or (k, {d})" if several else "() or (k,)"
        if paired is not None:
            expected = f"({paired}, {d})" if several else f"({paired},)"
        raise DataError(f"thresholds must have shape {expected}, got {values.shape}")
    if np.isnan(values).any():
        raise DataError(f"thresholds must not be NaN, {int(np.isnan(values).sum())} are")
    return values.reshape(count if paired is None else paired, d), single


def function_values(
    function: Callable[[Array], Array], rows: Array, name: str, truth: bool
) -> Array:
    """Values of a user's function at rows, shape (b, 1).

    Raises
    ------
    DataError
        If it fails, or its values have another shape, are not finite, or no truth values where
        ``truth`` asks for these.
    """
    try:
        values = np.asarray(function(rows), dtype=np.float64)
    except Exception as error:
        raise DataError(f"function {name!r} failed: {type(error).__name__}: {error}") from error
    if values.shape != (len(rows),):
        raise DataError(
            f"function {name!r} must return shape ({len(rows)},) for rows of shape {rows.shape}, "
            f"it returned {values.shape}"
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"function {name!r} returned {int((~np.isfinite(values)).sum())} values "
            "that are NaN or infinite"
        )
    if truth and not ((values == 0.0) | (values == 1.0)).all():
        raise DataError(f"event {name!r} must be true or false at each row: ask for expect(f)")
    return values[:, None]


def name_of(f: Any) -> str:
    """What a function is called in messages and labels."""
    return f if isinstance(f, str) else str(getattr(f, "__name__", repr(f)))


# What laws at points are made of, and how answers at all points are put together


Function = Callable[[Array], Array]

_HELD = 1 << 22  # numbers of laws that are held at once, 32 MB
_MOST_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Laws:
    """Laws of one variable, given the other at any point.

    Attributes
    ----------
    measure
        The laws.
    marginal
        The base measure, in the coordinates of the variable: cells of all its rows.
    columns
        Of the variable.
    read
        From its points, as users give them, to rows (k, d).
    functions
        Declared functions by name, where they are known.
    rows
        How many the laws were learned from.
    spread
        Gives standard deviations given the other variable, shape (d,), in the units of the columns:
        what smoothed densities are to resolve.
    near
        From rows of the other variable to how near they are to the data, shape (b,).
    given
        Columns of the other variable.
    mixture
        From rows of the other variable to the weights of a coupling's components; else None.
    source
        The model and the name of the given variable, of which pickles make the laws again.
    residual_spread
        As ``spread``, in the coordinates in which residuals are taken; None without a location.
    """

    measure: Law
    marginal: CellMeasure
    columns: Columns
    read: Function
    functions: Mapping[str, Function]
    rows: int
    spread: Callable[[], Array]
    near: Function
    given: Columns
    mixture: Function | None = None
    residual_spread: Callable[[], Array] | None = None
    source: tuple["JointModel", str] | None = None

    def __reduce__(self) -> Any:
        # Laws are closures over a model, which cannot be pickled; the model can.
        if self.source is None:
            raise TypeError("only laws that conditional() of a model gave can be pickled")
        return _laws_again, (*self.source, importable(self.functions))


def _laws_again(model: "JointModel", given: str, functions: Mapping[str, Function]) -> Laws:
    return replace(model.laws(given), functions=functions)


class LawsAtPoints:
    """Laws at points, and answers of them all, block by block: what the questions share.

    Parameters
    ----------
    laws
        Of the variable that is answered.
    points
        Rows of the other variable, shape (n, d).
    labels
        Of the answers.
    """

    def __init__(self, laws: Laws, points: Array, labels: Labels) -> None:
        self.laws, self.points = laws, points
        self._labels, self._measure = labels, laws.measure.remembering()

    def __reduce__(self) -> Any:
        return type(self), (self.laws, self.points, self._labels)

    @property
    def columns(self) -> Columns:
        """Columns of the variable that is answered."""
        return self.laws.columns

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

    def _fill(
        self,
        query: Callable[[Array, slice], Array],
        shape: tuple[int, ...] | None = None,
        held: int = 0,
    ) -> FloatArray:
        """Answers at all points, block by block; the shape of one is asked for if there is none."""
        n = len(self.points)
        step = max(min(_HELD // max(self._measure.held, held, 1), _MOST_ROWS), 1)
        result: Array = None if shape is None else np.empty((n, *shape))
        for start in range(0, max(n, 1), step):  # of no points one empty block tells the shape
            here = slice(start, min(start + step, n))
            # The very same array where it is all points: its weights are remembered.
            part = query(self.points if n <= step else self.points[here], here)
            if result is None:
                result = np.empty((n, *part.shape[1:]))
            result[here] = part
        return cast(FloatArray, result)

    def _positions(self, column: str | None = None) -> dict[str, int]:
        """Positions of the columns of numbers by name, or of the one that is asked for."""
        columns = self.laws.columns
        every = zip(columns.names, range(len(columns.names)), strict=True)
        result = {name: j for name, j in every if name not in columns.categories}
        if not result:
            raise labels_have_no_mean(columns.names[0], columns)
        if column is None:
            return result
        if column not in result:
            columns.positions([column])  # names it if there is none
            raise labels_have_no_mean(column, columns)
        return {column: result[column]}

    def _covariances(self) -> FloatArray:
        pick = list(self._positions().values())
        index = np.ix_(pick, pick)
        return self._fill(lambda x, _: self._measure.covariance(x)[:, index[0], index[1]])

    def _variances(self) -> FloatArray:
        result: FloatArray = np.einsum("nii->ni", self._covariances())
        return result

    def _columnwise(self, name: str, values: Array) -> FloatArray:
        if values.shape[1] == 1:
            return self._labels.wrap(values[:, 0], self.numeric[0])
        return self._labels.wrap(values, name, ("variable", self.numeric))

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
            return self._fill(lambda x, _: self._measure.mean(x)[:, [j]])[:, 0]
        query = self._measure.declared(f) if isinstance(f, str) else None
        if query is None:
            function = self._function(f)
            query = self._measure.average(lambda y: function_values(function, y, name_of(f), truth))
        answer = query
        return self._fill(lambda x, _: answer(x))[:, 0]

    def _function(self, f: Any) -> Function:
        if not isinstance(f, str):
            function: Function = f
            return function
        if f in self.laws.functions:
            return self.laws.functions[f]
        try:
            return Event.parse(f, self.columns.names, self.columns.categories)
        except DataError as error:
            known = [
                *self.columns.names,
                *filter(self._measure.declared, self.laws.marginal.cells.names),
            ]
            raise DataError(
                f"{f!r} is neither one of {', '.join(map(repr, known))} nor an event ({error}): "
                "give the function itself"
            ) from error

    def _points(self, y: Any, paired: bool) -> Array:
        points = self.laws.read(y)
        if paired and len(points) != self.n:
            raise DataError(
                f"paired points of y are one for each x: {self.n:,} expected, got {len(points):,}"
            )
        return points

    def _log_pdf(self, points: Array, paired: bool, bandwidth: Any = None) -> Array:
        smoothing = self._smoothing(bandwidth, self.laws.residual_spread)
        query = self._measure.log_density(smoothing, self._smoothing(None))
        if paired:
            return self._fill(lambda x, at: query(x, points[at], True))
        return self._fill(lambda x, _: query(x, points, False), (len(points),))

    def _log_marginal(self, points: Array, paired: bool) -> Array:
        """Logarithm of the smoothed density of the marginal, shape (n, 1) or (1, k)."""
        query = self.laws.marginal.log_density(self._smoothing(None))
        result = query(self.points[:1], points, False)
        return result.T if paired else result

    def _smoothing(self, bandwidth: Any, spread: Callable[[], Array] | None = None) -> Smoothing:
        if len(self.numeric) < len(self.columns.names):
            raise DataError(
                "a variable with labels has no density against the Lebesgue measure: ask for "
                "density_ratio or probability"
            )
        d = len(self.columns.names)
        smoothing = Smoothing((spread or self.laws.spread)(), self.laws.rows)
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


# From a joint model to the laws of one variable given the other


Query = Callable[[Array], Array]


def laws_of(model: "JointModel", given: str) -> Laws:
    """The laws that a model answers with: moved residuals of y near the data, where it has them.

    Far from the data these are the laws without residuals, which tend to the marginal law.

    Parameters
    ----------
    model
        The model.
    given
        ``"x"`` or ``"y"``: which variable is given.

    Raises
    ------
    DataError
        If the model has no cells.
    """
    base = base_laws(model, given)
    residual = model.residual
    if given == "y" or residual is None:
        return base
    inner = base_laws(residual.model, "x")
    assert isinstance(inner.measure, CellMeasure)
    assert isinstance(base.measure, CellMeasure)
    moved = ShiftedMeasure(
        inner.measure.cells, inner.measure.weigh, residual, base.measure.cells.values
    )
    newton = model.x.basis.newton
    assert isinstance(newton, (NewtonBasis, StackedNewton))
    measure = BlendedMeasure(moved, base.measure, near_data(newton))
    return replace(base, measure=measure, residual_spread=inner.spread)


def base_laws(model: "JointModel", given: str) -> Laws:
    """Laws on the cells of the answered variable; other parameters as for :func:`laws_of`."""
    here, other = (model.x, model.y) if given == "x" else (model.y, model.x)
    cells = other.cells
    if cells is None:
        raise DataError(
            "this model has no cells for conditional laws: fit with support_size of at least 1"
        )
    # H goes from the functions of x to those of y.
    coef = model.coef.T if given == "x" else model.coef
    mixture = None
    if model.base == 0.0:
        weigh, mixture = _mixing(here.basis, coef, cells)
    else:
        weigh = _projecting(here.basis, coef @ other.basis(cells.support.points).T, model, cells)
        if given == "x" and model.calibration is not None:
            weigh = _calibrating(weigh, here.basis.newton.support, model.calibration, cells)
    measure = CellMeasure(cells, weigh)
    marginal = CellMeasure(cells, lambda x: np.broadcast_to(cells.masses, (len(x), cells.size)))
    return Laws(
        measure,
        marginal,
        other.columns,
        lambda values: other.points(values, "y" if given == "x" else "x"),
        {},
        int(model.about["rows"]),
        partial(_spread, model, given, other.columns.names, cells),
        here.basis.newton.support,
        here.columns,
        mixture,
    )


def _projecting(basis: Query, right: Array, model: "JointModel", cells: CellStatistics) -> Query:
    """w(x): the signed ratio at the points of the cells, projected onto densities."""

    def weigh(points: Array) -> Array:
        return project(model.base + basis(points) @ right, cells.masses)[0]

    return weigh


def _calibrating(
    weigh: Query, support: Query, calibration: Calibration, cells: CellStatistics
) -> Query:
    """The laws, calibrated as far as data stand behind them."""
    levels = Levels(cells.means, calibration.columns)
    return lambda points: calibration.weights(weigh(points), levels, support(points))


def _mixing(basis: Query, coef: Array, cells: CellStatistics) -> tuple[Query, Query]:
    """w(x) = pi(x) mixed over the components' cells, and pi_j(x) = E[b_j] sum_i C_ji b_i(x)."""
    components = cells.components
    if components is None:
        raise DataError("this coupling counted no cells: fit it again")
    masses = components.sum(axis=1)
    shares = np.divide(
        components, masses[:, None], out=np.zeros_like(components), where=masses[:, None] > 0.0
    )

    def mixture(points: Array) -> Array:
        pi = (basis(points) @ coef) * masses
        return np.asarray(pi / pi.sum(axis=1, keepdims=True))

    def weigh(points: Array) -> Array:
        result = mixture(points) @ shares
        return np.asarray(result / result.sum(axis=1, keepdims=True))

    return weigh, mixture


def _spread(
    model: "JointModel", given: str, names: tuple[str, ...], cells: CellStatistics
) -> Array:
    """Standard deviations of the columns given the other variable, from held-out errors."""
    centre = cells.masses @ cells.means
    within = np.einsum("sii->si", cells.covariances)
    total = cells.masses @ ((cells.means - centre) ** 2 + within)
    held_out = model.about.get("held_out", {}).get(given, {})
    errors = np.array([held_out.get(name, {}).get("error", np.inf) for name in names])
    least = np.finfo(np.float64).eps * (centre**2 + 1.0)
    return np.sqrt(np.maximum(np.minimum(errors, total), least))
