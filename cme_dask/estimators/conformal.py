"""The last step of a fit: conformity scores of held-out rows, from which intervals are made."""

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from cme_dask.config import HELD_ROWS
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.refits import FitResult, refitted_laws
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.losses import HeldLaws
from cme_dask.models.conformal import FOLDS, column_scales, conformal_scores
from cme_dask.numerics.blending import near_data
from cme_dask.numerics.conformal import Tails, atom_tails, cell_tails, conformity
from cme_dask.numerics.location import Residuals
from cme_dask.numerics.measure import CellLaw
from cme_dask.numerics.values import ValueMap, ranges_without

Array = Any


class LocatedFit(NamedTuple):
    """What a location model is made of: the fit of x and e, locations, and values of moved laws."""

    context: FitContext
    result: FitResult
    residuals: Residuals
    values: ValueMap


def with_conformal(
    context: FitContext,
    result: FitResult,
    located: LocatedFit | None = None,
    by: str | None = None,
) -> FitResult:
    """The result with quantiles of conformity scores.

    Each row of the row sample is scored by the law of a refit without its fold, moved to the
    location without its fold where the model has one. The result is unchanged if fewer than two
    folds have rows.

    Parameters
    ----------
    context, result
        The fit, whose model has its location model.
    located
        What that was made of; None without one.
    by
        The column of labels of x within which rows are compared.
    """
    if len(result.measured.moments.held_out_folds) < 2:
        return result
    rows = context.rows.prefix(HELD_ROWS)
    (x, y), columns = rows.parts, result.model.y.columns
    numeric = [columns.names.index(name) for name in columns.numeric]
    scales = column_scales(result.model)
    scores = np.full((len(y), len(numeric)), np.nan)
    folds = 0
    with one_blas_thread():
        if located is None:
            tails = _cell_tails(context, result, y, numeric)
        else:
            tails = _moved_tails(context, result, located, numeric)
        for held, of_columns in tails:
            folds += len(held) > 0
            for place, (j, each) in enumerate(zip(numeric, of_columns, strict=True)):
                scores[held, place] = conformity(each, y[held, j], scales[j])
    # Rows of a fold that holds all the weight, or none of it, have no scores.
    seen = ~np.isnan(scores).any(axis=1)
    if folds < 2:
        return result
    learned = conformal_scores(result.model, scores[seen], rows.importance[seen], x[seen], by)
    by = str(context.sample.folding)
    info = {"rows": int(seen.sum()), "folds": folds, "fold_by": by, "guarantee": FOLDS}
    return result.described(conformal=info | learned.to_dict())


Scored = Iterator[tuple[Array, list[Tails]]]
"""For each fold the positions of its rows, and the tails of the laws there by column."""


def _cell_tails(context: FitContext, result: FitResult, y: Array, columns: list[int]) -> Scored:
    cells = result.model.y.cells
    assert cells is not None
    law = CellLaw(cells, np.asarray)
    for laws in refitted_laws(context, result):
        weights = laws.weights
        yield laws.held, [cell_tails(law, weights, y[laws.held], j) for j in columns]


def _moved_tails(
    context: FitContext, result: FitResult, located: LocatedFit, columns: list[int]
) -> Scored:
    rows = context.rows.prefix(HELD_ROWS)
    x, y = rows.parts
    fold_of_row = rows.folds(context.sample.folding, context.n_folds)
    cells = result.model.y.cells
    assert cells is not None
    far_law, share = CellLaw(cells, np.asarray), near_data(result.model.x.basis.newton)(x)
    every = (share == 1.0).all()
    plain: Iterable[HeldLaws | None]
    plain = repeat(None) if every else refitted_laws(context, result)
    low, high = ranges_without(y, located.values.range)
    of_column = {j: located.values.column(j) for j in columns}
    for laws, far in zip(refitted_laws(located.context, located.result), plain, strict=False):
        held, weights = laws.held, laws.weights
        # As narrow as the law that intervals are made of: the scores make up for that.
        e = laws.atoms if located.residuals.scale is None else laws.atoms * located.residuals.scale
        atoms = located.residuals.values(e, x[held], fold_of_row[held])
        blended = np.flatnonzero(share[held] < 1.0)
        tails = []
        for j in columns:
            inside = np.clip(atoms[:, :, j], low[held, None, j], high[held, None, j])
            values = of_column[j].possible(inside[:, :, None])[:, :, 0]
            each = atom_tails(values, weights, y[held, j])
            if far is not None and len(blended):
                beyond = cell_tails(far_law, far.weights[blended], y[held[blended]], j)
                mixed = each.at(blended).mixed(share[held[blended]], beyond)
                each = each.replaced(blended, mixed)
            tails.append(each)
        yield held, tails
