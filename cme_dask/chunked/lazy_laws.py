"""Conditional laws at the rows of Dask arrays and stores: the same questions, lazy answers."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import numpy as np
import zarr
from dask.base import is_dask_collection

from cme_dask.chunked.dask_frames import is_dask_frame
from cme_dask.chunked.lazy import lazy_rows, map_rows
from cme_dask.chunked.sources import DaskSource, open_sample
from cme_dask.errors import DataError, UnseenCategoryWarning
from cme_dask.models.functions import importable
from cme_dask.models.joint import JointModel, Variable
from cme_dask.models.law import ConditionalLaw
from cme_dask.models.laws import Function
from cme_dask.models.points import UNSEEN
from cme_dask.storage.columns import Columns, check_finite
from cme_dask.storage.rows import RowSource
from cme_dask.storage.sample import Sample

Array = Any
Question = Callable[[ConditionalLaw, int], Array]
"""From laws, and the number of the first of their points, to answers (b, ...)."""


def is_out_of_core(values: Any) -> bool:
    """Whether points lie in a Dask or Zarr array, a Dask DataFrame, or a store."""
    lazy = (str, zarr.Array, zarr.Group, Sample)
    return isinstance(values, lazy) or hasattr(values, "__fspath__") or is_dask_collection(values)


def given_rows(
    values: Any,
    variable: Variable,
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
        place = ("Y" if reverse else "X") if sample.location == "memory" else sample.location
        positions = columns.positions_of(variable.columns, place)
        source, columns = source.pick(positions), columns.only(names)
    if len(columns.names) != len(names):
        raise DataError(
            f"{sample.location} has {len(columns.names)} columns, the model's are "
            f"{variable.columns.listed()}"
        )
    for name, theirs in columns.categories.items():
        ours = variable.columns.categories.get(name)
        if ours == theirs:
            continue
        if ours is None or not is_dask_frame(values):
            raise DataError(
                f"the labels of column {name!r} have other codes in {sample.location} than in the "
                "model: ask it for the store that it was fitted on, or a part of that"
            )
        assert isinstance(source, DaskSource)
        source = _recoded(source, variable, name, theirs)
    return Sample((source,), (variable.columns,), location=sample.location, part=sample.part)


def _recoded(
    source: DaskSource, variable: Variable, name: str, labels: tuple[str, ...]
) -> DaskSource:
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

    Methods and shapes are those of :class:`cme_dask.models.law.ConditionalLaw`; they return Dask
    arrays whose chunks are whole rows, of 64 MiB at most. Wrong arguments are refused at once: each
    question is first put to one row of the model.
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

    def mean(self) -> Any:
        """Means, shape (n,) of one column, (n, d) of several."""
        return self._ask("mean", _Of(methodcaller("mean")))

    def std(self) -> Any:
        """Standard deviations, shaped like the means."""
        return self._ask("std", _Of(methodcaller("std")))

    def var(self) -> Any:
        """Variances, shaped like the means."""
        return self._ask("var", _Of(methodcaller("var")))

    def cov(self) -> Any:
        """Covariances, shape (n, d, d)."""
        return self._ask("cov", _Of(methodcaller("cov")))

    def corr(self) -> Any:
        """Correlations, shape (n, d, d)."""
        return self._ask("corr", _Of(methodcaller("corr")))

    def cdf(self, t: Any, column: str | None = None) -> Any:
        """Distribution functions at t, shape (n,) or (n, k)."""
        return self._ask("cdf", _Of(methodcaller("cdf", t, column=column)))

    def quantile(self, q: Any, column: str | None = None) -> Any:
        """Quantiles, shape (n,), (n, k), (n, d) or (n, k, d)."""
        return self._ask("quantile", _Of(methodcaller("quantile", q, column=column)))

    def median(self, column: str | None = None) -> Any:
        """Medians, shape (n,) or (n, d)."""
        return self._ask("median", _Of(methodcaller("median", column=column)))

    def interval(self, level: float = 0.9, column: str | None = None) -> tuple[Any, Any]:
        """Central intervals: their lower and upper ends, shapes (n,) or (n, d)."""
        ends = self._ask("interval", _Ends(level, column))
        return ends[:, 0], ends[:, 1]

    def probability(self, event: Any) -> Any:
        """Probabilities of an event, shape (n,)."""
        return self._ask("probability", _Of(methodcaller("probability", event)))

    def expect(self, f: Any) -> Any:
        """Expectations of f, shape (n,), or (n, k) of several."""
        return self._ask("expect", _Of(methodcaller("expect", f)))

    def density_ratio(self, y: Any) -> Any:
        """Density ratios of the laws to the marginal at points y, shape (n, k)."""
        return self._ask("density-ratio", _Of(methodcaller("density_ratio", y)))

    def pdf(self, y: Any) -> Any:
        """Densities at points y, shape (n, k)."""
        return self._ask("pdf", _Of(methodcaller("pdf", y)))

    def log_pdf(self, y: Any) -> Any:
        """Logarithms of the densities at points y, shape (n, k)."""
        return self._ask("log-pdf", _Of(methodcaller("log_pdf", y)))

    def sample(self, size: int | None = None, *, random_state: int = 0) -> Any:
        """Draws, shape (n,), (n, d), (n, size) or (n, size, d).

        Those of a row depend on the seed and the number of the row alone, so that any chunks give
        the same ones.
        """
        return self._ask("sample", _Draws(size, random_state))

    def weights(self) -> Any:
        """Probabilities of the cells, shape (n, S)."""
        return self._ask("weights", _Of(methodcaller("weights")))

    def mixture_weights(self) -> Any:
        """Of couplings: weights of the components, shape (n, m)."""
        return self._ask("mixture-weights", _Of(methodcaller("mixture_weights")))

    def effective_support(self) -> Any:
        """How much of the data speaks at each point, in [0, 1], shape (n,)."""
        return self._ask("effective-support", _Of(methodcaller("effective_support")))

    def predict_proba(self, column: str | None = None) -> Any:
        """Probabilities of the labels of a categorical column, shape (n, labels)."""
        return self._ask("predict-proba", _Of(methodcaller("predict_proba", column=column)))

    def _ask(self, name: str, question: Question) -> Any:
        given = self.model.y if self.reverse else self.model.x
        asked = _Asked(self.model, self.reverse, self.functions, given.columns, question)
        shape = np.shape(asked(_a_row(given), 0))[1:]
        rows = lazy_rows(self.source, int(np.prod(shape, dtype=int)))
        return map_rows(rows, asked, shape, f"law-{name}")


@dataclass(frozen=True, eq=False)
class _Asked:
    """A question to the laws at rows, of which the first has the number ``first``."""

    model: JointModel
    reverse: bool
    functions: Mapping[str, Function]
    columns: Columns
    question: Question

    def __call__(self, rows: Array, first: int) -> Array:
        check_finite(rows, self.columns.names, first)
        x, y = (None, rows) if self.reverse else (rows, None)
        law = self.model.conditional(x, Y=y, functions=self.functions)
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
class _Draws:
    """Draws, which depend on the numbers of the points."""

    size: int | None
    seed: int

    def __call__(self, law: ConditionalLaw, first: int) -> Array:
        return np.asarray(law.sample(self.size, random_state=self.seed, first=first))


def _a_row(given: Variable) -> Array:
    """A row of a variable, shape (1, d)."""
    points = given.basis.newton.points if given.cells is None else given.cells.atoms
    return np.asarray(points[:1])
