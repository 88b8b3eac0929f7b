"""Classes with learned kernels: the bound and its dense formula, Algorithm 1, the classifier."""

import dataclasses
import json
import math

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import zarr
from click.testing import CliRunner
from sklearn.linear_model import LogisticRegression

from benchmarks import multiclass, multiclass_methods, multiclass_page, study
from benchmarks.__main__ import cli as beside
from cme_dask import MulticlassEmbedding, kernels, load
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError, ResourceError
from cme_dask.learning.rademacher import (
    BoundOptions,
    LabelledRows,
    bound,
    learn_by_bound,
    shrunk,
)
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.labels import LabelCalibration, learn_label_calibration

KERNELS = (
    kernels.Gaussian(0.7),
    kernels.Gaussian((0.5, 1.5)),
    2.0 * kernels.Gaussian(0.9) + 0.1 * kernels.Linear(0.3),
    kernels.Matern((0.8, 1.2), 1.5) * kernels.Laplace(2.0)[1],
    kernels.RationalQuadratic(1.0, 0.6),
)


def rows(n=40, seed=0, labels=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    scores = np.column_stack([x[:, 0], x[:, 1], -x.sum(1)])[:, :labels]
    codes = (scores + 0.5 * rng.normal(size=scores.shape)).argmax(1)
    return LabelledRows(x, codes, rng.uniform(0.2, 1.0, n))


def dense(kernel, reg, train, held, labels, tau, epsilon):
    """(13) by its letter, for row weights w in the place of 1 / n."""
    w = np.diag(train.weights / train.weights.sum())
    gram = kernel(train.x, train.x)
    onehot = (train.codes[:, None] == np.arange(labels)).astype(float)
    v = np.linalg.solve(w @ gram + reg * np.eye(len(gram)), w @ onehot)
    f = kernel(held.x, train.x) @ v
    own = np.clip([f[i, c] for i, c in enumerate(held.codes)], epsilon, 1.0)
    loss = np.average(-np.log(own), weights=held.weights)
    r = np.sqrt(np.trace(v.T @ gram @ v) * kernel.diagonal(train.x).max())
    return loss + tau * r, loss, r


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("validated", [False, True])
def test_the_bound_equals_its_dense_formula_and_its_gradient_differences(kernel, validated):
    train, held = rows(), rows(25, 1)
    options = {"multiplier": 0.7, "epsilon": 1e-3, "validation": held if validated else None}
    result = bound(kernel, 0.03, train, 3, **options)
    held = held if validated else train
    expected = dense(kernel, 0.03, train, held, 3, 0.7, 1e-3)
    np.testing.assert_allclose(result[:3], expected, rtol=1e-10)
    values, step = np.append(kernel.parameters, 0.03), 1e-4
    differences = []
    for i, value in enumerate(values):
        total = 0.0
        for multiple, factor in ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12)):
            moved = values.copy()
            moved[i] += multiple * step * value
            changed = kernel.with_parameters(moved[:-1].tolist())
            total += factor * dense(changed, moved[-1], train, held, 3, 0.7, 1e-3)[0]
        differences.append(total / (step * value))
    np.testing.assert_allclose(result.gradient, differences, rtol=1e-6, atol=1e-7)


OPTIONS = BoundOptions(0.5, 1e-6, 0.0, "gradient", 0.3, 15, 10, 5, learn_reg=True)


def in_one_batch(train):
    return lambda epoch, start: iter([(0, train)] if not start else [])


def test_algorithm_1_on_all_rows_is_gradient_descent_on_the_dense_bound():
    train, kernel = rows(), kernels.Gaussian((0.5, 1.5))
    learned = learn_by_bound(kernel, 0.1, 3, in_one_batch(train), OPTIONS)
    logs = np.log([0.5, 1.5, 0.1])
    path = []

    def objective(logs):
        *scales, reg = np.exp(logs)
        return dense(kernels.Gaussian(tuple(scales)), reg, train, train, 3, 0.5, 1e-6)[0]

    for _ in range(15):
        path.append(objective(logs))
        steps = 1e-4 * np.eye(3)
        gradient = [(objective(logs + s) - objective(logs - s)) / 2e-4 for s in steps]
        logs = logs - 0.3 * np.array(gradient)
    np.testing.assert_allclose(learned.history[:, 1], path, rtol=1e-6)
    np.testing.assert_allclose([*learned.kernel.parameters, learned.reg], np.exp(logs), rtol=1e-5)
    assert path[-1] < path[0]
    assert math.isnan(learned.loss)
    assert learned.steps == 15


@pytest.mark.parametrize("optimizer", ["adam", "gradient"])
def test_learning_that_was_interrupted_ends_with_the_same_bits(optimizer):
    train = rows(60)

    def batches(epoch, start):
        order = np.random.default_rng(epoch).permutation(60)
        for number in range(start, 3):
            yield number, LabelledRows(*(v[order[20 * number : 20 * number + 20]] for v in train))

    options = BoundOptions(None, 1e-3, 0.5, optimizer, 0.05, 20, 10, 4, learn_reg=True)
    kernel, states = kernels.Gaussian((0.5, 1.5)), []

    def held_out(kernel, reg):
        return dense(kernel, reg, train, train, 3, 0.0, 1e-3)[1]

    whole = learn_by_bound(kernel, 0.1, 3, batches, options, held_out=held_out, save=states.append)
    for state in states:
        again = learn_by_bound(kernel, 0.1, 3, batches, options, held_out=held_out, state=state)
        assert again.kernel == whole.kernel
        assert again.reg == whole.reg
        np.testing.assert_array_equal(again.history, whole.history)
    assert whole.steps == 20
    assert whole.loss <= held_out(kernel, 0.1) + 1e-12


class Breaking(kernels.Gaussian):
    """Not a number beyond a length scale."""

    def of_squares(self, xp, squares):
        values = super().of_squares(xp, squares)
        return values if self.length_scale < 1.0 else values * np.nan


def test_a_gradient_that_is_not_finite_halves_the_step():
    train = rows()
    train = train._replace(x=10.0 * train.x)  # for which longer scales are better
    options = BoundOptions(0.5, 1e-6, 0.0, "adam", 1.0, 12, 10, 5, learn_reg=True)
    learned = learn_by_bound(Breaking(0.9), 0.1, 3, in_one_batch(train), options)
    assert 0 < learned.halved < learned.steps == 12
    with pytest.raises(DataError, match="not finite 20 times in a row"):
        learn_by_bound(
            Breaking(1.1), 0.1, 3, in_one_batch(train), dataclasses.replace(options, steps=50)
        )


def test_a_kernel_is_shrunk_by_leave_one_out_estimates():
    train, first = rows(60), kernels.Gaussian((1.0, 1.0))
    learned, regs = kernels.Gaussian((0.2, 5.0)), np.array([1e-3, 1e-2, 1e-1])
    best = shrunk(first, learned, train, 3, regs)
    root = np.sqrt(train.weights / train.weights.sum())

    def left_out(kernel, reg):
        signed = np.empty((60, 3))
        for i in range(60):
            rest = np.arange(60) != i
            gram = root[rest, None] * kernel(train.x[rest], train.x[rest]) * root[rest]
            target = root[rest, None] * np.eye(3)[train.codes[rest]]
            dual = root[rest, None] * np.linalg.solve(gram + reg * np.eye(59), target)
            signed[i] = kernel(train.x[i : i + 1], train.x[rest]) @ dual
        _, losses = learn_label_calibration(signed, train.codes, train.weights)
        return np.average(losses, weights=train.weights)

    between = {
        share: kernels.Gaussian((0.2**share, 5.0**share)) for share in (0.0, 1 / 3, 2 / 3, 1.0)
    }
    losses = {
        (share, reg): left_out(kernel, reg) for share, kernel in between.items() for reg in regs
    }
    share, reg = min(losses, key=losses.get)
    assert best.share == share
    assert best.reg == reg
    assert best.loss == pytest.approx(losses[share, reg], abs=1e-6)
    np.testing.assert_allclose(best.kernel.parameters, between[share].parameters, rtol=1e-12)
    assert shrunk(first, first, train, 3, regs).share == 1.0


# The classifier


NAMES = np.array(["east", "north", "west"])
BRIEF = {"batch_size": 100, "max_iter": 20, "random_state": 0}


@pytest.fixture(scope="module")
def table():
    train, test = rows(300, 3), rows(200, 4)
    return train.x, NAMES[train.codes], test.x, NAMES[test.codes]


@pytest.fixture(scope="module")
def fitted(table):
    return MulticlassEmbedding(**BRIEF).fit(*table[:2])


def with_all_rows(weights, values):
    """Weighted sums of values, with the remainder of the weights spread over all rows."""
    return weights @ values + np.outer(1.0 - weights.sum(axis=1), values.mean(axis=0))


def test_the_classifier_is_the_dense_embedding_with_the_learned_kernel(fitted, table):
    x, names, points, truth = table
    learned = fitted.search_
    train = LabelledRows(x, np.searchsorted(NAMES, names), np.ones(300))
    gram = learned.kernel(x, x) + 300 * fitted.reg_ * np.eye(300)
    weights = np.linalg.solve(gram, learned.kernel(x, points)).T
    signed = with_all_rows(weights, np.eye(3)[train.codes])
    np.testing.assert_allclose(fitted.signed_proba(points), signed, atol=2e-3)
    clipped = np.maximum(signed, 0)
    clipped /= clipped.sum(1, keepdims=True)
    np.testing.assert_allclose(fitted.clipped_proba(points), clipped, atol=5e-3)
    assert (fitted.predict(points) == NAMES[signed.argmax(1)]).mean() > 0.98
    assert fitted.n_passes_ == 1
    assert fitted.reg_ == fitted.path_.regs[fitted.path_.losses.argmin()]
    assert fitted.path_.criterion == "log"
    assert fitted.score(points, truth) > 0.75
    assert np.isfinite(learned.loss)
    assert len(learned.history) == learned.steps <= 20
    assert "log loss" in repr(fitted.model_)


def test_probabilities_are_calibrated_by_refits_without_the_fold_of_each_row(fitted, table):
    x, names, points, _ = table
    codes, folds = np.searchsorted(NAMES, names), fold_of_rows(0, 300, 10)
    kernel = fitted.search_.kernel

    def held_out(reg):
        signed = np.empty((300, 3))
        for fold in range(10):
            rest, here = folds != fold, folds == fold
            gram = kernel(x[rest], x[rest]) + rest.sum() * reg * np.eye(rest.sum())
            weights = np.linalg.solve(gram, kernel(x[rest], x[here])).T
            signed[here] = with_all_rows(weights, np.eye(3)[codes[rest]])
        return signed

    for reg, loss in zip(fitted.path_.regs[-6:], fitted.path_.losses[-6:], strict=True):
        _, losses = learn_label_calibration(held_out(reg), codes, np.ones(300))
        assert loss == pytest.approx(losses.mean(), abs=2e-3)
    learned, _ = learn_label_calibration(held_out(fitted.reg_), codes, np.ones(300))
    used = fitted.model_.calibration
    np.testing.assert_allclose(
        used(fitted.signed_proba(points)), learned(fitted.signed_proba(points)), atol=0.01
    )
    expected = (300 * used(fitted.signed_proba(points)) + 1 / 3) / 301
    np.testing.assert_allclose(fitted.predict_proba(points), expected, atol=1e-12)
    plain = MulticlassEmbedding(**BRIEF, calibration=False).fit(x, names)
    assert plain.model_.calibration is None
    np.testing.assert_array_equal(
        plain.predict(points), NAMES[plain.signed_proba(points).argmax(1)]
    )


def test_a_label_calibration_minimises_its_loss_and_keeps_the_order():
    rng = np.random.default_rng(0)
    truth = rng.dirichlet(np.ones(4), size=5000)
    codes = (rng.uniform(size=(5000, 1)) > truth.cumsum(1)).sum(1)
    signed = truth + 0.02 * rng.normal(size=truth.shape)
    weights = rng.uniform(0.5, 1.5, 5000)
    calibration, losses = learn_label_calibration(signed, codes, weights)

    def objective(a, b):
        p = LabelCalibration(a, b)(signed)[np.arange(5000), codes]
        return np.average(-np.log(p), weights=weights) + 0.005 * ((a - 4) ** 2 + b**2) / 5000

    best = objective(calibration.scale, calibration.power)
    assert best == pytest.approx(np.average(losses, weights=weights), abs=1e-4)
    for a, b in ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1)):
        assert objective(max(calibration.scale + a, 0), max(calibration.power + b, 0)) > best - 1e-9
    # Estimates that are nearly right stay what they are.
    assert np.abs(calibration(signed) - truth).mean() < 0.02
    same = LabelCalibration(0.0, 1.0)(truth)
    floored = np.maximum(truth, 0.01)
    np.testing.assert_allclose(same, floored / floored.sum(1, keepdims=True), rtol=1e-12)
    np.testing.assert_array_equal(calibration(signed).argmax(1), signed.argmax(1))
    np.testing.assert_allclose(calibration(signed).sum(1), 1.0, rtol=1e-12)


def test_a_calibration_survives_a_file(fitted, table, tmp_path):
    fitted.save(tmp_path / "model")
    again = load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(table[2]), fitted.predict_proba(table[2]))
    with pytest.raises(ValueError, match="two finite exponents"):
        LabelCalibration.from_list([1.0, -1.0])


def test_entropies(fitted, table):
    points = table[2]
    for estimate, p in (
        ("clipped", fitted.clipped_proba(points)),
        ("expected", np.maximum(fitted.signed_proba(points), 0.0)),
    ):
        with np.errstate(all="ignore"):
            expected = -np.nansum(p * np.log(p), axis=1)
        np.testing.assert_allclose(fitted.entropy(points, estimate), expected, atol=1e-12)
    assert 0.0 <= fitted.entropy(points).min() <= fitted.entropy(points).max() <= np.log(3) + 1e-12
    lazy = fitted.entropy(da.from_array(points, chunks=(50, 2)))
    np.testing.assert_allclose(lazy.compute(), fitted.entropy(points), atol=1e-12)
    with pytest.raises(DataError, match="estimate must be one of"):
        fitted.entropy(points, "other")


@pytest.mark.parametrize("skewed", [False, True])
def test_learning_begins_with_normal_scores_where_these_tell_more(skewed):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(1200, 2)) if skewed else rng.uniform(-2.0, 2.0, size=(1200, 2))
    y = np.where(np.sin(4.0 * z[:, 0]) * z[:, 1] > 0.0, "a", "b")
    x = np.exp(3.0 * z) if skewed else z
    options = {"max_iter": 20, "batch_size": 400, "random_state": 0}
    fits = [
        MulticlassEmbedding(kernel_x=kernel, **options).fit(x[:600], y[:600])
        for kernel in (None, "median")
    ]
    first, plain = (fit.search_.kernel for fit in fits)
    assert isinstance(plain, kernels.Gaussian)
    assert isinstance(first, kernels.TransformedKernel) == skewed
    better, worse = (fit.score(x[600:], y[600:]) for fit in fits)
    assert better > worse + 0.02 if skewed else better == worse


def test_a_fit_that_was_interrupted_while_learning_ends_with_the_same_bits(table, tmp_path):
    estimator = MulticlassEmbedding(**BRIEF)
    whole = estimator.fit(*table[:2])

    class Interrupted(Exception):
        pass

    seen = []

    def interrupt(progress):
        seen.append(progress)
        if len(seen) == 3:
            raise Interrupted

    again = MulticlassEmbedding(**BRIEF)
    with pytest.raises(Interrupted):
        again.fit(*table[:2], checkpoint=tmp_path / "run", progress=interrupt)
    again.fit(*table[:2], checkpoint=tmp_path / "run")
    assert again.search_.kernel == whole.search_.kernel
    np.testing.assert_array_equal(again.search_.history, whole.search_.history)
    np.testing.assert_array_equal(again.predict_proba(table[2]), whole.predict_proba(table[2]))


def test_weights_of_labels_are_weights_of_rows(table):
    x, names, points, _ = table
    weights = {"east": 2.0, "north": 1.0, "west": 0.5}
    given = {"kernel_x": kernels.Gaussian(1.0), "reg": 1e-2, "max_iter": 0}
    fit = MulticlassEmbedding(**given, class_weight=weights).fit(x, names)
    of_rows = MulticlassEmbedding(**given).fit(x, names, weights=[weights[name] for name in names])
    np.testing.assert_allclose(fit.predict_proba(points), of_rows.predict_proba(points), atol=1e-9)
    balanced = MulticlassEmbedding(**given, class_weight="balanced").fit(x, names)
    counts = dict(zip(*np.unique(names, return_counts=True), strict=True))
    by_hand = MulticlassEmbedding(**given).fit(
        x, names, weights=[100 / counts[name] for name in names]
    )
    np.testing.assert_allclose(
        balanced.predict_proba(points), by_hand.predict_proba(points), atol=1e-9
    )
    with pytest.raises(DataError, match="class_weight must be"):
        MulticlassEmbedding(**given, class_weight={"south": 1.0}).fit(x, names)


def test_weights_of_labels_go_by_name_in_stores_with_other_codes(table, tmp_path):
    x, names, points, _ = table
    given = {"kernel_x": kernels.Gaussian(1.0), "reg": 1e-2, "max_iter": 0, "calibration": False}
    models = []
    for texts in (NAMES.tolist(), NAMES.tolist()[::-1]):
        codes = np.array([[texts.index(name)] for name in names], dtype=float)
        columns = Columns.default("x", 2), Columns(("y",), {}, {"y": tuple(texts)})
        with writing_sample(tmp_path / texts[0], columns, chunk_rows=64) as writer:
            writer.append(x, codes)
        fit = MulticlassEmbedding(**given, class_weight={"east": 9.0})
        models.append(fit.partial_fit(x, names).partial_fit(tmp_path / texts[0]))
    a, b = (model.predict_proba(points) for model in models)
    np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.parametrize(
    ("labels", "keys"),
    [((0.0, 1.0), (0, 1)), ((False, True), (0, 1)), ((0, 1), (0.0, 1.0)), ((0, 1), (False, True))],
)
def test_weights_of_labels_go_by_equal_keys_however_they_are_written(labels, keys):
    rng = np.random.default_rng(8)
    x = rng.normal(size=(200, 1))
    y = np.array(labels)[(x[:, 0] + rng.normal(size=200) > 1.0).astype(int)]
    given = {"kernel_x": kernels.Gaussian(1.0), "reg": 1e-2, "max_iter": 0, "calibration": False}
    a, b = (
        MulticlassEmbedding(**given, class_weight=dict(zip(each, (1.0, 50.0), strict=True)))
        for each in (labels, keys)
    )
    np.testing.assert_array_equal(a.fit(x, y).predict_proba(x), b.fit(x, y).predict_proba(x))
    plain = MulticlassEmbedding(**given).fit(x, y).predict_proba(x)
    assert b.predict_proba(x)[:, 1].mean() > plain[:, 1].mean() + 0.2


def test_balanced_weights_are_those_of_one_fit(table):
    x, names, *_ = table
    given = {"kernel_x": kernels.Gaussian(1.0), "reg": 1e-2, "max_iter": 0}
    fit = MulticlassEmbedding(**given, class_weight="balanced").partial_fit(x, names)
    with pytest.raises(DataError, match="sees the new ones alone: give a mapping"):
        fit.partial_fit(x, names)


@pytest.mark.parametrize(
    ("reg", "n_folds", "criterion"),
    [(1e-2, 10, "hand"), (None, 10, "log loss"), (None, 1, "the Rademacher bound")],
)
def test_later_rows_leave_the_ridge_and_how_it_was_chosen(table, reg, n_folds, criterion):
    x, names, *_ = table
    given = {"kernel_x": kernels.Gaussian(1.0), "max_iter": 2, "validation_fraction": 0}
    fit = MulticlassEmbedding(**given, reg=reg, n_folds=n_folds).partial_fit(x, names)
    before = fit.reg_, fit.path_, fit.model_.about["criterion"], fit.model_.about["losses"]
    assert before[2] == criterion
    fit.partial_fit(x, names)
    assert before == (
        *(fit.reg_, fit.path_),
        *(fit.model_.about[name] for name in ("criterion", "losses")),
    )


@pytest.mark.parametrize("kind", ["memory", "store", "zarr", "dask"])
def test_weights_of_labels_multiply_those_of_rows_wherever_they_lie(table, tmp_path, kind):
    x, names, points, _ = table
    own = np.random.default_rng(0).uniform(0.5, 2.0, len(x))
    of_labels = {"east": 2.0, "north": 1.0, "west": 0.5}
    given = {
        "kernel_x": kernels.Gaussian(1.0),
        "reg": 1e-2,
        "max_iter": 0,
        "pivots": [x[:40], [[0.0], [1.0], [2.0]]],
    }
    both = own * [of_labels[name] for name in names]
    expected = MulticlassEmbedding(**given).fit(x, names, weights=both)
    rows = x, names, own
    if kind == "zarr":  # with labels that are texts
        labels = zarr.create_array(str(tmp_path / "y"), shape=300, dtype=str, chunks=70)
        labels[:] = names
        stored = zarr.create_array(str(tmp_path / "x"), data=x, chunks=(70, 2))
        rows = stored, labels, zarr.create_array(str(tmp_path / "w"), data=own, chunks=50)
    elif kind == "dask":
        chunks = (80, 2), 60, 50
        rows = [da.from_array(v, chunks=c) for v, c in zip(rows, chunks, strict=True)]
    elif kind == "store":
        codes = np.searchsorted(NAMES, names)[:, None]
        columns = Columns.default("x", 2), Columns(("label",), {}, {"label": tuple(NAMES)})
        with writing_sample(tmp_path / "s", columns, weights=True, chunk_rows=64) as writer:
            writer.append(x, codes, own)
        rows = str(tmp_path / "s"), None, None
    fit = MulticlassEmbedding(**given, class_weight=of_labels)
    fit.fit(*rows[:2], weights=rows[2])
    np.testing.assert_allclose(fit.predict_proba(points), expected.predict_proba(points), atol=1e-9)


def test_rows_out_of_core(table, tmp_path):
    x, names, points, truth = table
    stored = zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=(100, 2))
    codes = np.searchsorted(NAMES, names)
    labels = zarr.create_array(str(tmp_path / "y.zarr"), data=codes, chunks=(100,))
    options = BRIEF | {"class_weight": "balanced"}
    fit = MulticlassEmbedding(**options).fit(stored, labels)
    lazy = MulticlassEmbedding(**options).fit(
        da.from_array(x, chunks=(100, 2)), da.from_array(names, chunks=100)
    )
    assert fit.classes_.tolist() == [0, 1, 2]
    assert lazy.classes_.tolist() == NAMES.tolist()
    # The same chunks, so the same batches.
    np.testing.assert_array_equal(fit.search_.history, lazy.search_.history)
    np.testing.assert_allclose(fit.predict_proba(points), lazy.predict_proba(points), atol=1e-10)
    assert lazy.score(points, truth) > 0.75


def test_rare_and_unseen_labels(table):
    x, names, points, _ = table
    names = names.astype("<U8")
    names[:2] = "rare"  # two rows: one in a fold at most
    fit = MulticlassEmbedding(**BRIEF).fit(x, names)
    assert "rare" in fit.classes_
    assert np.isfinite(np.log(fit.predict_proba(points))).all()
    assert fit.score(points, np.full(200, "unseen")) == 0.0
    with pytest.raises(DataError, match="labels that the first call had not"):
        fit.partial_fit(x[:5], np.full(5, "unseen"))
    before = fit.reg_
    fit.partial_fit(*table[:2])
    assert fit.reg_ == before
    assert fit.moments_.n_rows == 600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.0}, "epsilon must lie between 0 and 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"optimizer": "newton"}, "optimizer must be one of adam, gradient"),
        ({"batch_size": 1}, "batch_size must be an integer of at least 2"),
        ({"batch_validation": 1.0}, "batch_validation must be a number from 0 to 0.9"),
        ({"reg": 0.0}, "reg must be above 0"),
    ],
)
def test_bad_parameters(options, message, table):
    with pytest.raises(DataError, match=message):
        MulticlassEmbedding(**options).fit(*table[:2])


def test_one_label_and_missing_labels(table):
    x, names, points, _ = table
    with pytest.raises(DataError, match="at least two classes, got 1 class"):
        MulticlassEmbedding().fit(x, np.full(300, "east"))
    some = np.where(np.arange(300) % 5 == 2, None, names.astype(object))
    with pytest.raises(DataError, match=r"species must hold labels, but 60 \(first at row 2\)"):
        MulticlassEmbedding().fit(x, pd.Series(some, name="species"))
    known = np.arange(300) % 5 != 2
    weights = np.linspace(1.0, 2.0, 300)
    # The same kernel, pivots and ridge: learning takes other batches of the same rows.
    given = {"kernel_x": kernels.Gaussian(1.0), "reg": 1e-3, "max_iter": 0, "n_folds": 1}
    given |= {"calibration": False, "pivots": (x[known][:30], np.arange(3.0))}
    left = MulticlassEmbedding(**given, missing="drop").fit(x, some, weights=weights)
    whole = MulticlassEmbedding(**given).fit(x[known], names[known], weights=weights[known])
    np.testing.assert_allclose(
        left.predict_proba(points), whole.predict_proba(points), rtol=1e-9, atol=1e-12
    )
    frame = MulticlassEmbedding(**BRIEF, missing="drop").fit(pd.DataFrame(x), pd.Series(some))
    assert frame.model_.about["rows"] == 240
    chunked = da.from_array(x, chunks=(100, 2)), da.from_array(some, chunks=70)
    for rows in ((chunked[0], some), chunked):
        again = MulticlassEmbedding(**given, missing="drop").fit(*rows, weights=weights)
        np.testing.assert_array_equal(again.predict_proba(points), left.predict_proba(points))
        assert again.model_.about["missing"]["rows"] == 60
    frame = dd.from_pandas(pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": some}), npartitions=3)
    again = MulticlassEmbedding(**given, missing="drop").fit(
        frame[["a", "b"]], frame["y"], weights=weights
    )
    assert again.model_.about["missing"]["rows"] == 60
    np.testing.assert_allclose(again.predict_proba(points), left.predict_proba(points))


@pytest.mark.parametrize("count", [1, 2])
def test_a_label_of_few_rows(table, count):
    x, names, points, _ = table
    names = names.astype("<U8")
    names[:count] = "rare"  # some refits have never seen it
    fit = MulticlassEmbedding(**BRIEF).fit(x, names)
    result = fit.predict_proba(points)
    assert fit.classes_.tolist() == ["east", "north", "rare", "west"]
    assert (result > 0.0).all()
    np.testing.assert_allclose(result.sum(axis=1), 1.0, rtol=1e-12)


def test_the_plan_predicts_what_learning_takes(table):
    x, names = np.tile(table[0], (20, 1)), np.tile(table[1], 20)
    estimator = MulticlassEmbedding(**BRIEF | {"batch_size": 500})
    plan = estimator.plan(x, names)
    assert plan.search_seconds > 0.0
    assert plan.passes == 1
    assert plan.to_dict()["parts"]["search for kernels"] == plan.search_seconds
    assert plan.memory.phase == "learning of the kernel"
    fit = estimator.fit(x, names)
    assert fit.report_.memory.predicted == fit.search_.memory.predicted == plan.memory.predicted
    with pytest.raises(ResourceError, match=r"learning of the kernel.*batch_size below 500"):
        estimator.plan(x, names, memory_limit=plan.memory.predicted - 1)


def test_the_study_of_classes_needs_all_of_its_tables_before_any_work(tmp_path):
    (tmp_path / "banknote.csv").write_text("1.0,2.0,0\n" * 60)
    words = ["study", "multiclass", "--data", str(tmp_path), "--data-set", "banknote"]
    done = CliRunner().invoke(beside, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "lacks iris.csv, wine.csv: --data is the folder of the tables" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_studies")
def test_the_study_of_classes_writes_page_picture_and_figures(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    names = np.array(["setosa", "versicolor", "virginica"])
    for name, columns, head in (("wine", 13, ""), ("iris", 4, "a,b,c,d,e\n")):
        codes = np.repeat([0, 1, 2], 20)
        x = rng.normal(size=(60, columns))
        x[:, :2] += 6.0 * np.eye(3)[codes, :2]
        rows = "\n".join(
            ",".join([*map(str, row), names[c]]) for row, c in zip(x.tolist(), codes, strict=True)
        )
        (tmp_path / f"{name}.csv").write_text(head + rows + "\n")

    def quick(x, y):
        return LogisticRegression().fit(x, y)

    monkeypatch.setattr(multiclass, "judge_all", study.judge_all)
    monkeypatch.setattr(multiclass_page, "_STEPS", 20)
    for name in multiclass_methods.METHODS:
        monkeypatch.setitem(multiclass_methods.METHODS, name, quick)
    words = ["study", "multiclass", "--data", str(tmp_path), "--data-set", "wine"]
    done = CliRunner().invoke(beside, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out" / "multiclass.md").read_text()
    assert "| published, GMCE | 97.2 |" in page
    result = json.loads((tmp_path / "out" / "multiclass.json").read_text())
    assert multiclass_page.multiclass_page(result) == page
    (cell,) = result["cells"]
    assert cell["models"]["SVC"]["accuracy"]["mean"] > 0.9
    assert np.isfinite(result["learned"]["scales"]).all()
    assert len(result["learned"]["scales"]) == 13
    assert (tmp_path / "out" / "multiclass.png").stat().st_size > 20_000
