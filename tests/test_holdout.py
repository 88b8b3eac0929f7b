"""Parts of a sample in every pass: NumPy masks are the oracle, reads are counted at the store."""

import shutil
from dataclasses import replace

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from click.testing import CliRunner
from conftest import pairwise, rewriting, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_reads import opened

from cme_dask import JointDistribution, PivotedCholesky, gram_columns, kernels
from cme_dask.cli import cli
from cme_dask.data.atomic import ATTRIBUTE
from cme_dask.data.store import compressors, sealed, write_array
from cme_dask.errors import DataError, StoreError
from cme_dask.numerics.basis import LinearBasis, NewtonBasis
from cme_dask.numerics.folds import BY_ROWS, Folding, Split, fold_of_rows
from cme_dask.numerics.moments import FeatureBlock, MomentReduction, strip_moments
from cme_dask.numerics.rows import BasisRanges, NearestRows
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.run import count_bad_values, run_pass
from cme_dask.passes.sources import open_sample

N = 10_001  # three strips, the last one short
DAY = 86_400.0
THREADS = RunOptions("threads", 2).executor()
EXAMPLES = settings(max_examples=6, suppress_health_check=list(HealthCheck))


def table():
    rng = np.random.default_rng(11)
    x = rng.standard_normal((N, 2))
    y = np.column_stack([np.sin(x[:, 0]), x[:, 1]]) + 0.3 * rng.standard_normal((N, 2))
    w = rng.exponential(size=N) * (rng.random(N) < 0.9)
    group = np.repeat(np.arange(60), 167)[:N] * 7 - 100
    time = 1.3e9 + np.sort(rng.uniform(0, 400 * DAY, size=N))
    return x, y, w, group, time


X, Y, W, GROUP, TIME = table()
COLUMNS = {"group": GROUP.astype(float), "time": TIME}
HALVES = ("rows", "group", "7d")


def write(path, *, weighted=False, chunk_rows=999, group=GROUP, time=TIME, x=X, y=Y):
    """A store with groups and times, these written through zarr itself."""
    write_store(path, x, y, W if weighted else None, chunk_rows=chunk_rows)
    store = zarr.open_group(str(path), mode="r+")
    index = store["row_sample/index"][...]
    roles = {"group": group, "time": time}
    for name, values in roles.items():
        if values is not None:
            rows = store.create_array(
                name,
                shape=values.shape,
                dtype=values.dtype,
                chunks=(chunk_rows,),
                compressors=compressors(),
                config={"write_empty_chunks": True},
            )
            rows[...] = values
            write_array(store["row_sample"], name, values[index])
    named = {name: f"the {name}" for name, values in roles.items() if values is not None}
    about = store.attrs[ATTRIBUTE]
    del about["checksum"]
    store.attrs[ATTRIBUTE] = sealed({**about, "schema_version": 3, "roles": named})
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("store") / "s.zarr", weighted=True)


@pytest.fixture(scope="module")
def plain_store(tmp_path_factory):
    """All rows weigh the same."""
    return write(tmp_path_factory.mktemp("store") / "p.zarr")


@pytest.fixture(scope="module")
def long_chunks(tmp_path_factory):
    """Each chunk is a strip."""
    path = tmp_path_factory.mktemp("store") / "l.zarr"
    return write(path, weighted=True, chunk_rows=4096)


def mask(by, share, held_out, seed=0):
    return Split(Folding.parse(by), share, seed, held_out).selects(np.arange(N), COLUMNS)


def spec_of(n_folds=1):
    sides = (
        FeatureBlock(NewtonBasis.from_points(kernels.Gaussian(1.0), X[:12]), ("a", "b")),
        FeatureBlock(NewtonBasis.from_points(kernels.Matern(1.5, 2.5), Y[:9]), ("c", "d")),
    )
    return MomentReduction(sides, n_folds)


def moments_of(sample, n_folds=1, executor=THREADS):
    (moments,), report = run_pass(sample, [spec_of(n_folds)], executor)
    return moments, report


def oracle(kept, folds=None, n_folds=1, weights=None):
    folds = np.zeros(N, dtype=np.uint8) if folds is None else folds
    w = None if weights is None else weights[kept]
    return strip_moments(spec_of(n_folds), (X[kept], Y[kept]), w, folds[kept])


def assert_close(found, expected):
    np.testing.assert_array_equal(found.rows, expected.rows)
    scale = np.abs(expected.gram).max()
    np.testing.assert_allclose(found.gram, expected.gram, rtol=0, atol=1e-13 * scale)
    np.testing.assert_allclose(found.traces, expected.traces, rtol=1e-12)


# Moments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", HALVES)
@pytest.mark.parametrize("fold_by", HALVES)
def test_moments_of_parts_are_those_of_masked_rows(store, by, fold_by):
    sample = open_sample(str(store)).fold_by(fold_by)
    folds = Folding.parse(fold_by).folds(np.arange(N), COLUMNS, 5)
    whole, _ = moments_of(sample, 5)
    assert_close(whole, oracle(np.ones(N, bool), folds, 5, W))
    together = None
    for part, held_out in zip(sample.split(0.3, by=by, seed=4), (False, True), strict=True):
        kept = mask(by, 0.3, held_out, seed=4)
        assert 0.1 < kept.mean() < 0.9
        found, report = moments_of(part, 5)
        assert report.rows == kept.sum()
        assert found.n_rows == (kept & (W > 0.0)).sum()
        assert_close(found, oracle(kept, folds, 5, W))
        together = found if together is None else together + found
    assert_close(together, whole)


def test_folds_by_rows_are_what_they_were(store):
    """The default does not change a bit."""
    found, _ = moments_of(open_sample(X, Y, weights=W), 10)
    again, _ = moments_of(open_sample(str(store)).fold_by("rows"), 10)
    strips = [slice(s, s + 4096) for s in range(0, N, 4096)]
    one, two, three = (
        strip_moments(spec_of(10), (X[s], Y[s]), W[s], fold_of_rows(s.start, min(s.stop, N), 10))
        for s in strips
    )
    # Strips are added up along the tree, and mirrored once at the end, which changes no bit.
    for moments in (found, again):
        np.testing.assert_array_equal(moments.gram, ((one + two) + three).gram)


@pytest.fixture(scope="module")
def reference():
    """Bits of train and test moments, by what is held out; arrays in memory, one thread."""
    sample = open_sample(X, Y, weights=W, group=GROUP, time=TIME)
    sync = RunOptions("synchronous").executor()
    return {
        by: [moments_of(p, 3, sync)[0].gram.tobytes() for p in sample.fold_by(by).split(0.3)]
        for by in HALVES
    }


cuts = st.lists(st.integers(1, N - 1), max_size=6, unique=True).map(
    lambda edges: tuple(np.diff([0, *sorted(edges), N]).tolist())
)


@EXAMPLES
@given(
    by=st.sampled_from(HALVES),
    chunk_rows=st.integers(500, N + 5),
    threads=st.integers(1, 4),
)
def test_any_store_chunks_give_the_same_bits(reference, tmp_path_factory, by, chunk_rows, threads):
    path = tmp_path_factory.mktemp("store") / "s.zarr"
    write(path, weighted=True, chunk_rows=chunk_rows)
    executor = RunOptions("threads", threads).executor()
    parts = open_sample(str(path)).fold_by(by).split(0.3)
    assert [moments_of(p, 3, executor)[0].gram.tobytes() for p in parts] == reference[by]


@EXAMPLES
@given(by=st.sampled_from(HALVES), chunks=cuts, other=cuts, threads=st.integers(1, 4))
def test_any_dask_chunks_give_the_same_bits(reference, by, chunks, other, threads):
    lazy = {
        name: da.from_array(values, chunks=(other,))
        for name, values in (("weights", W), ("group", GROUP), ("time", TIME))
    }
    sample = open_sample(
        da.from_array(X, chunks=(chunks, 1)), da.from_array(Y, chunks=(other, 2)), **lazy
    )
    executor = RunOptions("threads", threads).executor()
    parts = sample.fold_by(by).split(0.3)
    assert [moments_of(p, 3, executor)[0].gram.tobytes() for p in parts] == reference[by]


def test_processes_give_the_same_bits(reference, store):
    parts = open_sample(str(store)).fold_by("7d").split(0.3)
    executor = RunOptions("processes", 2).executor()
    assert [moments_of(p, 3, executor)[0].gram.tobytes() for p in parts] == reference["7d"]


@pytest.mark.parametrize("by", ["group", "7d"])
def test_units_stay_whole(store, by):
    """In the moments, where rows of a unit would be counted on both sides."""
    sample = open_sample(str(store)).fold_by(by)
    units = Folding.parse(by).units(np.arange(N), COLUMNS)
    rows = [set(units[mask(by, 0.4, side)]) for side in (False, True)]
    assert not rows[0] & rows[1]
    for part, held_out in zip(sample.split(0.4), (False, True), strict=True):
        found, _ = moments_of(part, 5)
        folds = sample.folding.folds(np.arange(N), COLUMNS, 5)
        counted = mask(by, 0.4, held_out) & (W > 0.0)
        np.testing.assert_array_equal(found.rows, np.bincount(folds[counted], minlength=5))


@pytest.mark.parametrize("pivots", ["sampled", "greedy", "random"])
def test_strips_without_a_row_of_the_part(pivots):
    """Sorted by group, a strip is of one group: the first or the second holds nothing."""
    group = np.repeat([0, 1, 2], [4096, 4096, N - 8192])
    sample = open_sample(X, Y, group=group)
    for part in sample.split(0.5, by="group", seed=0):
        kept = part.part.selects(np.arange(N), {"group": group.astype(float)})
        assert 0 < kept.sum() < N
        assert_close(moments_of(part)[0], oracle(kept))
        basis = PivotedCholesky(kernels.Gaussian(2.0), tol=0.05, pivots=pivots)
        basis.fit(part, scheduler="threads", workers=2)
        assert basis.model_.about["rows"] == kept.sum()
        assert kept[[np.flatnonzero((p == X).all(axis=1))[0] for p in basis.pivots_]].all()


def test_a_part_without_rows_is_named():
    """All rows are one group: one side has none."""
    parts = open_sample(X, Y, group=np.zeros(N)).split(0.5, by="group")
    sizes = [p.part.selects(np.zeros(1), {"group": np.zeros(1)}).sum() for p in parts]
    empty = parts[int(np.argmin(sizes))]
    points = PivotedCholesky(kernels.Gaussian(2.0), pivots=X[:3])
    for call in (
        lambda: moments_of(empty),
        lambda: JointDistribution().fit(empty),
        lambda: points.fit(empty),
        lambda: run_pass(empty, [NearestRows(X[:1], 5, np.ones(2))], THREADS),
    ):
        with pytest.raises(DataError, match=r"no row belongs to this part \(.*0.5 by group\)"):
            call()


def test_a_split_says_at_once_that_a_part_has_no_rows(tmp_path):
    n = 900
    zeros = np.zeros(n, dtype=np.int64)
    few = write(tmp_path / "few.zarr", group=zeros, time=None, x=X[:n], y=Y[:n])
    sample = open_sample(str(few))
    assert sample.row_sample.complete
    with pytest.raises(DataError, match=r"no row belongs to this part \(.*0.4 by group\): take"):
        sample.split(0.4, by="group")
    assert len(sample.k_fold(2, by="group")) == 2  # one of them holds out all
    with pytest.raises(DataError, match=r"\(1e-05 by rows\)"):
        sample.split(1e-5)
    for command in (
        ["fit", few, "--out", tmp_path / "m", "--kernel", "median"],
        ["fit", few, "--dry-run"],
    ):
        split = ["--fold-by", "group", "--hold-out", "0.4"]
        result = CliRunner().invoke(cli, [*map(str, command), *split])
        assert result.exit_code == 2
        assert "by group): give another --hold-out" in " ".join(result.output.split())
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("by", ["group", "7d"])
def test_a_part_may_have_no_row_in_a_row_sample_of_some(tmp_path, by):
    """Ten rows are units of their own, and the row sample holds rows of the other unit alone."""
    units = np.zeros(N)
    units[-10:] = np.arange(1, 11) * 7 * DAY
    store = write(tmp_path / "s.zarr", group=units.astype(np.int64), time=units)
    sample = open_sample(str(store))
    common = np.flatnonzero(units[sample.row_sample.index] == 0.0)[:200]
    sample = replace(sample, row_sample=replace(sample.row_sample.only(common), complete=False))
    for seed in range(4):
        parts = sample.split(0.4, by=by, seed=seed)
        assert 0 in [len(part.row_sample) for part in parts]
        for part in parts:
            inside = part.part.selects(np.arange(N), {"group": units, "time": units})
            _, report = run_pass(part, [NearestRows(X[:1], 1, np.ones(2))], THREADS)
            assert report.rows == inside.sum() > 0


# Other passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", HALVES)
def test_nearest_rows_of_a_part(store, by):
    sample = open_sample(str(store))
    points, scale = X[:3] + 0.01, np.array([1.0, 2.0])
    for part, held_out in zip(sample.split(0.2, by=by), (False, True), strict=True):
        (found,), _ = run_pass(part, [NearestRows(points, 50, scale)], THREADS)
        for i, point in enumerate(points):
            distance = np.sqrt((((X - point) / scale) ** 2).sum(axis=1))
            distance[~mask(by, 0.2, held_out) | (W == 0.0)] = np.inf
            order = np.argsort(distance, kind="stable")[:50]
            np.testing.assert_array_equal(found.index[i], order)
            np.testing.assert_array_equal(found.y[i], Y[order])
            np.testing.assert_array_equal(found.weights[i], W[order])


@pytest.mark.parametrize("by", HALVES)
def test_ranges_over_a_part(store, by):
    bases = [
        LinearBasis(side.basis, np.eye(side.basis.rank), np.ones(side.basis.rank))
        for side in spec_of().features
    ]
    for part, held_out in zip(
        open_sample(str(store)).split(0.2, by=by), (False, True), strict=True
    ):
        kept = mask(by, 0.2, held_out) & (W > 0.0)
        (found,), _ = run_pass(part, [BasisRanges(tuple(bases))], THREADS)
        for ranges, basis, rows in zip(found, bases, (X, Y), strict=True):
            psi = basis(rows[kept])
            np.testing.assert_allclose(ranges, [psi.min(axis=0), psi.max(axis=0)], atol=1e-12)


@pytest.mark.parametrize("mode", ["greedy", "random"])
@pytest.mark.parametrize("by", HALVES)
def test_pivots_over_all_rows_are_rows_of_the_part(store, mode, by):
    options = {"tol": 0.4, "pivots": mode, "random_state": 1}
    for part, held_out in zip(
        open_sample(str(store)).split(0.3, by=by), (False, True), strict=True
    ):
        kept = mask(by, 0.3, held_out)
        fit = PivotedCholesky(kernels.Gaussian(1.0), **options).fit(part, scheduler="threads")
        rows = [int(np.flatnonzero((p == X).all(axis=1))[0]) for p in fit.pivots_]
        assert kept[rows].all()
        assert fit.model_.about["rows"] == (kept & (W > 0.0)).sum()
        if mode == "greedy":  # Algorithm 1 on the masked rows takes the same pivots
            alone = PivotedCholesky(kernels.Gaussian(1.0), **options).fit(X[kept], weights=W[kept])
            np.testing.assert_array_equal(alone.pivots_, fit.pivots_)
            assert alone.trace_error_ == pytest.approx(fit.trace_error_, rel=1e-9)


def test_a_fit_on_a_part_is_the_fit_on_its_rows_alone(store):
    options = {
        "kernel_x": kernels.Gaussian(1.0),
        "kernel_y": kernels.Gaussian(1.0),
        "pivots": (X[:15], Y[:12]),
        "n_folds": 1,
        "reg": 1e-4,
        "support_size": 0,
        "accuracy": 0.0,
    }
    rest, _ = open_sample(str(store)).split(0.3, by="7d")
    kept = mask("7d", 0.3, False)
    found = JointDistribution(**options).fit(rest)
    alone = JointDistribution(**options).fit(X[kept], Y[kept], weights=W[kept])
    at = X[:20]
    np.testing.assert_allclose(
        found.expect(None, at), alone.expect(None, at, return_std=False), atol=1e-9
    )
    assert found.report_.rows == kept.sum()


def test_unusable_values_of_other_rows_do_not_matter(tmp_path):
    x = X.copy()
    held = np.flatnonzero(mask("7d", 0.3, True))
    x[held[[3, 50]], 1] = np.nan
    write(tmp_path / "s.zarr")
    with rewriting(tmp_path / "s.zarr") as group:
        group["x"][:] = x
    rest, held_out = open_sample(str(tmp_path / "s.zarr")).split(0.3, by="7d")
    assert moments_of(rest)[0].n_rows == N - len(held)
    count_bad_values(rest, THREADS)  # finds none
    message = rf"column 'x1' has 2 \(first at row {held[3]}\) NaN or infinite"
    with pytest.raises(DataError, match=message):
        count_bad_values(held_out, THREADS)
    with pytest.raises(DataError, match=message):
        JointDistribution(pivots=(X[:5], Y[:5]), kernel_x=kernels.Gaussian(1.0)).fit(held_out)


def test_rows_without_a_time_are_found(tmp_path):
    time = TIME.copy()
    time[[5000, 7000]] = np.nan
    write(tmp_path / "s.zarr", time=time)
    sample = open_sample(str(tmp_path / "s.zarr"))
    assert moments_of(sample, 5)[0].n_rows == N  # nobody asks for the time
    for part in (sample.fold_by("7d"), *sample.split(0.3, by="7d")):
        with pytest.raises(DataError, match=r"column 'time' has 2 \(first at row 5000\) NaN"):
            JointDistribution(kernel_x=kernels.Gaussian(1.0), tol=0.3).fit(part)


# Row samples ----------------------------------------------------------------------------------


@pairwise(weighted=[False, True], by=list(HALVES), size=[300, 20_000])
def test_row_samples_of_parts_agree_wherever_the_rows_lie(store, plain_store, weighted, by, size):
    """The stored sample filtered, and what is gathered from arrays, are the same rows."""
    path = str(store if weighted else plain_store)
    w = {"weights": W} if weighted else {}
    group = zarr.open_group(path, mode="r")
    foreign = {name: group[name] for name in ("group", "time", *w)}
    lazy = {"group": GROUP, "time": TIME, **w}
    lazy = {name: da.from_array(v, chunks=777) for name, v in lazy.items()}
    samples = [
        open_sample(path),
        open_sample(X, Y, group=GROUP, time=TIME, **w),
        open_sample(group["x"], group["y"], **foreign),
        open_sample(da.from_array(X, chunks=(1234, 2)), da.from_array(Y, chunks=777), **lazy),
    ]
    for side in (0, 1):
        kept = mask(by, 0.3, bool(side)) & ((W > 0.0) | (not weighted))
        found = [
            sample_rows(s.fold_by("7d").split(0.3, by=by)[side], size, 0, THREADS)[0]
            for s in samples
        ]
        assert all(len(rows) == min(size, kept.sum()) for rows in found)
        for rows in found:
            np.testing.assert_array_equal(rows.index, found[0].index)
            np.testing.assert_array_equal(rows.keys, found[0].keys)
            np.testing.assert_array_equal(rows.units["time"], TIME[rows.index])
            np.testing.assert_array_equal(rows.parts[0], X[rows.index])
            np.testing.assert_array_equal(rows.parts[1], Y[rows.index])
            np.testing.assert_array_equal(rows.weights, W[rows.index] if weighted else 1.0)
            assert rows.complete == (size >= kept.sum())
            assert kept[rows.index].all()
            folds = Folding.parse("7d").folds(np.arange(N), COLUMNS, 10)
            np.testing.assert_array_equal(rows.folds(Folding.parse("7d"), 10), folds[rows.index])
        if rows.complete:
            truth = np.average(X[kept], axis=0, weights=W[kept] if weighted else None)
            np.testing.assert_allclose(rows.importance @ rows.parts[0], truth, atol=1e-12)


def test_importance_of_a_part_estimates_its_mean():
    """Over seeds, so that the error of the mean is known; weighted, a tenth of the rows."""
    kept = mask("7d", 0.5, True)
    truth = np.average(X[kept, 0], weights=W[kept])
    sample = open_sample(X, Y, weights=W, time=TIME)
    found = []
    for seed in range(40):
        rows = sample_rows(sample.split(0.5, by="7d")[1], 500, seed, THREADS)[0]
        assert not rows.complete
        found.append(rows.importance @ rows.parts[0][:, 0])
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert abs(np.mean(found) - truth) < 3.5 * error


def test_a_small_stored_sample_of_a_part_is_enough(store):
    """Filtered it is smaller than what is asked for; only of a few rows more are looked for."""
    sample = open_sample(str(store))
    for stored, passes in ((N, 0), (4000, 0), (1000, 2)):
        cut = replace(sample, row_sample=sample.row_sample.prefix(stored))
        rows, found = sample_rows(cut.split(0.4, by="7d")[1], stored, 0, THREADS)
        assert found == passes
        assert len(rows) == stored if passes else 0.2 * stored < len(rows) < 0.6 * stored
    assert sample_rows(sample, N, 0, THREADS)[1] == 0  # all rows that have a weight


# Reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fold_by", "by", "columns"),
    [
        ("rows", "rows", set()),
        ("rows", "group", {"group"}),
        ("7d", "7d", {"time"}),
        ("7d", "group", {"group", "time"}),
        ("7d", None, {"time"}),
    ],
)
def test_each_chunk_is_read_once_and_only_of_needed_columns(long_chunks, fold_by, by, columns):
    counted, group = opened(long_chunks)
    sample = open_sample(group).fold_by(fold_by)
    sample = sample if by is None else sample.split(0.3, by=by)[0]
    fit = JointDistribution(
        kernel_x=kernels.Gaussian(2.0), kernel_y=kernels.Gaussian(2.0), tol=1e-1
    ).fit(sample, scheduler="threads", workers=2)
    assert fit.n_passes_ == 1
    for name in ("x", "y", "weights", "group", "time"):
        counts = counted.chunks(name)
        if name in ("group", "time") and name not in columns:
            assert not counts
        else:
            assert len(counts) == 3
            assert set(counts.values()) == {1}


def test_passes_without_folds_leave_their_column_unread(plain_store):
    counted, group = opened(plain_store)
    sample = open_sample(group).fold_by("7d")
    moments_of(sample, 1)
    run_pass(sample, [NearestRows(X[:2], 5, np.ones(2))], THREADS)
    PivotedCholesky(kernels.Gaussian(2.0), tol=0.1, pivots="greedy").fit(sample)
    assert not counted.chunks("time")


# What is refused, and what says what it is ------------------------------------------------------


def test_what_a_sample_without_groups_or_times_says(tmp_path):
    plain = open_sample(str(write_store(tmp_path / "p.zarr", X, Y)))
    for by, column in (("7d", "time"), ("group", "group")):
        message = rf"folds by {by} need the {column} of each row, .*ingest with --{column} COLUMN"
        with pytest.raises(DataError, match=message):
            plain.fold_by(by)
        with pytest.raises(DataError, match=message):
            plain.split(by=by)
    assert plain.split(seed=3)[1].part == Split(BY_ROWS, 0.2, 3, True)


def test_parts_are_refused_where_all_rows_are_needed(store, tmp_path):
    rest, _ = open_sample(str(store)).split(0.2)
    fit = PivotedCholesky(kernels.Gaussian(2.0), tol=0.1).fit(rest)
    for call in (
        lambda: fit.transform(rest),
        lambda: fit.transform_store(rest, tmp_path / "f"),
        lambda: gram_columns(kernels.Gaussian(1.0), rest, X[:3]),
    ):
        with pytest.raises(DataError, match=r"all rows, this is a part of them \(all but 0.2 by"):
            call()
    assert not (tmp_path / "f").exists()
    with pytest.raises(DataError, match=r"this is a part already .*: split the whole sample"):
        rest.split(0.5)


def test_repr_tells_folds_and_part(store):
    held_out = open_sample(str(store)).fold_by("7d").split(0.25)[1]
    assert "10,001 rows of which 0.25 by 7d, weighted, folds by 7d" in repr(held_out)
    assert held_out.part.folding == held_out.folding


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("time"), "lacks the array 'time'"),
        (lambda s: s.pop("row_sample/time"), "lacks the array 'time'"),
        (lambda s: s.replace("time", TIME.astype("f4")), "'time' of .* should be float64 rows"),
        (lambda s: s.replace("group", GROUP * 1.0), "'group' of .* should be int64 rows"),
        (lambda s: s.replace("time", TIME[:-1]), "has 10000 rows, its description says 10001"),
        (lambda s: s.replace("row_sample/time", TIME[:7]), "row sample .* does not fit its rows"),
        (lambda s: s.roles(["time"]), "describes no roles"),
        (lambda s: s.roles({"season": "s"}), "describes no roles"),
    ],
)
def test_damaged_roles_are_named(tmp_path, plain_store, damage, message):
    shutil.copytree(plain_store, tmp_path / "s.zarr")
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="r+")

    class Damage:
        def pop(self, name):
            del group[name]

        def replace(self, name, values):
            del group[name]
            write_array(group, name, values)

        def roles(self, value):
            about = dict(group.attrs[ATTRIBUTE])
            del about["checksum"]
            group.attrs[ATTRIBUTE] = {**about, "roles": value}

    damage(Damage())
    with pytest.raises(StoreError, match=message):
        open_sample(str(tmp_path / "s.zarr"))


# Groups and times of arrays and tables ----------------------------------------------------------


STAMPS = pd.to_datetime(TIME[:500].round(), unit="s")


@pytest.mark.parametrize(
    "time",
    [
        TIME[:500].round(),
        STAMPS,
        pd.Series(STAMPS.tz_localize("UTC").tz_convert("Asia/Shanghai")),
        STAMPS.to_numpy(),
        da.from_array(STAMPS.to_numpy(), chunks=99),
        xr.DataArray(STAMPS.to_numpy(), dims="t"),
        list(TIME[:500].round()),
    ],
)
def test_times_in_any_form_are_the_same_seconds(time):
    sample = open_sample(X[:500], Y[:500], time=time)
    np.testing.assert_array_equal(sample.time.read(0, 500)[:, 0], TIME[:500].round())


def test_texts_are_groups_and_tables_have_them_as_columns():
    labels = np.array(["b", "a", "c"])[np.arange(500) % 3]
    frame = pd.DataFrame({"u": X[:500, 0], "v": Y[:500, 0], "station": labels, "at": STAMPS})
    frame["kind"] = pd.Categorical(labels)
    codes = np.arange(500) % 3
    for name in ("station", "kind"):
        sample = open_sample(frame, x_columns=["u"], y_columns=["v"], group=name, time="at")
        np.testing.assert_array_equal(sample.group.read(0, 500)[:, 0], codes)
        np.testing.assert_array_equal(sample.time.read(0, 500)[:, 0], TIME[:500].round())
    held = sample.split(0.5, by="group", seed=1)[1]
    assert held.part is not None
    missing = labels.astype(object)
    missing[[3, 9]] = None, np.nan
    found = open_sample(X[:500], Y[:500], group=missing).group.read(0, 500)[:, 0]
    assert set(np.flatnonzero(np.isnan(found))) == {3, 9}
    texts = pd.Series(missing, dtype="string")
    again = open_sample(X[:500], Y[:500], group=texts).group.read(0, 500)[:, 0]
    np.testing.assert_array_equal(again, found)
    plain = labels.astype(np.dtypes.StringDType())
    sample = open_sample(X[:500], Y[:500], group=plain)
    np.testing.assert_array_equal(sample.group.read(0, 500)[:, 0], codes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"time": np.array(["2013-03-01"] * 500)},
            "time must be timestamps or seconds .* got text",
        ),
        ({"time": TIME[:499]}, "numbers of rows differ: x has 500, y has 500, time has 499"),
        ({"group": X[:500]}, "group must have one column, got 2"),
        ({"group": da.from_array(np.array(["a"] * 500))}, "groups of a Dask array must be numbers"),
    ],
)
def test_unusable_groups_and_times(given, message):
    with pytest.raises(DataError, match=message):
        open_sample(X[:500], Y[:500], **given)
    with pytest.raises(DataError, match="a sample holds y, weights, group and time itself"):
        open_sample(open_sample(X, Y), **given)
