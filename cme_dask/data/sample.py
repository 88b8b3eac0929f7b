"""A sample of (x, y, weight) rows, wherever it lies, and its Zarr schema.

Schema version 1: a Zarr (version 3) group with float64 arrays ``x`` (n, d_x), ``y`` (n, d_y),
optionally ``weights`` (n,), and the priority sample in ``row_sample/{keys,index,x,y}``. Chunks hold
whole rows. Version 2: ``x`` may be float32, and ``y`` may be absent. Version 3: the attribute
``roles`` names the columns that became ``group`` (n,), int64, and ``time`` (n,), float64, seconds
since 1970-01-01 UTC, both also in ``row_sample``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from cme_dask.config import VARIABLES
from cme_dask.data.batches import Batch, BatchReader, batches
from cme_dask.data.columns import Columns
from cme_dask.data.sources import RowFunction, RowSource, ZarrSource, applied
from cme_dask.data.store import (
    brief,
    is_listing,
    member,
    read_array,
    read_attribute,
    stored_array,
    use_checksums,
)
from cme_dask.errors import DataError, StoreError, remedy, without_secrets
from cme_dask.numerics.folds import BY_ROWS, Folding, RowSample, Split
from cme_dask.numerics.reduction import Filled

if TYPE_CHECKING:
    from cme_dask.numerics.given_location import BesideResiduals
    from cme_dask.numerics.location import Residuals

Array = Any

KIND, SCHEMA_VERSION = "sample", 3

_MOST_ROWS = 1 << 40
_TRIED_ROWS = 64  # on which a function of rows is tried
_ROLES = {"group": "int64", "time": "float64"}


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows (x_i, y_i, w_i), not read yet.

    Attributes
    ----------
    sources
        Rows of x and, if there is a y, of y; those of z, on which a test conditions.
    columns
        Descriptions of their columns.
    weights
        Weights of the rows, a source with one column, or None for equal weights.
    row_sample
        The stored priority sample, or None if the source holds none.
    location
        Where the rows lie, for messages.
    group, time
        The group of each row, a number, and its time, seconds since 1970-01-01 UTC; sources with
        one column, or None.
    folding
        What goes into folds as a whole.
    part
        The part of the rows that this is, or None for all. Sources hold all rows, passes leave out
        those of other parts; ``row_sample`` is that of the part.
    residuals
        What is made of x and y on the way, or None.
    dropping
        Whether passes leave out the rows that lack a value, and count them.
    beside
        Further sources, read by passes that leave out rows to see which of them lack a value.
    filled
        Where missing values of x are filled in when rows are read.
    first_row
        Global index of the first row, on which folds and the sampled rows of cells depend.
    n_rows
        Number of rows n of the sources; how many of them belong to a part or lack no value, only a
        pass tells.
    expected_rows
        How many rows belong to the part, roughly.
    units
        The columns on which folds and the part depend, by name.
    reads
        All sources that a pass reads: x, y, weights and units, and those beside.
    """

    sources: tuple[RowSource, ...]
    columns: tuple[Columns, ...]
    weights: RowSource | None = None
    row_sample: RowSample | None = None
    location: str = "memory"
    group: RowSource | None = None
    time: RowSource | None = None
    folding: Folding = BY_ROWS
    part: Split | None = None
    residuals: "Residuals | BesideResiduals | None" = None
    dropping: bool = False
    beside: tuple[RowSource, ...] = ()
    filled: tuple[Filled, ...] = ()
    first_row: int = 0
    n_rows: int = field(init=False)
    expected_rows: float = field(init=False)
    units: dict[str, RowSource] = field(init=False)
    reads: tuple[RowSource, ...] = field(init=False)

    def __post_init__(self) -> None:
        single = {"weights": self.weights, "group": self.group, "time": self.time}
        named = {
            **dict(zip(VARIABLES, self.sources, strict=False)),
            **{name: source for name, source in single.items() if source is not None},
        }
        rows = {name: source.shape[0] for name, source in named.items()}
        if len(set(rows.values())) != 1:
            counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise DataError(
                f"the numbers of rows differ: {counts}; row i of each must be one observation"
            )
        for name, source in named.items():
            if source.shape[1] == 0:
                raise DataError(
                    f"{name} has no columns: 0 feature(s) (shape={source.shape}) while a minimum "
                    "of 1 is required."
                )
            if name in single and source.shape[1] != 1:
                raise DataError(f"{name} must have one column, got {source.shape[1]}")
        for (name, source), columns in zip(named.items(), self.columns, strict=False):
            if self.residuals is None and source.shape[1] != len(columns.names):
                raise DataError(
                    f"{name} has {source.shape[1]} columns but {len(columns.names)} names"
                )
        needed = {self.folding.by, self.part and self.part.folding.by}
        units = {name: s for name, s in single.items() if name in needed and s is not None}
        weights = () if self.weights is None else (self.weights,)
        set_ = object.__setattr__  # of a frozen one
        if "://" in self.location:  # models and stores save it
            set_(self, "location", without_secrets(self.location))
        set_(self, "units", units)
        set_(self, "reads", (*self.sources, *weights, *units.values(), *self.beside))
        set_(self, "n_rows", self.reads[0].shape[0])
        share = 1.0 if self.part is None else self.part.expected_share
        set_(self, "expected_rows", self.n_rows * share)

    def __repr__(self) -> str:
        names = "; ".join(
            f"{variable}: {columns.listed()}"
            for variable, columns in zip(VARIABLES, self.columns, strict=False)
        )
        weights = "" if self.weights is None else ", weighted"
        part = "" if self.part is None else f" of which {self.part}"
        folds = "" if self.folding.by == "rows" else f", folds by {self.folding}"
        missing = ", without rows that lack a value" if self.dropping else ""
        about = f"{part}{weights}{folds}{missing}"
        return f"Sample({self.n_rows:,} rows{about}, {names}, in {self.location})"

    def fold_by(self, folding: str | Folding) -> "Sample":
        """The same rows with folds by ``"rows"``, by ``"group"`` or by blocks of time, as ``"7d"``.

        Parameters
        ----------
        folding
            See :meth:`cme_dask.numerics.folds.Folding.parse`.

        Raises
        ------
        DataError
            If it has another form, or the sample has no groups or times.
        """
        return replace(self, folding=self._possible(folding))

    def for_folds(self, n_folds: int) -> "Sample":
        """The sample as passes with so many folds read it: one fold needs no column to tell it."""
        if n_folds > 1 or self.residuals is not None or self.dropping:
            return self
        return replace(self, folding=BY_ROWS)

    def split(
        self, share: float = 0.2, by: str | Folding | None = None, seed: int = 0
    ) -> tuple["Sample", "Sample"]:
        """Two parts of the same rows: those to fit on, and those held out.

        Nothing is copied or stored: passes over a part read all rows and leave out the others. A
        unit is held out where a hash of it and the seed, as a number in (0, 1), is below ``share``,
        independently of folds and row samples. Of few units the rows held out may be another share.

        Parameters
        ----------
        share
            Chance of a unit to be held out, in (0, 1).
        by
            What is held out as a whole, as in :meth:`fold_by`; default what folds are by.
        seed
            Equal ones give the same parts.

        Returns
        -------
        rest, held_out : Sample

        Raises
        ------
        DataError
            On a share or seed out of range, without groups or times, or if this is a part already;
            if a row sample of all rows shows that a part has none.
        """
        sides = self._sides(Split(self._of_whole(by), share, seed, False))
        if self.row_sample is not None and self.row_sample.complete:  # others may miss rare units
            _check_some(sides)
        return sides

    def k_fold(
        self, n_folds: int = 5, by: str | Folding | None = None, seed: int = 0
    ) -> "list[tuple[Sample, Sample]]":
        """Pairs of parts, as :meth:`split` makes them, that hold out each unit once.

        Parameters
        ----------
        n_folds
            Number K of pairs, at least 2; each holds out about 1 / K of the units.
        by, seed
            As in :meth:`split`.

        Returns
        -------
        pairs : list of (rest, held_out)

        Raises
        ------
        DataError
            As :meth:`split`; if ``n_folds`` is no integer of at least 2.
        """
        if isinstance(n_folds, bool) or not isinstance(n_folds, int) or n_folds < 2:
            raise DataError(f"n_folds must be an integer of at least 2, got {n_folds!r}")
        folding = self._of_whole(by)
        return [
            self._sides(Split(folding, 1.0 / n_folds, seed, False, k / n_folds))
            for k in range(n_folds)
        ]

    def split_as(self, part: Split) -> "tuple[Sample, Sample]":
        """The two parts of a split that is known, such as that of the rows of an earlier fit.

        Parameters
        ----------
        part
            One side of it: the attribute ``part`` of a sample.

        Returns
        -------
        rest, held_out : Sample

        Raises
        ------
        DataError
            Without the groups or times that it is by, or if this is a part already.
        """
        self._of_whole(part.folding)
        return self._sides(part.other if part.held_out else part)

    def drop_missing(self) -> "Sample":
        """The same rows without those that lack a value (NaN) in any column that is read.

        Nothing is copied, stored or read now: passes over the sample read all rows, leave these out
        and count them by column. Rows keep their numbers, and with them their folds. Columns are
        those of x, y, the weights and, where folds or a part are by them, group and time.

        Returns
        -------
        Sample

        Examples
        --------
        >>> open_sample(np.array([1.0, np.nan, 3.0]), np.arange(3.0)).drop_missing()
        Sample(3 rows, without rows that lack a value, x: x0; y: y0, in memory)
        """
        rows = self.row_sample
        return replace(self, dropping=True, row_sample=rows and rows.without_missing())

    def map(
        self,
        x: RowFunction | None = None,
        y: RowFunction | None = None,
        *,
        x_columns: Sequence[str] | None = None,
        y_columns: Sequence[str] | None = None,
    ) -> "Sample":
        """Rows (f(x_i), g(y_i)): functions of the rows in their place, computed whenever read.

        Nothing is copied or stored. Weights, groups, times, parts and folds stay those of the rows.

        Parameters
        ----------
        x, y
            Functions f and g from arrays of shape (b, d) to arrays of shape (b, k), which make each
            row of its own row alone; None leaves the variable as it is. Worker processes and
            clusters must be able to import them, and a checkpoint recognises them by their module.
        x_columns, y_columns
            Names of the new columns; default x0, x1, ... and y0, y1, ...

        Returns
        -------
        Sample

        Raises
        ------
        DataError
            If a function returns another number of rows, no numbers, or rows that depend on other
            rows; if names do not match; if a variable has columns of labels, or there is no y.

        Examples
        --------
        >>> sample = open_sample(np.arange(6.0).reshape(3, 2), np.arange(3.0))
        >>> sample.map(x=lambda x: x[:, :1] ** 2, x_columns=["squared"])
        Sample(3 rows, x: squared; y: y0, in memory)
        """
        if y is not None and len(self.sources) < 2:
            raise DataError("y is to be mapped, but there are only rows of x: give y as well")
        sources, columns = list(self.sources), list(self.columns)
        rows = self.row_sample
        parts = list(rows.parts) if rows is not None else []
        for i, (function, names) in enumerate(((x, x_columns), (y, y_columns))):
            if function is None:
                continue
            name = "xy"[i]
            if self.columns[i].categories:
                labels = ", ".join(map(repr, self.columns[i].categories))
                raise DataError(
                    f"{labels} of {name} hold labels, which functions of numbers do not take: "
                    f"select the other columns first, sample.select({name}=[...])"
                )
            source = self.sources[i]
            few = parts[i] if parts else source.read(0, min(self.n_rows, _TRIED_ROWS))
            width = _width(function, few[:_TRIED_ROWS], name)
            sources[i] = source.map(function, width)
            columns[i] = Columns.default(name, width) if names is None else Columns(tuple(names))
            if len(columns[i].names) != width:
                raise DataError(
                    f"{name}_columns has {len(columns[i].names)} names for {width} columns"
                )
            if parts:
                parts[i] = applied(function, parts[i], width)
        made = rows and replace(rows, parts=tuple(parts))
        return replace(self, sources=tuple(sources), columns=tuple(columns), row_sample=made)

    def reweight(self, ratio: RowFunction) -> "Sample":
        """The same rows with weights r(x_i), such as a density ratio: for fits under another law.

        Nothing is copied or stored: weights are computed whenever rows are read, from the rows of x
        that a pass reads anyway. Sums with these weights estimate those under the law r dP.

        Parameters
        ----------
        ratio
            Function r >= 0 from rows of x, shape (b, d), to shape (b,), as of
            :meth:`DriftReport.ratio`; see :meth:`map` on what it must be.

        Raises
        ------
        DataError
            If the sample has weights already, or the function returns another shape.

        Examples
        --------
        >>> open_sample(np.arange(6.0).reshape(3, 2)).reweight(lambda x: x[:, 0])
        Sample(3 rows, weighted, x: x0, x1, in memory)
        """
        if self.weights is not None:
            raise DataError("this sample has weights already: open it without them")
        function, source = _AsColumn(ratio), self.sources[0]
        _width(function, source.read(0, min(self.n_rows, _TRIED_ROWS)), "the weights")
        return replace(self, weights=source.map(function, 1), row_sample=None)

    def batches(
        self, size: int, seed: int = 0, *, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Mini-batches of random rows, each row in one batch of an epoch, read from their place.

        Rows are shuffled among blocks of at least eight storage chunks, whose blocks come in random
        order, so that a whole epoch reads every chunk once and holds few of them.

        Parameters
        ----------
        size
            Rows of a batch; the last one of an epoch may have fewer.
        seed, epoch
            Equal ones give the same batches, for the same rows in the same chunks.
        start
            Number of the first batch to be given: learning that was interrupted goes on with it.
            Rows of earlier batches are not read, unless they share a block with later ones.

        Yields
        ------
        Batch
            With ``x``, ``y``, ``weights``, ``index`` and ``number``.

        Raises
        ------
        DataError
            If ``size`` is not positive, or ``seed``, ``epoch`` or ``start`` is negative.
        StoreError
            On damaged chunks, when they are read.

        Examples
        --------
        >>> sample = open_sample(np.arange(10.0), np.arange(10.0))
        >>> [len(batch) for batch in sample.batches(4, seed=1)]
        [4, 4, 2]
        """
        return batches(BatchReader.of(self), size, seed, epoch=epoch, start=start)

    def with_residuals(self, residuals: "Residuals", rows: RowSample) -> "Sample":
        """The rows (x, e) that passes make of these, with the row sample of them.

        Parameters
        ----------
        residuals
            What to make of x and y, in the folds of this sample.
        rows
            The row sample of these rows.
        """
        folds = rows.folds(self.folding, residuals.n_folds)
        made = replace(rows, parts=residuals(rows.parts, folds))
        x, y = self.columns
        added = [f"{what} of {name}" for what in residuals.location.covariates for name in y.names]
        while set(added) & set(x.names):
            added = [f"{name}'" for name in added]
        if added:
            x = Columns((*x.names, *added), x.units, x.categories)
        return replace(self, columns=(x, Columns(y.names)), row_sample=made, residuals=residuals)

    def beside_residuals(self, residuals: "Residuals") -> "Sample":
        """The rows (x, y, x', e): those that passes make beside these, for two fits in one pass."""
        from cme_dask.numerics.given_location import BesideResiduals  # and with it the moments

        return replace(self, residuals=BesideResiduals(residuals))

    def check_whole(self, what: str) -> None:
        """DataError if this is a part, or leaves out rows: ``what`` takes all of them."""
        if self.dropping:
            raise DataError(
                f"{what} takes all rows, this sample leaves out those that lack a value: give the "
                "sample before drop_missing()"
            )
        self.check_undivided(what)

    def check_undivided(self, what: str) -> None:
        """DataError if this is a part: ``what`` takes rows of the whole sample."""
        if self.part is not None:
            raise DataError(
                f"{what} takes all rows, this is a part of them ({self.part}): give the sample "
                "that was split"
            )

    def _possible(self, folding: str | Folding) -> Folding:
        result = Folding.parse(folding)
        if result.by != "rows" and getattr(self, result.by) is None:
            raise DataError(
                f"folds by {result} need the {result.by} of each row, which {self.location} "
                f"does not have: ingest with --{result.by} COLUMN, or open_sample(..., "
                f"{result.by}=...)"
            )
        return result

    def _of_whole(self, by: str | Folding | None) -> Folding:
        if self.part is not None:
            raise DataError(f"this is a part already ({self.part}): split the whole sample")
        return self._possible(self.folding if by is None else by)

    def _sides(self, rest: Split) -> "tuple[Sample, Sample]":
        return self._only(rest), self._only(rest.other)

    def _only(self, part: Split) -> "Sample":
        rows = self.row_sample
        retained = rows and rows.only(part.selects(rows.index, rows.units))
        return replace(self, part=part, row_sample=retained)

    def select(self, x: Sequence[str] | None = None, y: Sequence[str] | None = None) -> "Sample":
        """The same rows with the requested columns of x and y only."""
        if y is not None and len(self.sources) < 2:
            raise DataError("columns of y are requested, but there are only rows of x: give y")
        requested = [x, y][: len(self.sources)]
        if all(w is None for w in requested):
            return self
        sources, columns, parts = [], [], list(self.row_sample.parts) if self.row_sample else []
        for i, (source, info, names) in enumerate(
            zip(self.sources, self.columns, requested, strict=True)
        ):
            if names is None:
                sources.append(source)
                columns.append(info)
                continue
            positions = info.positions(names)
            sources.append(source.pick(positions))
            columns.append(info.only(names))
            if parts:
                parts[i] = parts[i][:, list(positions)]
        sample = self.row_sample and replace(self.row_sample, parts=tuple(parts))
        return replace(self, sources=tuple(sources), columns=tuple(columns), row_sample=sample)


def _check_some(sides: Sequence[Sample]) -> None:
    """DataError if a side, whose row sample holds all of its rows, has none."""
    for side in sides:
        if side.part is not None and side.row_sample is not None and not len(side.row_sample):
            raise no_rows(side.part)


def no_rows(part: Split) -> DataError:
    """The error on a part without rows."""
    return DataError(
        f"no row belongs to this part ({part}): "
        + remedy(
            "take another share or seed",
            "give another --hold-out, or other units by --fold-by (of a job hold_out, seed or "
            "fold_by)",
        )
    )


@dataclass(frozen=True)
class _AsColumn:
    """A function of rows (b, d) with values (b,), as one column (b, 1)."""

    function: RowFunction

    def __call__(self, rows: Array) -> Array:
        values = np.asarray(self.function(rows))
        if values.shape != (len(rows),):
            raise DataError(
                f"weights are a function from {len(rows)} rows to shape ({len(rows)},), it "
                f"returned {values.shape}"
            )
        return values[:, None]


def _width(function: RowFunction, rows: Array, name: str) -> int:
    """Columns that a function makes; DataError if a row's values depend on other rows."""
    together = applied(function, rows)
    first = applied(function, rows[: (len(rows) + 1) // 2])
    scale = np.abs(first).max(initial=0.0)
    if first.shape[1] != together.shape[1] or not np.allclose(
        first, together[: len(first)], rtol=1e-6, atol=1e-9 * scale, equal_nan=True
    ):
        raise DataError(
            f"the function of {name} makes other values of the same rows when fewer are given: "
            "passes see the rows in blocks, so each must be made of its own row alone"
        )
    if not together.shape[1]:
        raise DataError(f"the function of {name} makes no columns")
    return int(together.shape[1])


def open_store(group: zarr.Group, location: str) -> Sample:
    """The sample in a Zarr group.

    Raises
    ------
    StoreError
        If it is no sample of this schema, was never finished, or is of a newer version.
    """
    metadata = read_attribute(group, KIND, SCHEMA_VERSION, location)
    if not isinstance(metadata.get("weights"), bool):
        raise StoreError(f"{location} does not say whether it has weights: write it again")
    if "chunk_checksums" in metadata:  # older stores have none
        group = use_checksums(group, metadata["chunk_checksums"], location)
    variables, roles = _variables(metadata), _roles(metadata, location)
    names = [*variables, *(["weights"] if metadata["weights"] else []), *roles]
    arrays = {name: stored_array(group, name, location) for name in names}
    for name, array in arrays.items():
        either = name == "x" and metadata["schema_version"] > 1
        types = ("float64", "float32") if either else (_ROLES.get(name, "float64"),)
        if array.dtype not in types or array.ndim != (2 if name in variables else 1):
            raise StoreError(
                f"the array {name!r} of {location} should be {' or '.join(types)} rows, it is "
                f"{array.dtype} of shape {array.shape}: write the store again"
            )
        dims = getattr(array.metadata, "dimension_names", None)
        if dims and dims[0] != "row":
            raise StoreError(
                f"the array {name!r} of {location} has the dimensions {', '.join(map(str, dims))}, "
                "rows come first: write the store again"
            )
        if array.shape[0] > _MOST_ROWS:
            raise StoreError(
                f"the array {name!r} of {location} claims {array.shape[0]:,} rows, at most "
                f"{_MOST_ROWS:,} are possible: restore it from a copy or write the store again"
            )
        if array.shape[0] != metadata.get("rows"):
            raise StoreError(
                f"the array {name!r} of {location} has {array.shape[0]} rows, its description says "
                f"{brief(metadata.get('rows'))}: restore it from a copy or write the store again"
            )
    try:
        columns = tuple(Columns.from_dict(metadata["columns"][v]) for v in variables)
    except (KeyError, TypeError) as error:
        raise StoreError(f"{location} describes no columns: {brief(repr(error))}") from error
    for variable, described in zip(variables, columns, strict=True):
        width = arrays[variable].shape[1]
        if width != len(described.names):
            raise StoreError(
                f"the array {variable!r} of {location} has {width:,} columns, its description "
                f"names {len(described.names)}: restore it from a copy or write the store again"
            )
    sources = {name: ZarrSource(array, whole=True) for name, array in arrays.items()}
    for source in sources.values():
        source.check_listed(location)
    return Sample(
        sources=tuple(sources[v] for v in variables),
        columns=columns,
        weights=sources.get("weights"),
        row_sample=_row_sample(
            group,
            {v: arrays[v] for v in variables},
            roles,
            metadata,
            location,
        ),
        location=location,
        group=sources.get("group"),
        time=sources.get("time"),
    )


def schema_version(variables: Sequence[zarr.Array[Any]], *, roles: bool = False) -> int:
    """The lowest version that allows these arrays x and y: older readers read what they can.

    ``roles`` says that there are groups or times beside them.
    """
    if roles:
        return 3
    return 1 if len(variables) == 2 and variables[0].dtype == np.float64 else 2


def _roles(about: dict[str, Any], location: str) -> tuple[str, ...]:
    """Which of ``group`` and ``time`` the store has, as it may from version 3 on."""
    roles = about.get("roles", {}) if about["schema_version"] > 2 else {}
    if not isinstance(roles, dict) or not set(roles) <= set(_ROLES):
        raise StoreError(f"{location} describes no roles: {brief(repr(roles))}; write it again")
    return tuple(name for name in _ROLES if name in roles)


def _variables(about: dict[str, Any]) -> str:
    """``"xy"``, or ``"x"`` if the store describes no y, as it may from version 2 on."""
    described = about.get("columns")
    alone = isinstance(described, dict) and "y" not in described
    return "x" if alone and about["schema_version"] > 1 else "xy"


def _row_sample(
    group: zarr.Group,
    arrays: dict[str, zarr.Array[Any]],
    roles: Sequence[str],
    about: dict[str, Any],
    location: str,
) -> RowSample:
    rows = member(group, "row_sample", location)
    if not isinstance(rows, zarr.Group):
        raise StoreError(f"{location} holds no row sample: write it again")
    complete = about.get("row_sample_complete") is True
    written = about.get("row_sample", {})  # stores of before don't say what was written
    if not is_listing(written):
        raise StoreError(f"{location} describes no row sample: write it again")

    def read(name: str) -> Array:
        return read_array(rows, name, location, written.get(name))

    keys, index, weights, *parts = map(read, ("keys", "index", "weights", *arrays))
    units = {name: read(name) for name in roles}
    widths = [(len(keys), array.shape[1]) for array in arrays.values()]
    kinds = [a.dtype.kind for a in (index, keys, weights, *parts)]
    if (
        keys.ndim != 1
        or index.shape != keys.shape
        or weights.shape != keys.shape
        or [part.shape for part in parts] != widths
        or kinds != ["i", *(["f"] * (len(kinds) - 1))]
        or any((v.shape, v.dtype) != (keys.shape, _ROLES[name]) for name, v in units.items())
        or not len(keys)
        or not 0 <= index.min() <= index.max() < arrays["x"].shape[0]
    ):
        raise StoreError(f"the row sample of {location} does not fit its rows: write it again")
    # As floats, which passes read: then the rows of the sample are in the folds they are in there.
    units = {name: values.astype(np.float64) for name, values in units.items()}
    return RowSample(keys, index, tuple(parts), weights, complete, units)
