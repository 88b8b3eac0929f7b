"""Classifiers on the six tables of Hsu, Nock and Ramos: ours, scikit-learn's, and their figures."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study import mean_and_error, summary

Array = Any
Result = dict[str, Any]

DATA_SETS = ("banknote", "ecoli", "robot", "segment", "wine", "yeast")
FOLDS, BINS = 10, 15

DEFAULT = "MulticlassEmbedding"
OURS = (DEFAULT, "isotropic", "EmbeddingClassifier", "JointClassifier")
RIVALS = ("SVC", "Gaussian process", "logistic regression")
"""Those whose log losses the default is compared with."""
PEERS = (*RIVALS, "HistGradientBoosting")

PUBLISHED = {
    "banknote": (99.9, 98.8, 99.5),
    "ecoli": (87.5, 84.5, 87.5),
    "robot": (96.7, 95.5, 94.5),
    "segment": (98.4, 96.1, 96.7),
    "wine": (97.2, 93.3, 97.2),
    "yeast": (52.5, 60.3, 59.6),
}
"""Accuracies of table 1 in percent: GMCE, GMCE-SGD, and the better one of the two networks."""

PROCESS_ROWS = 1500
"""A Gaussian process gets at most this number of rows over the root of its binary problems."""

_FILES = {
    "banknote": "banknote.csv",
    "ecoli": "ecoli.data",
    "robot": "robot.csv",
    "segment": "segment.arff",
    "wine": "wine.csv",
    "yeast": "yeast.data",
    "iris": "iris.csv",
}
_NAMED = "ecoli", "yeast"  # whose first column is a name
_HEADED = "robot", "iris"
_TUNING_ROWS = 1000  # that parameters of the peers are chosen on at most
_LEAST = 1e-15  # probabilities of peers, as scikit-learn clips them
_HERE: dict[str, Any] = {"scheduler": "synchronous"}


def file_of(data: Path, name: str) -> Path:
    """The file of a data set in the folder of the tables."""
    return data / _FILES[name]


@lru_cache(maxsize=1)
def table(data: Path, name: str) -> tuple[Array, Array]:
    """Columns (n, d) and labels (n,) of a data set."""
    lines = file_of(data, name).read_text(encoding="utf-8").splitlines()
    rows = [line for line in map(str.strip, lines) if line and line[0] not in "%@"]
    fields = [row.replace(",", " ").split() for row in rows[name in _HEADED :]]
    x = np.array([row[name in _NAMED : -1] for row in fields], dtype=np.float64)
    return x, np.array([row[-1] for row in fields])


def parts(data: Path, name: str, fold: int) -> tuple[Array, Array, Array, Array]:
    """Rows and labels of all folds but one, and of that one; columns in standard deviations."""
    from sklearn.model_selection import StratifiedKFold

    x, y = table(data, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # classes with fewer rows than folds
        folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y))
    train, test = folds[fold]
    centre, spread = x[train].mean(axis=0), x[train].std(axis=0)
    x = (x - centre) / np.where(spread > 0.0, spread, 1.0)
    return x[train], y[train], x[test], y[test]


# The methods


def _embedding(x: Array, y: Array) -> Any:
    from cme_dask import MulticlassEmbedding

    return MulticlassEmbedding(random_state=0).fit(x, y, **_HERE)


def _isotropic(x: Array, y: Array) -> Any:
    from scipy.spatial.distance import pdist

    from cme_dask import MulticlassEmbedding, kernels

    few = np.random.default_rng(0).permutation(len(x))[:_TUNING_ROWS]
    kernel = kernels.Gaussian(float(np.median(pdist(x[few]))))
    return MulticlassEmbedding(kernel_x=kernel, random_state=0).fit(x, y, **_HERE)


def _least_squares(x: Array, y: Array) -> Any:
    from cme_dask import EmbeddingClassifier

    return EmbeddingClassifier(random_state=0).fit(x, y, **_HERE)


def _joint(x: Array, y: Array) -> Any:
    from cme_dask import JointClassifier

    return JointClassifier(random_state=0).fit(x, y, **_HERE)


def _chosen(model: Any, grid: dict[str, Any], x: Array, y: Array, scoring: Any = None) -> Any:
    """The best parameters by three folds of some rows."""
    from sklearn.model_selection import GridSearchCV

    few = np.random.default_rng(0).permutation(len(x))[:_TUNING_ROWS]
    search = GridSearchCV(model, grid, cv=3, scoring=scoring, refit=False)
    return search.fit(x[few], y[few]).best_params_


def _machine(x: Array, y: Array) -> Any:
    from sklearn.svm import SVC

    scales = (np.array([0.1, 0.3, 1.0, 3.0]) / x.shape[1]).tolist()
    best = _chosen(SVC(), {"C": [1.0, 10.0, 100.0, 1000.0], "gamma": scales}, x, y)
    return SVC(probability=True, random_state=0, **best).fit(x, y)


def _process(x: Array, y: Array) -> Any:
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    few = _process_rows(y)
    kernel = ConstantKernel(1.0) * RBF(np.sqrt(x.shape[1]))
    return GaussianProcessClassifier(kernel, random_state=0).fit(x[few], y[few])


def _process_rows(y: Array) -> Array:
    """Positions of random rows, with one of each label at least."""
    labels, first = np.unique(y, return_index=True)
    problems = len(labels) if len(labels) > 2 else 1
    size = int(PROCESS_ROWS / np.sqrt(problems))
    return np.union1d(np.random.default_rng(0).permutation(len(y))[:size], first)


def _logistic(x: Array, y: Array) -> Any:
    from sklearn.linear_model import LogisticRegression

    grid = {"C": [0.1, 1.0, 10.0, 100.0, 1000.0]}
    best = _chosen(LogisticRegression(max_iter=2000), grid, x, y, _minus_log_loss)
    return LogisticRegression(max_iter=2000, **best).fit(x, y)


def _minus_log_loss(model: Any, x: Array, y: Array) -> float:
    return -float(figures(_columns(model, x, np.unique(y)), y, np.unique(y))["log_loss"])


def _boosting(x: Array, y: Array) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(random_state=0).fit(x, y)


METHODS: dict[str, Callable[[Array, Array], Any]] = dict(
    zip(
        (*OURS, *PEERS),
        (
            *(_embedding, _isotropic, _least_squares, _joint),
            *(_machine, _process, _logistic, _boosting),
        ),
        strict=True,
    )
)


def _columns(model: Any, x: Array, labels: Array) -> Array:
    """Probabilities of these labels, shape (n, K); 0 of those that a model has never seen."""
    result = np.zeros((len(x), len(labels)))
    seen = np.isin(model.classes_, labels)
    result[:, np.searchsorted(labels, model.classes_[seen])] = model.predict_proba(x)[:, seen]
    return result


def figures(probabilities: Array, y: Array, labels: Array) -> Result:
    """Accuracy, log loss, Brier score, and by bin of confidence the rows, confidence and hits."""
    codes: Array = np.searchsorted(labels, y)
    rows = np.arange(len(y))
    own, top = probabilities[rows, codes], probabilities.max(axis=1)
    hits = probabilities.argmax(axis=1) == codes
    bins = np.minimum((top * BINS).astype(int), BINS - 1)
    truth = np.equal.outer(codes, np.arange(len(labels)))
    return {
        "accuracy": float(hits.mean()),
        "log_loss": float(-np.log(np.clip(own, _LEAST, 1.0)).mean()),
        "brier": float(((probabilities - truth) ** 2).sum(axis=1).mean()),
        "bins": [np.bincount(bins, each, BINS).tolist() for each in (np.ones(len(y)), top, hits)],
    }


@dataclass(frozen=True)
class Judge:
    """Fits one method without one fold, in a process of its own."""

    data: Path

    @property
    def files(self) -> list[Path]:
        """The tables that there are, of which it reads some."""
        paths = [file_of(self.data, name) for name in _FILES]
        return [path for path in paths if path.exists()]

    def __call__(self, name: str, n: int, fold: int) -> Result:
        """Figures of a data set and method, ``data_set/method``, and what it took."""
        data_set, method = name.split("/")
        x, y, at, truth = parts(self.data, data_set, fold)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begin = time.process_time()
            model = METHODS[method](x, y)
            labels = np.unique(table(self.data, data_set)[1])
            result = figures(_columns(model, at, labels), truth, labels)
        result["seconds"] = time.process_time() - begin
        return {"figures": result}


# The errors of calibration, and how methods compare


def calibration_error(folds: Sequence[Result]) -> float:
    """Expected calibration error: mean |confidence - accuracy| of the bins, by their rows."""
    count, confidence, hits = np.sum([fold["bins"] for fold in folds], axis=0)
    return float(np.abs(confidence - hits).sum() / count.sum())


def cell(name: str, rows: int, folds: Mapping[str, Sequence[Result]]) -> Result:
    """JSON form of a data set: by method means over the folds, errors and values.

    The calibration error is that of all rows; its values are the jackknife's.
    """
    models = {}
    for method, each in folds.items():
        plain = [{"": {key: v for key, v in fold.items() if key != "bins"}} for fold in each]
        whole, n = calibration_error(each), len(each)
        without = [calibration_error([*each[:i], *each[i + 1 :]]) for i in range(n)]
        values = [n * whole - (n - 1) * other for other in without]
        models[method] = summary(plain)[""]
        models[method]["calibration"] = mean_and_error(values) | {"mean": whole}
        models[method]["bins"] = np.sum([fold["bins"] for fold in each], axis=0).tolist()
    return {"scenario": name, "rows": rows, "models": models}


def verdicts(cells: Sequence[Result]) -> list[Result]:
    """By data set: accuracies beside the published ones, log loss and calibration beside peers."""
    return [_verdict(each) for each in cells]


def _verdict(each: Result) -> Result:
    models, published = each["models"], PUBLISHED[each["scenario"]]
    accuracy, loss = models[DEFAULT]["accuracy"], models[DEFAULT]["log_loss"]["mean"]
    rival = min(RIVALS, key=lambda name: float(models[name]["log_loss"]["mean"]))
    best = min(models, key=lambda name: float(models[name]["calibration"]["mean"]))
    ours, least = (np.array(models[name]["calibration"]["values"]) for name in (DEFAULT, best))
    excess = models[DEFAULT]["calibration"]["mean"] - models[best]["calibration"]["mean"]
    margin = mean_and_error((ours - least).tolist())["std_error"]
    short = published[0] - 100.0 * accuracy["mean"]
    return {
        "scenario": each["scenario"],
        "published": list(published),
        "below": short,
        "accurate": short <= 100.0 * accuracy["std_error"],
        "accurate_as_best": max(published) - 100.0 * accuracy["mean"]
        <= 100.0 * accuracy["std_error"],
        "rival": rival,
        "loss_over_rival": loss / models[rival]["log_loss"]["mean"],
        "calibrated": best,
        "excess": excess,
        "margin": margin,
        "as_calibrated": excess <= margin,
    }
