"""Kernels as short text, such as ``gaussian:TEMP=8,DEWP=10 * categorical:wd=0.7``."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from cme_dask.errors import DataError
from cme_dask.kernels.base import KERNELS, Kernel, Product
from cme_dask.kernels.discrete import Categorical
from cme_dask.kernels.files import from_dict
from cme_dask.kernels.stationary import Gaussian, Laplace, LengthScale, LengthScaled, Matern

FAMILIES: dict[str, Callable[[LengthScale], Kernel]] = {
    "gaussian": Gaussian,
    "laplace": Laplace,
    "matern12": lambda length_scale: Matern(length_scale, 0.5),
    "matern32": lambda length_scale: Matern(length_scale, 1.5),
    "matern52": lambda length_scale: Matern(length_scale, 2.5),
    "categorical": Categorical,
}
"""Kernels by the names that a text uses, as functions of their length scales."""


def families() -> dict[str, Callable[[LengthScale], Kernel]]:
    """Return these and, in lower case, kernels of a program's own that need a length scale only."""
    own = {
        name.lower(): kind
        for name, kind in KERNELS.items()
        if issubclass(kind, LengthScaled)
        and all(f.name == "length_scale" or f.default is not MISSING for f in fields(kind))
    }
    return {**own, **FAMILIES}


SYNTAX = (
    "median, NAME:NUMBER such as gaussian:0.3, NAME:NUMBER,NUMBER with a length scale for each "
    "column, NAME:COLUMN=NUMBER,..., a product of these such as "
    "'gaussian:TEMP=8,DEWP=10 * categorical:wd=0.7', or a kernel's JSON form"
)
"""What a text may say."""

Specification = str | dict[str, Any] | None
"""``"median"``, a text, the JSON form of a kernel, or None where the kernel is learned."""


@dataclass(frozen=True)
class Factor:
    """One factor of a product of kernels, as a text states it.

    Attributes
    ----------
    family
        A name of :data:`FAMILIES`.
    length_scale
        One number for all columns or, with ``columns`` or without, one number for each.
    columns
        Names of the columns that the factor sees; None for all that it fits.
    """

    family: str
    length_scale: LengthScale
    columns: tuple[str, ...] | None = None


def read_specification(value: str | Mapping[str, Any]) -> Specification:
    """Check a kernel that a command or a job file states, as far as possible without columns.

    Parameters
    ----------
    value
        ``"learned"``, ``"median"``, a text, or the JSON form of a kernel, as a text or a mapping.

    Returns
    -------
    specification
        For :func:`kernel_of`.

    Raises
    ------
    DataError
        If the text has another form, a name is unknown, or a length scale is not positive.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{value!r} is not JSON: {error}") from error
    if isinstance(value, Mapping):
        from_dict(value)
        return dict(value)
    text = value.strip()
    if text == "learned":
        return None
    if text != "median":
        factors(text)
    return text


def kernel_of(
    specification: Specification, names: Sequence[str], labelled: Collection[str] = ()
) -> Kernel | str | None:
    """Return the kernel of a specification for these columns.

    Parameters
    ----------
    specification
        From :func:`read_specification`.
    names
        All columns of the variable, in their order.
    labelled
        Those of them that hold labels.

    Returns
    -------
    kernel
        A kernel, or ``"median"`` or None as estimators take them.

    Raises
    ------
    DataError
        If the kernel doesn't fit the columns: every column must be in exactly one factor of a
        text, columns of labels in categorical ones.
    """
    if specification is None or specification == "median":
        return specification
    if isinstance(specification, dict):
        kernel = from_dict(specification)
        kernel.check(len(names))
        return kernel
    result = factors(specification)
    seen = [_columns(factor, names, labelled, specification) for factor in result]
    _check_cover(seen, names, specification)
    if len(result) == 1 and seen[0] == tuple(names):
        return _checked(result[0], len(names))
    kernels = [
        _checked(factor, len(columns)).on([names.index(name) for name in columns])
        for factor, columns in zip(result, seen, strict=True)
    ]
    product: Kernel = kernels[0]
    for kernel in kernels[1:]:
        product = Product(product, kernel)
    return product


def factors(text: str) -> list[Factor]:
    """Return the factors that a text states; DataError if it has another form."""
    return [_factor(part.strip(), text) for part in text.split("*")]


def _factor(part: str, text: str) -> Factor:
    family, colon, rest = (piece.strip() for piece in part.partition(":"))
    if family not in families() or not colon:
        known = f"names are {', '.join(families())}"
        raise DataError(f"{text!r} is no kernel: expected {SYNTAX}; {known}")
    pairs = [piece.rpartition("=") for piece in rest.split(",")]
    named = [bool(equals) for _, equals, _ in pairs]
    if any(named) and not all(named):
        raise DataError(f"{text!r}: name all columns of {family}, or none")
    scales = tuple(_number(number, text) for _, _, number in pairs)
    if all(named):
        return Factor(family, scales, tuple(name.strip() for name, _, _ in pairs))
    return Factor(family, scales if len(scales) > 1 else scales[0])


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise DataError(
            f"{whole!r}: length scales must be positive numbers, in the units of the columns, got "
            f"{text.strip()!r}"
        )
    return number


def _columns(
    factor: Factor, names: Sequence[str], labelled: Collection[str], text: str
) -> tuple[str, ...]:
    """The columns that a factor sees."""
    categorical = factor.family == "categorical"
    fitting = tuple(name for name in names if (name in labelled) == categorical)
    if factor.columns is None:
        if not fitting:
            kind = "labels" if categorical else "numbers"
            raise DataError(f"{text!r}: no column of {', '.join(names)} holds {kind}")
        return fitting
    for name in factor.columns:
        if name not in names:
            raise DataError(f"{text!r}: unknown column {name!r}, there are {', '.join(names)}")
        if name not in fitting:
            other = "numbers: give it another kernel, such as gaussian"
            if not categorical:
                other = f"labels, which have no distance: give it categorical:{name}=NUMBER"
            raise DataError(f"{text!r}: column {name!r} holds {other}")
    return factor.columns


def _check_cover(seen: Sequence[tuple[str, ...]], names: Sequence[str], text: str) -> None:
    """DataError unless every column is seen once."""
    counts = Counter(name for columns in seen for name in columns)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise DataError(f"{text!r}: column {twice[0]!r} has two length scales, give it one")
    unseen = [name for name in names if name not in counts]
    if unseen:
        raise DataError(
            f"{text!r}: {', '.join(map(repr, unseen))} has no length scale: give it one, such as "
            f"NAME:{unseen[0]}=NUMBER, or leave the column out of the fit"
        )


def _checked(factor: Factor, columns: int) -> Kernel:
    kernel = families()[factor.family](factor.length_scale)
    kernel.check(columns)
    return kernel
