"""Cells of laws: sums and kept rows against loops over cells, however the rows are cut."""

from dataclasses import replace
from functools import reduce
from itertools import pairwise

import array_api_strict as strict
import dask.array as da
import numpy as np
import oracle_cells as oracle
import pytest
from conftest import fit_context, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from cme_dask import JointDistribution, kernels, load, open_sample
from cme_dask.data.columns import Columns
from cme_dask.errors import DataError, StoreError
from cme_dask.numerics import cells as cell_sums
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cells import ROWS_PER_CELL, SALT, CellReduction
from cme_dask.numerics.folds import draw
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, moment_cost
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.reduction import Cost, Extent, RowRange, Strip, strip_length, to_host
from cme_dask.numerics.support import Support, make_support
from cme_dask.passes.driver import Executor, RunOptions, task_bytes
from cme_dask.passes.run import run_pass

FUNCTIONS = {"positive": lambda z: z[:, 0] > 0, "square": lambda z: z[:, -1] ** 2}


def spec_of(rows, size=20, n_rows=0, partition=False, variable=0, n_folds=1):
    """Cells of the first 500 rows; with ``n_rows``, bounds for a sample of so many."""
    few = rows[:500]
    basis = PartitionBasis(kernels.Gaussian(0.7), few[:7]) if partition else None
    support = make_support(few, np.full(len(few), 1 / len(few)), size)
    rows = drawn_from(few)
    return CellReduction.of(rows, variable, n_rows, n_folds, support, FUNCTIONS, basis)


def drawn_from(rows):
    """A row sample that holds all of these rows, as those of x and as those of y."""
    return draw(np.arange(len(rows)), (rows, rows), None, len(rows), 0)


def summed(spec, rows, weights, folds, n_folds, first=0):
    """Sums of one strip, whose rows are numbered from ``first``."""
    spec = replace(spec, n_folds=n_folds, variable=0)
    strip = Strip(first + np.arange(len(folds)), (rows,), weights, _made={n_folds: folds})
    return to_host(spec.update(spec.start(rows), strip))


def hashes_of(n):
    """Of the first n rows."""
    return Strip(np.arange(n), (), None).hashes(SALT)


def case(n, d, seed=0, offset=0.0):
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=n)
    weights[::5] = 0.0
    return rng.normal(size=(n, d)) + offset, weights, rng.integers(0, 4, n).astype(np.uint8)


# Against the oracle ------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("bounded", [False, True])
def test_cells_are_those_of_plain_loops(d, weighted, bounded, monkeypatch):
    monkeypatch.setattr(cell_sums, "_ROWS", (1 << 10, 1 << 10))  # six blocks
    rows, w, folds = case(6000, d)
    spec = spec_of(rows, n_rows=len(rows) if bounded else 0, partition=True)
    assert (spec.bounds < np.iinfo(np.uint64).max).any() == bounded
    hashes, size = hashes_of(len(rows)), spec.support.size
    sums = summed(spec, rows, w if weighted else None, folds, 5)
    found, w = spec.statistics(sums), w if weighted else np.ones(len(rows))
    cells = spec.support.assign(rows)
    assert_allclose(sums.masses, oracle.masses(cells, w, folds, 5, size), rtol=1e-12)
    assert_allclose(found.masses, np.bincount(cells, w) / w.sum(), rtol=1e-12)
    assert abs(found.masses.sum() - 1) < 1e-14
    means, covariances = oracle.moments(rows, cells, w, size)
    assert_allclose(found.means, means, atol=1e-12)
    assert_allclose(found.covariances, covariances, atol=1e-12)
    values = np.stack([f(rows) for f in FUNCTIONS.values()], axis=1).astype(float)
    assert found.names == ("positive", "square")
    assert_allclose(found.functions, oracle.averages(values, cells, w, size), atol=1e-12)
    assert_allclose(found.masses @ found.functions, np.average(values, axis=0, weights=w))
    plain = oracle.components(spec.partition(rows), cells, w, size)
    assert_allclose(found.components, plain, atol=1e-14)
    assert_allclose(found.components.sum(axis=0), found.masses, atol=1e-14)
    kept = oracle.kept(hashes, cells, w, spec.bounds, ROWS_PER_CELL, size)
    assert min(map(len, kept)) > 10
    for s, mine in enumerate(kept):
        here = slice(found.starts[s], found.starts[s + 1])
        assert_array_equal(found.atoms[here], rows[mine])
        assert_allclose(found.shares[here], w[mine] / w[mine].sum(), rtol=1e-14)
        assert found.whole[s] == (((cells == s) & (w > 0)).sum() == len(mine))


def test_bounds_keep_enough_rows_and_few_too_many():
    rows, _, folds = case(200_000, 2)
    spec = spec_of(rows, 50, len(rows))
    sums = summed(spec, rows, None, folds, 5)
    assert len(sums.bottom.cells) < 2.5 * ROWS_PER_CELL * 50
    counts = np.diff(spec.statistics(sums).starts)
    assert counts.max() == ROWS_PER_CELL
    assert counts.mean() > 0.97 * ROWS_PER_CELL
    assert counts.min() > ROWS_PER_CELL / 4  # of a cell that the row sample has seen too often
    assert not spec.statistics(sums).whole.any()


def test_kept_rows_are_a_uniform_sample_of_their_cell():
    """Their mean index is that of the cell to its standard error, at fixed hashes."""
    n = 100_000
    rows = np.zeros((n, 1))
    spec = CellReduction.of(drawn_from(rows), 0, n, 1, Support(np.zeros((1, 1)), np.empty(0)), {})
    position = np.arange(n, dtype=np.float64)[:, None]
    sums = summed(spec, position, None, np.zeros(n, np.uint8), 1)
    atoms = spec.statistics(sums).atoms[:, 0] / n
    assert len(atoms) == ROWS_PER_CELL
    assert abs(atoms.mean() - 0.5) < 3 * np.sqrt(1 / 12 / ROWS_PER_CELL)
    assert 0.15 < atoms.std() < 0.42


def test_spread_far_from_zero_does_not_cancel():
    rows, w, folds = case(3000, 2, offset=1e8)
    spec = spec_of(rows)
    found = spec.statistics(summed(spec, rows, w, folds, 5))
    exact = rows - 1e8  # to rounding of the rows themselves
    _, covariances = oracle.moments(exact, spec.support.assign(rows), w, spec.support.size)
    assert_allclose(found.covariances, covariances, rtol=1e-6, atol=1e-9)
    assert np.linalg.eigvalsh(found.covariances).min() > -1e-12


@pytest.mark.parametrize("bounded", [False, True])
def test_covariances_of_many_columns_are_those_of_the_kept_rows(bounded):
    """Without bias: their mean over many cells is that of all rows to its standard error."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(size=(40_000, 8)), np.repeat(np.arange(200.0), 200)])
    atoms = np.zeros((200, 9))
    atoms[:, 8] = np.arange(200.0)
    support = make_support(atoms, np.full(200, 1 / 200), 200)
    spec = CellReduction.of(drawn_from(rows), 0, len(rows) if bounded else 0, 1, support, {})
    assert spec.edges[-1] == 9
    folds = np.zeros(len(rows), np.uint8)
    found = spec.statistics(summed(spec, rows, None, folds, 1))
    exact, _ = oracle.moments(rows, support.assign(rows), np.ones(len(rows)), 200)
    assert_allclose(found.means, exact, atol=1e-12)
    s = 7
    mine = found.atoms[found.starts[s] : found.starts[s + 1]]
    assert len(mine) == ROWS_PER_CELL
    assert_allclose(found.covariances[s], np.cov(mine.T), atol=1e-13)
    mean = found.covariances.mean(axis=0)
    assert np.abs(mean[:8, :8] - np.eye(8)).max() < 4 * np.sqrt(2 / (200 * ROWS_PER_CELL))
    assert np.linalg.eigvalsh(found.covariances).min() > -1e-12
    few = spec.statistics(summed(spec, rows[:100], None, folds[:100], 1))
    few_rows = few.atoms[few.starts[support.assign(rows[:1])[0]] :][:ROWS_PER_CELL]
    assert not few.whole[support.assign(rows[:1])[0]]
    assert len(few_rows) == ROWS_PER_CELL


def test_wide_variables_have_fewer_cells_and_blocks_fewer_rows():
    wide = np.random.default_rng(0).normal(size=(3000, 100))
    kernel_x, kernel_y = kernels.Gaussian(10.0), kernels.Gaussian(1.0)
    fit = JointDistribution(kernel_x=kernel_x, kernel_y=kernel_y, tol=0.9, n_folds=1)
    model = fit.fit(wide, wide[:, :1]).model_
    assert (model.x.cells.size, model.y.cells.size) == ((1 << 21) // 100**2, 1000)
    narrow, partition = spec_of(wide[:, :2]), spec_of(wide[:, :2], partition=True)
    assert narrow.block == 1 << 16
    many = replace(partition, partition=PartitionBasis(kernels.Gaussian(1.0), wide[:500, :2]))
    assert many.block == 2048
    assert many.block * many.edges[-1] <= 1 << 20


def test_cells_of_atoms_have_no_spread_and_cells_without_rows_their_points():
    atoms = np.array([[0.1, 0.2], [0.1, 0.3], [7.0, 0.2], [9.0, 9.0]])
    support = make_support(atoms, np.full(4, 0.25), 10)
    spec = CellReduction.of(drawn_from(atoms), 0, 0, 1, support, FUNCTIONS)
    rows = np.repeat(atoms[:3], [1, 40, 100], axis=0)
    w = np.ones(141)
    w[41:] = 0.0  # the third atom has no weight
    sums = summed(spec, rows, w, np.zeros(141, np.uint8), 1)
    found = spec.statistics(sums)
    here = support.assign(atoms)
    assert_array_equal(found.means[here], atoms)
    assert_array_equal(found.covariances, np.zeros((4, 2, 2)))
    assert_allclose(found.masses[here], [1 / 41, 40 / 41, 0, 0])
    assert_array_equal(np.diff(found.starts)[here], [1, ROWS_PER_CELL, 1, 1])
    assert_array_equal(found.atoms[found.starts[:-1]][here], atoms)
    assert_array_equal(found.whole[here], [True, False, True, True])
    overall = [1.0, (0.2**2 + 40 * 0.3**2) / 41]
    assert_allclose(found.functions[here[2:]], [overall, overall])


def test_weights_of_any_size_are_shares():
    rows = np.zeros((4, 1))
    w = np.array([1e-310, 1e300, 1e300, 0.0])
    spec = CellReduction.of(drawn_from(rows), 0, 4, 1, Support(np.zeros((1, 1)), np.empty(0)), {})
    found = spec.statistics(summed(spec, rows, w, np.zeros(4, np.uint8), 1))
    assert len(found.shares) == 3
    assert abs(found.shares.sum() - 1) < 1e-15
    assert found.whole[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("complete", [False, True])
def test_a_row_sample_tells_how_many_rows_a_cell_has(weighted, complete):
    """Also where weights decide what is drawn: rows are kept by their number, not their weight."""
    rng = np.random.default_rng(0)
    n = 60_000
    rows = rng.normal(size=(n, 2))
    w = np.exp(2 * rows[:, 0]) if weighted else np.ones(n)
    drawn = draw(np.arange(n), (rows, rows), w if weighted else None, n if complete else 4000, 7)
    support = make_support(drawn.parts[1], drawn.importance, 40)
    spec = CellReduction.of(drawn, 1, n, 1, support, {})
    sums = summed(spec, rows, w, np.zeros(n, np.uint8), 1)
    kept = np.bincount(sums.bottom.cells, minlength=40) / np.minimum(sums.counts, 2 * ROWS_PER_CELL)
    assert 0.8 < np.median(kept) < 1.2
    assert np.abs(np.log2(kept)).max() < 3


def test_weights_over_all_magnitudes_give_cells():
    rng = np.random.default_rng(0)
    rows, w = rng.normal(size=(3000, 2)), 10.0 ** rng.uniform(-320, 300, 3000)
    for size in (3000, 500):
        drawn = draw(np.arange(3000), (rows, rows), w, size, 7)
        support = make_support(drawn.parts[1], drawn.importance, 40)
        spec = CellReduction.of(drawn, 1, 3000, 1, support, {})
        found = spec.statistics(summed(spec, rows, w, np.zeros(3000, np.uint8), 1))
        assert (found.shares > 0).all()
        for values in (found.masses, found.means, found.covariances, found.shares):
            assert np.isfinite(values).all()


def test_sums_that_overflow_are_left_to_the_moments_to_tell():
    rows = np.full((3000, 2), 1e200) * np.random.default_rng(0).normal(size=(3000, 1))
    with pytest.raises(DataError, match="sums over the rows overflow"):
        JointDistribution(**OPTIONS | {"kernel_y": kernels.Gaussian(1e200)}).fit(
            rows[:, :1] * 1e-200, rows
        )


def test_another_array_library_gives_the_same():
    rows, w, folds = case(3000, 2)
    spec = replace(spec_of(rows, partition=True), functions={})
    ours = spec.statistics(summed(spec, rows, w, folds, 4))
    sums = to_host(summed(spec, strict.asarray(rows), strict.asarray(w), folds, 4))
    theirs = spec.statistics(sums)
    assert_array_equal(theirs.hashes, ours.hashes)
    assert_array_equal(theirs.atoms, ours.atoms)
    assert_allclose(theirs.covariances, ours.covariances, rtol=1e-13)
    assert_allclose(theirs.components, ours.components, rtol=1e-13)
    assert_array_equal(theirs.counts, ours.counts)


def test_a_function_that_fails_is_named():
    rows, _, folds = case(100, 2)
    spec = replace(spec_of(rows), functions={"bad": lambda z: z})
    with pytest.raises(DataError, match="'bad' must return shape"):
        summed(spec, rows, None, folds, 4)


# However the rows are cut ------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    n=st.integers(1, 3000),
    d=st.integers(1, 3),
    size=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
    seed=st.integers(0, 100),
    crowd=st.sampled_from([1, 2, 100]),
)
def test_any_cut_and_order_keeps_the_same_rows(n, d, size, cuts, seed, crowd):
    rows, w, folds = case(n, d, seed)
    spec = spec_of(rows, size)
    whole = spec.statistics(summed(spec, rows, w, folds, 4)) if w.any() else None
    edges = [0, *sorted(min(c, n) for c in cuts), n]
    before = cell_sums._CROWD
    cell_sums._CROWD = crowd  # how soon rows that can't be needed are dropped
    try:
        cuts = [slice(*pair) for pair in pairwise(edges)]
        strips = [summed(spec, rows[c], w[c], folds[c], 4, c.start) for c in cuts]
        strips = [strips[i] for i in np.random.default_rng(seed).permutation(len(strips))]
        total = reduce(spec.combine, strips)
    finally:
        cell_sums._CROWD = before
    if whole is None:
        return
    cut = spec.statistics(total)
    for name in ("atoms", "starts", "shares", "whole"):
        assert_array_equal(getattr(cut, name), getattr(whole, name))
    for name in ("masses", "means", "covariances", "functions"):
        assert_allclose(getattr(cut, name), getattr(whole, name), rtol=1e-9, atol=1e-12)


def joint_case(n=20_000):
    rng = np.random.default_rng(1)
    X, Y, w = rng.normal(size=(n, 2)), rng.normal(size=(n, 1)), rng.exponential(size=n)
    sides = tuple(
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), part[:9]), names)
        for part, names in ((X, ("a", "b")), (Y, ("c",)))
    )
    return (
        X,
        Y,
        w,
        MomentReduction(sides, 5),
        tuple(spec_of(part, 40, n, variable=i, n_folds=5) for i, part in enumerate((X, Y))),
    )


def passed(sample, spec, cells, scheduler="threads", workers=2):
    executor = RunOptions(scheduler, workers).executor()
    (moments, *sums), report = run_pass(sample, [spec, *cells], executor)
    return (moments,), tuple(sums), report


def test_a_pass_gives_the_same_bits_however_the_rows_are_cut(tmp_path):
    X, Y, w, spec, cells = joint_case()
    (bare,), none, _ = passed(open_sample(X, Y, weights=w), spec, ())
    assert none == ()
    (moments,), first, _ = passed(open_sample(X, Y, weights=w), spec, cells)
    assert_array_equal(moments.gram, bare.gram)
    counted = np.bincount(cells[1].support.assign(Y), w, minlength=cells[1].support.size)
    assert_allclose(first[1].masses.sum(axis=0), counted, rtol=1e-12)
    store = write_store(tmp_path / "s", X, Y, w, chunk_rows=777)
    chunked = (da.from_array(part, chunks=(1234, -1)) for part in (X, Y))
    others = [
        passed(open_sample(store), spec, cells, workers=1),
        passed(open_sample(store), spec, cells, scheduler="processes"),
        passed(open_sample(*chunked, weights=da.from_array(w, chunks=999)), spec, cells, workers=3),
    ]
    for _, sums, _ in others:
        for one, mine, theirs in zip(cells, first, sums, strict=True):
            assert_array_equal(theirs.masses, mine.masses)
            ours, other = one.statistics(mine), one.statistics(theirs)
            for name in ("means", "covariances", "functions", "atoms", "starts", "shares", "whole"):
                assert_array_equal(getattr(other, name), getattr(ours, name))


def test_memory_and_cost_know_the_cells():
    run, extent = RowRange(0, 4096, 4096), Extent(10**6, 3, strip_length(10**6))
    bare = moment_cost((20, 20), 44, 10, extent)
    cost = bare + Cost(state=9 * 8 * 16_384, partial=5000 * 8, retained=8 * 10**6)
    one, more_words = Executor("threads", 1), 5000 + 9 * 16_384 + 2 * 4096
    with_cells, without = (one.check_pass(c, extent, [run] * 2).predicted for c in (cost, bare))
    assert with_cells - without == 8 * (more_words + 5000 + 10**6)
    assert task_bytes(cost, extent, run)[0] - task_bytes(bare, extent, run)[0] == 8 * more_words
    X, Y, _, spec, cells = joint_case(1000)
    sample = open_sample(X, Y)
    executor = Executor("threads", 2, 1 << 40)
    context = fit_context(sample, range(0), n_folds=5, executor=executor)
    plans = [context.predict(spec.ranks, spec.width, some)[1].predicted for some in ((), cells)]
    costs = [one.cost(Extent(1000, 3, 4096)) for one in cells]
    # Of two tasks.
    assert plans[1] - plans[0] >= sum(c.partial + c.retained + 2 * c.state for c in costs)
    sums = summed(cells[0], X, None, np.zeros(1000, np.uint8), 5)
    assert sums.masses.nbytes + sums.counts.nbytes + sums.sums.nbytes == costs[0].partial


# Fits and files ----------------------------------------------------------------------------------

KERNEL = kernels.Gaussian(0.8)
OPTIONS = {"kernel_x": KERNEL, "kernel_y": KERNEL, "tol": 0.1, "n_folds": 3, "residual": False}


def fitted(constraint="normalized", d=2, n=2000, **options):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (n, 1))
    y = x + 0.5 * rng.normal(size=(n, d))
    fit = JointDistribution(**OPTIONS | {"constraint": constraint, "support_size": 60} | options)
    return fit.fit(x, y, functions={"up": lambda y: y[:, 0] > 0}), x, y


@pytest.mark.parametrize("constraint", ["normalized", "coupling"])
@pytest.mark.parametrize("d", [1, 2])
def test_a_fit_has_cells_of_both_variables_and_a_file_keeps_them(tmp_path, constraint, d):
    fit, x, y = fitted(constraint, d)
    model = fit.model_
    for variable, rows in ((model.x, x), (model.y, y)):
        cells = variable.cells
        assert cells.size <= 60
        counts = np.bincount(cells.support.assign(rows), minlength=cells.size)
        assert_allclose(cells.masses, counts / len(rows), rtol=1e-12)
        assert_allclose(cells.masses @ cells.means, rows.mean(axis=0), atol=1e-14)
        second = cells.covariances + cells.means[:, :, None] * cells.means[:, None, :]
        assert_allclose(np.tensordot(cells.masses, second, 1), rows.T @ rows / len(rows))
        if constraint == "coupling":
            shares = variable.basis.newton(rows).mean(axis=0)
            assert_allclose(cells.components.sum(axis=1), shares, rtol=1e-12)
    assert model.x.cells.names == ()
    assert model.y.cells.names == ("up",)
    assert_allclose(model.y.cells.masses @ model.y.cells.functions, [(y[:, 0] > 0).mean()])
    model.save(tmp_path / "m")
    back = load(tmp_path / "m")
    for mine, theirs in ((model.x.cells, back.x.cells), (model.y.cells, back.y.cells)):
        for name in ("masses", "means", "covariances", "names", "functions", "atoms", "starts"):
            assert_array_equal(getattr(theirs, name), getattr(mine, name))
        assert_array_equal(theirs.shares, mine.shares)
        assert_array_equal(theirs.whole, mine.whole)
        assert_array_equal(
            theirs.support.assign(y[:, : mine.means.shape[1]]),
            mine.support.assign(y[:, : mine.means.shape[1]]),
        )
        assert (theirs.components is None) == (constraint != "coupling")


def test_fewer_rows_than_cells_are_kept_whole():
    fit, _, y = fitted(n=50)
    cells = fit.model_.y.cells
    assert cells.size == 50
    assert cells.whole.all()
    assert_array_equal(np.unique(cells.atoms, axis=0), np.unique(y, axis=0))
    assert_array_equal(cells.means, cells.atoms)


def test_a_part_of_the_rows_is_summed_alone():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(30_000, 1))
    sample, rest = open_sample(x, x).split(0.2)
    held = JointDistribution(**OPTIONS, support_size=30).fit(rest).model_.y.cells
    other = JointDistribution(**OPTIONS, support_size=30).fit(sample).model_.y.cells
    for cells in (held, other):
        assert np.diff(cells.starts).mean() > 0.9 * ROWS_PER_CELL  # of all rows
    assert abs(held.masses @ held.means[:, 0] - other.masses @ other.means[:, 0]) > 0


def test_labels_are_never_mixed():
    rng = np.random.default_rng(5)
    y = np.column_stack([rng.integers(0, 3, 4000), rng.normal(size=4000)]).astype(float)
    sample = open_sample(y[:, 1:], y)
    columns = Columns(("kind", "value"), {}, {"kind": ("a", "b", "c")})
    sample = replace(sample, columns=(sample.columns[0], columns))
    kernel_y = kernels.Delta().on([0]) * kernels.Gaussian(1.0).on([1])
    fit = JointDistribution(**OPTIONS | {"kernel_y": kernel_y}, support_size=40).fit(sample)
    cells = fit.model_.y.cells
    assert_array_equal(cells.means[:, 0], np.round(cells.means[:, 0]))
    assert_array_equal(cells.covariances[:, 0, :], np.zeros((cells.size, 2)))


@pytest.fixture(scope="module")
def model():
    return fitted(n=400)[0].model_


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("masses", lambda a: -a, "masses"),
        ("masses", lambda a: 2 * a, "masses"),
        ("masses", lambda a: a[:-1], "y_cells_masses"),
        ("means", lambda a: a * np.nan, "not finite"),
        ("means", lambda a: a[:, :1], "y_cells_means"),
        ("covariances", lambda a: -a, "covariances"),
        ("covariances", lambda a: a + np.triu(np.ones(2), 1), "covariances"),
        ("functions", lambda a: np.full_like(a, np.inf), "not finite"),
        ("functions", lambda a: np.hstack([a, a]), "y_cells_functions"),
        ("starts", lambda a: a[::-1].copy(), "starts"),
        ("starts", lambda a: a * 0, "starts"),
        ("starts", lambda a: a + 10**12, "starts"),
        ("starts", lambda a: a.astype(float), "starts"),
        ("starts", lambda a: a[:-1], "y_cells_starts"),
        ("atoms", lambda a: a[:-1], "y_cells_shares"),
        ("shares", lambda a: 0 * a, "shares"),
        ("shares", lambda a: 2 * a, "shares"),
        ("shares", lambda a: a[:-1], "y_cells_shares"),
        ("whole", lambda a: a[:-1], "y_cells_whole"),
        ("support_left", lambda a: a * 0, "support is damaged"),
        ("support_left", None, "support is damaged"),
        ("support_thresholds", None, "lacks the array 'y_cells_support_thresholds'"),
        ("support_features", lambda a: a + 7, "support is damaged"),
        ("support_thresholds", lambda a: a * np.nan, "support is damaged"),
        ("support_points", lambda a: a * np.nan, "not finite"),
        ("support_points", lambda a: a[:0], "support is damaged"),
        ("shares", None, "y_cells_shares"),
    ],
)
def test_hostile_files_are_refused(model, name, change, message):
    state = model.to_state()
    key = f"y_cells_{name}"
    arrays = dict(state.arrays)
    if change is None:
        del arrays[key]
    else:
        arrays[key] = change(arrays[key])
    with pytest.raises(StoreError, match=message):
        type(model).from_state(replace(state, arrays=arrays))


def test_components_must_add_up():
    model = fitted("coupling", n=400)[0].model_
    state = model.to_state()
    for change in (lambda a: -a, lambda a: 2 * a, lambda a: a[:-1], lambda a: a * np.nan):
        arrays = state.arrays | {"x_cells_components": change(state.arrays["x_cells_components"])}
        with pytest.raises(StoreError, match=r"components|not finite"):
            type(model).from_state(replace(state, arrays=arrays))


def test_without_laws_there_are_no_cells(tmp_path):
    fit, _, _ = fitted(support_size=0)
    assert fit.model_.support is None
    fit.save(tmp_path / "m")
    assert load(tmp_path / "m").y.cells is None
    with pytest.raises(DataError, match="support_size of at least 1"):
        load(tmp_path / "m").masses  # noqa: B018 - the property raises
