"""What laws at points are made of, and how answers at all points are put together."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cme_dask.errors import DataError
from cme_dask.models.arguments import function_values, name_of
from cme_dask.models.events import Event
from cme_dask.models.functions import importable
from cme_dask.models.labels import Axis, FloatArray, Labels
from cme_dask.numerics.blending import BlendedMeasure
from cme_dask.numerics.measures import CellMeasure
from cme_dask.numerics.smoothing import Smoothing
from cme_dask.storage.columns import Columns, labels_have_no_mean

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel

Array = Any
Function = Callable[[Array], Array]
Measure = CellMeasure | BlendedMeasure

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
        Standard deviations given the other variable, shape (d,), in the units of the columns: what
        smoothed densities are to resolve.
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

    measure: Measure
    marginal: CellMeasure
    columns: Columns
    read: Function
    functions: Mapping[str, Function]
    rows: int
    spread: Array
    near: Function
    given: Columns
    mixture: Function | None = None
    residual_spread: Array | None = None
    source: tuple["JointModel", str] | None = None

    def __reduce__(self) -> Any:
        # Laws are closures over a model, which cannot be pickled; the model can.
        if self.source is None:
            raise TypeError("only laws that conditional() of a model gave can be pickled")
        return _laws_again, (*self.source, importable(self.functions))

    @property
    def declared(self) -> tuple[str, ...]:
        """Functions whose means over all rows the cells have."""
        return self.measure.cells.names if isinstance(self.measure, CellMeasure) else ()


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
        found: Array = None if shape is None else np.empty((self.n, *shape))
        for here in self._slices(held):
            # The very same array where it is all points: what it weighs is remembered.
            whole = here.stop - here.start == self.n
            part = query(self.points if whole else self.points[here], here)
            if found is None:
                found = np.empty((self.n, *part.shape[1:]))
            found[here] = part
        return cast(FloatArray, found)

    def _slices(self, held: int) -> Iterator[slice]:
        step = max(min(_HELD // max(self._measure.held, held, 1), _MOST_ROWS), 1)
        # Of no points one empty block still tells the shape.
        for start in range(0, max(self.n, 1), step):
            yield slice(start, min(start + step, self.n))

    def _numeric(self) -> list[int]:
        if not self.numeric:
            raise labels_have_no_mean(self.columns.names[0], self.columns)
        return [self._position(name) for name in self.numeric]

    def _names(self, column: str | None) -> tuple[str, ...]:
        self._numeric()
        return self.numeric if column is None else (column,)

    def _position(self, column: str) -> int:
        return self.columns.positions([column])[0]

    def _number_column(self, column: str) -> int:
        position = self._position(column)
        if column not in self.numeric:
            raise labels_have_no_mean(column, self.columns)
        return position

    def _covariances(self) -> FloatArray:
        pick = self._numeric()
        index = np.ix_(pick, pick)
        return self._fill(lambda x, _: self._measure.covariance(x)[:, index[0], index[1]])

    def _variances(self) -> FloatArray:
        found: FloatArray = np.einsum("nii->ni", self._covariances())
        return found

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
            j = self._number_column(f)
            return self._fill(lambda x, _: self._measure.mean(x)[:, [j]])[:, 0]
        if (
            isinstance(f, str)
            and isinstance(self._measure, CellMeasure)
            and f in self.laws.declared
        ):
            query = self._measure.declared([self.laws.declared.index(f)])
        else:
            function = self._function(f)
            query = self._measure.average(lambda y: function_values(function, y, name_of(f), truth))
        return self._fill(lambda x, _: query(x))[:, 0]

    def _function(self, f: Any) -> Function:
        if not isinstance(f, str):
            function: Function = f
            return function
        if f in self.laws.functions:
            return self.laws.functions[f]
        try:
            return Event.parse(f, self.columns.names, self.columns.categories)
        except DataError as error:
            known = [*self.columns.names, *self.laws.declared]
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
        if isinstance(self._measure, BlendedMeasure):
            near = self._smoothing(bandwidth, self.laws.residual_spread)
            query = self._measure.log_density(near, self._smoothing(None))
        else:
            query = self._measure.log_density(self._smoothing(bandwidth))
        if paired:
            return self._fill(lambda x, at: query(x, points[at], True))
        return self._fill(lambda x, _: query(x, points, False), (len(points),))

    def _log_marginal(self, points: Array, paired: bool) -> Array:
        """Logarithm of the smoothed density of the marginal, shape (n, 1) or (1, k)."""
        query = self.laws.marginal.log_density(self._smoothing(None))
        found = query(self.points[:1], points, False)
        return found.T if paired else found

    def _smoothing(self, bandwidth: Any, spread: Array | None = None) -> Smoothing:
        if len(self.numeric) < len(self.columns.names):
            raise DataError(
                "a variable with labels has no density against the Lebesgue measure: ask for "
                "density_ratio or probability"
            )
        d = len(self.columns.names)
        smoothing = Smoothing(self.laws.spread if spread is None else spread, self.laws.rows)
        if bandwidth is None:
            return smoothing
        try:
            found = np.broadcast_to(np.asarray(bandwidth, dtype=np.float64), (d,))
        except (TypeError, ValueError):
            found = np.zeros(d)
        if not (np.isfinite(found).all() and (found > 0.0).all()):
            raise DataError(f"bandwidth must be one positive number, or {d}, got {bandwidth!r}")
        return replace(smoothing, bandwidth=found)

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
