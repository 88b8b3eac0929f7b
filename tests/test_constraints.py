"""Constraints through the public estimator: what they promise holds, and is said truly."""

import warnings

import numpy as np
import pytest
from conftest import write_store
from test_reads import opened

from cme_dask import JointDistribution, constraints, kernels, load
from cme_dask.data.generate import Normal3
from cme_dask.errors import ConvergenceError, ConvergenceWarning, DataError
from cme_dask.estimators.joint_fit import trial_solver
from cme_dask.numerics.folds import draw
from cme_dask.numerics.measure import project
from cme_dask.numerics.problem import JointSolver, Regularization, SolverInfo
from cme_dask.passes.sources import open_sample

OPTIONS = {
    "kernel_x": kernels.Gaussian(0.2),
    "kernel_y": kernels.Gaussian(0.2),
    "tol": 3e-3,
}


@pytest.fixture(scope="module")
def rows():
    return next(Normal3("strong").batches(6000, 0))


def far_and_near(x, y):
    rng = np.random.default_rng(1)
    return (
        np.concatenate([x[:300], 5 * rng.standard_normal((200, 1)), [[1e6]]]),
        np.concatenate([y[:300], 5 * rng.standard_normal((200, 2)), [[-1e6, 1e6]]]),
    )


@pytest.mark.parametrize("constraint", ["certified", constraints.Certified(formulation="paper")])
def test_certified_ratios_are_nowhere_negative(rows, constraint):
    law = JointDistribution(**OPTIONS, constraint=constraint).fit(*rows)
    assert law.density_ratio(*far_and_near(*rows)).min() >= -1e-6
    assert law.solution_.info.converged
    ratio = law.density_ratio(rows[0][:50], rows[1])
    assert np.abs(ratio.mean(axis=1) - 1).max() < 1e-6
    free = JointDistribution(**OPTIONS).fit(*rows)
    assert free.density_ratio(*rows_of(rows, 300)).min() < -0.1  # it had something to do


def rows_of(rows, n):
    return rows[0][:n], rows[1][:n]


@pytest.mark.parametrize("bounds", ["sample", "observed"])
def test_observed_bounds_allow_more_and_certify_at_their_rows(rows, bounds, tmp_path):
    analytic = JointDistribution(**OPTIONS, constraint="certified").fit(*rows)
    x, y = rows
    write_store(tmp_path / "s", x, y, chunk_rows=4096)
    counting, group = opened(tmp_path / "s")
    options = {**OPTIONS, "constraint": constraints.Certified(bounds=bounds)}
    law = JointDistribution(**options).fit(group)
    passes = 2 if bounds == "observed" else 1
    assert law.n_passes_ == passes
    assert set(counting.chunks("y").values()) == {passes}
    # The row sample's first 4,096 rows are ranged over, or all.
    seen = open_sample(group).row_sample.index[:4096] if bounds == "sample" else np.arange(len(x))
    assert law.density_ratio(x[seen[::7]], y[seen[::5]]).min() >= -1e-12
    assert np.abs(law.coef_).sum() > 1.5 * np.abs(analytic.coef_).sum()


def test_observed_ranges_are_those_of_all_rows(rows):
    """Against plain minima, with weights of zero left out."""
    from cme_dask.numerics.rows import BasisRanges
    from cme_dask.passes.driver import RunOptions
    from cme_dask.passes.run import run_pass
    from cme_dask.passes.sources import open_sample

    x, y = rows
    weights = np.ones(len(x))
    weights[np.abs(x[:, 0]) > 0.3] = 0.0
    law = JointDistribution(**OPTIONS).fit(x, y)
    bases = law.model_.x.basis, law.model_.y.basis
    for given, kept in ((None, slice(None)), (weights, weights > 0)):
        sample = open_sample(x, y, weights=given)
        executor = RunOptions("threads", 2).executor()
        (found,), _ = run_pass(sample, [BasisRanges(bases)], executor)
        for ranges, basis, part in zip(found, bases, rows, strict=True):
            psi = basis(part[kept])
            np.testing.assert_allclose(ranges, [psi.min(axis=0), psi.max(axis=0)], atol=1e-13)


def test_unbounded_kernels_have_no_analytic_certificate(rows):
    options = {**OPTIONS, "kernel_x": kernels.Linear()}
    with pytest.raises(DataError, match="needs kernels that are bounded"):
        JointDistribution(**options, constraint="certified").fit(*rows)
    bounds = constraints.Certified(bounds="sample")
    assert JointDistribution(**options, constraint=bounds).fit(*rows).solution_.info.converged


def test_names_objects_and_json_forms_say_the_same():
    for name in ("none", "normalized", "certified", "pointwise", "coupling"):
        kind = constraints.CONSTRAINTS[name]
        assert constraints.parse(name) == kind() == constraints.parse(kind().to_dict())
    one = constraints.Coupling(landmarks=(20, 40), choice="kmeans")
    assert constraints.parse(one.to_dict()) == one
    assert one.counts == (20, 40)
    assert constraints.Coupling().counts is None
    assert constraints.Pointwise(landmarks=7).counts == (7, 7)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ("positive", "must be one of none, normalized"),
        ({"name": "certified", "limits": 1}, "limits"),
        ({"bounds": "observed"}, "must be one of none, normalized"),
        (3, "must be one of none, normalized"),
    ],
)
def test_unknown_constraints(rows, constraint, message):
    with pytest.raises(DataError, match=message):
        JointDistribution(**OPTIONS, constraint=constraint).fit(*rows)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (constraints.Certified, {"bounds": "wide"}, "bounds must be one of"),
        (constraints.Certified, {"solver": "gurobi"}, "solver must be one of"),
        (constraints.Certified, {"formulation": "dual"}, "formulation must be one of"),
        (constraints.Certified, {"formulation": "paper", "bounds": "sample"}, "analytic bounds"),
        (constraints.Pointwise, {"landmarks": 0}, "positive integer"),
        (constraints.Pointwise, {"landmarks": (3, 4, 5)}, "positive integer"),
        (constraints.Pointwise, {"landmarks": None}, "positive integer"),
        (constraints.Pointwise, {"tol": 0.0}, "tol must lie between 0 and 1"),
        (constraints.Pointwise, {"max_iterations": 1.5}, "max_iterations must be a positive"),
        (constraints.Coupling, {"landmarks": True}, "positive integer"),
        (constraints.Coupling, {"choice": "grid"}, "choice must be one of"),
        (constraints.Coupling, {"tol": "high"}, "tol must lie between 0 and 1"),
    ],
)
def test_bad_options(kind, options, message):
    with pytest.raises(DataError, match=message):
        kind(**options)


@pytest.mark.parametrize("constraint", ["pointwise", "coupling"])
def test_what_needs_the_two_sided_ridge_says_so(rows, constraint):
    with pytest.raises(DataError, match="two-sided"):
        JointDistribution(**OPTIONS, constraint=constraint, reg_form="single").fit(*rows)


def test_a_missed_tolerance_is_an_error_or_a_warning(rows):
    few = constraints.Pointwise(landmarks=40, tol=1e-12, max_iterations=3)
    options = {**OPTIONS, "n_folds": 1, "constraint": few}
    with pytest.raises(ConvergenceError, match="KKT residual"):
        JointDistribution(**options).fit(*rows)
    with pytest.warns(ConvergenceWarning, match="KKT residual"):
        law = JointDistribution(**options, convergence="warn").fit(*rows)
    assert not law.solution_.info.converged
    for unknown in ("ignore", None):
        with pytest.raises(DataError, match="convergence must be one of"):
            JointDistribution(**options, convergence=unknown).fit(*rows)


def test_nan_is_no_convergence():
    outcome = SolverInfo("ADMM", "optimal", 0.0, 0.0, float("nan"), 0.0, 1, 0.0, 1e-6)
    assert not outcome.converged
    with pytest.raises(ConvergenceError):
        outcome.check("raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SolverInfo("ADMM", "optimal", 0.0, 0.0, 1e-7, 0.0, 1, 0.0, 1e-6).check("raise")


@pytest.mark.parametrize(
    "constraint",
    [
        "none",
        "normalized",
        "certified",
        constraints.Pointwise(landmarks=30),
        constraints.Coupling(landmarks=16),
    ],
)
def test_saved_laws_answer_as_before(rows, tmp_path, constraint):
    options = {**OPTIONS, "n_folds": 2, "constraint": constraint}
    law = JointDistribution(**options).fit(*rows, functions={"up": lambda y: y[:, 0] > 0.1})
    law.save(tmp_path / "m")
    again = load(tmp_path / "m")
    x, y = far_and_near(*rows)
    assert np.array_equal(again.expect(["up", "y0"], x), law.expect(["up", "y0"], x))
    assert np.array_equal(again.density_ratio(x, y), law.density_ratio(x, y))
    assert constraints.parse(again.about["constraint_options"]) == constraints.parse(constraint)


@pytest.mark.parametrize(
    ("constraint", "d"), [("none", 2), ("normalized", 1), ("normalized", 2), ("certified", 1)]
)
def test_weights_are_laws_with_masses_of_all_rows(rows, tmp_path, constraint, d):
    x, y = rows[0], rows[1][:, :d]
    options = {**OPTIONS, "constraint": constraint, "support_size": 200}
    law = JointDistribution(**options).fit(x, y)
    points = np.concatenate([x[:200], [[-3.0], [1e5]]])
    weights = law.weights(points)
    support, masses = law.model_.support, law.model_.masses
    assert weights.shape == (202, support.size)
    assert weights.min() >= 0
    assert np.abs(weights.sum(axis=1) - 1).max() < 1e-12
    counts = np.bincount(support.assign(y), minlength=support.size)
    np.testing.assert_allclose(masses, counts / len(y), rtol=1e-12)
    signed = law.density_ratio(points, support.points)
    expected = project(signed, masses)[0]
    np.testing.assert_allclose(weights, expected, atol=1e-12)
    law.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert np.array_equal(again.weights(points), weights)


def test_no_support_no_weights(rows):
    law = JointDistribution(**OPTIONS, support_size=0).fit(*rows)
    with pytest.raises(DataError, match="support_size of at least 1"):
        law.weights(rows[0][:3])
    with pytest.raises(DataError, match="support_size must be an integer"):
        JointDistribution(**OPTIONS, support_size=-1).fit(*rows)


def test_mass_below_zero_is_told(rows):
    told = {}
    for constraint in ("normalized", "certified", constraints.Pointwise(60), "coupling"):
        law = JointDistribution(**OPTIONS, constraint=constraint).fit(*rows)
        told[law.model_.about["constraint"]] = law.model_.about["negative_mass"]
    ratio = JointDistribution(**OPTIONS).fit(*rows).density_ratio(*rows_of(rows, 1000))
    assert told["normalized"] == pytest.approx(np.maximum(-ratio, 0).mean(), rel=0.2)
    assert told["certified"] == told["coupling"] == 0.0
    assert 0 < told["pointwise"] < 0.5 * told["normalized"]


def test_mass_below_zero_counts_rows_by_their_weights(rows):
    x, y = (part[:300] for part in rows)
    weights = np.random.default_rng(0).uniform(0.5, 2.0, size=300)
    law = JointDistribution(**OPTIONS).fit(x, y, sample_weight=weights)
    share, ratio = weights / weights.sum(), law.density_ratio(x, y)
    mass = share @ np.maximum(-ratio, 0.0) @ share
    assert 0.0 < law.model_.about["negative_mass"] == pytest.approx(mass)


@pytest.mark.parametrize(
    "constraint",
    [
        "coupling",
        constraints.Coupling(landmarks=(20, 40)),
        constraints.Coupling(landmarks=30, choice="kmeans"),
    ],
)
def test_couplings_are_densities_far_from_all_data(rows, constraint):
    law = JointDistribution(**OPTIONS, constraint=constraint, reg=1e-4).fit(*rows)
    assert law.solution_.info.converged
    assert law.n_passes_ == 1
    assert law.basis_x_.trace_error is None
    x, y = far_and_near(*rows)
    given_x, given_y = law.density_ratio(x, rows[1]), law.density_ratio(rows[0], y)
    assert min(given_x.min(), given_y.min()) >= 0.0  # not a rounding below
    assert np.abs(given_x.mean(axis=1) - 1).max() <= 1e-10
    assert np.abs(given_y.mean(axis=0) - 1).max() <= 1e-10
    counts = law.model_.x.basis.rank, law.model_.y.basis.rank
    if constraint != "coupling":
        assert counts == constraint.counts
    # E[f | x] is the mean of f under g, and so within its range, everywhere.
    told = law.expect("y0", x)
    np.testing.assert_allclose(told, given_x @ rows[1][:, 0] / len(rows[1]), atol=1e-10)
    assert rows[1][:, 0].min() <= told.min()
    assert told.max() <= rows[1][:, 0].max()


def test_landmarks_may_be_given(rows):
    x, y = rows
    pivots = x[:10], y[:15]
    law = JointDistribution(**OPTIONS, constraint="coupling", pivots=pivots).fit(x, y)
    np.testing.assert_array_equal(law.basis_x_.pivots, pivots[0])
    assert law.basis_y_.rank == 15
    twice = np.concatenate([pivots[0], pivots[0]]), pivots[1]  # the cells of both are the same
    again = JointDistribution(**OPTIONS, constraint="coupling", pivots=twice).fit(x, y)
    expected = law.expect("y0", x[:200])
    np.testing.assert_allclose(again.expect("y0", x[:200]), expected, atol=2e-3)
    numbers = constraints.Coupling(landmarks=(10, 15))
    stated = JointDistribution(**OPTIONS, constraint=numbers, pivots=pivots).fit(x, y)
    np.testing.assert_allclose(stated.expect("y0", x[:200]), expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(DataError, match="takes landmarks from the row sample"):
        JointDistribution(**OPTIONS, constraint="coupling", pivots="greedy").fit(x, y)
    with pytest.raises(DataError, match="kernel"):
        JointDistribution(
            kernel_x=kernels.Linear(), kernel_y=kernels.Gaussian(1.0), constraint="coupling"
        ).fit(x, y)


@pytest.mark.parametrize(
    ("options", "rank", "message"),
    [
        ({"landmarks": (10, 8)}, None, "15 given pivots of y are the landmarks .* asks for 8"),
        ({"landmarks": 15}, None, "10 given pivots of x are the landmarks .* asks for 15"),
        ({"choice": "kmeans"}, None, "choice='kmeans' has none to choose: give either pivots or"),
        ({}, 12, "15 given pivots of y .* more than max_rank=12: raise max_rank, or give fewer"),
    ],
)
def test_given_landmarks_take_no_other_options(rows, options, rank, message):
    x, y = rows
    pivots, constraint = (x[:10], y[:15]), constraints.Coupling(**options)
    given = {**OPTIONS, "max_rank": rank, "constraint": constraint, "pivots": pivots}
    with pytest.raises(DataError, match=message):
        JointDistribution(**given).fit(x, y)


def test_couplings_have_a_ridge_of_their_own(rows):
    few = constraints.Coupling(landmarks=8)
    assert JointDistribution(**OPTIONS, constraint=few).fit(*rows).model_.about["reg"] == [1e-4] * 2
    one = JointDistribution(**OPTIONS, constraint=few, reg=1e-3).fit(*rows)
    assert one.model_.about["reg"] == [1e-3] * 2
    assert JointDistribution(**OPTIONS).fit(*rows).model_.about["reg"] == [1e-6] * 2


def test_a_coupling_can_be_planned(rows):
    plan = JointDistribution(**OPTIONS, constraint=constraints.Coupling(landmarks=12)).plan(*rows)
    assert plan.ranks == (12, 12)
    assert plan.passes == 1


def test_trials_of_the_arithmetic_solve_no_programs(rows):
    """Each trial solves several times: what has no closed form is left out of it."""
    law = JointDistribution(**OPTIONS).fit(*rows)
    sample = draw(np.arange(len(rows[0])), tuple(rows), None, 100, 0)
    reg = Regularization(1e-6, 1e-6)
    for name, left in (("none", "none"), ("certified", "certified"), ("coupling", "normalized")):
        solver = JointSolver(constraints.parse(name), reg)
        assert trial_solver(solver, law.sides_, sample).constraint.name == left
    paper = JointSolver(constraints.Certified(formulation="paper"), reg)
    assert trial_solver(paper, law.sides_, sample).constraint.name == "normalized"
