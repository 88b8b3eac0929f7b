"""Pickles of default fits: small, without the training rows, with the same answers to the bit."""

import copy
import io
import pickle

import dask.array as da
import joblib
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from sklearn.base import clone

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    PivotedCholesky,
    Tuning,
)
from cme_dask.errors import DataError, ToleranceWarning

N = 400
AT = np.linspace(-2.0, 2.0, 7)[:, None]


def rows(n=N, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1))
    y = np.sin(x) + 0.3 * rng.normal(size=x.shape)
    return x, y, np.where(y[:, 0] > 0.2, "high", "low")


def above(rows):
    return rows[:, 0] > 0.0


@pytest.fixture(scope="module")
def fitted():
    x, y, labels = rows()
    functions = {"above": above, "local": lambda rows: rows[:, 0] ** 2}
    return {
        "joint": JointDistribution().fit(x, y, functions=functions),
        "averaged": JointDistribution(tuning=Tuning(averaged=2)).fit(x, y, functions=functions),
        "located": JointDistribution(residual=True, kernel_x="median", kernel_y="median").fit(x, y),
        "embedding": ConditionalMeanEmbedding().fit(x, y),
        "joint classifier": JointClassifier().fit(x, labels),
        "embedding classifier": EmbeddingClassifier().fit(x, labels),
        "logistic": KernelLogisticRegression().fit(x, labels),
        "cholesky": PivotedCholesky().fit(x),
    }


NAMES = (
    "joint",
    "averaged",
    "located",
    "embedding",
    "joint classifier",
    "embedding classifier",
    "logistic",
    "cholesky",
)


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes


def through_joblib(value):
    buffer = io.BytesIO()
    joblib.dump(value, buffer)
    buffer.seek(0)
    return joblib.load(buffer)


def answers(model):
    """What a model says at a few points, by every kind of question it takes."""
    found = [
        getattr(model, name)(AT)
        for name in ("predict", "predict_proba", "transform")
        if hasattr(model, name)
    ]
    if hasattr(model, "conditional"):
        law = model.conditional(AT)
        found += [law.weights(), law.sample(3), model.density_ratio(AT, model.model_.y.cells.atoms)]
        if law.numeric:
            found += [law.cdf(0.3), law.quantile([0.1, 0.9]), law.pdf([[0.1]]), law.cov()]
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trip", [through_pickle, through_joblib])
def test_default_fits_are_pickled_with_the_same_answers(fitted, name, trip):
    model = fitted[name]
    again = trip(model)
    for one, two in zip(answers(model), answers(again), strict=True):
        assert_array_equal(one, two)
    assert repr(again) == repr(model)
    assert clone(again).get_params().keys() == model.get_params().keys()
    assert repr(through_pickle(model.model_)) == repr(model.model_)


@pytest.mark.parametrize("name", ["joint", "located", "joint classifier"])
def test_laws_and_lazy_laws_are_pickled(fitted, name):
    model = fitted[name]
    for law in (model.conditional(AT), model.conditional(Y=model.model_.y.cells.atoms[:3])):
        again = through_pickle(law)
        assert_array_equal(again.weights(), law.weights())
        assert_array_equal(again.sample(2), law.sample(2))
    lazy = model.conditional(da.from_array(AT, chunks=3))
    again = through_pickle(lazy)
    assert_array_equal(again.weights().compute(), lazy.weights().compute())


def size_of(model):
    """Bytes of a pickle, and of its model's arrays."""
    arrays = model.model_.to_state().arrays.values()
    return len(pickle.dumps(model)), sum(a.nbytes for a in arrays)


@pytest.mark.parametrize("name", NAMES)
def test_pickles_hold_neither_rows_nor_moments_of_averaged_members(fitted, name):
    held, model = size_of(fitted[name])
    sums = getattr(fitted[name], "moments_", None)
    grows = sums is not None and not getattr(fitted[name], "members_", [])
    assert held < 5 * model + 20_000 + (sums.gram.nbytes if grows else 0)
    if name in ("joint", "averaged"):
        moments = sum(m.moments.gram.nbytes for m in fitted[name].members_)
        second = fitted[name].model_.residual  # whose sums are part of the model
        own = 0 if second is None else second.model.moments["gram"].nbytes
        assert held < 0.5 * moments + model + own
        again = through_pickle(fitted[name])
        assert all(member.moments is None for member in again.members_)
        assert len(again.members_) == len(fitted[name].members_) == 1 + (name == "averaged")


def test_pickles_do_not_grow_with_the_rows():
    sizes = []
    for n in (300, 30_000):
        x, _, labels = rows(n)
        sizes.append(size_of(KernelLogisticRegression(tol=1e-2).fit(x, labels))[0])
    assert sizes[1] < 1.5 * sizes[0]


def test_local_functions_are_left_out_of_pickles_but_their_expectations_are_not(fitted):
    model = fitted["joint"]
    again = through_pickle(model)
    for name in ("above", "local"):
        assert_array_equal(again.expect(name, AT), model.expect(name, AT))
    assert_array_equal(again.expect(above, AT), model.expect("above", AT))
    local = again._functions[1]["local"]
    with pytest.raises(DataError, match="'local' was a lambda or a local function"):
        local(AT)


def test_a_pickled_fit_goes_on_growing():
    x, y, _ = rows()
    grown = JointDistribution().partial_fit(x[:250], y[:250])
    again = through_pickle(grown)
    for model in (grown, again):
        with pytest.warns(ToleranceWarning):
            model.partial_fit(x[250:], y[250:])
    assert_array_equal(again.coef_, grown.coef_)
    assert_array_equal(again.moments_.gram, grown.moments_.gram)


def test_the_search_makes_candidates_after_a_pickle(fitted):
    search = fitted["joint"].search_
    again = through_pickle(search)
    one, two = (s.candidate(s.trials[-1]) for s in (search, again))
    assert one.kernel_x.to_dict() == two.kernel_x.to_dict()
    assert one.reg == two.reg
    assert_array_equal(
        copy.deepcopy(fitted["logistic"]).predict(AT), fitted["logistic"].predict(AT)
    )
