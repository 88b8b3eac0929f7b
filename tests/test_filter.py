"""Kernel Bayes filters: closed forms of a linear model, dense forms, sequences, bad input."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from scipy.signal import lfilter
from scipy.stats import norm
from sklearn.base import clone

from benchmarks import filtering
from cme_dask import KernelBayesFilter, PivotedCholesky, kernels, load, open_sample, operators
from cme_dask.errors import DataError

GAUSSIAN = kernels.Gaussian(1.0)
DECAY, NOISE = filtering.DECAY, filtering.NOISE
QUICK = {"tol": 1e-3, "support_size": 60, "reg": 1e-3, "random_state": 0}


def linear(n, seed=0):
    rng = np.random.default_rng(seed)
    noise = np.sqrt(1.0 - DECAY**2) * rng.normal(size=n)
    noise[0] /= np.sqrt(1.0 - DECAY**2)
    x = lfilter([1.0], [1.0, -DECAY], noise)[:, None]
    return x, x + NOISE * rng.normal(size=x.shape)


def sequences(count, length, seed=1):
    process = filtering.PROCESSES["linear"]
    rng = np.random.default_rng(seed)
    x = filtering.simulated(process, rng, count, length)
    return x[..., 0], process.observe(rng, x)[..., 0]


def rms(error):
    return np.sqrt(np.mean(error**2))


@pytest.fixture(scope="module")
def fit():
    options = {"tol": 1e-5, "support_size": 300, "n_folds": 5, "sample_size": 50_000}
    functions = {"square": lambda x: x[:, 0] ** 2}
    return KernelBayesFilter(GAUSSIAN, GAUSSIAN, **options).fit(
        *linear(50_000), functions=functions
    )


def test_steps_that_lack_a_value_are_left_out():
    """A missing observation takes no state from the transition; a missing state ends it."""
    x, y = linear(300)
    gone = np.random.default_rng(1).random((2, 300)) < 0.2
    x[gone[0]], y[gone[1]] = np.nan, np.nan
    options = QUICK | {"pivots": (np.linspace(-2.0, 2.0, 5)[:, None],) * 2}
    sample = open_sample(x, y).drop_missing()
    model = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **options).fit(sample).model_
    assert model.about["rows"] == 300 - gone.any(axis=0).sum()
    assert model.about["missing"]["columns"] == {"x0": gone[0].sum(), "y0": gone[1].sum()}
    time = np.flatnonzero(~gone[0])
    dense = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **options).fit(
        x[~gone[0]], np.nan_to_num(y[~gone[0]]), time=time
    )
    np.testing.assert_allclose(model.transition, dense.model_.transition, atol=1e-10)
    whole = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **options)
    whole.fit(x[~gone.any(axis=0)], y[~gone.any(axis=0)])
    np.testing.assert_allclose(model.observation, whole.model_.observation, atol=1e-10)
    with pytest.raises(DataError, match=r"NaN or infinite: fill .*drop_missing\(\), which leaves"):
        whole.fit(x, y)


def test_laws_of_a_linear_model_are_those_of_kalman(fit):
    assert fit.n_passes_ == 2
    assert fit.model_.about["rows"] == 50_000
    x, y = sequences(40, 40)
    law = fit.filter(y.T.reshape(-1, 1), group=np.repeat(np.arange(40), 40))
    means = law.mean().reshape(40, 40).T
    best = filtering.kalman(y)
    assert rms(means - x) < 1.05 * rms(best - x)
    assert rms(means - best) < 0.15 * rms(best - x)
    after = law.std().reshape(40, 40).T[-1]
    variance = 1.0
    for _ in range(50):
        variance = DECAY**2 * variance + 1.0 - DECAY**2
        variance = variance * NOISE**2 / (variance + NOISE**2)
    np.testing.assert_allclose(np.median(after), np.sqrt(variance), rtol=0.1)
    # Quantiles, probabilities and expectations are those of the same laws.
    low, high = law.quantile([0.1, 0.9]).T
    inside = (low < x.T.ravel()) & (x.T.ravel() < high)
    assert 0.77 < inside.mean() < 0.83
    np.testing.assert_allclose(
        law.probability("x0 <= 0.5"), norm.cdf((0.5 - law.mean()) / law.std()), atol=0.1
    )
    square = law.mean() ** 2 + law.std() ** 2
    np.testing.assert_allclose(law.expect("square"), square, atol=1e-6)
    np.testing.assert_allclose(law.expect(lambda x: x[:, 0] ** 2), square, rtol=0.03, atol=0.05)
    # Smoothing knows more than filtering.
    smooth = fit.smooth(y.T.reshape(-1, 1), group=np.repeat(np.arange(40), 40))
    assert rms(smooth.mean().reshape(40, 40).T - x) < 0.95 * rms(means - x)
    np.testing.assert_allclose(smooth.mean().reshape(40, 40)[:, -1], means[-1], atol=1e-10)
    with pytest.raises(DataError, match="have no density"):
        law.log_pdf([[0.0]])


def test_rules_are_near_their_closed_forms(fit):
    errors = filtering.rules(fit)
    assert errors["sum rule"]["mean"] < 0.05
    assert errors["Bayes' rule"]["mean"] < 0.05
    assert max(each["probability"] for each in errors.values()) < 0.03


def test_a_filter_equals_its_dense_form():
    """With all rows as pivots and as cells, in n x n matrices."""
    (x, y), reg, n = linear(150, 2), 1e-3, 150
    kernel = kernels.Laplace(0.8)
    options = {"pivots": (x, y), "support_size": n, "reg": reg}
    fit = KernelBayesFilter(kernel, kernel, **options).fit(x, y)

    def ratio(a, b, at):
        """1 + h of rows (a, b) of their density ratio: a function of points of a and of b."""
        rows = len(a)

        def centred(points, rows_of):
            # Without the component along the mean.
            mean = kernel(points, rows_of).mean(axis=1), kernel(rows_of, rows_of).mean(axis=1)
            return kernel(points, rows_of) - np.outer(mean[0], mean[1]) / mean[1].mean()

        inverse_a = np.linalg.inv(centred(a, a) + rows * reg * np.eye(rows))
        inverse_b = np.linalg.inv(centred(b, b) + rows * reg * np.eye(rows))
        left, right = at
        return 1.0 + rows * centred(right, b) @ inverse_b @ inverse_a @ centred(left, a).T

    _, observed = linear(12, 3)
    see = np.maximum(ratio(x, y, (x, observed)), 0.0)
    move = ratio(x[:-1], x[1:], (x, x))
    weights, means = None, []
    for t in range(len(observed)):
        prior = 1.0 if weights is None else np.maximum(move @ weights, 0.0)
        weights = prior * see[t]
        weights /= weights.sum()
        means.append(weights @ x[:, 0])
    np.testing.assert_allclose(fit.filter(observed).mean(), means, atol=1e-8)


def test_the_study_takes_the_kernel_with_the_smallest_loss_of_next_states():
    x, y, group = filtering.training("pendulum", 5000, np.random.default_rng(0))
    chosen = filtering.PROCESSES["pendulum"].estimator(x, y, group)
    wide = clone(chosen).set_params(kernel_x=kernels.Gaussian((0.6, 1.2)))
    losses = [
        each.set_params(tol=1e-2).fit(x, y, group=group).losses_["transition"].min()
        for each in (chosen, wide)
    ]
    assert losses[0] <= losses[1]
    assert chosen.kernel_x.length_scale < (0.6, 1.2)


def test_sequences_are_independent_and_go_on(fit):
    _, y = sequences(3, 12)
    group = np.array([7, 2, 5])
    # Interleaved, of different lengths, in the order of time.
    table = [(group[s], y[t, s]) for t in range(12) for s in range(3) if t < 12 - 4 * s]
    which, rows = np.array([g for g, _ in table]), np.array([[v] for _, v in table])
    law = fit.filter(rows, group=which)
    smooth = fit.smooth(rows, group=which)
    for s in range(3):
        alone = y[: 12 - 4 * s, [s]]
        np.testing.assert_allclose(
            law.mean()[which == group[s]], fit.filter(alone).mean(), atol=1e-12
        )
        np.testing.assert_allclose(
            smooth.mean()[which == group[s]], fit.smooth(alone).mean(), atol=1e-12
        )
    # One observation at a time.
    last, means = None, []
    for row in y[:, 0]:
        step = fit.filter([[row]], previous=last)
        means.append(step.mean()[0])
        last = step.last
    np.testing.assert_allclose(means, fit.filter(y[:, [0]]).mean(), atol=1e-12)
    np.testing.assert_allclose(fit.filter(y[:, [0]]).embed().coef[-1], last.coef[0], atol=1e-12)


def test_missing_observations_are_predicted(fit):
    start = np.array([[-1.0], [0.0], [1.2]])
    ahead = np.full((3, 4), np.nan).reshape(-1, 1)
    law = fit.filter(ahead, group=np.repeat(np.arange(3), 4), previous=start)
    means = law.mean().reshape(3, 4)
    np.testing.assert_allclose(means, start * DECAY ** np.arange(1, 5), atol=0.06)
    np.testing.assert_allclose(law.std()[0], np.sqrt(1.0 - DECAY**2), atol=0.05)
    np.testing.assert_array_equal(law.log_likelihood(), 0.0)
    # An observation that the state contradicts is left out, and seen in the likelihood.
    _, y = linear(20, 4)
    y[7] = 1e6
    law = fit.filter(y)
    assert np.isfinite(law.mean()).all()
    frame = pd.DataFrame({"y0": y[:, 0]}, index=np.arange(20) + 5)
    frame.iloc[3] = np.nan
    y[3] = np.nan
    labelled = fit.filter(frame)
    np.testing.assert_array_equal(labelled.mean().to_numpy(), fit.filter(y).mean())
    assert labelled.mean().index[0] == 5
    assert labelled.log_likelihood().iloc[3] == 0.0
    beside = frame.assign(station=np.where(np.arange(20) == 3, None, "a"))
    np.testing.assert_array_equal(fit.filter(beside).mean(), labelled.mean())
    np.testing.assert_array_equal(fit.filter(frame * np.nan).log_likelihood(), 0.0)
    assert fit.score(linear(500, 5)[1]) > 0.1


def observed_tables(frame):
    """The same rows in every form that names columns, these in another order."""
    turned = frame[["noise", "good"]]
    names = list(turned.columns)
    array = xr.DataArray(turned.to_numpy(), dims=("time", "column"), coords={"column": names})
    return {
        "pandas": turned,
        "arrow": pa.Table.from_pandas(turned, preserve_index=False),
        "polars": pl.DataFrame({name: turned[name].to_numpy() for name in names}),
        "xarray": array,
        "dict": {name: turned[name].to_numpy() for name in names},
    }


def test_tables_of_observations_go_by_name():
    x, y = linear(300)
    noise = np.random.default_rng(1).normal(size=300)
    frame = pd.DataFrame({"good": y[:, 0], "noise": 3 * noise})
    fit = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **QUICK).fit(x, frame)
    rows = frame[:9].copy()
    rows.iloc[4] = np.nan
    expected = fit.filter(rows.to_numpy())
    smooth = fit.smooth(rows.to_numpy())
    for form, table in observed_tables(rows).items():
        law = fit.filter(table)
        np.testing.assert_array_equal(law.mean(), expected.mean(), err_msg=form)
        np.testing.assert_array_equal(fit.smooth(table).mean(), smooth.mean(), err_msg=form)
        assert law.log_likelihood()[4] == 0.0
    assert fit.filter(observed_tables(rows)["xarray"]).mean().dims == ("time",)
    hidden = np.zeros((9, 2), dtype=bool)
    hidden[4] = True
    masked = np.ma.array(rows.fillna(7.0).to_numpy(), mask=hidden)
    np.testing.assert_array_equal(fit.predict(masked), expected.mean())
    rows.iloc[6, 0] = np.nan
    with pytest.raises(DataError, match=r"'good' has 1 \(first at row 6\)"):
        fit.filter(rows)


def test_observed_labels_are_taken_from_arrays_and_lists():
    x, _ = linear(300)
    labels = np.where(x[:, 0] > 0.0, "high", "low")
    kernel = kernels.Categorical(0.5)
    fit = KernelBayesFilter(GAUSSIAN, kernel, **QUICK).fit(x, pd.DataFrame({"label": labels}))
    expected = fit.predict(pd.DataFrame({"label": ["high", None, "low"]})).to_numpy()
    for rows in (
        [["high"], [None], ["low"]],
        np.array(["high", None, "low"], dtype=object),
        {"label": ["high", None, "low"]},
    ):
        np.testing.assert_array_equal(fit.predict(rows), expected)


def test_observed_states_come_in_every_table():
    x, y = linear(300)
    states = pd.DataFrame({"pos": x[:, 0], "sign": np.where(x[:, 0] > 0.0, "plus", "minus")})
    kernel = GAUSSIAN[0] * kernels.Categorical(0.5)[1]
    fit = KernelBayesFilter(kernel, GAUSSIAN, **QUICK).fit(states, y)
    law, codes = fit.filter(y[:5]), states[:5].copy()
    codes["sign"] = [fit.model_.columns.categories["sign"].index(s) for s in codes["sign"]]
    for table in (states[["sign", "pos"]][:5], states[:5].to_dict("list")):
        for paired in (True, False):
            ratio = law.density_ratio(codes.to_numpy(), paired=paired)
            np.testing.assert_array_equal(law.density_ratio(table, paired=paired), ratio)
        score = law.crps(codes.to_numpy(), column="pos")
        np.testing.assert_array_equal(law.crps(table, column="pos"), score)
    with pytest.raises(DataError, match="column 'sign' has the unknown 'none'"):
        law.crps(states[:5].assign(sign="none"), column="pos")


def test_saved_models_filter_without_data(tmp_path, fit):
    fit.save(tmp_path / "model")
    again = load(tmp_path / "model")
    _, y = linear(30, 6)
    np.testing.assert_array_equal(again.filter(y).mean(), fit.predict(y))
    assert "in 2 passes" in repr(again)
    assert clone(fit).get_params() == fit.get_params()
    plan = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **QUICK).plan(*linear(3000))
    assert plan.passes == 2
    assert plan.parts["pass: successive states"] == plan.further_pass.seconds > 0.0
    x, y = linear(3000)
    two = np.hstack([x, y])  # columns of states and of observations may differ in number
    assert KernelBayesFilter(GAUSSIAN, GAUSSIAN, **QUICK).plan(two, y).passes == 2


def test_chunks_and_trajectories_give_the_same_bits(tmp_path):
    x, y = linear(9000, 7)
    group = np.repeat([3, 1, 2], 3000)
    options = QUICK | {"pivots": tuple(np.linspace(-3, 3, 8)[:, None] for _ in range(2))}
    first = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **options).fit(x, y, group=group)
    stored = [
        zarr.create_array(str(tmp_path / name), data=rows, chunks=(length, *rows.shape[1:]))
        for name, rows, length in (("x", x, 700), ("y", y, 1100), ("group", group, 500))
    ]
    again = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **options)
    again.fit(*stored[:2], group=stored[2])
    for name in ("transition", "observation"):
        np.testing.assert_array_equal(getattr(again.model_, name), getattr(first.model_, name))
    # No pair of states crosses trajectories.
    order = np.concatenate([np.arange(3000, 9000), np.arange(3000)])
    other = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **options)
    other.fit(x[order], y[order], group=group[order])
    np.testing.assert_allclose(other.model_.transition, first.model_.transition, atol=1e-8)


def test_processes_and_a_cluster_equal_threads(cluster):
    x, y = linear(9000, 8)
    _, observed = linear(20, 9)
    fits = [
        KernelBayesFilter(GAUSSIAN, GAUSSIAN, **QUICK).fit(x, y, scheduler=scheduler)
        for scheduler in ("threads", "processes", cluster)
    ]
    one, *others = (fit.filter(observed).mean() for fit in fits)
    for other in others:
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"reg": 0.0}, {}, "reg must be a positive number or two"),
        ({"reg": [1.0, 1.0, 1.0]}, {}, "reg must be a positive number or two"),
        ({"reg": None, "n_folds": 1}, {}, "give reg, or n_folds >= 2"),
        ({"support_size": 0}, {}, "support_size must be an integer of at least 1"),
        ({"time_step": 0.0}, {}, "time_step must be a number"),
        ({}, {"Y": None}, "states and observations: give Y"),
        ({}, {"Y": np.zeros((7, 1))}, "the numbers of rows differ"),
        ({}, {"group": np.arange(300)}, "all weights are zero|no row"),
    ],
)
def test_unusable_parameters_and_rows_are_refused(options, given, message):
    x, y = linear(300)
    rows = {"Y": y} | given
    with pytest.raises(DataError, match=message):
        KernelBayesFilter(GAUSSIAN, GAUSSIAN, **(QUICK | options)).fit(x, **rows)


def test_unusable_observations_are_refused(fit):
    with pytest.raises(DataError, match=r"Y must have shape \(n, 1\)"):
        fit.filter(np.zeros((5, 2)))
    with pytest.raises(DataError, match="group must have shape"):
        fit.filter(np.zeros((5, 1)), group=[0, 1])
    with pytest.raises(DataError, match="previous must have a row for each of the 1 sequences"):
        fit.filter(np.zeros((5, 1)), previous=[[0.0], [1.0]])
    with pytest.raises(DataError, match="Y must be numeric"):
        fit.filter([["a"]])
    with pytest.raises(DataError, match=r"group must be known, but 1 rows lack it \(first row 1\)"):
        fit.filter(np.zeros((3, 1)), group=["a", None, "b"])
    other = operators.Space.of(PivotedCholesky(kernels.Gaussian(0.7), tol=1e-2).fit(linear(300)[0]))
    with pytest.raises(DataError, match="previous must be embeddings of the state, but their"):
        fit.filter(np.zeros((5, 1)), previous=other.embed([[0.0]]))
    x, y = linear(500)
    two = KernelBayesFilter(GAUSSIAN, GAUSSIAN, **(QUICK | {"tol": 0.1})).fit(x, np.hstack([y, y]))
    with pytest.raises(DataError, match="NaN"):
        two.filter([[0.0, 0.0], [np.nan, 1.0]])
