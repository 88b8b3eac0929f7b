"""Pivots chosen over all rows in rounds: the rules, their states, and the fits that use them."""

import json
from collections import Counter
from functools import reduce

import dask.array as da
import numpy as np
import oracle_pivots as slow
import psutil
import pytest
from click.testing import CliRunner
from conftest import write_store

from cme_dask import JointDistribution, PivotedCholesky, kernels
from cme_dask.cli import cli
from cme_dask.cli.schema import FitSection, checked
from cme_dask.errors import DataError, RankWarning, ResourceError, ToleranceWarning
from cme_dask.estimators.context import PivotProgress
from cme_dask.numerics import rounds
from cme_dask.numerics.cholesky import pivoted_cholesky
from cme_dask.numerics.folds import draw
from cme_dask.numerics.reduction import Strip, strip_length
from cme_dask.numerics.rounds import Greedy, PivotOffers, PivotState, Random, offered_rows
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import choose_in_rounds
from cme_dask.passes.progress import Event
from cme_dask.passes.sources import open_sample

KERNELS = {
    "gaussian": kernels.Gaussian(0.3),
    "laplace": kernels.Laplace(2.0),
    "matern": kernels.Matern(0.6, 1.5),
    "delta": kernels.Delta(),
    "linear": kernels.Linear(0.5),
    "sum": kernels.Gaussian(0.3) + 0.5 * kernels.Linear(1.0),
}
GAUSSIAN = KERNELS["gaussian"]
N = 900
SPAWNS = True  # see conftest


def scattered(rng):
    return rng.uniform(size=(N, 2))


def gridded(rng):
    side = np.arange(30.0) / 29
    return np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)


def duplicated(rng):
    return rng.integers(0, 9, size=(N, 2)) / 8.0


def one_round(rule, state, x, weights=None, length=211):
    """A round over strips of rows, as the passes make it."""
    starts = range(0, len(x), length)
    offers = PivotOffers(((rule, state),), len(starts))
    task, parts = offers.start(x), []
    for start in starts:
        here = slice(start, start + length)
        w = None if weights is None else weights[here]
        parts.append(offers.update(task, Strip(np.arange(len(x))[here], (x[here],), w)))
    return rule.step(state, *reduce(offers.combine, parts))


def all_rounds(rule, x, weights=None, state=None, length=211):
    state = PivotState.empty(x.shape[1]) if state is None else state
    while not state.done:
        state = one_round(rule, state, x, weights, length)
    return state


def same(a, b):
    assert all(np.array_equal(value, vars(b)[name]) for name, value in vars(a).items())


# Greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("rows", [scattered, gridded, duplicated])
@pytest.mark.parametrize("name", KERNELS)
def test_span_1_chooses_what_algorithm_1_chooses(name, rows, weighted, rng):
    kernel, x = KERNELS[name], rows(rng)
    weights = rng.exponential(size=len(x)) if weighted else None
    K, tol = kernel(x, x), 0.9 if name == "delta" else 3e-3
    pivots, L, trace = slow.greedy(K, tol, weights=weights)
    state = all_rounds(Greedy(kernel, tol), x, weights)
    assert state.rows.tolist() == pivots
    np.testing.assert_array_equal(state.points, x[pivots])
    np.testing.assert_allclose(state.factor, L[pivots], atol=1e-10 * np.sqrt(K.max()))
    np.testing.assert_allclose(state.history, trace, atol=1e-12)
    assert state.status == "tolerance"


@pytest.mark.parametrize("name", ["gaussian", "matern", "laplace", "sum"])
def test_half_a_span_takes_few_rounds_and_loses_little(name, rng):
    kernel, x = KERNELS[name], rng.uniform(size=(12_000, 3))
    rule, length = Greedy(kernel, 1e-9, max_rank=96, span=0.5), strip_length(12_000)
    state = all_rounds(rule, x, length=length)
    assert state.rank == 96
    assert state.status == "max_rank"
    assert state.round <= state.rank / 8
    exact = pivoted_cholesky(kernel, x, 0.0, 96).residual_trace
    newton = state.basis(kernel)(x)
    left = (kernel.diagonal(x) - (newton**2).sum(axis=1)).sum() / kernel.diagonal(x).sum()
    assert left <= 1.1 * exact[-1]


@pytest.mark.parametrize("strips", [1, 3, 250, 4000])
@pytest.mark.parametrize("rank", [0, 64, 1000])
@pytest.mark.parametrize("span", [1.0, 0.5])
def test_the_pool_is_small(strips, rank, span, rng):
    each = offered_rows(rank, strips)
    assert each >= 1
    assert strips * each <= max(32 * strips, 4 * rank)
    if rank == 64 and strips < 100:
        x = rng.uniform(size=(3000, 2))
        state = PivotState.of(pivoted_basis(x, rank))
        offers = PivotOffers(((Greedy(GAUSSIAN, 1e-9, span=span), state),), strips)
        (offer,) = offers.update(offers.start(x), Strip(np.arange(3000), (x,), None))
        assert 0 < len(offer.points) <= each


def pivoted_basis(x, rank):
    found = pivoted_cholesky(GAUSSIAN, x, 0.0, rank)
    state = PivotState.empty(x.shape[1]).extended(x[found.pivots], found.pivots, found.factor)
    return state.basis(GAUSSIAN)


def test_a_bound_keeps_a_round_from_taking_too_much(rng):
    """Each accepted pivot, one by one, is as large as ``span`` times all residuals left then."""
    x = rng.uniform(size=(3000, 2))
    for span in (1.0, 0.5, 0.1):
        state = all_rounds(Greedy(GAUSSIAN, 1e-3, span=span), x)
        left = np.ones(len(x))
        newton = state.basis(GAUSSIAN)(x)
        for j, row in enumerate(state.rows):
            assert left[row] >= span * left.max() * (1 - 1e-9)
            left -= newton[:, j] ** 2


def test_rows_of_weight_zero_are_no_rows(rng):
    x, weights = rng.uniform(size=(N, 2)), rng.integers(0, 2, size=N).astype(float)
    x[weights == 0] *= 1e3
    kept = np.flatnonzero(weights)
    for rule in (
        Greedy(GAUSSIAN, 1e-3),
        Greedy(GAUSSIAN, 1e-3, span=0.5),
        Random(GAUSSIAN, 1e-3, seed=(3,)),
    ):
        state = all_rounds(rule, x, weights)
        assert set(state.rows) <= set(kept)
    exact = pivoted_cholesky(GAUSSIAN, x[kept], 1e-3)
    found = all_rounds(Greedy(GAUSSIAN, 1e-3), x, weights).rows
    assert found.tolist() == kept[exact.pivots].tolist()


@pytest.mark.parametrize("positive", [0.9, 0.1])
def test_strips_of_few_rows_of_positive_weight_offer_no_others(positive):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(300, 2)), (rng.random(300) < positive).astype(float)
    cholesky = PivotedCholesky(kernels.Gaussian(0.5), pivots="greedy", tol=1e-3)
    found = cholesky.fit(x, weights=weights).basis_.pivots
    np.testing.assert_array_equal(found, cholesky.fit(x[weights > 0.0]).basis_.pivots)


@pytest.mark.parametrize("span", [1.0, 0.5])
def test_rows_that_span_no_more_end_the_choice(span):
    x = np.repeat(np.arange(5.0), 100)[:, None]
    for rule in (Greedy(kernels.Gaussian(1.0), 1e-20, span=span), Random(GAUSSIAN, 1e-20)):
        state = all_rounds(rule, x)
        assert state.status == "exhausted"
        assert sorted(x[state.rows][:, 0]) == [0, 1, 2, 3, 4]
    none = all_rounds(Greedy(kernels.Linear(), 1e-3, span=span), np.zeros((99, 2)))
    assert (none.status, none.rank) == ("exhausted", 0)


# States --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        Greedy(GAUSSIAN, 1e-3),
        Greedy(GAUSSIAN, 1e-3, span=0.5),
        Random(GAUSSIAN, 1e-3, seed=(5,)),
        Random(GAUSSIAN, 1e-9, max_rank=70),
    ],
    ids=["greedy", "half", "random", "max_rank"],
)
def test_a_stored_state_goes_on_with_the_same_bits(rule, tmp_path, rng):
    x = scattered(rng)
    states = [PivotState.empty(2)]
    while not states[-1].done:
        states.append(one_round(rule, states[-1], x))
    assert len(states) > 2
    for number, state in enumerate(states):
        np.savez(tmp_path / f"{number}.npz", **vars(state))
        with np.load(tmp_path / f"{number}.npz") as arrays:
            again = PivotState(**{name: arrays[name][()] for name in arrays})
        same(again, state)
        same(all_rounds(rule, x, state=again), states[-1])


def test_history_is_measured_one_round_later(rng):
    x, rule = scattered(rng), Greedy(GAUSSIAN, 1e-3, span=0.5)
    first = one_round(rule, PivotState.empty(2), x)
    assert first.rank > 1
    assert len(first.history) == 1
    second = one_round(rule, first, x)
    assert len(second.history) == first.rank + 1
    left = 1 - np.cumsum(first.basis(GAUSSIAN)(x) ** 2, axis=1).mean(axis=0)
    np.testing.assert_allclose(second.history[1:], left, atol=1e-14)


# Random --------------------------------------------------------------------------------------


def index_kernel(K):
    """The kernel whose matrix at rows 0, 1, 2, ... is K."""

    def block(X, Z):
        return K[X[:, 0].astype(int)[:, None], Z[:, 0].astype(int)]

    return kernels.Custom("table", block, lambda X: np.diag(K)[X[:, 0].astype(int)])


@pytest.mark.parametrize("proposals", [128, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_random_pivots_have_the_law_of_drawing_one_at_a_time(weighted, proposals, monkeypatch):
    """Chi-square against the enumerated law, in one round and over rounds of two proposals."""
    monkeypatch.setattr(rounds, "_PROPOSALS", proposals)
    rng, n, rank, runs = np.random.default_rng(0), 5, 3, 700
    factor = rng.standard_normal((n, n)) * np.array([1.0, 0.7, 0.5, 0.4, 0.3])
    K = factor @ factor.T
    weights = rng.uniform(0.5, 2.0, size=n) if weighted else None
    x, kernel = np.arange(float(n))[:, None], index_kernel(K)
    counts = Counter(
        tuple(all_rounds(Random(kernel, 1e-12, rank, seed=(seed, 1)), x, weights, length=2).rows)
        for seed in range(runs)
    )
    law = slow.law_of_random_pivots(K, rank, weights)
    assert set(counts) <= set(law)
    cells = sorted(law, key=law.get)
    expected, observed = runs * np.array([law[c] for c in cells]), [counts[c] for c in cells]
    rare = np.cumsum(expected) <= 10  # as one cell
    chi2 = ((observed - expected) ** 2 / expected)[~rare].sum()
    degrees = (~rare).sum() - 1
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)


def test_random_pivots_leave_what_drawing_one_at_a_time_leaves(rng):
    x = rng.uniform(size=(1200, 2))
    K, rank = GAUSSIAN(x, x), 40
    plain = np.log([slow.randomly(K, rank, rng)[1] for _ in range(30)])
    ours = []
    for seed in range(30):
        rule = Random(GAUSSIAN, 1e-9, max_rank=rank, seed=(seed,))
        newton = all_rounds(rule, x).basis(GAUSSIAN)(x)
        ours.append(np.log(1 - (newton**2).sum(axis=1).mean()))
    spread = np.sqrt((np.var(plain) + np.var(ours)) / 30)
    assert abs(np.mean(ours) - np.mean(plain)) < 4 * spread


def test_seeds_tell_random_pivots_apart(rng):
    x = scattered(rng)
    one, two, other = (
        all_rounds(Random(GAUSSIAN, 1e-2, seed=seed), x).rows.tolist()
        for seed in ((1, 0), (1, 0), (1, 1))
    )
    assert one == two != other


# Fits ----------------------------------------------------------------------------------------


MODES = [("greedy", 1.0), ("greedy", 0.5), ("random", 1.0)]
ROWS = 9001
TOL = 1e-2


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(4)
    x = rng.uniform(size=(ROWS, 2))
    return x, x[:, :1] + 0.3 * rng.standard_normal((ROWS, 1)), rng.exponential(size=ROWS)


def fitted(mode, span, *data, scheduler="synchronous", progress=None, **options):
    estimator = JointDistribution(
        kernel_x=kernels.Gaussian(0.4),
        kernel_y=kernels.Matern(1.5, 1.5),
        tol=TOL,
        pivots=mode,
        span=span,
        random_state=7,
        residual=False,
        **options,
    )
    workers = {} if scheduler == "synchronous" else {"workers": 2}
    return estimator.fit(*data, scheduler=scheduler, progress=progress, **workers)


def bits(fit):
    arrays = [
        part
        for basis in (fit.basis_x_.newton, fit.basis_y_.newton)
        for part in (basis.points, basis.rows, basis.factor)
    ]
    return tuple(np.ascontiguousarray(a).tobytes() for a in arrays), fit.basis_x_.trace_error


@pytest.mark.parametrize(("mode", "span"), MODES)
def test_any_chunks_and_scheduler_give_the_same_bits(mode, span, table, tmp_path):
    x, y, _ = table
    plain = fitted(mode, span, x, y)
    assert plain.basis_x_.trace_error <= TOL
    assert plain.basis_y_.trace_error <= TOL
    expected = bits(plain)
    for chunk in (700, 5000):
        write_store(tmp_path / f"{chunk}.zarr", x, y, chunk_rows=chunk)
        stored = fitted(mode, span, tmp_path / f"{chunk}.zarr", scheduler="threads")
        assert bits(stored) == expected
        assert stored.n_passes_ == plain.n_passes_
    lazy = [da.from_array(a, chunks=(1234, -1)) for a in (x, y)]
    assert bits(fitted(mode, span, *lazy, scheduler="threads")) == expected


@pytest.mark.slow
def test_processes_give_the_same_bits_and_serve_all_passes(table):
    x, y, _ = table
    this = psutil.Process()
    others = set(this.children(recursive=True))
    for mode in ("greedy", "random"):
        started, passes = set(), set()

        def progress(event, started=started, passes=passes):
            started.update(set(this.children(recursive=True)) - others)
            passes.add(getattr(event.detail, "name", ""))

        options = {"max_rank": 12}
        with pytest.warns(RankWarning, match="max_rank=12"):
            expected = bits(fitted(mode, 0.3, x, y, **options))
        options |= {"scheduler": "processes", "progress": progress}
        with pytest.warns(RankWarning, match="max_rank=12"):
            assert bits(fitted(mode, 0.3, x, y, **options)) == expected
        assert len(passes) > 1
        assert len(started) <= 3  # two workers, and what tracks their resources
        assert not any(p.is_running() and "spawn_main" in " ".join(p.cmdline()) for p in started)


def test_greedy_fits_equal_greedy_in_memory(table):
    x, y, _ = table
    fit = fitted("greedy", 1.0, x, y)
    for basis, rows in ((fit.basis_x_, x), (fit.basis_y_, y)):
        exact = pivoted_cholesky(basis.newton.kernel, rows, TOL)
        assert basis.newton.rows.tolist() == exact.pivots.tolist()
        assert basis.trace_error == pytest.approx(exact.residual_trace[-1], abs=1e-13)


@pytest.mark.parametrize(("mode", "span"), MODES)
def test_a_round_is_one_pass_for_both_variables(mode, span, table):
    x, y, w = table
    events, reads = [], Counter()

    def block(rows, name, block_info=None):
        reads[name, block_info[0]["array-location"][0][0]] += 1
        return rows

    lazy = [
        da.from_array(a, chunks=(4096, -1)).map_blocks(
            block, name, dtype=float, meta=np.empty((0, 0))
        )
        for a, name in ((x, "x"), (y, "y"))
    ]
    estimator = JointDistribution(
        kernel_x=kernels.Gaussian(0.4),
        kernel_y=kernels.Matern(1.5, 1.5),
        tol=TOL,
        pivots=mode,
        span=span,
    )
    estimator.fit(*lazy, weights=w, scheduler="synchronous", progress=events.append)
    told = [e.detail for e in events if isinstance(e.detail, PivotProgress)]
    rounds_of = Counter(e.variable for e in told)
    # A pass over the weights and one over all rows gather the sample, one makes the moments; the
    # rounds of x and y run side by side.
    assert estimator.n_passes_ == max(rounds_of.values()) + 3
    assert max(reads.values()) == estimator.n_passes_ - 1
    assert {count for (name, _), count in reads.items() if name == "y"} == {rounds_of["y"] + 2}
    names = names_of(events)
    assert set(names) == {"pivot-round", "strip-moments"}
    for variable, basis in (("x", estimator.basis_x_), ("y", estimator.basis_y_)):
        last = [e for e in told if e.variable == variable][-1]
        assert last.rank == basis.rank
        assert last.residual_trace == pytest.approx(basis.trace_error, rel=1e-9)


def test_one_variable_may_be_chosen_otherwise(table):
    x, y, _ = table
    given = np.linspace(-0.5, 1.5, 9)[:, None]
    fit = fitted(("greedy", given), 0.5, x, y)
    np.testing.assert_array_equal(np.sort(fit.basis_y_.pivots, axis=0), given)
    assert fit.basis_x_.trace_error <= TOL


def with_rare_rows(seen):
    """Sixty rows far from the others and from each other, of which the row sample has these."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(30_000, 2))
    drawn = draw(np.arange(len(x)), (x,), None, 4096, 0).index
    rest = np.setdiff1d(np.arange(len(x)), drawn)
    rare = np.concatenate([rng.choice(drawn, seen, replace=False), rest[-60 + seen :]])
    x[rare] += 100 + 50 * rng.uniform(size=(60, 2))
    return x


def names_of(events):
    parts = [event.detail for event in events]
    return [part.name for part in parts if isinstance(part, Event)]


@pytest.mark.parametrize("seen", [0, 8])
def test_what_the_sample_missed_is_topped_up(seen):
    """Rows that it has not seen are found by the moments; if it has, rounds come first."""
    x, events = with_rare_rows(seen), []
    features = PivotedCholesky(kernels.Gaussian(0.4), tol=1e-4, sample_size=4096)
    features.fit(x, progress=events.append)
    assert features.trace_error_ <= 1e-4
    assert (features.pivots_[:, 0] > 50).sum() > 30
    rounds_made = features.n_passes_ - (1 if seen else 2)  # a strip offers 32 of the 60
    assert rounds_made == 3
    assert names_of(events)[0] == ("pivot-round" if seen else "strip-moments")
    assert names_of(events)[-1] == "strip-moments"
    pure = np.delete(x, np.flatnonzero(x[:, 0] > 50), axis=0)
    plain = PivotedCholesky(kernels.Gaussian(0.4), tol=1e-4, sample_size=4096).fit(pure)
    assert plain.n_passes_ == 1
    assert plain.trace_error_ <= 1e-4


def test_a_plan_makes_no_pass():
    lazy = da.from_array(with_rare_rows(8), chunks=(10_000, -1))
    events = []
    features = PivotedCholesky(kernels.Gaussian(0.4), tol=1e-4, sample_size=4096)
    features.plan(lazy, scheduler="synchronous", progress=events.append)
    assert not names_of(events)


def test_weights_count_where_the_sample_missed_rows():
    """Rare rows of little weight matter as little."""
    x = with_rare_rows(0)
    rare = x[:, 0] > 50
    for weight, needed in ((1e-4, False), (3.0, True)):
        weights = np.where(rare, weight, 1.0)
        features = PivotedCholesky(kernels.Gaussian(0.4), tol=1e-4, sample_size=4096)
        features.fit(x, weights=weights)
        assert features.trace_error_ <= 1e-4
        assert (features.n_passes_ > 1) == needed


def test_one_variable_is_topped_up_alone():
    x = with_rare_rows(0)
    law = JointDistribution(
        kernel_x=kernels.Gaussian(0.4),
        kernel_y=kernels.Gaussian(0.4),
        tol=1e-4,
        sample_size=4096,
    ).fit(x, x[:, :1] % 1.0)
    assert law.basis_x_.trace_error <= 1e-4
    assert law.basis_y_.trace_error <= 1e-4
    assert law.n_passes_ == 5
    assert law.basis_y_.pivots.max() < 1.0


@pytest.mark.parametrize("seen", [0, 8])
def test_max_rank_ends_a_top_up_with_a_warning(seen):
    features = PivotedCholesky(kernels.Gaussian(0.4), tol=1e-4, sample_size=4096, max_rank=50)
    with pytest.warns(RankWarning, match=r"X: trace error .* max_rank=50 was reached"):
        features.fit(with_rare_rows(seen))
    assert features.basis_.rank == 50


def test_a_round_that_does_not_fit_is_refused_before_it_runs(table):
    x, _, _ = table
    sample = open_sample(x)
    rule = Greedy(kernels.Matern(0.05, 0.5), 1e-6, span=0.5)
    seen = []
    tight = RunOptions("threads", 2, "262MB").executor()
    with pytest.raises(
        ResourceError, match=r"for a round of pivots at rank \d+ and 2 tasks at once"
    ):
        choose_in_rounds(
            sample,
            {0: (rule, PivotState.empty(2))},
            tight,
            on_round=lambda i, state: seen.append(state.rank),
        )
    assert 0 < max(seen) < 2000


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_the_memory_of_a_fit_is_that_of_its_rounds_if_they_take_more(mode, monkeypatch):
    monkeypatch.setattr("cme_dask.passes.fit.choice_bytes", lambda ranks, extent: 300 << 20)
    features = PivotedCholesky(GAUSSIAN, tol=0.1, pivots=mode)
    memory = features.fit(np.random.default_rng(0).uniform(size=(9000, 2))).report_.memory
    assert (memory.predicted > 300 << 20) == (mode == "greedy")
    if mode == "greedy":
        assert memory.phase == "the choice of pivots"


@pytest.mark.parametrize("mode", ["greedy", "random"])
def test_bad_rows_are_counted_when_a_round_meets_them(mode):
    x = np.random.default_rng(0).uniform(size=(50_000, 2))
    x[40_000:40_003, 1] = np.nan
    features = PivotedCholesky(GAUSSIAN, tol=0.1, pivots=mode, sample_size=10)
    with pytest.raises(DataError, match="column 'x1' has 3"):
        features.fit(x)


@pytest.mark.parametrize("span", [0.0, -1, 1.5, float("nan"), "1", True, None])
def test_spans_out_of_range(span, table):
    with pytest.raises(DataError, match="span must lie above 0 and be at most 1"):
        PivotedCholesky(GAUSSIAN, pivots="greedy", span=span).fit(table[0])


def test_unknown_modes_list_the_known_ones(table):
    with pytest.raises(DataError, match="'sampled', 'greedy', 'random' or given points"):
        PivotedCholesky(GAUSSIAN, pivots="best").fit(table[0])


def test_kernels_that_are_zero_are_refused():
    features = PivotedCholesky(kernels.Linear(), pivots="greedy")
    with pytest.raises(DataError, match="the kernel of X is zero at every row"):
        features.fit(np.zeros((50, 2)))


# Command -------------------------------------------------------------------------------------


def test_the_command_takes_pivots_and_span(table, tmp_path):
    x, y, _ = table
    write_store(tmp_path / "s.zarr", x, y, chunk_rows=5000)
    passes = {}
    for mode in ("sampled", "greedy", "random"):
        how = f"--pivots {mode} --span 0.5 --tol 1e-2 --scheduler synchronous --json".split()
        how += ["--residual", "no", "--kernel", "median"]
        arguments = ["fit", str(tmp_path / "s.zarr"), "--out", str(tmp_path / mode), *how]
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        passes[mode] = json.loads(done.stdout)["passes"]
    assert passes["sampled"] == 1 < min(passes["greedy"], passes["random"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"pivots": "best"}, "pivots"), ({"span": 0.0}, "span"), ({"span": 1.5}, "span")],
)
def test_job_files_say_what_is_wrong(options, message):
    with pytest.raises(DataError, match=message):
        checked(FitSection, options, "job.toml: fit")


def test_rounds_stop_where_rounding_makes_pivots_dependent():
    """Of this sample pivots go down to rounding; those of rows that it missed come after them."""
    rng = np.random.default_rng(1)
    rng.normal(size=12_000), rng.uniform(size=15_000)
    x = rng.lognormal(size=(3000, 1))
    fit = PivotedCholesky(kernels.Gaussian(0.05), tol=1e-12, sample_size=1000)
    with pytest.warns(ToleranceWarning, match="the rows span no more than that, to rounding"):
        fit.fit(x, scheduler="synchronous")
    assert 1e-12 < fit.trace_error_ < 1e-5
    left = 1.0 - (fit.transform(x) ** 2).sum(axis=1)
    assert np.abs(left.mean() - fit.trace_error_) < 1e-8
    assert left.min() > -1e-6
