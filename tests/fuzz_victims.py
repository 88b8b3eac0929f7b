"""What the fuzzing damages: stores, models and checkpoints as small as they can be, and how to ask.

The first half is what defaults write, and averages: learned kernels, locations by a ridge
regression and by trees, values of y, missing values, labels, groups and times, sums of a pass.
"""

import json
import warnings
from dataclasses import dataclass, replace

import numpy as np

import cme_dask
from cme_dask import (
    ConditionalMeanEmbedding,
    JointClassifier,
    JointDistribution,
    KernelBayesFilter,
    KernelLogisticRegression,
    MulticlassEmbedding,
    PivotedCholesky,
    SparseEmbedding,
    TransferOperator,
    Tuning,
    ingest,
    kernels,
    open_sample,
    operators,
)
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import StoreError
from cme_dask.passes import checkpoint

GAUSS = kernels.Gaussian(1.0)
BRIEF = Tuning(rows=120, max_rank=8, evaluations=0, finalists=2, averaged=2, trees=())
SMALL = {"max_rank": 6, "support_size": 12, "n_folds": 3, "random_state": 0}
WHERE = {"scheduler": "synchronous"}


@dataclass(frozen=True)
class Victim:
    """What is damaged.

    Attributes
    ----------
    share
        How often it is taken, beside others.
    make
        Writes it to a path.
    read
        Asks for all that it can be asked for: arrays and texts.
    """

    share: int
    make: object
    read: object


def table(n=160, d=2, noise=0.05, seed=3):
    """Rows of x and a y with little noise, which a location explains."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    return x, np.sin(x[:, :1]) + 0.5 * x[:, 1:2] + noise * rng.normal(size=(n, 1))


# How they are asked


def asked(model):
    """What any model tells of itself."""
    return [repr(model), model._repr_html_(), json.dumps(model.contents())]


def points(model):
    """Two rows of each variable."""
    sides = [model.x.columns, model.y.columns] if hasattr(model, "x") else [model.columns]
    values = zip(([0.1, -0.7] * 9, [0.3] * 9), sides, strict=False)
    return [np.resize(np.array(v), (2, len(side.names))) for v, side in values]


def read_store(path):
    sample = open_sample(path)
    repr(sample)
    rows = sample.row_sample  # None, where the description has become that of a single array
    values = [] if rows is None else [rows.keys, rows.index, rows.weights, *rows.parts]
    for source in sample.reads:
        last = source.shape[0]
        values += [source.read(0, min(last, 1000)), source.read(max(last - 100, 0), last)]
    return [*values, json.dumps([c.to_dict() for c in sample.columns])]


def read_model(path):
    """Of given kernels: expectations and what is linear in the moments."""
    model = cme_dask.load(path)
    at = points(model)
    if hasattr(model, "density_ratio"):
        given = list(model.function_names[0])
        return [*asked(model), model.expect(given, at[0]), model.density_ratio(*at)]
    if hasattr(model, "embedding"):
        return [*asked(model), model.expect(None, at[0]), model.embedding(*at)]
    if hasattr(model, "predict_proba"):
        return [*asked(model), model.predict_proba(at[0])]
    return [*asked(model), model.transform(at[0])]


def read_laws(path):
    """Of a joint distribution with all that defaults add: its laws."""
    model = cme_dask.load(path)
    at = points(model)
    law = model.conditional(at[0])
    answers = [law.mean(), law.std(), law.quantile([0.1, 0.5]), law.cdf(at[1][:, 0])]
    if model.about.get("conformal"):
        answers += [np.asarray(law.interval(0.5, conformal=True))]
    return [*asked(model), *map(np.asarray, answers), model.expect(None, at[0])]


def read_labels(path):
    model = cme_dask.load(path)
    at = points(model)[0]
    return [*asked(model), np.asarray(model.predict_proba(at)), str(model.predict(at))]


def read_means(path):
    model = cme_dask.load(path)
    return [*asked(model), np.asarray(model.expect(None, points(model)[0]))]


def read_filter(path):
    model = cme_dask.load(path)
    law = model.filter(np.array([[0.1], [np.nan], [-0.7]]))
    return [*asked(model), np.asarray(law.mean()), np.asarray(law.log_likelihood())]


def read_forecasts(path):
    model = cme_dask.load(path)
    at = np.array([[0.3], [-0.5]])
    return [*asked(model), np.asarray(model.forecast(at, 3)), np.asarray(model.eigenvalues)]


def read_operator(path):
    model = cme_dask.load(path)
    return [*asked(model), model.matrix, np.array([model.norm()])]


def read_sums(path):
    """The sum of the pass of a checkpoint, as the run that goes on reads it."""
    total = None
    if checkpoint.is_checkpoint(path):
        total = replace(_BEGUN["sums"], folder=path).read_total()
    if total is None:
        raise StoreError("the pass has not ended, and would be made again")
    return arrays_of(total)


def arrays_of(value):
    """The arrays and numbers in a partial result."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        return [a for key in sorted(value, key=str) for a in (str(key), *arrays_of(value[key]))]
    if isinstance(value, (list, tuple)):
        return [a for item in value for a in arrays_of(item)]
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return [a for name in names for a in arrays_of(getattr(value, name))]
    return [str(value)]


# How they are made


def make_store(path):
    columns = Columns(("a", "b"), {"a": "m"}), Columns(("c",), {}, {})
    x, y = table(40)
    with writing_sample(path, columns, weights=True, chunk_rows=16) as writer:
        writer.append(x, y, np.ones(40))


def make_events(path):
    """Labels, groups and times beside the numbers, from a file."""
    x, y = table(40)
    lines = [
        f"{a},{'no' if b < 0 else 'yes'},{c},{i // 8},{i}"
        for i, (a, b, c) in enumerate(np.hstack([x, y]).tolist())
    ]
    file = path.with_name(f"{path.name}.csv")
    file.write_text("\n".join(["a,b,c,g,t", *lines]))
    names = {"x": ["a", "b"], "y": ["c"], "categorical": ["b"], "group": "g", "time": ["t"]}
    ingest([file], path, chunk_rows=16, **names)


def located():
    return JointDistribution(tuning=BRIEF, **SMALL)


def make_located(path):
    fit = located().fit(*table(), **WHERE)
    assert fit.model_.residual is not None
    fit.save(path)


def make_trees(path):
    rng = np.random.default_rng(0)
    x = rng.random((200, 1))
    y = 2.0 * (x > 0.4) + 0.05 * rng.normal(size=(200, 1))
    tuning = Tuning(**{**BRIEF.__dict__, "trees": ("shallow",)})
    fit = JointDistribution(tuning=tuning, **SMALL).fit(x, y, **WHERE)
    assert fit.model_.about["residual"]["location"]
    fit.save(path)


def make_counts(path):
    """Whole numbers of y, which laws are on."""
    x, y = table(noise=0.3)
    fit = located().fit(x, np.round(2.0 * np.exp(y)), **WHERE)
    assert "support" in fit.model_.about
    fit.save(path)


def make_missing(path):
    x, y = table()
    x[::7, 0] = np.nan
    JointDistribution(tuning=BRIEF, missing="impute", **SMALL).fit(x, y, **WHERE).save(path)


def make_labels(path):
    x, y = table()
    fit = JointClassifier(tuning=BRIEF, **SMALL)
    fit.fit(x, np.where(y[:, 0] > 0.0, "high", "low"), **WHERE).save(path)


def make_multiclass(path):
    x, y = table()
    fit = MulticlassEmbedding(max_rank=6, max_iter=3, random_state=0)
    fit.fit(x, np.where(y[:, 0] > 0.0, "high", "low"), **WHERE).save(path)


def make_network(path):
    x, y = table(60)
    fit = MulticlassEmbedding(kernel_x=kernels.Network((4,)), max_iter=0, random_state=0)
    fit.fit(x, np.where(y[:, 0] > 0.0, "high", "low"), **WHERE).save(path)


def make_embedding(path):
    ConditionalMeanEmbedding(max_rank=6, random_state=0).fit(*table(), **WHERE).save(path)


def make_sparse(path):
    fit = SparseEmbedding(
        kernel_x=GAUSS, kernel_y=GAUSS, max_rank=6, penalty="columns", gamma_ratio=0.1, n_gammas=3
    )
    fit.fit(*table(60), **WHERE).save(path)


def make_filter(path):
    states, seen = (part[:, :1] for part in table(200))
    fit = KernelBayesFilter(GAUSS, GAUSS, max_rank=6, reg=1e-2)
    fit.fit(np.sort(states, axis=0), seen, **WHERE).save(path)


def make_transfer(path):
    x = np.cumsum(table(200)[0][:, :1], axis=0) % 3.0
    TransferOperator(GAUSS, max_rank=6, tol=1e-6, reg=1e-3).fit(x, **WHERE).save(path)


def make_operator(path):
    x, y = table(60)
    fit = ConditionalMeanEmbedding(kernel_x=GAUSS, kernel_y=GAUSS, max_rank=4, tol=1e-9, reg=0.1)
    model = fit.fit(x, y, **WHERE).model_
    of_x, of_y = operators.Space.of(model.x), operators.Space.of(model.y)
    moments = operators.measure(open_sample(x, y), of_x, of_y)
    moments.conditional_expectation(0.1).save(path)


_BEGUN = {}


def make_sums(path):
    """The sums of a pass of a default fit that was cut off before its solution."""
    begin, end = checkpoint.Checkpoint.begin, checkpoint.PassSums.end

    def remembered(self, *args):
        _BEGUN["sums"] = begin(self, *args)
        return _BEGUN["sums"]

    def cut_off(self, value):
        end(self, value)
        raise InterruptedError

    checkpoint.Checkpoint.begin, checkpoint.PassSums.end = remembered, cut_off
    try:
        located().fit(*table(60), checkpoint=path, **WHERE)
    except InterruptedError:
        pass
    finally:
        checkpoint.Checkpoint.begin, checkpoint.PassSums.end = begin, end


def make_given(path):
    options = {"max_rank": 4, "tol": 1e-9, "support_size": 0, "residual": False}
    JointDistribution(kernel_x=GAUSS, kernel_y=GAUSS, **options).fit(*table(40), **WHERE).save(path)


def make_given_embedding(path):
    fit = ConditionalMeanEmbedding(kernel_x=GAUSS, kernel_y=GAUSS, max_rank=4, tol=1e-9)
    fit.fit(*table(40), **WHERE).save(path)


def make_features(path):
    PivotedCholesky(GAUSS, max_rank=4, tol=1e-9).fit(table(40)[0], **WHERE).save(path)


def make_logistic(path):
    x, y = table(40)
    KernelLogisticRegression(GAUSS, pivots=x[:4]).fit(x, y[:, 0] > 0, **WHERE).save(path)


VICTIMS = {
    "located": Victim(3, make_located, read_laws),
    "trees": Victim(2, make_trees, read_laws),
    "counts": Victim(1, make_counts, read_laws),
    "missing": Victim(1, make_missing, read_laws),
    "labels": Victim(3, make_labels, read_labels),
    "multiclass": Victim(3, make_multiclass, read_labels),
    "network": Victim(2, make_network, read_labels),
    "learned embedding": Victim(3, make_embedding, read_means),
    "events": Victim(4, make_events, read_store),
    "sums": Victim(4, make_sums, read_sums),
    "sparse": Victim(2, make_sparse, read_means),
    "filter": Victim(2, make_filter, read_filter),
    "transfer": Victim(2, make_transfer, read_forecasts),
    "operator": Victim(2, make_operator, read_operator),
    "store": Victim(4, make_store, read_store),
    "features": Victim(3, make_features, read_model),
    "logistic": Victim(2, make_logistic, read_model),
    "embedding": Victim(2, make_given_embedding, read_model),
    "joint": Victim(2, make_given, read_model),
}
"""By name."""


def make_victims(folder, names):
    """Those of these names, in a folder; their paths by name."""
    paths = {name: folder / name.replace(" ", "-") for name in VICTIMS if name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, path in paths.items():
            VICTIMS[name].make(path)
    return paths
