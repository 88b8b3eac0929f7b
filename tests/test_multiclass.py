"""Classes with learned kernels: the bound and its dense formula, Algorithm 1, the classifier."""

import dataclasses
import math

import dask.array as da
import numpy as np
import pytest
import zarr

from cme_dask import MulticlassEmbedding, kernels
from cme_dask.errors import DataError
from cme_dask.learning.rademacher import (
    BoundOptions,
    LabelledRows,
    bound,
    learn_by_bound,
)

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
    assert whole.loss <= held_out(kernel, 0.1)


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


def test_the_classifier_is_the_dense_embedding_with_the_learned_kernel(fitted, table):
    x, names, points, truth = table
    learned = fitted.search_
    train = LabelledRows(x, np.searchsorted(NAMES, names), np.ones(300))
    gram = learned.kernel(x, x) + 300 * learned.reg * np.eye(300)
    signed = learned.kernel(points, x) @ np.linalg.solve(gram, np.eye(3)[train.codes])
    np.testing.assert_allclose(fitted.signed_proba(points), signed, atol=2e-3)
    clipped = np.maximum(signed, 0)
    clipped /= clipped.sum(1, keepdims=True)
    np.testing.assert_allclose(fitted.clipped_proba(points), clipped, atol=5e-3)
    assert (fitted.predict(points) == NAMES[signed.argmax(1)]).mean() > 0.98
    assert fitted.n_passes_ == 1
    assert fitted.reg_ == learned.reg
    assert fitted.score(points, truth) > 0.75
    assert np.isfinite(learned.loss)
    assert len(learned.history) == learned.steps <= 20
    assert "Rademacher" in repr(fitted.model_)


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
    x, names, _, _ = table
    with pytest.raises(DataError, match="at least two classes, got 1 class"):
        MulticlassEmbedding().fit(x, np.full(300, "east"))
    with pytest.raises(DataError, match="NaN or missing"):
        MulticlassEmbedding().fit(x, np.where(np.arange(300) < 3, None, names.astype(object)))
