"""Locations that a user gives: names of columns with predictions, or a scikit-learn regressor."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.multioutput import MultiOutputRegressor
from sklearn.utils import get_tags
from sklearn.utils.validation import has_fit_parameter

from cme_dask.data.columns import Columns
from cme_dask.data.store import brief
from cme_dask.errors import DataError, warn
from cme_dask.estimators.context import FitContext, GivenLocation
from cme_dask.estimators.steps import GIVEN
from cme_dask.learning.tree_fits import tree_mean
from cme_dask.numerics.folds import RowSample, relative_weights, sklearn_seed
from cme_dask.numerics.given_location import (
    ColumnMean,
    ColumnResiduals,
    RegressorMean,
    RegressorResiduals,
)
from cme_dask.numerics.learning_curve import scale_of_all
from cme_dask.numerics.trees import TreeMean
from cme_dask.passes.progress import StepBegan

Array = Any

_METHODS = "fit", "predict", "get_params", "set_params"
_OTHERS = "classifier", "clusterer", "outlier_detector", "density_estimator"
_KINDS = (
    "a scikit-learn regressor that is not fitted yet, or the name of a column of x that holds "
    "predictions of y (of several columns of y a list of names)"
)


def check_location(name: str, value: Any) -> None:
    """DataError unless the value may be a location: names of columns, or a regressor."""
    if location_kind(value) == "column":
        return
    if isinstance(value, type):
        raise DataError(f"{name} must be {_KINDS}, got the class {value.__name__}: give an object")
    missing = [method for method in _METHODS if not hasattr(value, method)]
    if missing:
        lacks = ", ".join(missing)
        raise DataError(f"{name} must be {_KINDS}, got {brief(repr(value))}, which lacks {lacks}")
    tags = _tags(value)
    if tags is not None and tags.estimator_type in _OTHERS:
        kind = tags.estimator_type.replace("_", " ")
        raise DataError(
            f"{name} must be {_KINDS}, got the {kind} {type(value).__name__}: residuals are "
            "those of predicted numbers"
        )


def _tags(value: Any) -> Any:
    """Scikit-learn's tags of an object; None for one of another package that has none."""
    try:
        return get_tags(value)
    except AttributeError:
        return None


def _are_names(value: Any) -> bool:
    sequence = isinstance(value, (list, tuple)) and len(value) > 0
    return sequence and all(isinstance(name, str) for name in value)


def location_kind(value: Any) -> str:
    """``column`` or ``regressor``."""
    return "column" if isinstance(value, str) or _are_names(value) else "regressor"


def described_location(value: Any) -> str:
    """A given location in words, for the model and the plan."""
    if location_kind(value) == "regressor":
        return type(value).__name__
    names = [value] if isinstance(value, str) else list(value)
    return f"column{'s' * (len(names) > 1)} {', '.join(names)}"


def given_location(value: Any, context: FitContext, *, covariate: bool) -> GivenLocation:
    """The location of y, and residuals from it.

    Parameters
    ----------
    value
        Names of columns of x, or a regressor, as :func:`check_location` admits them.
    context
        The rows, of two folds or more; a regressor is fitted to the row sample, once and without
        each fold.
    covariate
        Whether laws of residuals may be given a regressor's predictions beside x; columns of x are
        there anyway.

    Raises
    ------
    DataError
        On unknown columns or labels, another number of columns than y has, or a regressor that
        fails.
    """
    x, y = context.sample.columns
    if location_kind(value) == "column":
        names = [value] if isinstance(value, str) else list(value)
        positions = _positions(names, x, y)
        residuals = ColumnResiduals(ColumnMean(len(x.names), positions), context.n_folds)
        return GivenLocation(residuals, described_location(value), 0.0)
    if context.progress is not None:
        context.progress(StepBegan(GIVEN))
    begin = time.perf_counter()
    fitted = _cross_fitted(value, context, covariate)
    return GivenLocation(fitted, described_location(value), time.perf_counter() - begin)


def _positions(names: Sequence[str], x: Columns, y: Columns) -> tuple[int, ...]:
    unknown = [name for name in names if name not in x.names]
    if unknown:
        raise DataError(
            f"the location {', '.join(map(repr, unknown))} is no column of x: there are "
            f"{x.listed()}; predictions are a column of x, at the points of queries too"
        )
    labelled = [name for name in names if name in x.categories]
    if labelled:
        raise DataError(f"the location {labelled[0]!r} holds labels: predictions are numbers")
    if len(names) != len(y.names):
        raise DataError(
            f"the location names {len(names)} column{'s' * (len(names) > 1)}, y has "
            f"{len(y.names)} ({y.listed()}): name the column with the predictions of each, in "
            "this order"
        )
    return x.positions(names)


def _cross_fitted(value: Any, context: FitContext, covariate: bool) -> RegressorResiduals:
    """A regressor fitted to all rows of the row sample, and to those without each fold."""
    rows = context.rows
    d, q = (len(columns.names) for columns in context.sample.columns)
    folds = rows.folds(context.sample.folding, context.n_folds)
    used = rows.used_folds(context.sample.folding, context.n_folds)
    template, name = _template(value, q, context.seed), type(value).__name__
    differ = relative_weights(rows.importance[rows.weights > 0.0]) is not None
    if differ and _weight_parameter(template) is None:
        warn(
            f"the location {name} takes no sample_weight: it is fitted to rows of equal weight, "
            "the laws around it are those of weighted rows",
            UserWarning,
        )

    def fitted(selected: Array) -> RegressorMean | TreeMean:
        regressor = _fit(template, rows, selected, name)
        # Trees can be saved.
        trees = tree_mean(regressor, (d, q), covariate=covariate)
        return RegressorMean(regressor, name, (d, q), covariate) if trees is None else trees

    every = np.ones(len(rows), dtype=bool)
    whole = fitted(every)
    each = [whole] * context.n_folds
    for done, fold in enumerate(used, start=1):
        if context.progress is not None:
            context.progress(StepBegan(GIVEN, done / (len(used) + 1)))
        each[fold] = fitted(folds != fold)
    result = RegressorResiduals(whole, tuple(each), "")
    values = result.held_out(rows.parts[0], folds), whole(rows.parts[0])

    def refits(left_out: Sequence[Array]) -> list[Array]:
        return [fitted(~out)(rows.parts[0][out]) for out in left_out]

    units = context.sample.folding.units(rows.index, rows.units)
    scale = scale_of_all(rows.parts[1], values[0], folds, rows.importance, refits, units)
    return RegressorResiduals(whole, tuple(each), digest_of(values), scale=scale)


def digest_of(predictions: Sequence[Array]) -> str:
    """A fingerprint of predictions."""
    return hashlib.sha256(b"".join(map(np.ndarray.tobytes, predictions))).hexdigest()


def _template(value: Any, q: int, seed: int) -> Any:
    """A clone that predicts all columns of y, with the seed of the fit where it has none."""
    result = clone(value)
    open_ = {
        key: sklearn_seed(seed)
        for key, given in result.get_params(deep=True).items()
        if key.rpartition("__")[2] == "random_state" and given is None
    }
    result.set_params(**open_)
    # MultiOutputRegressor refuses what has no tags, which may predict several columns itself.
    tags = _tags(result)
    if q > 1 and tags is not None and not tags.target_tags.multi_output:
        return MultiOutputRegressor(result)
    return result


def _fit(template: Any, rows: RowSample, selected: Array, name: str) -> Any:
    """A fitted clone; DataError if that fails."""
    selected = selected & (rows.weights > 0.0)
    x, y = (part[selected] for part in rows.parts)
    weights = relative_weights(rows.importance[selected])
    parameter = _weight_parameter(template)
    given = {} if parameter is None or weights is None else {parameter: weights}
    regressor = clone(template)
    try:
        return regressor.fit(x, y[:, 0] if y.shape[1] == 1 else y, **given)
    except Exception as error:
        raise DataError(
            f"the location {name} can't be fitted to {len(x):,} rows of x, shape {x.shape}, and "
            f"y, {y.shape[1]} column{'s' * (y.shape[1] > 1)} (NumPy arrays, labels as codes): "
            f"{error}"
        ) from error


def _weight_parameter(regressor: Any) -> str | None:
    """The parameter of ``fit`` that takes weights; None if there is none.

    Pipelines pass it on to their last step, searches and transformed targets to their regressor,
    and regressors of several columns to each of theirs.
    """
    from sklearn.compose import TransformedTargetRegressor  # slow to import
    from sklearn.linear_model import LinearRegression

    steps = getattr(regressor, "steps", None)
    if steps:
        inner = _weight_parameter(steps[-1][1])
        return None if inner is None else f"{steps[-1][0]}__{inner}"
    if isinstance(regressor, (GridSearchCV, RandomizedSearchCV)):
        return _weight_parameter(regressor.estimator)
    if isinstance(regressor, TransformedTargetRegressor):
        inner = regressor.regressor
        return _weight_parameter(LinearRegression() if inner is None else inner)
    # These pass on no other name, and fail where theirs do not take it.
    if isinstance(regressor, MultiOutputRegressor):
        regressor = regressor.estimator
    return "sample_weight" if has_fit_parameter(regressor, "sample_weight") else None
