"""E[f | z] of functions f of one variable given the other: what every signed estimator answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError, remedy
from cme_dask.models.basis_file import AnyBasis
from cme_dask.models.events import Event, looks_like_event
from cme_dask.models.labels import FloatArray
from cme_dask.numerics.validation import interval_factor
from cme_dask.storage.columns import Columns, labels_have_no_mean

Array = Any

_QUERY_ROWS = 4096  # points per block: memory does not grow with the number of points


@dataclass(frozen=True, eq=False)
class Answers:
    """Everything E[f | z] needs for the functions f of one variable given the other.

    Attributes
    ----------
    names
        The other variable's columns, then its declared functions.
    constant
        The intercept, shape (q,): E f of joint distributions, 0 of embeddings.
    slope
        E[f | z] = constant + psi(z)^T slope, shape (k, q).
    fold_constant, fold_slope
        The same without one fold, by fold, on the Newton basis: shapes (F, q), (F, m, q); F = 0
        without folds.
    """

    names: tuple[str, ...]
    constant: Array
    slope: Array
    fold_constant: Array
    fold_slope: Array

    def wanted(
        self, f: str | Sequence[str] | None, columns: Columns, reverse: bool = False
    ) -> str | list[str]:
        """The names that are asked for; by default those of the columns that hold numbers.

        Parameters
        ----------
        f
            What is asked for.
        columns
            Of the other variable.
        reverse
            Whether that is x.

        Raises
        ------
        DataError
            If they are no texts, unknown, columns of labels, or events that weren't declared.
        """
        if f is None:
            if not columns.numeric:
                raise labels_have_no_mean(columns.names[0], columns)
            return list(columns.numeric)
        if not isinstance(f, str) and not (
            isinstance(f, Iterable) and all(isinstance(name, str) for name in f)
        ):
            raise DataError(
                "expect takes names: declare a function at the fit, functions={'name': f}, and ask "
                f"for its name; known here: {', '.join(self.names)}"
            )
        for name in [f] if isinstance(f, str) else f:
            self._check(name, columns, reverse)
        return f if isinstance(f, str) else list(f)

    def _check(self, name: str, columns: Columns, reverse: bool) -> None:
        if name in columns.categories:
            raise labels_have_no_mean(name, columns)
        if name in self.names:
            return
        known = ", ".join(map(repr, self.names))
        if not looks_like_event(name):
            raise DataError(f"unknown column {name!r}: there are {known}")
        try:
            Event.parse(name, columns.names, columns.categories)
        except DataError as error:
            raise DataError(f"{name!r} is neither one of {known} nor an event ({error})") from error
        x, of_x, flag, back = ("Y=y", "_x", "-x", " --reverse") if reverse else ("x", "", "", "")
        raise DataError(
            f"the event {name!r} was not declared, so that its moments are not known: "
            + remedy(
                f"fit with functions{of_x}=[{name!r}], or ask the law, "
                f"conditional({x}).probability({name!r})",
                f"fit with --event{flag} {name!r}, or ask the law, "
                f"cme-dask predict --event {name!r}{back}",
            )
        )

    def factor(self, level: float) -> float:
        """Standard errors on each side of an interval, see :func:`interval_factor`."""
        return interval_factor(len(self.fold_constant), level)

    def expect(
        self, wanted: str | list[str], basis: AnyBasis, points: Array, return_std: bool
    ) -> FloatArray | tuple[FloatArray, FloatArray]:
        """E[f | z] at points (n, d), shape (n,) for one name and (n, len) for several.

        With ``return_std`` also standard errors by the jackknife over the folds.

        Raises
        ------
        DataError
            On unknown names, or folds that the fit did not keep.
        """
        single = isinstance(wanted, str)
        pick = [self.names.index(name) for name in ([wanted] if single else wanted)]
        folds = len(self.fold_constant)
        if return_std and folds < 2:
            raise DataError(
                f"standard errors need folds: fit with {remedy('n_folds', '--folds')} of at least 2"
            )
        slopes = [basis.slope(self.slope[:, pick])]
        if return_std:  # what the folds say, side by side
            slopes.append(np.concatenate(self.fold_slope[:, :, pick], axis=1))
        functions = basis.newton.combined(*slopes)
        result = np.empty((2 if return_std else 1, len(points), len(pick)))
        for start in range(0, len(points), _QUERY_ROWS):
            here = slice(start, start + _QUERY_ROWS)
            values = functions(points[here])
            result[0, here] = self.constant[pick] + values[0]
            if return_std:
                each = values[1].reshape(len(values[1]), folds, len(pick))
                each = each + self.fold_constant[:, pick]
                spread = ((each - each.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
                result[1, here] = np.sqrt((folds - 1) / folds * spread)
        if single:
            result = result[..., 0]
        return (result[0], result[1]) if return_std else result[0]
