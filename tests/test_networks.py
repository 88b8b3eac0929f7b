"""Features and networks with classes: Algorithm 2 beside Algorithm 1, networks, their models."""

import importlib.util
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy.signal import correlate2d

from benchmarks import mnist
from benchmarks.mnist import MnistOptions, mnist_tables, run_mnist
from cme_dask import MulticlassEmbedding, kernels, load
from cme_dask.cli.progress import ProgressLines
from cme_dask.errors import DataError, StoreError
from cme_dask.learning.autodiff import description
from cme_dask.learning.networks import FeatureCoordinates, coordinates_of, feature_bound
from cme_dask.learning.rademacher import (
    BoundOptions,
    LabelledRows,
    bound,
    learn_by_bound,
)
from cme_dask.reductions import FeatureBasis


@dataclass(frozen=True)
class Waves(kernels.Features):
    """Cosines and sines of the columns."""

    frequency: float
    height: float = 1.0

    def features(self, xp, X):
        waves = [f(k * self.frequency * X) for k in (1.0, 2.0) for f in (xp.cos, xp.sin)]
        return self.height * xp.concat([X, *waves], axis=1)


class Dense(kernels.Kernel):
    """The same kernel, which is not known to have features."""

    signed = True

    def __init__(self, kernel):
        object.__setattr__(self, "kernel", kernel)

    def formula(self, xp, X, Z):
        return self.kernel.formula(xp, X, Z)

    def diagonal_formula(self, xp, X):
        return self.kernel.diagonal_formula(xp, X)

    @property
    def parameters(self):
        return self.kernel.parameters

    def with_parameters(self, values):
        return Dense(self.kernel.with_parameters(values))


def rows(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    scores = np.column_stack([x[:, 0], x[:, 1], -x.sum(1)])
    codes = (scores + 0.5 * rng.normal(size=scores.shape)).argmax(1)
    return LabelledRows(x, codes, rng.uniform(0.2, 1.0, n))


# Algorithm 2


@pytest.mark.parametrize("n", [40, 7])
@pytest.mark.parametrize("validated", [False, True])
def test_the_bound_of_features_equals_that_of_their_kernel_and_its_gradient_differences(
    n, validated
):
    waves, train, held = Waves(0.9), rows(n), rows(25, 1)
    options = {"multiplier": 0.7, "epsilon": 1e-3, "validation": held if validated else None}
    z, z_held = waves.features(np, train.x), waves.features(np, held.x)

    def of_features(z, z_held, reg=0.03):
        return feature_bound(z, reg, train, labels=3, **options, validation_features=z_held)

    result, slope, slope_held = of_features(z, z_held)
    dense = bound(Dense(waves), 0.03, train, 3, **options)
    np.testing.assert_allclose(result[:3], dense[:3], rtol=1e-10)
    np.testing.assert_allclose(result.gradient, dense.gradient[-1:], rtol=1e-10)
    rng = np.random.default_rng(2)
    for values, gradient, place in ((z, slope, 0), (z_held, slope_held, 1)):
        for _ in range(4 if len(gradient) else 0):
            way, step = rng.normal(size=values.shape), 1e-4
            total = 0.0
            for multiple, factor in ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12)):
                moved = [z, z_held]
                moved[place] = values + multiple * step * way
                total += factor * of_features(*moved)[0].objective / step
            np.testing.assert_allclose((gradient * way).sum(), total, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_learning_features_takes_the_steps_of_learning_their_kernel(share):
    train = rows(60)
    options = BoundOptions(0.5, 1e-6, share, "adam", 0.1, 12, 10, 5, learn_reg=True)

    def in_one_batch(epoch, start):
        return iter([(0, train)] if not start else [])

    of_kernel = learn_by_bound(Dense(Waves(0.9)), 0.1, 3, in_one_batch, options)
    learned = learn_by_bound(
        Waves(0.9), 0.1, 3, in_one_batch, options, coordinates=FeatureCoordinates
    )
    np.testing.assert_allclose(learned.history[:, :4], of_kernel.history[:, :4], rtol=1e-8)
    np.testing.assert_allclose(learned.kernel.parameters, of_kernel.kernel.parameters, rtol=1e-8)
    assert learned.history[-1, 1] < learned.history[0, 1]


# The kernel of a network


def by_loops(network, vector, image):
    """The features of one image, pixel by pixel."""
    shapes, start, arrays = network.shapes(image.size), 0, []
    for shape in shapes:
        stop = start + int(np.prod(shape))
        arrays.append(vector[start:stop].astype(float).reshape(shape))
        start = stop
    h = image.astype(float).reshape(*network.image[:2], -1)
    for _ in network.filters:
        filters, biases = arrays.pop(0), arrays.pop(0)
        responses = [
            sum(
                correlate2d(h[:, :, c], filters[:, :, c, f], mode="same") for c in range(h.shape[2])
            )
            + biases[f]
            for f in range(len(biases))
        ]
        h = np.maximum(np.stack(responses, axis=2), 0.0)
        h = np.array(
            [
                [h[i : i + 2, j : j + 2].max(axis=(0, 1)) for j in range(0, h.shape[1], 2)]
                for i in range(0, h.shape[0], 2)
            ]
        )
    h = h.ravel()
    while arrays:
        h = np.maximum(h @ arrays.pop(0) + arrays.pop(0), 0.0)
    return h


@pytest.mark.parametrize(
    "network",
    [
        kernels.Network((5, 3), image=(8, 4), filters=(2, 3), filter_size=3),
        kernels.Network(4, image=(4, 8, 2), filters=3),
    ],
    ids=repr,
)
def test_features_are_those_of_loops_over_pixels(network):
    X = np.random.default_rng(0).normal(size=(40, int(np.prod(network.image))))
    network.check(X.shape[1])
    network = network.started(X.shape[1], seed=3)
    expected = [by_loops(network, network.vector, row) for row in X]
    values = network.features(np, X)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_allclose(network(X, X[:3]), values @ values[:3].T)
    np.testing.assert_allclose(network.diagonal(X), (values**2).sum(axis=1))
    assert network.started(X.shape[1], seed=4) == network


def test_networks_are_plain_values():
    network = kernels.Network((16, 32, 8), dropout=0.25)
    assert kernels.from_dict(network.to_dict()) == network
    assert network.parameters == ()
    started = network.started(3, seed=1)
    described = json.loads(json.dumps(started.to_dict()))
    assert kernels.from_dict(described) == started
    assert hash(started) != hash(network.started(3, seed=2))
    assert started.vector.dtype == np.float32
    assert len(started.vector) == 3 * 16 + 16 + 16 * 32 + 32 + 32 * 8 + 8
    assert (started + kernels.Linear()).to_dict()["left"] == started.to_dict()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": ()}, "layers must hold the width"),
        ({"layers": (8, 0)}, "a size in layers must be an integer of at least 1"),
        ({"layers": (8,), "dropout": 1.0}, "dropout must be below 1"),
        ({"layers": (8,), "image": (4, 4)}, "image and filters belong together"),
        ({"layers": (8,), "image": (6, 4), "filters": (2, 2)}, "that 4 divides"),
        ({"layers": (8,), "image": (4, 4), "filters": 2, "filter_size": 4}, "must be odd"),
        ({"layers": (8,), "weights": [1.0, np.nan]}, "weights must be finite"),
        ({"layers": (8,), "weights": "import os"}, "weights must be finite"),
        ({"layers": (8,), "weights": {"float32-base64": "?"}}, "no base64 text"),
    ],
)
def test_bad_networks(given, message):
    with pytest.raises(DataError, match=message):
        kernels.Network(**given)


def test_networks_of_other_columns():
    with pytest.raises(DataError, match="an image of 4 x 4 has 16 columns, the data have 15"):
        kernels.Network(8, image=(4, 4), filters=2).check(15)
    with pytest.raises(DataError, match="of 4 columns has 40 weights, got 32"):
        kernels.Network(8).started(3).check(4)
    with pytest.raises(DataError, match="kernel must derive"):
        FeatureBasis(kernels.Gaussian(1.0), 1)


# Classifiers


NAMES = np.array(["east", "north", "west"])


@pytest.fixture(scope="module")
def table():
    train, test = rows(400, 3), rows(200, 4)
    return train.x, NAMES[train.codes], test.x, NAMES[test.codes]


def test_features_are_the_basis_of_the_final_pass(table, tmp_path):
    x, names, points, truth = table
    options = {"batch_size": 100, "max_iter": 20, "validation_fraction": 0.0, "random_state": 0}
    fit = MulticlassEmbedding(kernel_x=Waves(0.7), **options).fit(x, names)
    learned = fit.search_
    assert learned.kernel.frequency != 0.7
    z, onehot = learned.kernel.features(np, x), (names[:, None] == NAMES).astype(float)
    away = onehot - onehot.mean(axis=0)
    weights = np.linalg.solve(z.T @ z + 400 * fit.reg_ * np.eye(z.shape[1]), z.T @ away)
    expected = onehot.mean(axis=0) + learned.kernel.features(np, points) @ weights
    np.testing.assert_allclose(fit.signed_proba(points), expected, atol=1e-10)
    assert fit.basis_x_.rank == z.shape[1] == 10
    assert abs(fit.basis_x_.trace_error) < 1e-12
    assert fit.n_passes_ == 1
    assert fit.score(points, truth) > 0.75
    fit.save(tmp_path / "waves.model")
    again = load(tmp_path / "waves.model")
    np.testing.assert_array_equal(again.predict_proba(points), fit.predict_proba(points))
    before = fit.predict_proba(points)
    fit.partial_fit(x, names)
    assert fit.moments_.n_rows == 800
    np.testing.assert_allclose(fit.predict_proba(points), before, atol=2e-3)


def test_random_networks_fit_and_load_without_jax(table, tmp_path):
    x, names, points, truth = table
    network = kernels.Network((40,))
    fit = MulticlassEmbedding(kernel_x=network, max_iter=0, random_state=0).fit(x, names)
    assert fit.score(points, truth) > 0.75
    fit.save(tmp_path / "random.model")
    attributes = json.loads((tmp_path / "random.model" / "zarr.json").read_text())
    assert "float32-base64" not in json.dumps(attributes)
    again = load(tmp_path / "random.model")
    np.testing.assert_array_equal(again.predict_proba(points), fit.predict_proba(points))
    assert again.x.basis.newton.kernel == fit.search_.kernel
    assert len(again.x.basis.newton.kernel.vector) == 2 * 40 + 40
    (path,) = (tmp_path / "random.model").glob("*weights*")
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        load(tmp_path / "random.model")


def test_without_jax_one_sentence_says_what_to_install(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(DataError, match=r"jax, which is not .* install cme-dask\[nn\]"):
        MulticlassEmbedding(kernel_x=kernels.Network((8,))).fit(*table[:2])


LEARNING = """
import sys
import numpy as np, optax, jax, zarr
from cme_dask import MulticlassEmbedding, kernels
from cme_dask.learning.networks import NetworkCoordinates
from test_networks import NAMES, rows

folder, result = sys.argv[1], {}

# Gradients, in float64
train, held = rows(20), rows(10, 1)
rng = np.random.default_rng(0)
for name, network, d in (
    ("dense", kernels.Network((5, 4)), 2),
    ("image", kernels.Network((4,), image=(4, 4), filters=(2,), filter_size=3, dropout=0.3), 16),
):
    x, x_held = rng.normal(size=(20, d)) * 3 + 1, rng.normal(size=(10, d)) * 3 + 1
    own, theirs = train._replace(x=x), held._replace(x=x_held)
    options = dict(labels=3, multiplier=0.5, epsilon=1e-6, validation=theirs)
    with jax.enable_x64(True):
        points = NetworkCoordinates(x, np.full(20, 0.05), 0, network, 0.1, learn_reg=True)
        points.dtype = np.float64
        bound, gradient = points.bound(points.start, own, 1, **options)
        for i in range(3):
            way, step, total = rng.normal(size=len(gradient)), 1e-6, 0.0
            for multiple, factor in ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12)):
                moved = points.start + multiple * step * way
                total += factor * points.bound(moved, own, 1, **options)[0].objective / step
            result[f"{name}{i}"] = gradient @ way, total
    if name == "dense":
        kernel, reg = points.at(points.start)
        result["features"] = kernel.features(np, x), points._propagated(points.start[:-1], x)[0]

# Learning: from a store, and the same bits after an interruption, whose first half begins anew
data, test = rows(600, 3), rows(200, 4)
x, names = data.x * [100.0, 0.01] + [1000.0, 5.0], NAMES[data.codes]
points = test.x * [100.0, 0.01] + [1000.0, 5.0]

def estimator():
    schedule = optax.cosine_decay_schedule(0.01, 40)
    return MulticlassEmbedding(
        kernel_x=kernels.Network((16, 32, 8), dropout=0.1), optimizer=optax.adam(schedule),
        batch_size=200, max_iter=40, random_state=0)

class Interrupted(Exception):
    pass

def interrupt(event):
    if getattr(event.detail, "stage", "") == "learning" and event.detail.done == 20:
        raise Interrupted

whole = estimator().fit(x, names)
resumed = estimator()
try:
    resumed.fit(x, names, checkpoint=folder + "/run", progress=interrupt)
except Interrupted:
    result["interrupted"] = 1
resumed.fit(x, names, checkpoint=folder + "/run")
stored = zarr.create_array(folder + "/x.zarr", data=x, chunks=(150, 2))
codes = zarr.create_array(folder + "/y.zarr", data=data.codes, chunks=(150,))
of_store = MulticlassEmbedding(
    kernel_x=kernels.Network((16, 8)), batch_size=200, max_iter=30, class_weight="balanced",
    ).fit(stored, codes)
for name, fit in (("whole", whole), ("resumed", resumed)):
    result[name] = fit.predict_proba(points)
    result[name + " history"] = fit.search_.history
    assert fit.n_passes_ == 1
result["accuracies"] = (
    whole.score(points, NAMES[test.codes]), of_store.score(points, test.codes))
whole.save(folder + "/network.model")
np.savez(folder + "/result.npz", points=points, **result)
"""


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Results of a process of its own: JAX has threads, and other tests fork."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None:
        pytest.skip("JAX or optax is not installed")
    folder = tmp_path_factory.mktemp("learned")
    run = [sys.executable, "-c", LEARNING, str(folder)]
    subprocess.run(run, check=True, cwd=Path(__file__).parent)
    with np.load(folder / "result.npz") as stored:
        return folder, dict(stored)


def test_gradients_of_networks_equal_finite_differences(learned):
    _, result = learned
    for name in ("dense", "image"):
        for i in range(3):
            gradient, difference = result[f"{name}{i}"]
            assert gradient == pytest.approx(difference, rel=1e-6)
    np.testing.assert_allclose(*result["features"], rtol=1e-4, atol=1e-5)


def test_learned_networks_have_the_same_bits_after_an_interruption(learned):
    _, result = learned
    assert result["interrupted"]
    np.testing.assert_array_equal(result["resumed"], result["whole"])
    np.testing.assert_array_equal(result["resumed history"], result["whole history"])
    assert (result["accuracies"] > 0.75).all()


def test_a_learned_network_answers_without_jax(learned, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    folder, result = learned
    model = load(folder / "network.model")
    np.testing.assert_array_equal(model.predict_proba(result["points"]), result["whole"])
    assert "Network" in repr(model)


# The study of MNIST


@pytest.mark.slow
def test_the_study_of_mnist_learns_length_scales_and_draws_them(tmp_path):
    rng = np.random.default_rng(0)
    codes = np.repeat([0, 1, 2], 60)
    digits = np.zeros((180, 28, 28), dtype=np.uint8)
    digits[np.arange(180), 5 + 8 * codes] = 200
    digits = digits + rng.integers(0, 50, size=digits.shape, dtype=np.uint8)
    parts = {"x_train": digits, "y_train": codes, "x_test": digits[::2], "y_test": codes[::2]}
    np.savez(tmp_path / "mnist.npz", **parts)
    options = MnistOptions(tmp_path, ("length scales",), (150,))
    with ProgressLines() as progress:
        result = run_mnist(options, tmp_path / "out", overwrite=False, progress=progress)
    assert [cell["rows"] for cell in result["cells"]] == [150]
    assert all(cell["accuracy"] == 1.0 for cell in result["cells"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mnist.json", "mnist.png"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*mnist_tables(result))
    assert "100.00%" in console.export_text()
    with pytest.raises(DataError, match=r"has no mnist\.npz"):
        MnistOptions(tmp_path / "out")


def test_the_study_of_mnist_removes_its_own_parts_alone(tmp_path, monkeypatch):
    digits = {"x": np.ones((60, 28, 28)), "y": np.arange(60) % 10}
    parts = {f"{name}_{part}": rows for part in ("train", "test") for name, rows in digits.items()}
    np.savez(tmp_path / "mnist.npz", **parts)
    out = tmp_path / "out"
    (out / "my-model.zarr").mkdir(parents=True)
    mine = "getting-started.md", "my-model.zarr/x", "network-60.json", "length-scales-90.clock"
    for name in mine:
        (out / name).write_text("mine")

    def judged(name, estimator, train, test, checkpoint, progress):
        checkpoint.mkdir()
        checkpoint.with_suffix(".clock").write_text("")
        return {"accuracy": 0.9}

    monkeypatch.setattr(mnist, "judged", judged)
    monkeypatch.setattr(mnist, "mnist_picture", lambda result, path: path.write_bytes(b""))
    options = MnistOptions(tmp_path, ("length scales",), (50,))
    run_mnist(options, out, overwrite=False, progress=ProgressLines(False))
    left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert left == {*mine, "mnist.json", "mnist.png"}


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off", "other names"])
def test_the_study_of_mnist_refuses_a_damaged_file(tmp_path, content):
    if isinstance(content, bytes):
        (tmp_path / "mnist.npz").write_bytes(content)
    else:
        np.savez(tmp_path / "mnist.npz", images=np.ones(3))
    with pytest.raises(DataError, match=r"mnist\.npz is damaged or no file of images"):
        run_mnist(MnistOptions(tmp_path), None, overwrite=False, progress=ProgressLines(False))


@pytest.mark.parametrize("constant", [0.1, 1.0, 20240101.0])
def test_constant_columns_do_not_drown_the_others(constant):
    data = rows(300)
    x = np.column_stack([data.x, np.full(300, constant)])
    importance = np.random.default_rng(0).dirichlet(np.ones(300))
    started = coordinates_of(x, importance, 0, kernels.Network((64,)), 0.1, learn_reg=False)
    kernel, _ = started.at(started.start)
    features = kernel.features(np, x)
    assert 0.1 < features.std(axis=0).mean() < 10.0


def test_offsets_that_float32_does_not_hold_are_refused():
    x = np.random.default_rng(0).normal([0.0, 1e7], 1.0, size=(50, 2))
    importance = np.full(50, 0.02)
    with pytest.raises(DataError, match=r"column 1 of x has a mean of 1e\+07 .* subtract the mean"):
        coordinates_of(x, importance, 0, kernels.Network((4,)), 0.1, learn_reg=False)


def test_descriptions_of_optimisers_tell_schedules_of_one_place_apart():
    schedules = [lambda step: 1e-3, lambda step: 1e-4, lambda step, rate=1e-3: rate]
    assert len({str(description(each)) for each in schedules}) == 3
