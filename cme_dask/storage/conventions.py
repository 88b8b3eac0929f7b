"""Values that are coded by the CF conventions, as xarray writes them to Zarr."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from cme_dask.errors import DataError, ResourceError

Array = Any
Decode = Callable[[Array], Array]

_ENCODED = ("scale_factor", "add_offset", "missing_value", "_FillValue", "dtype")


def cf_decoder(name: str, array: zarr.Array[Any]) -> Decode | None:
    """What undoes the CF conventions; None if there is nothing to undo."""
    attributes = dict(array.attrs)
    fill = _fill_value(name, array, attributes)
    attributes.pop("_FillValue", None)
    if fill is not None and not np.isnan(fill):
        attributes["_FillValue"] = fill
    if not (" since " in str(attributes.get("units")) or set(_ENCODED) & set(attributes)):
        return None
    return _CF(name, attributes)


def _fill_value(name: str, array: zarr.Array[Any], attributes: Mapping[str, Any]) -> float | None:
    """The number that stands for a missing value, as xarray keeps it."""
    if array.dtype.kind not in "iuf":
        return None
    if "_FillValue" in attributes:
        return _number(name, attributes["_FillValue"])
    if array.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in attributes:
        return None if array.fill_value is None else array.fill_value.item()
    return None


def _number(name: str, fill: Any) -> float:
    """A fill value: a number, or of a float in format 3 its bytes, coded as text."""
    try:
        if isinstance(fill, str) and fill != "NaN":
            return float(np.frombuffer(base64.b64decode(fill), "<f8")[0])
        return fill if isinstance(fill, int) else float(fill)
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(
            f"the array {name!r} has the fill value {fill!r}, a number was expected: correct its "
            "attribute _FillValue"
        ) from error


@dataclass(frozen=True)
class _CF:
    """Decodes values by the CF conventions, as xarray does."""

    name: str
    attributes: Mapping[str, Any]

    def __call__(self, values: Array) -> Array:
        try:
            import xarray
        except ImportError as error:
            raise ResourceError(
                f"the array {self.name!r} is coded by the CF conventions, which needs xarray: "
                "install cme-dask[xarray]"
            ) from error
        dimensions = ("row", "column")[: values.ndim]
        try:
            coded = xarray.Variable(dimensions, values, dict(self.attributes))
            return xarray.conventions.decode_cf_variable(self.name, coded).values
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"the array {self.name!r} is coded by the CF conventions in a way that xarray "
                f"can't read: {error}"
            ) from error
