"""Answers with the labels of their points: pandas' index, xarray's coordinates."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from cme_dask.storage.columns import Columns

Array = Any
FloatArray: TypeAlias = NDArray[np.float64]
"""Answers at points; points of pandas or xarray give a Series, DataFrame or DataArray instead."""

Axis = tuple[str, Sequence[Any]]
"""Name and labels of an axis."""


@dataclass(frozen=True, eq=False)
class Labels:
    """How answers at some points are labelled.

    Attributes
    ----------
    index
        pandas' index of the points, if they came with one.
    rows
        Name and coordinates of xarray's dimension of the points, if they came with one.
    """

    index: Any = None
    rows: tuple[str, Any] | None = None

    @classmethod
    def of(cls, values: Any) -> "Labels":
        """Those of points as users give them; none for arrays and lists."""
        # What is not imported can't have made them.
        pandas, xarray = sys.modules.get("pandas"), sys.modules.get("xarray")
        if pandas is not None and isinstance(values, (pandas.DataFrame, pandas.Series)):
            return cls(index=values.index)
        if xarray is not None and isinstance(values, (xarray.DataArray, xarray.Dataset)):
            name = next(iter(values.dims), None)
            if name is not None:
                return cls(rows=(str(name), values.coords.get(name)))
        return cls()

    def wrap(self, values: Array, name: str, *axes: Axis) -> FloatArray:
        """Answers with labels.

        Parameters
        ----------
        values
            Shape (n, ...), points first.
        name
            What they are.
        axes
            The axes after the first.

        Returns
        -------
        the array itself; or a Series, or a DataFrame with a level of columns for each axis; or a
        DataArray
        """
        if self.rows is not None:
            return cast(FloatArray, self._data_array(values, name, axes))
        if self.index is None:
            return cast(FloatArray, values)
        return cast(FloatArray, self._table(values, name, axes))

    def draws(self, values: Array, columns: Columns, *axes: Axis) -> FloatArray:
        """Draws: as :meth:`wrap`, with the labels of columns that hold labels instead of codes.

        pandas' answers hold categorical columns, xarray's are then arrays of objects; NumPy's hold
        the codes, which stand for ``columns.categories``.

        Parameters
        ----------
        values
            Shape (n, ...); of several columns, the last axis is theirs.
        columns
            Of the variable.
        axes
            The axes after the first.
        """
        if not columns.categories or (self.rows is None and self.index is None):
            return self.wrap(values, "sample", *axes)
        labels = [columns.categories.get(name) for name in columns.names]
        if self.rows is not None:
            drawn = values.reshape(len(values), -1, len(labels)).astype(object)
            for j, each in enumerate(labels):
                if each is not None:
                    drawn[:, :, j] = np.array(each, dtype=object)[drawn[:, :, j].astype(np.intp)]
            return self.wrap(drawn.reshape(values.shape), "sample", *axes)
        return cast(FloatArray, self._table(values, "sample", axes, labels))

    def _table(
        self,
        values: Array,
        name: str,
        axes: Sequence[Axis],
        labels: Sequence[Sequence[str] | None] = (None,),
    ) -> Any:
        """A Series or a DataFrame, its columns by turns with these labels instead of codes."""
        import pandas as pd

        flat = np.asarray(values).reshape(len(values), -1)
        if all(each is None for each in labels):
            table = pd.DataFrame(flat, index=self.index)
        else:
            parts: dict[int, Any] = {}
            for k, part in enumerate(flat.T):
                each = labels[k % len(labels)]
                parts[k] = (
                    part
                    if each is None
                    else pd.Categorical.from_codes(part.astype(np.int64), pd.Index(list(each)))
                )
            table = pd.DataFrame(parts, index=self.index)
        if not axes:
            return table[0].rename(name)
        names = [axis for axis, _ in axes]
        table.columns = (
            pd.Index(list(axes[0][1]), name=names[0])
            if len(axes) == 1
            else pd.MultiIndex.from_product([list(each) for _, each in axes], names=names)
        )
        return table

    def _data_array(self, values: Array, name: str, axes: Sequence[Axis]) -> Any:
        import xarray as xr

        assert self.rows is not None
        row, along = self.rows
        coords = {axis: list(labels) for axis, labels in axes}
        if along is not None:
            coords[row] = along.values
        return xr.DataArray(values, dims=[row, *(a for a, _ in axes)], coords=coords, name=name)
