"""The fits of the chaos test: what people run, small, from stores on disk."""

import contextlib
import dataclasses
import json
import pickle
from collections.abc import Mapping

import numpy as np

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelBayesFilter,
    KernelLogisticRegression,
    MulticlassEmbedding,
    PivotedCholesky,
    SparseEmbedding,
    TransferOperator,
    Tuning,
    drift_report,
    independence_test,
    open_sample,
    two_sample_test,
)
from cme_dask.constraints import Coupling
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.kernels import Gaussian
from cme_dask.models.events import Event

N_ROWS = 60_000
GAUSS = Gaussian(1.0)
TOL = 1e-2


def write_stores(folder, n=N_ROWS):
    """Stores of rows; chunks of the labels, which have weights, end where no strip does.

    In the first one y is smooth in x, in the second it jumps, in the third it is skewed; the last
    one is a trajectory of hidden states x and of observations y.
    """
    rng = np.random.default_rng(20261122)
    x, noise = rng.normal(size=(n, 2)), rng.normal(size=(n, 1))
    folder.mkdir(exist_ok=True)
    columns = Columns(("a", "b")), Columns(("y",))

    def write(name, x, y):
        with writing_sample(folder / f"{name}.zarr", columns, chunk_rows=4_096, seed=0) as writer:
            writer.append(x, y)

    write("numbers", x, 2.0 * np.sin(x[:, :1]) + x[:, 1:] + 0.4 * noise)
    write("jumps", x, np.where(x[:, :1] > 0.3, 2.0, 0.0) + np.where(x[:, 1:] > 0, 1.0, 0.0) + noise)
    write("skewed", x, np.exp(x[:, :1] + noise))
    states = np.zeros((n, 2))
    for t, step in enumerate(0.4 * rng.normal(size=(n - 1, 2)), 1):
        states[t] = 0.9 * states[t - 1] + step
    write("states", states, states[:, :1] + 0.5 * noise)
    codes = np.digitize(x[:, 0] + 0.3 * rng.normal(size=n), [-0.5, 0.5])
    columns = columns[0], Columns(("label",), categories={"label": ("l", "m", "h")})
    with writing_sample(
        folder / "labels.zarr", columns, weights=True, chunk_rows=3_000, seed=0
    ) as writer:
        writer.append(x, codes[:, None].astype(float), rng.uniform(0.5, 1.5, n))


SEARCH = Tuning(rows=250, max_rank=20, evaluations=3, trees=())


def joint(**options):
    """A joint distribution with given kernels."""
    given = {"kernel_x": GAUSS, "kernel_y": GAUSS, "reg": 1e-4, "residual": False}
    return JointDistribution(**{**given, "tol": TOL, "support_size": 60, **options})


def learned(**options):
    """A joint distribution by default, on a smaller row sample and at lower ranks."""
    small = {"max_rank": 30, "sample_size": 2_000, "support_size": 60, "tuning": SEARCH}
    return JointDistribution(**{**small, **options})


AVERAGED = dataclasses.replace(SEARCH, finalists=3, averaged=2)
TREES = dataclasses.replace(SEARCH, trees=("shallow",))
OF_X = {"kernel_x": GAUSS, "tol": TOL}

ESTIMATORS = {
    "joint": lambda: joint(),
    "joint, certified, greedy": lambda: joint(constraint="certified", pivots="greedy", span=0.1),
    "joint, coupling": lambda: joint(constraint=Coupling(landmarks=24), reg=1e-3),
    "joint, residual": lambda: joint(residual=True),
    "joint, learned": lambda: learned(),
    "joint, learned, trees": lambda: learned(tuning=TREES, sample_size=1_500),
    "joint, learned, scores": lambda: learned(residual=True, tuning=AVERAGED),
    "cholesky, greedy": lambda: PivotedCholesky(GAUSS, tol=TOL, pivots="greedy", span=0.1),
    "cholesky, random": lambda: PivotedCholesky(
        GAUSS, tol=TOL, pivots="random", basis="spectral", random_state=7
    ),
    "embedding": lambda: ConditionalMeanEmbedding(kernel_y=GAUSS, **OF_X),
    "embedding, squared": lambda: ConditionalMeanEmbedding(
        criterion="squared", max_rank=30, sample_size=400
    ),
    "embedding, surrogate": lambda: ConditionalMeanEmbedding(
        criterion="surrogate", max_rank=30, sample_size=400
    ),
    "sparse": lambda: SparseEmbedding(max_rank=20, sample_size=400, n_gammas=4, gap=1e-4),
    "logistic": lambda: KernelLogisticRegression(GAUSS, tol=TOL, gradient_tol=0.05),
    "joint classifier": lambda: JointClassifier(
        kernel_x=GAUSS, kernel_y="median", tol=TOL, reg=1e-4, pivots=("random", "sampled")
    ),
    "joint classifier, learned": lambda: JointClassifier(
        max_rank=30, sample_size=2_000, support_size=60, tuning=SEARCH
    ),
    "embedding classifier": lambda: EmbeddingClassifier(**OF_X),
    "embedding classifier, learned": lambda: EmbeddingClassifier(max_rank=30, sample_size=400),
    "multiclass": lambda: MulticlassEmbedding(
        batch_size=100, max_iter=40, max_rank=20, n_folds=3, random_state=0
    ),
    "transfer": lambda: TransferOperator(GAUSS, tol=TOL),
    "filter": lambda: KernelBayesFilter(GAUSS, GAUSS, tol=TOL, support_size=60),
}
_STORES = {
    "joint, learned, trees": "jumps",
    "joint, learned, scores": "skewed",
    "transfer": "states",
    "filter": "states",
}
_OF_LABELS = ("logistic", "classifier", "multiclass")
_WITH_FUNCTIONS = (JointDistribution, ConditionalMeanEmbedding)


def fit(name, folder, **where):
    """Run the named case where ``scheduler`` says; an estimator, or a report."""
    if name in _REPORTS:
        return _REPORTS[name](folder, where)
    estimator, store = ESTIMATORS[name](), _STORES.get(name, "numbers")
    if any(part in name for part in _OF_LABELS):
        store = "labels"
    elif isinstance(estimator, _WITH_FUNCTIONS):
        where["functions"] = {"above": Event.parse("y > 0.5", ("y",))}
    return estimator.fit(open_sample(f"{folder}/{store}.zarr"), **where)


# What gives a report, not a model


def _drift(folder, where):
    """Of a model that is fitted once, without chaos."""
    model = folder / "drift.model"
    if not model.exists():
        with contextlib.suppress(Exception):  # another process was faster
            fit("joint", folder, scheduler="synchronous").save(model)
    return drift_report(_loaded(model), open_sample(f"{folder}/skewed.zarr"), **where)


def _loaded(path):
    from cme_dask import load

    return load(path)


def _independence(folder, where):
    return independence_test(open_sample(f"{folder}/numbers.zarr"), max_rank=30, **where)


def _two_sample(folder, where):
    each = (open_sample(f"{folder}/{name}.zarr") for name in ("numbers", "jumps"))
    return two_sample_test(*each, max_rank=30, **where)


_REPORTS = {
    "drift": _drift,
    "independence": _independence,
    "two samples": _two_sample,
}
CASES = (*ESTIMATORS, *_REPORTS)


# Bits


def bits(result):
    """Every array of a fit by name, as bytes: of the model that is saved, and of the moments.

    Of a report all that it holds but times.
    """
    if not hasattr(result, "model_"):
        return _flat(result, "report", {})
    found, moments = state_bits(result.model_.to_state()), getattr(result, "moments_", None)
    if moments is not None:
        for field in dataclasses.fields(moments):
            value = getattr(moments, field.name)
            if isinstance(value, np.ndarray):
                found[f"moments {field.name}"] = _bytes(value)
    return found


def state_bits(state):
    """The same of a saved model alone."""
    arrays = {name: _bytes(values) for name, values in state.arrays.items()}
    return {"about": json.dumps(timeless(state.description), sort_keys=True), **arrays}


def differences(found, wanted):
    """Names of arrays that are not equal bit by bit."""
    return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def save(result, out):
    """A model as such, a report's bits."""
    if hasattr(result, "model_"):
        result.save(out, overwrite=True)  # of a start that was killed when all was done
    else:
        aside = out.with_name(f"{out.name}.aside")
        aside.write_bytes(pickle.dumps(bits(result)))
        aside.rename(out)


def _bytes(array):
    array = np.ascontiguousarray(array)
    return array.dtype.str, array.shape, array.tobytes()


_OF_THE_MOMENT = ("seconds", "rows_per_second", "memory", "reports", "report", "ratio", "basis")


def _flat(value, name, found):
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not (str(key) in _OF_THE_MOMENT or str(key).endswith("_seconds")):
                _flat(each, f"{name} {key}", found)
    elif isinstance(value, (tuple, list)):
        for i, each in enumerate(value):
            _flat(each, f"{name} {i}", found)
    else:
        found[name] = _bytes(value) if isinstance(value, np.ndarray) else repr(value)
    return found


def timeless(about):
    """A description without the seconds that something took."""
    if isinstance(about, dict):
        return {
            key: timeless(value)
            for key, value in about.items()
            if key not in _OF_THE_MOMENT and not key.endswith("_seconds")
        }
    return [timeless(item) for item in about] if isinstance(about, (list, tuple)) else about
