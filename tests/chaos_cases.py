"""The fits of the chaos test: every estimator, small, from stores on disk."""

import dataclasses
import json

import numpy as np

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    PivotedCholesky,
    Tuning,
    open_sample,
)
from cme_dask.constraints import Coupling
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.kernels import Gaussian
from cme_dask.models.events import Event

N_ROWS = 150_000
GAUSS = Gaussian(1.0)
TOL = 1e-2


def write_stores(folder, n=N_ROWS):
    """Two stores: numbers, and labels with weights in chunks whose ends no strip shares."""
    rng = np.random.default_rng(20261122)
    x = rng.normal(size=(n, 2))
    y = np.sin(x[:, :1]) + 0.5 * rng.normal(size=(n, 1))
    folder.mkdir(exist_ok=True)
    columns = Columns(("a", "b")), Columns(("y",))
    with writing_sample(folder / "numbers.zarr", columns, chunk_rows=4_096, seed=0) as writer:
        writer.append(x, y)
    codes = np.digitize(x[:, 0] + 0.3 * rng.normal(size=n), [-0.5, 0.5])
    columns = columns[0], Columns(("label",), categories={"label": ("l", "m", "h")})
    with writing_sample(
        folder / "labels.zarr", columns, weights=True, chunk_rows=3_000, seed=0
    ) as writer:
        writer.append(x, codes[:, None].astype(float), rng.uniform(0.5, 1.5, n))


def joint(**options):
    """A joint distribution with what all of them share."""
    given = {"kernel_x": GAUSS, "kernel_y": GAUSS, "reg": 1e-4, "residual": False}
    return JointDistribution(**{**given, "tol": TOL, "support_size": 60, **options})


SEARCH = Tuning(rows=400, max_rank=20, evaluations=1, finalists=2, averaged=2)

CASES = {
    "joint": lambda: joint(),
    "joint, certified, greedy": lambda: joint(constraint="certified", pivots="greedy", span=0.1),
    "joint, coupling": lambda: joint(constraint=Coupling(landmarks=24), reg=1e-3),
    "joint, residual": lambda: joint(residual=True),
    "joint, learned": lambda: joint(
        kernel_x=None, kernel_y=None, reg=None, max_rank=40, tuning=SEARCH
    ),
    "cholesky, greedy": lambda: PivotedCholesky(GAUSS, tol=TOL, pivots="greedy", span=0.1),
    "cholesky, random": lambda: PivotedCholesky(
        GAUSS, tol=TOL, pivots="random", basis="spectral", random_state=7
    ),
    "embedding": lambda: ConditionalMeanEmbedding(kernel_x=GAUSS, kernel_y=GAUSS, tol=TOL),
    "logistic": lambda: KernelLogisticRegression(GAUSS, tol=TOL, gradient_tol=0.05),
    "joint classifier": lambda: JointClassifier(
        kernel_x=GAUSS, kernel_y="median", tol=TOL, reg=1e-4, pivots=("random", "sampled")
    ),
    "embedding classifier": lambda: EmbeddingClassifier(kernel_x=GAUSS, tol=TOL),
}
_OF_LABELS = ("logistic", "joint classifier", "embedding classifier")
_WITH_FUNCTIONS = (JointDistribution, ConditionalMeanEmbedding)


def fit(name, folder, **where):
    """Fit the named case where ``scheduler`` says."""
    store = folder / ("labels.zarr" if name in _OF_LABELS else "numbers.zarr")
    estimator = CASES[name]()
    if name not in _OF_LABELS and isinstance(estimator, _WITH_FUNCTIONS):
        where["functions"] = {"above": Event.parse("y > 0.5", ("y",))}
    return estimator.fit(open_sample(str(store)), **where)


def bits(estimator):
    """Every array of a fit by name, as bytes: of the model that is saved, and of the moments."""
    found, moments = state_bits(estimator.model_.to_state()), getattr(estimator, "moments_", None)
    if moments is not None:
        for field in dataclasses.fields(moments):
            value = getattr(moments, field.name)
            if isinstance(value, np.ndarray):
                found[f"moments {field.name}"] = _bytes(value)
    return found


def state_bits(state):
    """The same of a saved model alone."""
    arrays = {name: _bytes(values) for name, values in state.arrays.items()}
    return {"about": json.dumps(_timeless(state.description), sort_keys=True), **arrays}


def differences(found, wanted):
    """Names of arrays that are not equal bit by bit."""
    return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def _bytes(array):
    array = np.ascontiguousarray(array)
    return array.dtype.str, array.shape, array.tobytes()


def _timeless(about):
    """A description without the seconds that something took."""
    if isinstance(about, dict):
        return {key: _timeless(value) for key, value in about.items() if key != "seconds"}
    return [_timeless(item) for item in about] if isinstance(about, (list, tuple)) else about
