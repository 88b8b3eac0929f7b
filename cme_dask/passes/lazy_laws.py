"""Conditional laws at the rows of Dask arrays and stores: the same questions, lazy answers."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cme_dask.data.columns import Columns, check_finite
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowSource
from cme_dask.errors import DataError, UnseenCategoryWarning
from cme_dask.models.events import importable
from cme_dask.models.files import AnyBasis
from cme_dask.models.joint import JointModel
from cme_dask.models.law import ConditionalLaw
from cme_dask.models.laws import Function
from cme_dask.models.points import UNSEEN, is_out_of_core
from cme_dask.passes.lazy import lazy_rows, map_rows
from cme_dask.passes.sources import DaskSource, is_dask_frame, open_sample

if TYPE_CHECKING:
    import dask.array as da


Array = Any
Question = Callable[..., Array]
"""From laws, and the number of the first of their points, to answers (b, ...).

Where each point has a row of its own, such as an observed y, these are given as well.
"""

_ROWS = 1 << 16  # of a chunk of rows in memory that are paired with lazy ones


class Given(Protocol):
    """A variable that is given: its columns and its basis."""

    @property
    def columns(self) -> Columns:
        """Its columns."""

    @property
    def basis(self) -> AnyBasis:
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
        On columns that are not the model's, or labels with other codes.
    StoreError
        If a store is damaged.
    """
    sample = open_sample(values, storage_options=storage_options)
    which = 1 if reverse and len(sample.sources) == 2 else 0
    source, columns, names = sample.sources[which], sample.columns[which], variable.columns.names
    default = columns.names == Columns.default("xy"[which], len(columns.names)).names
    # Arrays have no names of their own: of these all columns are asked for, as in memory.
    unnamed = default and sample.location == "memory"
    if not unnamed and (not default or set(names) <= set(columns.names)):
        where = ("Y" if reverse else "X") if sample.location == "memory" else sample.location
        positions = columns.positions_of(variable.columns, where)
        columns = columns.only([columns.names[place] for place in positions])
        source = source.pick(positions)
    if len(columns.names) != len(names):
        raise DataError(
            f"{sample.location} has {len(columns.names)} columns, the model's are "
            f"{variable.columns.listed()}"
        )
    for name, label in zip(names, columns.names, strict=True):
        theirs, ours = columns.categories.get(label), variable.columns.categories.get(name)
        if theirs is None or ours == theirs:
            continue
        if ours is None or not is_dask_frame(values):
            raise DataError(
                f"the labels of column {name!r} have other codes in {sample.location} than in the "
                "model: ask it for the store that it was fitted on, or a part of that"
            )
        assert isinstance(source, DaskSource)
        source = _recoded(source, variable, name, theirs)
    return Sample((source,), (variable.columns,), location=sample.location, part=sample.part)


def _recoded(source: DaskSource, variable: Given, name: str, labels: tuple[str, ...]) -> DaskSource:
    """The rows of a Dask DataFrame with the model's codes of these labels of a column."""
    place, ours = variable.columns.names.index(name), variable.columns.categories[name]
    unseen = [label for label in labels if label not in ours]
    if unseen:
        told = ", ".join(map(repr, unseen[:10])) + (" and more" if len(unseen) > 10 else "")
        if not variable.basis.newton.kernel.pools(place):
            raise DataError(
                f"column {name!r} has the unknown {told}: there are {variable.columns.labels(name)}"
            )
        warnings.warn(
            "labels that the fit has not seen are answered as its pooled rare ones: column "
            f"{name!r} {told}",
            UnseenCategoryWarning,
            stacklevel=5,
        )
    number = {label: float(code) for code, label in enumerate(ours)}
    table = np.array([number.get(label, UNSEEN) for label in labels])
    return DaskSource(source.array.map_blocks(_with_codes, place, table, dtype=np.float64))


def _with_codes(rows: Array, place: int, table: Array) -> Array:
    rows = rows.copy()
    known = ~np.isnan(rows[:, place])
    rows[known, place] = table[rows[known, place].astype(np.int64)]
    return rows


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
    asked = _Method(model, method, "Y" if reverse else "X", arguments, given.columns)
    first = asked.call(_a_row(given))
    shape = np.shape(asked.one_array(first))[1:]
    rows = lazy_rows(sample.sources[0], int(np.prod(shape, dtype=int)))
    found = map_rows(rows, asked, shape, f"model-{method.replace('_', '-')}")
    return tuple(found[:, i] for i in range(shape[0])) if isinstance(first, tuple) else found


@dataclass(frozen=True, eq=False)
class _Method:
    """A method of a model at rows."""

    model: Any
    method: str
    points: str
    arguments: dict[str, Any]
    columns: Columns

    def call(self, rows: Array) -> Any:
        return getattr(self.model, self.method)(**{self.points: rows}, **self.arguments)

    @staticmethod
    def one_array(found: Any) -> Array:
        return np.stack(found, axis=1) if isinstance(found, tuple) else np.asarray(found)

    def __call__(self, rows: Array, first: int) -> Array:
        check_finite(rows, self.columns.names, first)
        return self.one_array(self.call(rows))


def lazy_law(
    model: JointModel,
    X: Any = None,
    *,
    Y: Any = None,
    functions: Mapping[str, Function] | None = None,
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
        Functions of the answered variable by name, for names that are asked for later.
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
    return LazyLaw(model, sample.sources[0], reverse, functions or {})


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
        Functions of the answered variable by name, for names that are asked for later.
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

    def mean(self) -> "da.Array":
        """Means, shape (n,) of one column, (n, d) of several."""
        return self._ask("mean", _Of(methodcaller("mean")))

    def std(self) -> "da.Array":
        """Standard deviations, shaped like the means."""
        return self._ask("std", _Of(methodcaller("std")))

    def var(self) -> "da.Array":
        """Variances, shaped like the means."""
        return self._ask("var", _Of(methodcaller("var")))

    def cov(self) -> "da.Array":
        """Covariances, shape (n, d, d)."""
        return self._ask("cov", _Of(methodcaller("cov")))

    def corr(self) -> "da.Array":
        """Correlations, shape (n, d, d)."""
        return self._ask("corr", _Of(methodcaller("corr")))

    def cdf(self, t: Any, column: str | None = None, *, paired: bool = False) -> "da.Array":
        """Distribution functions at t, shape (n,) or (n, k); one t for each row if ``paired``.

        Its arguments: see :meth:`ConditionalLaw.cdf`.
        """
        if not paired:
            return self._ask("cdf", _Of(methodcaller("cdf", t, column=column)))
        width = 1 if column is not None else len(self.numeric)
        return self._ask("cdf", _Thresholds(column), self._thresholds(t, width))

    def quantile(self, q: Any, column: str | None = None) -> "da.Array":
        """Quantiles, shape (n,), (n, k), (n, d) or (n, k, d).

        Its arguments: see :meth:`ConditionalLaw.quantile`.
        """
        return self._ask("quantile", _Of(methodcaller("quantile", q, column=column)))

    def median(self, column: str | None = None) -> "da.Array":
        """Medians, shape (n,) or (n, d).

        Its arguments: see :meth:`ConditionalLaw.median`.
        """
        return self._ask("median", _Of(methodcaller("median", column=column)))

    def interval(
        self, level: float = 0.9, column: str | None = None
    ) -> "tuple[da.Array, da.Array]":
        """Central intervals: their lower and upper ends, shapes (n,) or (n, d).

        Its arguments: see :meth:`ConditionalLaw.interval`.
        """
        ends = self._ask("interval", _Ends(level, column))
        return ends[:, 0], ends[:, 1]

    def crps(self, y: Any, column: str | None = None) -> "da.Array":
        """Continuous ranked probability scores at observed y, one for each row, shape (n,).

        Its arguments: see :meth:`ConditionalLaw.crps`.
        """
        return self._ask("crps", _Paired("crps", {"column": column}), self._observed(y))

    def probability(self, event: Any) -> "da.Array":
        """Probabilities of an event, shape (n,), or of several, (n, k).

        Its arguments: see :meth:`ConditionalLaw.probability`.
        """
        return self._ask("probability", _Of(methodcaller("probability", event)))

    def expect(self, f: Any) -> "da.Array":
        """Expectations of f, shape (n,), or (n, k) of several.

        Its arguments: see :meth:`ConditionalLaw.expect`.
        """
        return self._ask("expect", _Of(methodcaller("expect", f)))

    def density_ratio(self, y: Any, *, paired: bool = False) -> "da.Array":
        """Density ratios of the laws to the marginal at points y, shape (n, k), or (n,).

        Its arguments: see :meth:`ConditionalLaw.density_ratio`.
        """
        return self._at("density_ratio", y, paired)

    def pdf(self, y: Any, *, paired: bool = False, bandwidth: Any = None) -> "da.Array":
        """Densities at points y, shape (n, k), or (n,) if ``paired``.

        Its arguments: see :meth:`ConditionalLaw.pdf`.
        """
        return self._at("pdf", y, paired, bandwidth=bandwidth)

    def log_pdf(self, y: Any, *, paired: bool = False, bandwidth: Any = None) -> "da.Array":
        """Logarithms of the densities at points y, shape (n, k), or (n,) if ``paired``.

        Its arguments: see :meth:`ConditionalLaw.log_pdf`.
        """
        return self._at("log_pdf", y, paired, bandwidth=bandwidth)

    def sample(
        self, size: int | None = None, *, random_state: int = 0, first: int = 0
    ) -> "da.Array":
        """Draws, shape (n,), (n, d), (n, size) or (n, size, d).

        Those of a row depend on the seed and the number of the row alone, so that any chunks give
        the same ones. Of columns of labels they are codes: ``columns.categories`` has the labels.

        Parameters
        ----------
        size
            Draws at each row; default one, without an axis of its own.
        random_state
            Seed, a non-negative integer.
        first
            Number of the first row.
        """
        return self._ask("sample", _Draws(size, random_state, first))

    def weights(self) -> "da.Array":
        """Probabilities of the cells, shape (n, S)."""
        return self._ask("weights", _Of(methodcaller("weights")))

    def mixture_weights(self) -> "da.Array":
        """Of couplings: weights of the components, shape (n, m)."""
        return self._ask("mixture-weights", _Of(methodcaller("mixture_weights")))

    def effective_support(self) -> "da.Array":
        """How much of the data speaks at each point, in [0, 1], shape (n,)."""
        return self._ask("effective-support", _Of(methodcaller("effective_support")))

    def predict_proba(self, column: str | None = None) -> "da.Array":
        """Probabilities of the labels of a categorical column, shape (n, labels).

        Its arguments: see :meth:`ConditionalLaw.predict_proba`.
        """
        return self._ask("predict-proba", _Of(methodcaller("predict_proba", column=column)))

    def _ask(self, name: str, question: Question, paired: Any = None) -> Any:
        given = self.model.y if self.reverse else self.model.x
        asked = _Asked(self.model, self.reverse, self.functions, given.columns, question)
        row = _a_row(given)
        if paired is not None:
            row = np.concatenate([row, self._one_of(paired)], axis=1)
        shape = np.shape(asked(row, 0))[1:]
        rows = lazy_rows(self.source, int(np.prod(shape, dtype=int)))
        if paired is not None:
            paired = paired.rechunk((rows.chunks[0], -1))
            import dask.array as da

            rows = da.concatenate([rows, paired], axis=1).rechunk({1: -1})
        return map_rows(rows, asked, shape, f"law-{name}")

    def _one_of(self, paired: Any) -> Array:
        """A row like those that are paired with the points: of the variable, or zeros."""
        answered = self.model.x if self.reverse else self.model.y
        row = _a_row(answered)
        return row if row.shape[1] == paired.shape[1] else np.zeros((1, paired.shape[1]))

    def _at(self, method: str, y: Any, paired: bool, **options: Any) -> Any:
        """A method that takes points y, with each row or one for each row."""
        name = method.replace("_", "-")
        if paired:
            return self._ask(name, _Paired(method, {"paired": True, **options}), self._observed(y))
        return self._ask(name, _Of(methodcaller(method, y, **options)))

    def _observed(self, y: Any) -> Any:
        """Points of the answered variable, one for each row, as a Dask array (n, d)."""
        import dask.array as da

        answered = self.model.x if self.reverse else self.model.y
        if is_out_of_core(y):
            sample = given_rows(y, answered, reverse=not self.reverse)
            sample.check_whole("points y")
            rows = lazy_rows(sample.sources[0], len(answered.columns.names))
        else:
            points = answered.points(y, "y")
            rows = da.from_array(points, chunks=(_ROWS, -1))
        return self._checked(rows, "points of y")

    def _thresholds(self, t: Any, width: int) -> Any:
        """Thresholds, one row for each point, as a Dask array (n, width) of numbers."""
        import dask.array as da

        rows = t if is_out_of_core(t) else da.from_array(np.asarray(t, dtype=np.float64))
        rows = rows[:, None] if rows.ndim == 1 and width == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != width:
            raise DataError(
                f"thresholds must have shape ({len(self)}{f', {width}' if width > 1 else ','}), "
                f"got {t.shape}"
            )
        return self._checked(rows.astype(np.float64), "thresholds")

    def _checked(self, rows: Any, name: str) -> Any:
        if len(rows) != len(self):
            raise DataError(
                f"paired {name} are one for each x: {len(self):,} expected, got {len(rows):,}"
            )
        return rows


@dataclass(frozen=True, eq=False)
class _Asked:
    """A question to the laws at rows, of which the first has the number ``first``."""

    model: JointModel
    reverse: bool
    functions: Mapping[str, Function]
    columns: Columns
    question: Question

    def __call__(self, rows: Array, first: int) -> Array:
        d = len(self.columns.names)
        given, paired = np.ascontiguousarray(rows[:, :d]), rows[:, d:]
        check_finite(given, self.columns.names, first)
        x, y = (None, given) if self.reverse else (given, None)
        law = self.model.conditional(x, Y=y, functions=self.functions)
        if paired.shape[1]:
            return np.asarray(self.question(law, first, paired))
        return np.asarray(self.question(law, first))


@dataclass(frozen=True)
class _Of:
    """What a method of the laws answers."""

    method: Callable[[ConditionalLaw], Array]

    def __call__(self, law: ConditionalLaw, first: int) -> Array:
        return self.method(law)


@dataclass(frozen=True)
class _Ends:
    """The ends of intervals side by side, shape (b, 2, ...)."""

    level: float
    column: str | None

    def __call__(self, law: ConditionalLaw, first: int) -> Array:
        return np.stack(law.interval(self.level, column=self.column), axis=1)


@dataclass(frozen=True)
class _Paired:
    """What a method answers that takes one point y for each row."""

    method: str
    options: dict[str, Any]

    def __call__(self, law: ConditionalLaw, first: int, y: Array) -> Array:
        check_finite(y, law.columns.names, first)
        return np.asarray(getattr(law, self.method)(y, **self.options))


@dataclass(frozen=True)
class _Thresholds:
    """Distribution functions at one threshold for each row."""

    column: str | None

    def __call__(self, law: ConditionalLaw, first: int, t: Array) -> Array:
        single = self.column is not None or len(law.numeric) == 1
        return law.cdf(t[:, 0] if single else t, self.column, paired=True)


@dataclass(frozen=True)
class _Draws:
    """Draws, which depend on the numbers of the points."""

    size: int | None
    seed: int
    start: int = 0

    def __call__(self, law: ConditionalLaw, first: int) -> Array:
        return law.sample(self.size, random_state=self.seed, first=self.start + first)


def _a_row(given: Given) -> Array:
    """A row of a variable, shape (1, d)."""
    cells = getattr(given, "cells", None)
    points = given.basis.newton.points if cells is None else cells.atoms
    return np.asarray(points[:1])
