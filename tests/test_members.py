"""Members of an averaged fit: bases on shared pivots, ridges near a first one, laws made once."""

import time
import warnings
from itertools import product

import numpy as np
import pytest

from cme_dask import JointDistribution, Tuning, kernels
from cme_dask.errors import RankWarning, ResourceError
from cme_dask.estimators import refits, residual, tuned
from cme_dask.estimators.context import FitContext
from cme_dask.estimators.joint_fit import JointFit
from cme_dask.learning.candidates import Score
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.problem import Regularization

ROWS = np.random.default_rng(5).normal(size=(400, 4))


@pytest.fixture(scope="module")
def bases_of():
    """Bases of these kernels of x, compared in this order, on at most 60 of the rows."""
    seen = []
    measure = JointFit._measure
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)
        patch.setattr(JointFit, "_measure", lambda fit, of: seen.append(of) or measure(fit, of))
        kernel = kernels.Gaussian(1.0)
        JointDistribution(kernel_x=kernel, kernel_y=kernel, max_rank=60).fit(ROWS, ROWS[:, :1])

    def made(*of_x):
        pairs = [(kernel, kernels.Gaussian(1.0)) for kernel in of_x]
        bases, rounds, _ = seen[0].bases_of_each(pairs)
        assert not rounds
        return [x for x, _ in bases]

    return made


def trace_error(basis):
    return 1.0 - (basis(ROWS) ** 2).sum() / basis.kernel.diagonal(ROWS).sum()


@pytest.mark.parametrize(
    "kernel", [kernels.Gaussian(0.8), kernels.Gaussian(1.6), kernels.Matern(2.0, 0.5)], ids=str
)
def test_pivots_of_the_first_kernel_serve_where_the_rank_ends_their_choice(bases_of, kernel):
    first, second = bases_of(kernels.Gaussian(1.0), kernel)
    (own,) = bases_of(kernel)
    assert own.rank == second.rank == first.rank == 60
    assert set(second.rows) == set(first.rows) != set(own.rows)
    np.testing.assert_array_equal(second.points, ROWS[second.rows])
    at = second(second.points)
    np.testing.assert_allclose(at @ at.T, kernel(second.points, second.points), atol=1e-10)
    assert trace_error(second) < 1.15 * trace_error(own)


def test_a_kernel_that_needs_fewer_pivots_has_its_own(bases_of):
    smooth, rough = kernels.Gaussian(30.0), kernels.Gaussian(1.0)
    first, second = bases_of(rough, smooth)
    (own,) = bases_of(smooth)
    assert second.rank == own.rank < first.rank
    np.testing.assert_array_equal(second.rows, own.rows)
    # The other way round the first kernel has too few pivots for the second.
    assert bases_of(smooth, rough)[1].rank == 60


def test_pivots_that_another_kernel_cannot_tell_apart_are_not_shared():
    points = np.linspace(-1.0, 1.0, 12)[:, None]
    basis = NewtonBasis.from_points(kernels.Matern(0.5, 0.5), points)
    assert basis.on_same_pivots(kernels.Gaussian(50.0)) is None
    other = basis.on_same_pivots(kernels.Matern(1.0, 0.5))
    assert sorted(other.points.ravel()) == sorted(points.ravel())
    assert other.rows is None


def losses_around(lowest, form, asked):
    """Losses that rise from the ridges these many steps from (1e-3, 1e-2) on, in half decades."""

    def losses(regs):
        asked.extend(regs)
        steps = np.array([[2 * np.log10(reg.y / 1e-3), 2 * np.log10(reg.x / 1e-2)] for reg in regs])
        steps = steps / 2 if form == "single" else steps
        (y, x), (a, b) = steps.T, lowest
        loss = (y - a) ** 2 + (x - b) ** 2 + 0.5 * (y - a) * (x - b) - 100.0
        return (loss, 0.1 + 0.0 * loss), (loss - 1.0, 0.2 + 0.0 * loss)

    return losses


@pytest.mark.parametrize("lowest", [*product((-2, -1, 0, 1, 2), repeat=2)])
def test_ridges_are_followed_to_the_best_within_two_steps(lowest):
    start, asked = Regularization(1e-3, 1e-2), []
    score = Score(0.5, 0.5)
    reg, reached = tuned._learned_ridge(start, losses_around(lowest, "", asked), score, 1)
    y, x = (10.0 ** (step / 2) for step in lowest)
    np.testing.assert_allclose([reg.y, reg.x], [1e-3 * y, 1e-2 * x])
    np.testing.assert_allclose(reached, [(-100.0, 0.1), (-101.0, 0.2)])
    assert len(set(asked)) == len(asked) <= 25
    assert len(asked) == 9 or lowest != (0, 0)
    # All at once, the same.
    every: list[Regularization] = []
    losses = losses_around(lowest, "", every)
    assert tuned._learned_ridge(start, losses, score, 2)[0] == reg
    assert len(every) == 25


@pytest.mark.parametrize("lowest", [-2, 0, 1])
def test_a_single_ridge_has_steps_of_its_own(lowest):
    start, asked = Regularization(1e-3, 1e-2, "single"), []
    losses = losses_around((lowest, lowest), "single", asked)
    reg, _ = tuned._learned_ridge(start, losses, Score(0.5, 0.5), 1)
    np.testing.assert_allclose([reg.y, reg.x], [1e-3 * 10.0**lowest, 1e-2 * 10.0**lowest])
    assert len(asked) <= 5


def test_a_given_ridge_stays():
    start, asked = Regularization(1e-3, 1e-2), []
    found = tuned._learned_ridge(start, losses_around((2, 2), "", asked), Score(0.5, 0.5), 0)
    assert found[0] == start == asked[0]
    assert len(asked) == 1


def rows(n):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, 2))
    return x, np.sin(2 * x[:, :1]) + 0.3 * rng.normal(size=(n, 1))


def test_laws_of_refits_are_made_once(monkeypatch):
    """For a calibration, the decision, values of y, and conformity scores: once for each fit."""
    made, make = [], refits._projected_laws
    monkeypatch.setattr(refits, "_projected_laws", lambda *of: made.append(of) or make(*of))
    tuning = Tuning(rows=500, evaluations=0, finalists=2, averaged=2, trees=())
    models = []
    for most in (refits._RETAINED, 0):  # too many of them: as often as they are needed
        monkeypatch.setattr(refits, "_RETAINED", most)
        fit = JointDistribution(tuning=tuning, residual=True, conformal=True, random_state=0)
        models.append(fit.fit(*rows(500)).model_)
        assert models[-1].residual is not None
        assert len(made) == 2 if most else len(made) > 2 + 4
    one, two = models
    assert one.about["calibration"] == two.about["calibration"]
    assert one.about["conformal"] == two.about["conformal"]
    assert one.about["residual"]["crps"] == two.about["residual"]["crps"]


@pytest.mark.parametrize(("n", "threads"), [(256, 0), (257, 2)])
def test_few_rows_are_searched_in_one_thread(monkeypatch, n, threads):
    beside, begun = tuned.beside, []
    monkeypatch.setattr(tuned, "beside", lambda work: begun.append(work) or beside(work))
    maps, mapped = tuned.parallel_map, []
    monkeypatch.setattr(tuned, "parallel_map", lambda *of: mapped.append(of[2]) or maps(*of))
    tuning = Tuning(rows=500, evaluations=0, finalists=2, averaged=2, trees=())
    JointDistribution(tuning=tuning, random_state=0).fit(*rows(n), scheduler="threads", workers=2)
    assert len(begun) == (threads > 0)
    assert set(mapped) == {max(threads, 1)}


def test_bases_are_made_beside_the_search_for_a_location(monkeypatch):
    """In threads, before that search is waited for; and they are the same without."""
    steps, pivots, location = [], FitContext._sampled, residual.with_location

    def sampled(context, i, *of):
        of_member = context.averages and context.sample.residuals is None and len(of) < 3
        steps.append("basis of a member" if of_member else "another basis")
        return pivots(context, i, *of)

    monkeypatch.setattr(FitContext, "_sampled", sampled)
    monkeypatch.setattr(
        residual, "with_location", lambda *of: steps.append("location") or location(*of)
    )
    tuning = Tuning(rows=500, evaluations=0, finalists=2, averaged=2, trees=())
    models = []
    for workers in (1, 2):
        steps.clear()
        fit = JointDistribution(tuning=tuning, random_state=0)
        fit.fit(*rows(400), scheduler="threads", workers=workers)
        models.append(fit)
        first, at = steps.index("basis of a member"), steps.index("location")
        assert (first < at) == (workers == 2)
        after = steps[at:].count("basis of a member")
        assert (after == 0) == (workers == 2)
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)


def test_a_plan_counts_the_seconds_of_these_bases(monkeypatch):
    pivots = FitContext._sampled
    monkeypatch.setattr(FitContext, "_sampled", lambda *of: time.sleep(0.05) or pivots(*of))
    tuning = Tuning(rows=500, evaluations=0, finalists=2, averaged=2, trees=())
    fit = JointDistribution(tuning=tuning, random_state=0)
    plan = fit.plan(*rows(400), scheduler="threads", workers=2)
    assert plan.pivot_seconds >= 0.1  # of x and of y


def test_bases_that_do_not_fit_beside_that_search_are_made_after_it(monkeypatch):
    tried, of_each = [], FitContext.bases_of_each

    def refused(context, kernels):
        if context.held and context.sample.residuals is None:
            tried.append(context.held)
            raise ResourceError("too little memory")
        return of_each(context, kernels)

    tuning = Tuning(rows=500, evaluations=0, finalists=2, averaged=2, trees=())
    monkeypatch.setattr(FitContext, "bases_of_each", refused)
    fit = JointDistribution(tuning=tuning, random_state=0)
    fit.fit(*rows(400), scheduler="threads", workers=2)
    assert len(tried) == 1
    assert len(fit.members_) > 0
