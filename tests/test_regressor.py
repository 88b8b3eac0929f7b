"""Embeddings as regressors: leave-one-out, paths of ridges, elements of an RKHS, exact fits."""

import io
import json
import pickle
import tracemalloc
from functools import partial

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from conftest import ForkedPool
from rich.console import Console

from benchmarks import rates, rule_rates
from benchmarks.__main__ import cli
from cme_dask import (
    ConditionalMeanEmbedding,
    PivotedCholesky,
    SparseEmbedding,
    kernels,
    load,
)
from cme_dask.cli.tables import plan_tables
from cme_dask.errors import DataError
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.leave_one_out import leave_one_out
from cme_dask.numerics.reduction import Extent, Strip

GAUSSIAN = kernels.Gaussian(0.7)
REGS = np.geomspace(1e-9, 1.0, 19)


def rows(n=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    y = np.column_stack([np.sin(x[:, 0]), x[:, 1] ** 2]) + 0.3 * rng.normal(size=(n, 2))
    return x, y


def brute_force(x, targets, gram, weights, regs, constant, *, centred=False):
    """Mean loss of refits without each row, in a given basis with values ``gram`` of x.

    With ``centred`` of the targets less their means over the other rows.
    """
    share = weights / weights.sum()
    losses = []
    for reg in regs:
        each = np.zeros(len(x))
        for i in np.flatnonzero(share):
            rest = np.where(np.arange(len(x)) == i, 0.0, share)
            normal = (gram * rest[:, None]).T @ gram + reg * np.eye(gram.shape[1])
            away = targets - centred * (rest @ targets / rest.sum())
            slope = np.linalg.solve(normal, (gram * rest[:, None]).T @ away)
            each[i] = ((away[i] - gram[i] @ slope) ** 2).sum() + constant[i]
        losses.append(share @ each)
    return np.array(losses)


@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_equals_refits_in_two_passes(weighted):
    x, y = rows()
    weights = np.random.default_rng(1).uniform(0, 2, len(x)) if weighted else np.ones(len(x))
    weights[3] = 1.0 - weighted
    kernel = {"kernel_x": GAUSSIAN, "kernel_y": GAUSSIAN, "tol": 1e-4}
    estimator = ConditionalMeanEmbedding(
        **kernel, criterion="surrogate", validation="leave-one-out"
    )
    fit = estimator.fit(x, y, weights=weights)
    newton_x, newton_y = fit.basis_x_.newton(x), fit.basis_y_.newton(y)
    outside = 1.0 - (newton_y**2).sum(axis=1)
    expected = brute_force(x, newton_y, newton_x, weights, REGS, outside)
    np.testing.assert_allclose(fit.path_.regs, REGS, rtol=1e-12)
    np.testing.assert_allclose(fit.path_.losses, expected, rtol=1e-9)
    assert fit.n_passes_ == 2
    assert fit.reg_ == REGS[expected.argmin()]
    assert fit.path_.validation == "leave-one-out"


@pytest.mark.parametrize("criterion", ["surrogate", "squared"])
def test_plans_and_progress_of_leave_one_out_have_both_passes(criterion):
    x, y = rows(9000)
    estimator = ConditionalMeanEmbedding(
        kernel_x=GAUSSIAN,
        kernel_y=GAUSSIAN,
        tol=1e-2,
        validation="leave-one-out",
        criterion=criterion,
        n_folds=1,
    )
    plan, events = estimator.plan(x, y, workers=2), []
    fit = estimator.fit(x, y, workers=2, progress=events.append)
    assert (plan.passes, fit.n_passes_) == (2, 2)
    assert plan.memory.predicted == fit.report_.memory.predicted
    second = plan.further_pass
    assert (second.rows, second.tasks) == (9000, plan.moment_pass.tasks)
    assert plan.parts["pass: leave-one-out"] == second.seconds > 0.0
    assert plan.seconds == pytest.approx(sum(plan.parts.values()))
    console = Console(width=300, record=True, file=io.StringIO())
    for table in plan_tables(json.loads(json.dumps(plan.to_dict())) | {"store": "s.zarr"}):
        console.print(table)
    text = " ".join(console.export_text().split())
    assert "2 over 9,000 rows" in text
    assert f"pass: leave-one-out {second.seconds:.3g}" in text
    names = list(dict.fromkeys(event.name for event in events))
    passes = ["pass over the rows", "leave-one-out pass over the rows", "solution"]
    assert [name for name in names if name in passes] == passes[:2]
    done = [event.done for event in events]
    assert done == sorted(done)
    assert done[-1] == 1.0


def leave_one_out_memory(criterion):
    """Peaks of a pass, what its cost says, and the size of what is sent to workers."""
    x, y = rows(1 << 13)
    fit = ConditionalMeanEmbedding(
        kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=1e-4, reg=1e-3, n_folds=1, max_rank=200
    ).fit(x, y)
    reduction = leave_one_out(fit.moments_, fit._sides, criterion, REGS[:3])
    cost = reduction.cost(Extent(len(x), 4, len(x)))
    strip = Strip(np.arange(len(x)), (x, y), None)
    tracemalloc.start()
    reduction.update(None, strip)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, cost, len(pickle.dumps(reduction))


@pytest.mark.parametrize("criterion", ["surrogate", "squared"])
def test_memory_of_the_leave_one_out_pass_is_what_its_cost_states(criterion):
    """In a process of its own: threads of the clusters of other tests allocate as well."""
    with ForkedPool(1, None) as pool:
        peak, cost, sent = pool.submit(leave_one_out_memory, criterion).result()
    assert 0.8 * cost.state <= peak <= cost.state
    assert sent <= cost.process


@pytest.mark.parametrize("level", [0.0, 1000.0])
def test_leave_one_out_of_squared_errors_of_columns_and_functions(level):
    x, y = rows()
    y[:, 1] += level
    fit = ConditionalMeanEmbedding(
        kernel_x=GAUSSIAN, tol=1e-4, validation="leave-one-out", criterion="squared"
    ).fit(x, y, functions=["y0 > 0.5"])
    targets = np.column_stack([y, y[:, 0] > 0.5])
    scaled = targets / targets.std(axis=0) / np.sqrt(3)
    gram = fit.basis_x_.newton(x)
    none = np.zeros(len(x))
    expected = brute_force(x, scaled, gram, np.ones(len(x)), REGS, none, centred=True)
    np.testing.assert_allclose(fit.path_.losses, expected, rtol=1e-8)


def test_standard_error_of_the_leave_one_out_loss():
    x, y = rows(40)
    fit = ConditionalMeanEmbedding(
        kernel_x=GAUSSIAN,
        kernel_y=GAUSSIAN,
        tol=1e-3,
        criterion="surrogate",
        validation="leave-one-out",
    ).fit(x, y)
    newton_x, newton_y = fit.basis_x_.newton(x), fit.basis_y_.newton(y)
    outside, n = 1.0 - (newton_y**2).sum(axis=1), len(x)
    reg = fit.path_.regs[9]
    each = []
    for i in range(n):
        rest = np.delete(np.arange(n), i)
        normal = newton_x[rest].T @ newton_x[rest] / n + reg * np.eye(newton_x.shape[1])
        slope = np.linalg.solve(normal, newton_x[rest].T @ newton_y[rest] / n)
        each.append(((newton_y[i] - newton_x[i] @ slope) ** 2).sum() + outside[i])
    assert fit.path_.errors[9] == pytest.approx(np.std(each) / np.sqrt(n), rel=1e-6)


def test_paths_of_ridges_name_the_largest_within_one_standard_error(tmp_path):
    pytest.importorskip("matplotlib")
    x, y = rows(400)
    fit = ConditionalMeanEmbedding(kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, tol=1e-3).fit(x, y)
    path = fit.path_
    assert path.regs[path.chosen] == fit.reg_
    inside = path.losses <= path.losses.min() + path.errors[path.losses.argmin()]
    assert path.one_standard_error == path.regs[inside][-1] >= fit.reg_
    np.testing.assert_array_equal(np.column_stack([path.regs, path.losses]), fit.losses_)
    assert path.plot().get_xlabel() == "ridge r"
    given = ConditionalMeanEmbedding(kernel_x=GAUSSIAN, reg=0.1).fit(x, y)
    assert given.path_ is None


@pytest.mark.parametrize("validation", ["folds", "leave-one-out"])
def test_given_ridges_are_compared_as_those_by_default(validation):
    x, y = rows(100)
    options = {"kernel_x": GAUSSIAN, "tol": 1e-2, "validation": validation}
    fit = ConditionalMeanEmbedding(**options).fit(x, y)
    again = ConditionalMeanEmbedding(**options, reg=fit.path_.regs[[9, 3, 15]].tolist()).fit(x, y)
    np.testing.assert_array_equal(again.path_.regs, fit.path_.regs[[3, 9, 15]])
    np.testing.assert_allclose(again.path_.losses, fit.path_.losses[[3, 9, 15]], rtol=1e-12)
    assert again.reg_ == again.path_.regs[again.path_.losses.argmin()]
    for reg, text in [([], "holds no ridge"), ([0.1, -1.0], "non-negative"), (["a"], "numbers")]:
        with pytest.raises(DataError, match=text):
            ConditionalMeanEmbedding(kernel_x=GAUSSIAN, reg=reg).fit(x, y)


def test_exact_embeddings_are_the_dense_ones():
    x, y = rows(200)
    x[5] = x[6]
    fit = ConditionalMeanEmbedding(
        kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, reg=1e-3, method="exact"
    ).fit(x, y, functions={"square": lambda y: y[:, 0] ** 2})
    at = rows(20, seed=4)[0]
    weights = np.linalg.solve(GAUSSIAN(x, x) + len(x) * 1e-3 * np.eye(len(x)), GAUSSIAN(x, at))
    names = ["y0", "y1", "square"]
    values = np.column_stack([y, y[:, 0] ** 2])
    dense = weights.T @ values + np.outer(1.0 - weights.sum(axis=0), values.mean(axis=0))
    np.testing.assert_allclose(fit.expect(names, at), dense, atol=1e-8)
    # A residual of k(y, y) at rounding, 1e-15, is one of 3e-8 in the functions.
    np.testing.assert_allclose(fit.model_.embedding(at, y), weights.T @ GAUSSIAN(y, y), atol=1e-7)


def test_exact_embeddings_are_for_small_tables():
    x = np.zeros((5001, 1))
    with pytest.raises(DataError, match="method='exact' takes at most 5,000 rows, got 5,001"):
        ConditionalMeanEmbedding(kernel_x=GAUSSIAN, method="exact").fit(x, x)
    with pytest.raises(DataError, match="pivots"):
        ConditionalMeanEmbedding(method="exact", pivots="greedy").fit(x[:9], x[:9])
    with pytest.raises(DataError, match="pivots"):
        ConditionalMeanEmbedding(method="exact", pivots=x[:5]).fit(x[:9], x[:9])
    some = np.random.default_rng(0).normal(size=(50, 1))
    with pytest.raises(DataError, match="which holds 20 of 50: raise sample_size"):
        ConditionalMeanEmbedding(kernel_x=GAUSSIAN, method="exact", sample_size=20).fit(some, some)
    with pytest.raises(DataError, match="method must be one of pivots, exact"):
        ConditionalMeanEmbedding(method="dense").fit(x[:9], x[:9])
    with pytest.raises(DataError, match="validation must be one of folds, leave-one-out"):
        ConditionalMeanEmbedding(validation="cv").fit(x[:9], x[:9])


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [("finite-rank", 400**-0.5), ("slow-decay", (np.log(400) / 400) ** (2 / 3))],
)
def test_ridges_follow_schedules_in_the_number_of_rows(schedule, factor):
    x, y = rows(400)
    fit = ConditionalMeanEmbedding(kernel_x=2.0 * GAUSSIAN, reg=schedule, tol=1e-3).fit(x, y)
    assert fit.reg_ == pytest.approx(0.1 * 2.0 * factor)
    assert fit.model_.about["criterion"] == f"schedule {schedule}"
    with pytest.raises(DataError, match=r"\(finite-rank, slow-decay\), got .fast."):
        ConditionalMeanEmbedding(kernel_x=GAUSSIAN, reg="fast").fit(x, y)


def embedding(seed=0, **options):
    x, y = rows(300, seed)
    options = {"kernel_x": GAUSSIAN, "kernel_y": GAUSSIAN, "tol": 1e-3, "reg": 1e-3} | options
    return ConditionalMeanEmbedding(**options).fit(x, y)


def test_embeddings_are_elements_of_an_rkhs():
    fit = embedding()
    at, points = rows(7, seed=4)[0], rows(9, seed=5)[1]
    mu = fit.model_.embed(at)
    assert len(mu) == 7
    np.testing.assert_allclose(mu(points), fit.model_.embedding(at, points), atol=1e-12)
    newton = fit.basis_y_.newton
    weights = np.linalg.solve(newton.factor.T, mu.coef.T).T
    gram = GAUSSIAN(newton.points, newton.points)  # mu(x) = sum_j weights_j k(p_j, .)
    inner = weights @ gram @ weights.T
    np.testing.assert_allclose(mu.inner(), inner, atol=1e-7)
    square = np.diag(inner)[:, None] + np.diag(inner) - 2.0 * inner
    np.testing.assert_allclose(mu.distance() ** 2, square, atol=1e-6)
    np.testing.assert_allclose(mu.norm() ** 2, np.diag(inner), atol=1e-7)
    assert mu[2:4].inner(mu).shape == (2, 7)
    assert mu[1].distance(mu)[0, 1] == 0.0


def test_embeddings_of_different_models_are_compared_in_one_space(tmp_path):
    one, two = embedding(), embedding(1, tol=1e-2)
    at = rows(5, seed=4)[0]
    mu, nu = one.model_.embed(at), two.model_.embed(at)

    def sections(fit, element):
        basis = fit.basis_y_.newton
        return basis.points, np.linalg.solve(basis.factor.T, element.coef.T)

    (p, a), (q, b) = sections(one, mu), sections(two, nu)
    inner = a.T @ GAUSSIAN(p, q) @ b
    np.testing.assert_allclose(mu.inner(nu), inner, atol=1e-6)
    square = mu.norm()[:, None] ** 2 + nu.norm() ** 2 - 2.0 * inner
    np.testing.assert_allclose(mu.distance(nu) ** 2, square, atol=1e-6)
    one.save(tmp_path / "one.model")
    again = load(tmp_path / "one.model").embed(at)
    np.testing.assert_allclose(again.inner(mu), mu.inner(), atol=1e-9)
    with pytest.raises(DataError, match=r"same kernel.*their kernels are"):
        mu.inner(embedding(kernel_y=kernels.Gaussian(2.0)).model_.embed(at))


def test_embeddings_of_other_kernels_or_columns_are_not_compared():
    x, y = rows(60)
    table = pd.DataFrame(y, columns=["u", "v"])
    options = {"kernel_x": GAUSSIAN, "tol": 1e-1, "reg": 1e-2}

    def embedded(y, kernel=GAUSSIAN):
        fit = ConditionalMeanEmbedding(kernel_y=kernel, **options).fit(x, y)
        return fit.model_.embed(x[:2])

    def own(scale):
        kernel = kernels.Gaussian(scale)
        return kernels.Custom("own", kernel, kernel.diagonal)

    plain, named = embedded(y), embedded(table)
    np.testing.assert_allclose(plain.inner(named), plain.inner(), rtol=1e-6)
    for pair, text in [
        ((plain, embedded(y, kernels.Laplace(0.7))), "their kernels are Gaussian.* and Laplace"),
        ((embedded(y, own(0.7)), embedded(y, own(0.5))), "their kernels are Custom"),
        ((plain, embedded(y[:, :1])), "their columns are y0, y1 and y0"),
        ((named, embedded(table[["v", "u"]])), "their columns are u, v and v, u: .*in this order"),
        ((plain, y), "as embed makes them, got"),
    ]:
        for compare in (plain.__class__.inner, plain.__class__.distance):
            with pytest.raises(DataError, match=text):
                compare(*pair)


def test_sparse_embeddings_are_elements_of_the_same_space():
    x, y = rows(300)
    fit = SparseEmbedding(
        penalty="columns", kernel_x=GAUSSIAN, kernel_y=GAUSSIAN, reg=1e-2, tol=1e-2, n_gammas=5
    ).fit(x, y)
    at, points = rows(5, seed=4)[0], rows(9, seed=5)[1]
    sparse, dense = fit.model_.embed(at), fit.dense_.embed(at)
    np.testing.assert_allclose(sparse(points), fit.model_.embedding(at, points), atol=1e-10)
    weights = GAUSSIAN(at, fit.points_x_) @ fit.model_.coef
    gram = GAUSSIAN(fit.points_y_, fit.points_y_)
    np.testing.assert_allclose(sparse.inner(), weights @ gram @ weights.T, atol=1e-8)
    direct = np.sqrt(
        np.maximum(sparse.norm()[:, None] ** 2 + dense.norm() ** 2 - 2.0 * sparse.inner(dense), 0.0)
    )
    np.testing.assert_allclose(sparse.distance(dense), direct, atol=1e-6)


@pytest.fixture
def few_nodes(monkeypatch):
    """Expected errors of rules by quadrature at a quarter of the nodes."""
    monkeypatch.setattr(rule_rates, "_NODES", 12)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_studies", "few_nodes")
def test_the_study_of_rates(tmp_path):
    command = ["study", "rates", "--rows", "200", "--rows", "3200", "--seeds", "2"]
    result = CliRunner().invoke(cli, [*command, "--out", str(tmp_path / "rates"), "--workers", "1"])
    assert result.exit_code == 0, result.output
    study = json.loads((tmp_path / "rates" / "rates.json").read_text())
    laws, methods = ([each[key] for each in study["verdicts"]] for key in ("scenario", "method"))
    assert laws[:2] == ["finite-rank", "slow-decay"]
    assert methods == ["embedding"] * 2 + list(rule_rates.RULES)
    excess = [cell["models"]["embedding"]["excess"]["mean"] for cell in study["cells"][:4]]
    assert excess[0] > 3.0 * excess[1] > 0.0
    assert excess[2] > 3.0 * excess[3] > 0.0
    assert study["verdicts"][0]["theory"] == pytest.approx(-1.0)
    for verdict, pair in zip(study["verdicts"][:2], (excess[:2], excess[2:]), strict=True):
        assert 0.4 * pair[1] < verdict["expected"][1] < 2.5 * pair[1]
        assert verdict["expected_slope"] < -0.6
    assert "expected" in result.output
    rules = study["cells"][-1]["models"]
    assert [each["passes"]["mean"] for each in rules.values()] == [1, 1, 2, 2, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("few_nodes")
def test_the_expected_errors_of_rules_are_means_over_draws():
    """Of the sum rule and Bayes' rules, against closed forms of a linear Gaussian model."""
    draws = [rule_rates.judge(2000, seed) for seed in range(12)]
    for rule in rule_rates.RULES:
        errors = [draw[rule]["excess"] for draw in draws]
        expected = rule_rates.Population(rule).squared_error(2000)
        spread = np.std(errors, ddof=1) / np.sqrt(len(errors))
        assert abs(np.mean(errors) - expected) < 4.0 * spread + 0.1 * expected, rule


def test_the_expected_excess_is_the_mean_over_draws():
    draws = [rates.judge("finite-rank", 400, seed)["embedding"]["excess"] for seed in range(60)]
    error = np.std(draws) / np.sqrt(len(draws))
    assert abs(np.mean(draws) - rates.expected_excess("finite-rank", 400)) < 3.0 * error


def test_truths_of_the_study_of_rates_are_laws():
    x = np.linspace(-1.0, 1.0, 501)
    for name in rates.SCENARIOS:
        probabilities = rates.probabilities(name, x)
        assert probabilities.min() > 0.0
        np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    quadratic = np.polynomial.polynomial.polyfit(x, rates.probabilities("finite-rank", x), 2)
    fitted = np.polynomial.polynomial.polyval(x, quadratic).T
    np.testing.assert_allclose(fitted, rates.probabilities("finite-rank", x), atol=1e-12)


def vector_valued(x, y, weights, reg, *, centred=False):
    """Ridge regression of all columns of y with the operator-valued kernel k(x, z) Id.

    With ``centred`` of the columns less their means.
    """
    share = weights / weights.sum()
    centre = centred * (share @ y)

    def predict(points):
        gram = GAUSSIAN(x, x) + reg * np.diag(1.0 / share)
        return centre + GAUSSIAN(points, x) @ np.linalg.solve(gram, y - centre)

    return predict


@pytest.mark.parametrize("criterion", ["surrogate", "squared"])
def test_all_columns_of_y_share_the_ridge_of_their_joint_loss(criterion):
    """With a linear kernel of y the surrogate loss is the sum of the squared errors."""
    x, y = rows(150)
    y = np.column_stack([y, 10.0 * x[:, 0]])
    weights = np.random.default_rng(2).uniform(0.5, 2.0, len(x))
    table, targets = (
        pd.DataFrame(values, columns=names)
        for values, names in ((x, ["wind", "slope"]), (y, ["speed", "height", "range"]))
    )
    fit = ConditionalMeanEmbedding(
        kernel_x=GAUSSIAN, kernel_y=kernels.Linear(), tol=1e-12, criterion=criterion, n_folds=5
    ).fit(table, targets, weights=weights)
    at = table[:7]
    predict = vector_valued(x, y, weights, fit.reg_, centred=True)
    np.testing.assert_allclose(fit.predict(at), predict(x[:7]), atol=1e-6)
    assert fit.columns_y.names == ("speed", "height", "range")
    mean = fit.expect(["range", "speed"], at)
    np.testing.assert_allclose(mean, predict(x[:7])[:, [2, 0]], atol=1e-6)
    # mu(x) is the vector itself: its values at unit vectors are its coordinates.
    embedded, plain = fit.model_.embedding(at, np.eye(3)), vector_valued(x, y, weights, fit.reg_)
    np.testing.assert_allclose(embedded, plain(x[:7]), atol=1e-6)
    folds = fold_of_rows(0, len(x), 5)
    losses = np.zeros(len(fit.path_.regs))
    centre = np.average(y, axis=0, weights=weights)
    scale = np.average((y - centre) ** 2, axis=0, weights=weights)
    for fold in range(5):
        held, share = folds == fold, weights * (folds == fold)
        for i, reg in enumerate(fit.path_.regs):
            rest = x[~held], y[~held], weights[~held], reg
            away = y[held] - vector_valued(*rest, centred=criterion == "squared")(x[held])
            each = np.average(away**2, axis=0, weights=weights[held])
            loss = each.sum() if criterion == "surrogate" else (each / scale).mean()
            losses[i] += share.sum() / weights.sum() * loss
    large = fit.path_.regs >= 1e-6  # of smaller ones the dense Gram matrix is singular to rounding
    np.testing.assert_allclose(fit.path_.losses[large], losses[large], rtol=1e-5)
    assert fit.reg_ == fit.path_.regs[fit.path_.losses.argmin()]
    targets.iloc[3, 1] = np.nan
    with pytest.raises(DataError, match="column 'height' has 1 "):
        fit.fit(table, targets)


def test_targets_that_are_features_of_a_kernel_give_its_embedding():
    x, y = rows(300)
    features = PivotedCholesky(GAUSSIAN, tol=1e-6).fit(y)
    options = {"kernel_x": GAUSSIAN, "tol": 1e-6, "reg": 1e-3}
    vectors = ConditionalMeanEmbedding(kernel_y=kernels.Linear(), **options)
    vectors.fit(x, features.transform(y))
    embedded = ConditionalMeanEmbedding(kernel_y=GAUSSIAN, **options).fit(x, y)
    at, points = rows(6, seed=4)[0], rows(9, seed=5)[1]
    values = vectors.model_.embedding(at, features.transform(points))
    np.testing.assert_allclose(values, embedded.model_.embedding(at, points), atol=1e-3)


def test_functions_with_several_columns_are_declared_one_by_one():
    x, y = rows(100)
    fit = ConditionalMeanEmbedding(kernel_x=GAUSSIAN, tol=1e-2)
    text = "function 'both' must return shape .* declare a function for each column"
    with pytest.raises(DataError, match=text):
        fit.fit(x, y, functions={"both": lambda y: y**2})
    squares = {f"square {j}": partial(power, j) for j in range(2)}
    again = fit.fit(x, y, functions=squares)
    whole = ConditionalMeanEmbedding(kernel_x=GAUSSIAN, tol=1e-2, reg=again.reg_).fit(x, y**2)
    np.testing.assert_allclose(again.expect([*squares], x[:5]), whole.predict(x[:5]), atol=1e-10)


def power(column, y):
    return y[:, column] ** 2


@pytest.mark.parametrize("weighted", [False, True])
def test_an_event_that_a_fold_lacks_does_not_decide_about_the_ridge(weighted):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(600, 1))
    y = np.sin(2 * x) + 0.1 * rng.normal(size=(600, 1))
    top = np.sort(y[:, 0])[-3]
    weights = rng.uniform(0.5, 2.0, 600) if weighted else None
    rare = {"rare": lambda rows: (rows[:, 0] >= top).astype(float)}
    estimator = ConditionalMeanEmbedding(kernel_x=GAUSSIAN, criterion="squared", tol=1e-4)
    fit = estimator.fit(x, y, weights=weights, functions=rare)
    assert fit.reg_ < 0.1
    assert fit.path_.losses.max() < 10.0
    assert fit.score(x, y) > 0.9
