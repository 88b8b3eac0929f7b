"""Answers with the labels of their points: pandas' index, xarray's coordinates."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
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

    def wrap(self, values: Array, name: str, *axes: Axis) -> Any:
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
            return self._data_array(values, name, axes)
        if self.index is None:
            return values
        import pandas as pd

        if not axes:
            return pd.Series(values, index=self.index, name=name)
        names = [axis for axis, _ in axes]
        columns = (
            pd.Index(list(axes[0][1]), name=names[0])
            if len(axes) == 1
            else pd.MultiIndex.from_product([list(labels) for _, labels in axes], names=names)
        )
        flat = np.asarray(values).reshape(len(values), -1)
        return pd.DataFrame(flat, index=self.index, columns=columns)

    def _data_array(self, values: Array, name: str, axes: Sequence[Axis]) -> Any:
        import xarray as xr

        assert self.rows is not None
        row, along = self.rows
        coords = {axis: list(labels) for axis, labels in axes}
        if along is not None:
            coords[row] = along.values
        return xr.DataArray(values, dims=[row, *(a for a, _ in axes)], coords=coords, name=name)
