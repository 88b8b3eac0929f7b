"""Conditional laws at the rows of Dask arrays and stores: the same queries, lazy answers."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, cast

import numpy as np

from cme_dask.data.arrow import is_dataset
from cme_dask.data.columns import Columns, check_finite, check_points
from cme_dask.data.missing import Completion
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.errors import DataError, UnseenCategoryWarning, warn
from cme_dask.models.events import FunctionsLike, declared, importable
from cme_dask.models.joint import JointModel, Variable
from cme_dask.models.law import ConditionalLaw, Function
from cme_dask.models.points import UNSEEN, is_out_of_core, query_points, threshold_values
from cme_dask.numerics.basis import LinearBasis, StackedBasis
from cme_dask.passes.lazy import lazy_rows, map_rows
from cme_dask.passes.sources import open_sample, with_codes

if TYPE_CHECKING:
    import dask.array as da


Array = Any
_ROWS = 1 << 16  # of a chunk of rows in memory that are paired with lazy ones


class Given(Protocol):
    """A variable that is given: its columns and its basis."""

    @property
    def columns(self) -> Columns:
        """Its columns."""

    @property
    def basis(self) -> LinearBasis | StackedBasis:
        """Its basis, with points."""


def given_rows(
    values: Any,
    variable: Given,
    *,
    reverse: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Sample:
    """Rows of the given variable alone: its columns by name, or by position where rows have none.

    Parameters
    ----------
    values
        Rows as in :func:`open_sample`; of a store of x and y the x, with ``reverse`` the y.
    variable
        The given variable of a model.
    reverse
        Laws of X given Y.
    storage_options
        Passed on to fsspec with URLs.

    Raises
    ------
    DataError
        On columns that are not the model's, or in other units, or labels where it has numbers.
    StoreError
        If a store is damaged.
    """
    expected = variable.columns.given
    requested = _columns_of(values, expected, "Y" if reverse else "X")
    sample = open_sample(values, x_columns=requested, storage_options=storage_options)
    which = 1 if reverse and len(sample.sources) == 2 else 0
    source, columns, names = sample.sources[which], sample.columns[which], expected.names
    default = columns.names == Columns.default("xy"[which], len(columns.names)).names
    # Arrays have no names of their own: of these all columns are taken, as in memory.
    unnamed = default and sample.location == "memory"
    where = ("Y" if reverse else "X") if sample.location == "memory" else sample.location
    if not unnamed and (not default or set(names) <= set(columns.names)):
        positions = columns.positions_of(expected, where)
        columns = columns.only([columns.names[place] for place in positions])
        source = source.pick(positions)
    if len(columns.names) != len(names):
        raise DataError(
            f"{where} has {len(columns.names)} columns, the model's are {expected.listed()}"
        )
    expected.check_units(columns)
    for name, label in zip(names, columns.names, strict=True):
        theirs, ours = columns.categories.get(label), expected.categories.get(name)
        if theirs is None or ours == theirs:
            continue
        if ours is None:
            raise DataError(
                f"column {name!r} holds labels in {where} and numbers in the model: give numbers"
            )
        source = _recoded(source, variable, name, theirs)
    if variable.columns.imputation is not None:
        source = source.map(Completion(variable.columns), len(variable.columns.names))
    return Sample(
        (source,),
        (variable.columns,),
        location=sample.location,
        part=sample.part,
        dropping=sample.dropping,
    )


def _columns_of(values: Any, expected: Columns, name: str) -> list[str] | None:
    """The columns of a Dataset of xarray, which may hold others beside them; None of other rows."""
    if not is_dataset(values):
        return None
    present = Columns(tuple(map(str, values.data_vars)))
    return [present.names[place] for place in present.positions_of(expected, name)]


def _recoded(source: RowSource, variable: Given, name: str, labels: tuple[str, ...]) -> RowSource:
    """The rows with the model's codes of these labels of a column."""
    place, ours = variable.columns.names.index(name), variable.columns.categories[name]
    unseen = [label for label in labels if label not in ours]
    if unseen:
        info = ", ".join(map(repr, unseen[:10])) + (" and more" if len(unseen) > 10 else "")
        if not variable.basis.newton.kernel.pools(place):
            raise DataError(
                f"column {name!r} has the unknown {info}: there are {variable.columns.labels(name)}"
            )
        warn(
            "labels that the fit has not seen are answered as its pooled rare ones: column "
            f"{name!r} {info}",
            UnseenCategoryWarning,
        )
    number = {label: float(code) for code, label in enumerate(ours)}
    table = np.array([number.get(label, UNSEEN) for label in labels])
    return with_codes(source, place, table)


def lazy_method(
    model: Any,
    method: str,
    values: Any,
    given: Given,
    *,
    reverse: bool = False,
    **arguments: Any,
) -> Any:
    """``model.method(values, **arguments)`` at rows out of core; nothing is computed yet.

    Parameters
    ----------
    model
        The model.
    method
        Name of one of its methods that takes points as ``X``, or with ``reverse`` as ``Y``, and
        returns an array with a row for each of them, or a tuple of such arrays.
    values
        Rows, as in :func:`open_sample`.
    given
        The variable they belong to.
    reverse
        Rows of y.
    arguments
        Of the method.

    Returns
    -------
    dask.array.Array, or a tuple of them
        In chunks of whole rows, one task each.

    Raises
    ------
    DataError
        On columns that are not the model's, or arguments that the method refuses; and, when it is
        computed, on NaN or infinity, by column and row.
    StoreError
        If a store is damaged; a damaged chunk is named when it is computed.
    """
    sample = given_rows(values, given, reverse=reverse)
    sample.check_whole(method)
    query = _Query(model, reverse, method, arguments, given.columns)
    return _at_rows(query, f"model-{method}", sample.sources[0], _a_row(given))


def lazy_law(
    model: JointModel,
    X: Any = None,
    *,
    Y: Any = None,
    functions: FunctionsLike | None = None,
    storage_options: dict[str, Any] | None = None,
) -> "LazyLaw":
    """Conditional laws at rows out of core; nothing is computed yet.

    Parameters
    ----------
    model
        The model.
    X, Y
        Rows of the given variable, as in :func:`open_sample`: Dask or Zarr, a path or URL, a
        ``Sample``.
    functions
        Functions of the answered variable by name, for names that are queried later.
    storage_options
        Passed on to fsspec with URLs.

    Raises
    ------
    DataError
        On columns that are not the model's; and, when it is computed, on NaN or infinity, by column
        and row.
    StoreError
        If a store is damaged; a damaged chunk is named when it is computed.
    """
    if (X is None) == (Y is None):
        raise DataError("conditional takes points of one variable: X=... or Y=...")
    reverse = X is None
    given = model.y if reverse else model.x
    sample = given_rows(
        Y if reverse else X, given, reverse=reverse, storage_options=storage_options
    )
    sample.check_whole("conditional")
    answered = model.x if reverse else model.y
    return LazyLaw(model, sample.sources[0], reverse, declared(functions, answered.columns))


P = ParamSpec("P")


def _lazily(
    query: Callable[Concatenate[ConditionalLaw, P], Any],
    *,
    pairs: str | None = None,
    returns: str = "da.Array",
) -> "Callable[Concatenate[LazyLaw, P], da.Array]":
    """A query of laws as a method of lazy laws.

    Parameters
    ----------
    query
        The method of :class:`ConditionalLaw`.
    pairs
        Its argument that has a row for each point, always or where ``paired`` says so.
    returns
        Type of its answers.
    """
    signature = inspect.signature(query)

    @functools.wraps(query)
    def lazily(self: "LazyLaw", *args: Any, **kwargs: Any) -> Any:
        _, *given = signature.bind(self, *args, **kwargs).arguments.items()
        arguments = dict(given)
        paired = arguments.get("paired", "paired" not in signature.parameters)
        return self._ask(query.__name__, arguments, pairs if paired else None)

    lazily.__annotations__ = {**query.__annotations__, "return": returns}
    return cast("Callable[Concatenate[LazyLaw, P], da.Array]", lazily)


@dataclass(frozen=True, eq=False)
class LazyLaw:
    """Laws of Y given X = x, or of X given Y = y, at the rows of a source.

    Made by ``conditional`` at points out of core. Methods and shapes are those of
    :class:`cme_dask.ConditionalLaw`, but for its plots; they return Dask arrays whose chunks are
    whole rows, of 64 MiB at most. Wrong arguments are refused at once: each question is first put
    to one row of the model.

    Parameters
    ----------
    model
        The model.
    source
        Rows of the given variable.
    reverse
        Laws of X given Y = y.
    functions
        Functions of the answered variable by name, for names that are queried later.
    """

    model: JointModel
    source: RowSource
    reverse: bool = False
    functions: Mapping[str, Function] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        functions = importable(self.functions)
        return LazyLaw, (self.model, self.source, self.reverse, functions)

    def __repr__(self) -> str:
        return f"LazyLaw of {self.columns.listed()} at {len(self):,} points"

    def __len__(self) -> int:
        """Number of points n."""
        return self.source.shape[0]

    @property
    def columns(self) -> Columns:
        """Columns of the answered variable."""
        return (self.model.x if self.reverse else self.model.y).columns

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self)

    @property
    def numeric(self) -> tuple[str, ...]:
        """The columns that hold numbers, which have means and quantiles."""
        return self.columns.numeric

    mean = _lazily(ConditionalLaw.mean)
    var = _lazily(ConditionalLaw.var)
    std = _lazily(ConditionalLaw.std)
    cov = _lazily(ConditionalLaw.cov)
    corr = _lazily(ConditionalLaw.corr)
    expect = _lazily(ConditionalLaw.expect)
    probability = _lazily(ConditionalLaw.probability)
    predict_proba = _lazily(ConditionalLaw.predict_proba)
    cdf = _lazily(ConditionalLaw.cdf, pairs="t")
    quantile = _lazily(ConditionalLaw.quantile)
    median = _lazily(ConditionalLaw.median)
    interval = cast(
        "Callable[..., tuple[da.Array, da.Array]]",
        _lazily(ConditionalLaw.interval, returns="tuple[da.Array, da.Array]"),
    )
    crps = _lazily(ConditionalLaw.crps, pairs="y")
    density_ratio = _lazily(ConditionalLaw.density_ratio, pairs="y")
    pdf = _lazily(ConditionalLaw.pdf, pairs="y")
    log_pdf = _lazily(ConditionalLaw.log_pdf, pairs="y")
    sample = _lazily(ConditionalLaw.sample)
    weights = _lazily(ConditionalLaw.weights)
    mixture_weights = _lazily(ConditionalLaw.mixture_weights)
    effective_support = _lazily(ConditionalLaw.effective_support)

    def _ask(self, method: str, arguments: dict[str, Any], pairs: str | None) -> Any:
        given, answered = self.model.x, self.model.y
        if self.reverse:
            given, answered = answered, given
        rows, row = None, _a_row(given)
        if pairs is not None:
            values = arguments.pop(pairs)
            if pairs == "y":
                rows, beside = self._observed(values, answered), _a_row(answered)
            else:
                column = arguments.get("column")
                columns = self.columns.only(self.numeric if column is None else (column,))
                rows, beside = self._thresholds(values, columns), np.zeros((1, len(columns.names)))
            if len(rows) != len(self):
                name = "points of y" if pairs == "y" else "thresholds"
                raise DataError(
                    f"paired {name} are one for each x: {len(self):,} expected, got {len(rows):,}"
                )
            row = np.concatenate([row, beside], axis=1)
        query = _Query(
            self.model, self.reverse, method, arguments, given.columns, self.functions, pairs
        )
        return _at_rows(query, f"law-{method}", self.source, row, rows)

    def _observed(self, y: Any, answered: Variable) -> Any:
        """Points of the answered variable, one for each row, as a Dask array (n, d)."""
        import dask.array as da

        if not is_out_of_core(y):
            return da.from_array(query_points(y, answered, "y"), chunks=(_ROWS, -1))
        sample = given_rows(y, answered, reverse=not self.reverse)
        sample.check_whole("points y")
        return lazy_rows(sample.sources[0], len(answered.columns.names))

    def _thresholds(self, t: Any, columns: Columns) -> Any:
        """Thresholds, one row for each point, as a Dask array (n, d) of numbers."""
        import dask.array as da

        width = len(columns.names)
        if is_out_of_core(t):
            sample = open_sample(t, x_columns=_columns_of(t, columns, "t"))
            sample.check_whole("thresholds")
            source, own = sample.sources[0], sample.columns[0]
            several = max(width, len(own.names)) > 1
            if several and own.names != Columns.default("x", len(own.names)).names:
                places = own.positions_of(columns, "t")
                source, own = source.pick(places), own.only([own.names[j] for j in places])
            if len(own.names) == width:
                columns.check_units(own)
            rows = lazy_rows(source, width)
        else:
            rows = da.from_array(np.asarray(threshold_values(t, columns), order="C"))
            rows = rows[:, None] if rows.ndim == 1 and width == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != width:
            raise DataError(
                f"thresholds must have shape ({len(self)}{f', {width}' if width > 1 else ','}), "
                f"got {rows.shape}"
            )
        return rows


@dataclass(frozen=True, eq=False)
class _Query:
    """A method of a model, or of its laws where there are ``functions``, at given rows.

    Called with rows and the number of the first. Where the argument ``pairs`` has a row of its own
    for each of them, these are their last columns.
    """

    model: Any
    reverse: bool
    method: str
    arguments: dict[str, Any]
    columns: Columns
    functions: Mapping[str, Function] | None = None
    pairs: str | None = None

    def answer(self, rows: Array, first: int) -> Any:
        d = len(self.columns.names)
        given, paired = np.ascontiguousarray(rows[:, :d]), rows[:, d:]
        check_points(given, self.columns, first)
        points, arguments = {"Y" if self.reverse else "X": given}, dict(self.arguments)
        if self.functions is None:
            return getattr(self.model, self.method)(**points, **arguments)
        law = self.model.conditional(**points, functions=self.functions)
        if self.pairs == "y":
            check_finite(paired, law.columns.names, first)
        if self.pairs is not None:
            single = self.pairs == "t" and paired.shape[1] == 1
            arguments[self.pairs] = paired[:, 0] if single else paired
        if self.method == "sample":  # draws depend on the numbers of the points
            arguments["first"] = arguments.get("first", 0) + first
        return getattr(law, self.method)(**arguments)

    def __call__(self, rows: Array, first: int) -> Array:
        return _one_array(self.answer(rows, first))


def _one_array(answer: Any) -> Array:
    """An answer, or several of the same shape side by side, shape (b, 2, ...)."""
    return np.stack(answer, axis=1) if isinstance(answer, tuple) else np.asarray(answer)


def _at_rows(query: _Query, name: str, source: RowSource, row: Array, paired: Any = None) -> Any:
    """Lazy answers at the rows of a source, which are first put to one row of the model."""
    first = query.answer(row, 0)
    shape = np.shape(_one_array(first))[1:]
    rows = lazy_rows(source, int(np.prod(shape, dtype=int)))
    if paired is not None:
        import dask.array as da

        rows = da.concatenate([rows, paired.rechunk((rows.chunks[0], -1))], axis=1)
        rows = rows.rechunk({1: -1})
    result = map_rows(rows, query, shape, name.replace("_", "-"))
    return tuple(result[:, i] for i in range(shape[0])) if isinstance(first, tuple) else result


def _a_row(given: Given) -> Array:
    """A row of a variable, shape (1, d)."""
    cells = getattr(given, "cells", None)
    points = given.basis.newton.points if cells is None else cells.atoms
    return np.asarray(points[:1])
