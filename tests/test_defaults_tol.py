"""What ``tol`` means where kernels are learned: a promise if it is given, else the rank decides."""

import warnings

import numpy as np
import pytest

from cme_dask import ConditionalMeanEmbedding, JointDistribution, Tuning, kernels
from cme_dask.errors import RankWarning, ToleranceWarning

ALL_PIVOTS = True

BRIEF = Tuning(rows=300, max_rank=60, evaluations=4)


@pytest.fixture(scope="module")
def rows():
    """Heavy tails: a row sample of a few hundred misses what is far out."""
    rng = np.random.default_rng(1)  # whose kernels are smooth: others reach no small tol
    x = rng.standard_t(2.5, size=(12_000, 1))
    return x, np.tanh(x) + 0.3 * rng.standard_t(3, size=x.shape)


def fit(rows, **options):
    fitted = JointDistribution(tuning=BRIEF, residual=False, **options).fit(*rows)
    return fitted, np.array([member.component.trace_errors for member in fitted.members_])


def test_a_given_tol_is_kept_over_all_rows_where_kernels_are_learned(rows):
    options = {"sample_size": 300}
    _, missed = fit(rows, **options)
    assert missed.max() > 3e-4  # what the row sample alone reaches
    fitted, errors = fit(rows, tol=1e-5, **options)
    assert errors.max() <= 1e-5
    assert fitted.n_passes_ > 3  # the moments twice, rounds of pivots between
    # The moments are those of the bases that were topped up.
    ranks = [[side.basis.rank for side in member.component.sides] for member in fitted.members_]
    assert [list(member.component.mean.blocks["x", "x"].shape) for member in fitted.members_] == [
        [rank, rank] for rank, _ in ranks
    ]


def test_learned_bases_that_max_rank_ends_before_a_given_tol_warn(rows):
    with pytest.warns(RankWarning, match=r"trace error .* tol is 1e-12: max_rank=20 was reached"):
        fit(rows, tol=1e-12, max_rank=20)


def test_the_default_rank_is_named_where_it_ends_learned_bases(rows):
    x, y = (part[:700] for part in rows)
    noise = np.random.default_rng(0).normal(size=(700, 12))
    with pytest.warns(RankWarning, match=r"x: .*max_rank=500 \(the default\) was reached: raise"):
        fit((np.hstack([x, noise]), y), tol=1e-12)


def test_without_tol_the_rank_decides_and_only_coarse_bases_warn(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted, errors = fit(rows, sample_size=300)
    assert 1e-5 < errors.max() < 1e-2
    assert fitted.basis_x_.trace_error is not None
    with pytest.warns(RankWarning, match=r"trace error .*: max_rank=3 was reached") as told:
        _, errors = fit(rows, max_rank=3)
    assert errors.max() > 1e-2
    assert not any("tol is" in str(one.message) for one in told)


def test_an_embedding_warns_where_its_default_rank_ends_before_a_given_tol(rows):
    model = ConditionalMeanEmbedding(kernel_x=kernels.Gaussian(1e-3), tol=1e-12, reg=1e-3)
    with pytest.warns(RankWarning, match=r"x: .*max_rank=500 \(the default\) was reached"):
        model.fit(*(part[:700] for part in rows))


def test_a_row_sample_that_missed_too_much_is_reported_where_no_tol_was_given():
    """A twentieth of the rows lies far out, one by one: a small row sample sees few of them."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8_000, 1))
    x[:400, 0] = 1e3 * np.arange(1, 401)
    y = np.tanh(x) + 0.3 * rng.normal(size=x.shape)
    options = {"kernel_x": kernels.Gaussian(1.0), "sample_size": 200}  # that of y is learned
    with pytest.warns(ToleranceWarning, match=r"x: trace error .* row sample alone; give tol"):
        JointDistribution(tuning=BRIEF, residual=False, **options).fit(x, y)
