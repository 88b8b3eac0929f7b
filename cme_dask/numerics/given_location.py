"""Locations that a user gives: columns of predictions, and regressors fitted without each fold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cme_dask.errors import DataError
from cme_dask.kernels.transforms import Transform
from cme_dask.numerics.location import MeanFunction, Residuals, without_covariates
from cme_dask.numerics.reduction import OfParts, Reduction
from cme_dask.numerics.trees import PREDICTION, SPREAD, TreeMean

Array = Any

_ROWS = 1 << 16  # that a regressor predicts at once, of all folds together


@dataclass(frozen=True, eq=False)
class ColumnMean:
    r"""Location :math:`\mu_j(x) = x_{p_j}`: columns of x hold predictions that were made elsewhere.

    Parameters
    ----------
    width
        Number d of the columns of x.
    columns
        Position p_j in x of the predictions of each column of y.
    """

    width: int
    columns: tuple[int, ...]

    covariates: ClassVar[tuple[str, ...]] = ()

    def _validate(self) -> None:
        """DataError unless these are columns of x."""
        if not all(0 <= column < self.width for column in self.columns):
            raise DataError("the predictions are no columns of x")

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers d and q of the columns of x and of y."""
        return self.width, len(self.columns)

    def __call__(self, x: Array) -> Array:
        """Mu at the rows of x, shape (n, q)."""
        return x[:, list(self.columns)]

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mu at the rows of x, and no covariates: the columns are in x."""
        return without_covariates(self(x))


@dataclass(frozen=True, eq=False)
class ColumnResiduals(Residuals):
    """Residuals from predictions that columns of x hold: the same in all folds.

    Parameters
    ----------
    location
        Which columns.
    folds
        Number of folds F.
    """

    location: ColumnMean
    folds: int
    transform: Transform | None = None
    scale: Array | None = None

    @property
    def n_folds(self) -> int:
        """Number of folds F."""
        return self.folds

    def held_out(self, x: Array, folds: Array) -> Array:
        """Mu at the rows of x, shape (n, q)."""
        return self.location(x)


@dataclass(frozen=True, eq=False)
class RegressorMean:
    """Location mu(x) by the predictions of a fitted regressor, in memory: it cannot be saved.

    Parameters
    ----------
    regressor
        Anything with ``predict``, from rows (n, d) to shape (n,) or (n, q).
    name
        Its class, for messages.
    widths
        Numbers d and q of the columns of x and of y.
    covariate
        Whether laws of residuals are given mu(x) beside x.
    """

    regressor: Any
    name: str
    widths: tuple[int, int]
    covariate: bool

    def _validate(self) -> None:
        """DataError, since files hold no regressors."""
        raise DataError("a location in a file is no regressor")

    @property
    def covariates(self) -> tuple[str, ...]:
        """What laws of residuals are given beside x."""
        return (PREDICTION,) if self.covariate else ()

    def __call__(self, x: Array) -> Array:
        """Mu at the rows of x, shape (n, q); NaN at rows that are not finite.

        Raises
        ------
        DataError
            If the regressor fails, or predicts other shapes, NaN or infinity.
        """
        q = self.widths[1]
        result = np.full((len(x), q), np.nan)
        # The pass names rows with NaN, which regressors would refuse without a name.
        usable = np.flatnonzero(np.isfinite(x).all(axis=1))
        for start in range(0, len(usable), _ROWS):
            here = usable[start : start + _ROWS]
            result[here] = self._of_finite(x[here])
        return result

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mu at the rows of x, and the covariates, shape (n, C q)."""
        mu = self(x)
        return (mu, mu) if self.covariate else without_covariates(mu)

    def _of_finite(self, x: Array) -> Array:
        try:
            values = np.asarray(self.regressor.predict(x), dtype=np.float64)
        except Exception as error:
            raise DataError(f"the location {self.name} fails to predict: {error}") from error
        n, q = len(x), self.widths[1]
        if values.shape not in ((n, q), (n,) if q == 1 else (n, q)):
            raise DataError(
                f"the location {self.name} predicts an array of shape {values.shape} at {n:,} "
                f"rows, y has {q} column{'s' * (q > 1)}: shape ({n}, {q}) is expected"
            )
        bad = n - int(np.isfinite(values.reshape(n, q)).all(axis=1).sum())
        if bad:
            raise DataError(
                f"the location {self.name} predicts NaN or infinity at {bad:,} of {n:,} rows of "
                "finite x: give a regressor whose predictions are finite"
            )
        return values.reshape(n, q)


@dataclass(frozen=True, eq=False)
class MixedMean:
    r"""Location :math:`\mu(x) = s\, z(\mu_1(x)) + (1 - s)\, \mu_2(x)`: a regressor and another one.

    Parameters
    ----------
    given
        mu_1, the predictions of a given regressor.
    other
        mu_2, trees or a ridge regression, in the coordinates z.
    share
        s, in (0, 1].
    transform
        z of each column of y; None for z = y.
    """

    given: TreeMean | RegressorMean
    other: TreeMean | MeanFunction
    share: float
    transform: Transform | None = None

    def _validate(self) -> None:
        """DataError unless both are locations of the same columns, and the share is one."""
        if self.given.widths != self.other.widths:
            raise DataError("its two locations are not of the same columns")
        if not 0.0 < self.share <= 1.0:
            raise DataError("the share of a location is not between 0 and 1")
        if isinstance(self.other, TreeMean) and self.given.covariate and not self.other.covariate:
            raise DataError("one of its two locations says nothing of the law of residuals")
        if self.transform is not None and len(self.transform.columns) != self.widths[1]:
            raise DataError("its coordinates are not those of the columns of y")

    @property
    def name(self) -> str:
        """What it is made of, for messages."""
        return f"{self.given.name} and {self.other.name}"

    @property
    def covariates(self) -> tuple[str, ...]:
        """What laws of residuals are given beside x: mu(x), and the spread of its forests."""
        if not self.given.covariate:
            return ()
        forests = SPREAD in self.given.covariates + self.other.covariates
        return (PREDICTION, SPREAD) if forests else (PREDICTION,)

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers d and q of the columns of x and of y."""
        return self.given.widths

    def __call__(self, x: Array) -> Array:
        """Mu at the rows of x, shape (n, q)."""
        return self._mixed(self._moved(self.given(x)), self.other(x))

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mu at the rows of x, and the covariates, shape (n, C q)."""
        (one, beside_one), (other, beside_other) = self.given.predicted(x), self.other.predicted(x)
        mu, q = self._mixed(self._moved(one), other), self.widths[1]
        if not self.given.covariate:
            return without_covariates(mu)
        spreads = [beside[:, q:] for beside in (beside_one, beside_other) if beside.shape[1] > q]
        if len(spreads) == 2:
            spreads = [self._mixed(*spreads)]
        return mu, np.hstack([mu, *spreads])

    def _moved(self, mu: Array) -> Array:
        """Predictions of y in the coordinates z."""
        return mu if self.transform is None else self.transform(mu)

    def _mixed(self, one: Array, other: Array) -> Array:
        return self.share * one + (1.0 - self.share) * other


@dataclass(frozen=True, eq=False)
class RegressorResiduals(Residuals):
    """Residuals from regressors, each fitted without the fold of the rows that it predicts.

    Rows outside the row sample, which none of them has seen, have the regressor of their fold as
    well: one rule for all rows, and residuals are those of equal amounts of training rows.

    Parameters
    ----------
    location
        Fitted to all rows of the row sample.
    each
        Those without each fold; of a fold without such rows the one of all rows.
    token
        A fingerprint of their predictions, by which checkpoints recognise them.
    scale
        As of :class:`Residuals`.
    """

    location: RegressorMean | TreeMean | MixedMean
    each: tuple[RegressorMean | TreeMean | MixedMean, ...]
    token: str
    transform: Transform | None = None
    scale: Array | None = None

    @property
    def n_folds(self) -> int:
        """Number of folds F."""
        return len(self.each)

    def held_out(self, x: Array, folds: Array) -> Array:
        """Mu at the rows of x, shape (n, q), each from all folds but its own, ``folds`` (n,)."""
        return self.predicted(x, folds)[0]

    def predicted(self, x: Array, folds: Array) -> tuple[Array, Array]:
        """Mu, and the covariates of the same location, shape (n, C q)."""
        mu, covariates = np.empty((len(x), self.location.widths[1])), np.empty((len(x), self.added))
        for start in range(0, len(x), _ROWS):
            order = start + np.argsort(folds[start : start + _ROWS], kind="stable")
            for fold, rows in _runs(folds, order):
                mu[rows], covariates[rows] = self.each[fold].predicted(x[rows])
        return mu, covariates

    def __dask_tokenize__(self) -> tuple[str, ...]:
        return type(self).__name__, self.location.name, self.token


def _runs(folds: Array, order: Array) -> Iterator[tuple[int, Array]]:
    """Each fold and its rows, from positions in the order of their folds."""
    values, first = np.unique(folds[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, first[1:]), strict=True)


@dataclass(frozen=True, eq=False)
class BesideResiduals:
    """What a pass makes of (x, y) for a fit to them and one to residuals: (x, y, x', e).

    Parameters
    ----------
    residuals
        From (x, y) to (x', e).
    """

    residuals: Residuals

    @property
    def n_folds(self) -> int:
        """Number of folds F."""
        return self.residuals.n_folds

    @property
    def added(self) -> int:
        """Columns of x' and e."""
        d, q = self.residuals.location.widths
        return int(d + q + self.residuals.added)

    def __call__(self, parts: tuple[Array, ...], folds: Array) -> tuple[Array, ...]:
        """Rows (x, y, x', e) of rows (x, y), in the folds (n,)."""
        return *parts, *self.residuals(parts, folds)


def of_both(
    plain: Sequence[Reduction[Any, Any]], moved: Sequence[Reduction[Any, Any]]
) -> list[Reduction[Any, Any]]:
    """Reductions of (x, y), then those of (x', e), of rows (x, y, x', e)."""
    return [*(OfParts(one, 0) for one in plain), *(OfParts(one, 2) for one in moved)]
