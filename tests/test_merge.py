"""Models of parts of the rows, merged, are the model of all rows; what can't be merged is named."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import oracle_joint as oracle
import pytest
from click.testing import CliRunner
from conftest import write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from cme_dask import JointDistribution, constraints, kernels, load, merge, open_sample
from cme_dask.cli import cli
from cme_dask.errors import DataError
from cme_dask.models.merging import JointSums
from cme_dask.numerics.basis import StackedBasis
from cme_dask.numerics.cells import ROWS_PER_CELL, BottomK, CellReduction, CellSums
from cme_dask.numerics.folds import fold_of_rows
from cme_dask.numerics.moments import MomentReduction, strip_moments
from cme_dask.numerics.reduction import Strip
from cme_dask.numerics.support import Support

N, RANKS = 1500, (11, 8)
KERNEL = kernels.Gaussian(1.0)
CONSTRAINTS = {
    "normalized": "normalized",
    "none": "none",
    "certified": "certified",
    "pointwise": constraints.Pointwise(landmarks=RANKS, tol=1e-10),
    "coupling": constraints.Coupling(landmarks=RANKS, tol=1e-10),
}


def positive(y):
    return (y[:, 0] > 5).astype(float)


FUNCTIONS = {"positive": positive}


def rows(n=N, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    y = np.column_stack([np.sin(x[:, 0]) + 5, x[:, 1]]) + 0.3 * rng.normal(size=(n, 2))
    return x, y, rng.uniform(0.0, 2.0, n)


X, Y, W = rows()


def estimator(constraint="normalized", **changed):
    given = {} if constraint == "coupling" else {"pivots": (X[: RANKS[0]], Y[: RANKS[1]])}
    parameters = {
        "kernel_x": KERNEL,
        "kernel_y": KERNEL,
        "constraint": CONSTRAINTS[constraint],
        "reg": 1e-3,
        "tol": 0.3,
        "support_size": 40,
        **given,
        **changed,
    }
    return JointDistribution(**parameters)


def fitted(constraint="normalized", **changed):
    return estimator(constraint, **changed).fit(
        X, Y, weights=W, functions=FUNCTIONS, scheduler="synchronous"
    )


@cache
def whole_model(constraint="normalized"):
    return fitted(constraint).model_


def part(whole, start, stop, constraint="normalized", *, numbered=True, **changed):
    """The model of some rows, with the pivots and cells of another."""
    here = slice(start, stop)
    return (
        estimator(constraint, **changed)
        .partial_fit(
            X[here],
            Y[here],
            weights=W[here],
            functions=FUNCTIONS,
            like=whole,
            first_row=start if numbered else 0,
            scheduler="synchronous",
        )
        .model_
    )


def parts(whole, count, constraint="normalized", **changed):
    edges = np.linspace(0, N, count + 1).astype(int).tolist()
    return [part(whole, a, b, constraint, **changed) for a, b in pairwise(edges)]


def assert_same_model(a, b, rtol=1e-12, *, folds=True):
    """Agreement of all answers, relative to the scale of each."""

    def near(found, expected):
        scale = max(np.abs(expected).max(), 1.0)
        assert_allclose(found, expected, rtol=0, atol=rtol * scale)

    points, others = X[:40], Y[:30]
    for at in ({"X": points}, {"Y": others}):
        (mean, std), (expected, expected_std) = (m.expect(**at, return_std=True) for m in (a, b))
        near(mean, expected)
        if folds:
            near(std, expected_std)
        laws, expected_laws = (m.conditional(**at) for m in (a, b))
        near(laws.weights(), expected_laws.weights())
        near(laws.mean(), expected_laws.mean())
        near(laws.cov(), expected_laws.cov())
    near(a.expect("positive", points), b.expect("positive", points))
    near(a.density_ratio(points, others), b.density_ratio(points, others))
    near(a.masses, b.masses)
    near(a.y.cells.covariances, b.y.cells.covariances)
    near(a.y.cells.functions, b.y.cells.functions)
    assert a.about["rows"] == b.about["rows"]
    for name in "xy":
        if b.about["trace_error"][name] is not None:
            near(a.about["trace_error"][name], b.about["trace_error"][name])
        assert a.about["held_out"][name].keys() == b.about["held_out"][name].keys()


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_ten_models_merge_to_the_model_of_all_rows(constraint):
    whole = whole_model(constraint)
    merged = merge(parts(whole, 10, constraint))
    # Iterations end within their tolerance of the solution: 1e-10 here.
    tol = 1e-8 if constraint in ("pointwise", "coupling") else 1e-12
    assert_same_model(merged, whole, tol)
    for name in ("x", "y"):
        mine, theirs = getattr(merged, name).cells, getattr(whole, name).cells
        assert_array_equal(mine.atoms, theirs.atoms)
        assert_array_equal(mine.starts, theirs.starts)
        assert_allclose(mine.shares, theirs.shares, rtol=1e-14)
        assert_array_equal(mine.whole, theirs.whole)


def test_the_merged_model_is_the_dense_one():
    merged = merge(parts(whole_model(), 3))
    pivots = X[: RANKS[0]], Y[: RANKS[1]]
    f = np.column_stack([Y, positive(Y)])
    means = oracle.means(KERNEL, KERNEL, X, Y, *pivots, W, f)
    coef = oracle.coefficients(means, "normalized", (1e-3, 1e-3), "two-sided")
    newton = oracle.newton(KERNEL, X[:20], pivots[0])
    expected = oracle.expect(newton, coef, means)
    assert_allclose(merged.expect(["y0", "y1", "positive"], X[:20]), expected, rtol=1e-9)
    assert_allclose(merged.about["trace_error"]["x"], means["tau_x"], rtol=1e-9)


@settings(max_examples=12)
@given(
    cuts=st.lists(st.integers(1, N // 2 - 1).map(lambda i: 2 * i), max_size=4, unique=True),
    order=st.randoms(),
)
def test_any_split_in_any_order_gives_the_same_model(cuts, order):
    whole = whole_model()
    edges = [0, *sorted(cuts), N]
    models = [part(whole, a, b) for a, b in pairwise(edges)]
    order.shuffle(models)
    merged = merge(models)
    assert_same_model(merged, whole)
    assert_array_equal(merged.y.cells.atoms, whole.y.cells.atoms)
    nested = merge([merge(models[:1]), *models[1:]])
    assert_same_model(nested, merged)


def test_rows_of_other_tables_have_the_same_numbers_and_other_folds(tmp_path):
    whole = whole_model()
    models = parts(whole, 3, numbered=False)
    merged = merge(models)
    assert_same_model(merged, whole, folds=False)
    backwards = merge(models[::-1])
    assert_same_model(backwards, merged)
    assert_array_equal(backwards.y.cells.atoms, merged.y.cells.atoms)  # ties don't tell the order
    distance = np.abs(merged.expect("y0", X[:9], return_std=True)[1])
    expected = whole.expect("y0", X[:9], return_std=True)[1]
    assert 0.2 < np.median(distance / expected) < 5
    known = {tuple(row) for row in Y}
    assert all(tuple(row) in known for row in merged.y.cells.atoms)


@pytest.mark.parametrize("constraint", ["pointwise", "coupling"])
def test_saved_and_unsaved_models_have_the_same_constraint(constraint, tmp_path):
    first, second = parts(whole_model(constraint), 2, constraint)
    first.save(tmp_path / "first")
    assert merge([tmp_path / "first", second]).about["rows"] == len(X)
    for several in (first, None):
        with pytest.raises(DataError, match="merging takes a list of models or paths, got"):
            merge(several)


def test_saved_models_merge_without_dask_or_sklearn(tmp_path):
    whole = whole_model()
    models = parts(whole, 2)
    for i, model in enumerate(models):
        model.save(tmp_path / f"{i}.zarr")
    code = f"""
import sys
import cme_dask
model = cme_dask.merge([{str(tmp_path / "0.zarr")!r}, {str(tmp_path / "1.zarr")!r}])
heavy = {{"dask", "distributed", "sklearn", "pandas"}} & set(sys.modules)
assert not heavy, heavy
model.save({str(tmp_path / "m.zarr")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_model(load(tmp_path / "m.zarr"), whole)
    again = merge([tmp_path / "m.zarr"])  # of one model, itself
    assert_same_model(again, whole)


def test_merging_leaves_the_models_as_they_were():
    models = parts(whole_model(), 2)
    before = [{k: v.copy() for k, v in m.moments.items()} for m in models]
    merge(models)
    for model, arrays in zip(models, before, strict=True):
        for name, values in arrays.items():
            assert_array_equal(model.moments[name], values)


def test_the_two_sides_of_a_split_make_the_whole(tmp_path):
    whole = whole_model()
    sample = open_sample(X, Y, weights=W)
    models = [
        estimator()
        .partial_fit(side, functions=FUNCTIONS, like=whole, scheduler="synchronous")
        .model_
        for side in sample.split(0.3)
    ]
    merged = merge(models)
    assert_same_model(merged, whole)
    assert models[0].about["part"] is not None
    assert merged.about["part"] is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reg": 1e-2}, r"ridges differ \(.*0.001.*0.01"),
        ({"n_folds": 5}, r"numbers of folds differ \(10; 5\)"),
        ({"constraint": "none"}, "constraints differ"),
        ({"kernel_x": kernels.Gaussian(2.0)}, r"kernels of x differ \(Gaussian.*Gaussian"),
        ({"kernel_y": kernels.Gaussian(0.7)}, "kernels of y differ"),
        ({"pivots": (X[1:12], Y[:8])}, r"pivots of x differ \(11 and 11 of them\)"),
        ({"pivots": (X[:11], Y[:7])}, r"pivots of y differ \(8 and 7 of them\)"),
        ({"support_size": 20}, r"cells of x differ \(40 and \d+ of them\)"),
        ({"support_size": 0}, "only one of them has cells"),
    ],
)
def test_the_difference_is_named(changed, message):
    first, second = whole_model(), fitted(**changed).model_
    with pytest.raises(DataError, match=rf"model 2 can't be merged with the first one, {message}"):
        merge([first, second])


def test_other_columns_and_functions_are_named():
    first = whole_model()
    other = estimator().fit(X, Y, weights=W, scheduler="synchronous").model_
    with pytest.raises(DataError, match=r"declared functions of y differ \('positive'; none\)"):
        merge([first, other])
    renamed = estimator().fit(open_sample(X, Y, weights=W), scheduler="synchronous")
    narrow = JointDistribution(kernel_x=KERNEL, kernel_y=KERNEL, tol=0.3).fit(X[:, :1], Y)
    with pytest.raises(DataError, match=r"columns of x differ \(x0, x1; x0\)"):
        merge([renamed.model_, narrow.model_])


def test_what_does_not_add_up_is_refused():
    with pytest.raises(DataError, match="at least one model"):
        merge([])
    with pytest.raises(DataError, match="got int"):
        merge([3])
    model = whole_model()
    several = StackedBasis((model.x.basis,) * 2)  # as of averages
    mean = replace(model, x=replace(model.x, basis=several))
    with pytest.raises(DataError, match=r"mean of several.*averaged=1"):
        merge([mean, mean])
    moved = fitted(residual=True).model_
    with pytest.raises(DataError, match=r"location model.*residual=False"):
        merge([moved, moved])
    bounds = constraints.Certified(bounds="observed")
    observed = estimator().set_params(constraint=bounds).fit(X, Y).model_
    with pytest.raises(DataError, match=r"observed over all rows.*analytic"):
        merge([observed])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("counts", lambda a: a * 0),
        ("counts", lambda a: a.astype(float)),
        ("counts", lambda a: a[:-1]),
        ("hashes", lambda a: a[:-1]),
        ("weights", lambda a: -a),
        ("weights", lambda a: a * np.nan),
        ("weights", None),
    ],
)
def test_hostile_files_are_refused(name, change):
    model = whole_model()
    state = model.to_state()
    arrays = dict(state.arrays)
    key = f"y_cells_{name}"
    if change is None:
        del arrays[key]
    else:
        arrays[key] = change(arrays[key])
    with pytest.raises(DataError, match=r"damaged|y_cells"):
        type(model).from_state(type(state)(state.type, state.description, arrays))


def test_sums_out_of_a_model_are_those_of_its_fit():
    whole = fitted()
    sums = JointSums.of(whole.model_)
    assert_array_equal(sums.moments.gram, whole.moments_.gram)
    for side, expected in zip(sums.sides, whole.sides_, strict=True):
        assert_allclose(side.shift, expected.shift, rtol=1e-15)
        assert side.names == expected.names
    assert_allclose(sums.weight, W.sum())
    assert_allclose(sums.cells[1].masses.sum(), W.sum())
    assert_array_equal(
        sums.cells[1].counts, np.bincount(sums.specs[1].support.assign(Y), minlength=40)
    )


def test_moments_move_to_other_factors_and_shifts():
    """As if the pass had been made with these: factors differ in last bits between processors."""
    rng = np.random.default_rng(5)
    sums = JointSums.of(whole_model())
    sides = []
    for side, functions in zip(sums.sides, ({}, FUNCTIONS), strict=True):
        m = side.basis.rank
        factor = side.basis.factor @ (np.eye(m) + 0.1 * np.tril(rng.normal(size=(m, m)), -1))
        basis = replace(side.basis, factor=factor)
        shift = side.shift + rng.normal(size=len(side.shift))
        sides.append(replace(side, basis=basis, shift=shift, functions=functions))
    found = sums.on_sides(tuple(sides))
    spec = MomentReduction(tuple(sides), 10)
    expected = strip_moments(spec, (X, Y), W, fold_of_rows(0, N, 10))
    assert_allclose(found.gram, expected.gram, atol=1e-10 * np.abs(expected.gram).max())


def test_columns_far_from_zero_merge_as_well():
    """Shifts are near the means: sums of squares don't cancel."""
    y = Y + 1e6
    fit = estimator(pivots=(X[:11], y[:8]))
    whole = fit.fit(X, y, scheduler="synchronous").model_
    models = [
        estimator().partial_fit(X[h], y[h], like=whole, scheduler="synchronous").model_
        for h in (slice(0, 400), slice(400, N))
    ]
    merged = merge(models)
    assert_allclose(merged.expect("y0", X[:20]), whole.expect("y0", X[:20]), rtol=1e-14)
    law, expected = merged.conditional(X[:20]), whole.conditional(X[:20])
    assert_allclose(law.cov(), expected.cov(), atol=1e-7)


def test_kept_rows_of_a_union_by_hand():
    """Rows of a set that dropped some count only as far as its hashes are known."""
    rng = np.random.default_rng(1)
    hashes = rng.permutation(400).astype(np.uint64) + np.uint64(1)
    values = rng.normal(size=(400, 1))
    several, counts = [], []
    for here in (slice(0, 300), slice(300, 390), slice(390, 400)):
        size = here.stop - here.start
        every = BottomK(np.zeros(size, int), hashes[here], np.ones(size), values[here])
        several.append(every.first(ROWS_PER_CELL))
        counts.append(np.array([size]))
    found = BottomK.of_union(several, counts)
    first = np.argsort(hashes)[:ROWS_PER_CELL]
    assert_array_equal(found.hashes, hashes[first])
    assert_array_equal(found.rows, values[first])
    # A set that kept 5 of 300 rows says nothing of hashes beyond its fifth.
    few = several[0].first(5)
    found = BottomK.of_union([few, several[1]], [counts[0], counts[1]])
    assert found.hashes.max() == few.hashes.max()
    none = several[0].first(0)
    assert len(BottomK.of_union([none, several[1]], [counts[0], counts[1]]).hashes) == 0
    empty = BottomK.of_union([none, several[1]], [np.array([0]), counts[1]])
    assert_array_equal(empty.hashes, several[1].hashes)


def test_merged_rows_are_a_fair_sample():
    """Of two tables with the same row numbers each row is kept with about the same chance."""
    support = Support(np.zeros((1, 1)), np.empty(0))
    spec = CellReduction(support, np.full(1, np.iinfo(np.uint64).max, dtype=np.uint64))
    rng, taken = np.random.default_rng(3), np.zeros(2)
    sizes = 400, 100
    for _ in range(200):
        several = []
        for label, size in enumerate(sizes):
            values = np.full((size, 1), float(label))
            strip = Strip(rng.choice(2**60, size, replace=False), (values,), None)
            several.append(spec.update(spec.start(values), strip))
        kept = CellSums.of_union(several).bottom
        assert len(kept.cells) == ROWS_PER_CELL
        taken += np.bincount(kept.rows[:, 0].astype(int), minlength=2)
    share = taken[0] / taken.sum()
    error = np.sqrt(0.8 * 0.2 / taken.sum())
    assert abs(share - 0.8) < 4 * error


def command(*args):
    result = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_the_commands_grow_and_merge(tmp_path):
    names = {"x_names": ["u", "v"], "y_names": ["p", "q"]}
    for name, here in (("a", slice(0, 700)), ("b", slice(700, N)), ("all", slice(0, N))):
        write_store(tmp_path / f"{name}.zarr", X[here], Y[here], W[here], **names)
    model, store = (lambda s: tmp_path / f"{s}.model"), (lambda s: tmp_path / f"{s}.zarr")
    quick = ("--growing", "--kernel", "median", "--reg", "1e-3", "--tol", "0.1", "--max-rank", 60)
    fit = ("fit", store("a"), "--out", model("a"), *quick, "--event", "p > 5")
    assert command(*fit)[0] == 0
    alone = ("grow", model("a"), store("b"), "--alone", "--first-row", 700, "--out", model("b"))
    assert command(*alone, "--json")[0] == 0
    code, out, _ = command("merge", model("a"), model("b"), "--out", model("m"), "--json")
    result = json.loads(out)
    assert (code, result["rows"], len(result["merged"])) == (0, N, 2)
    code, out, _ = command("grow", model("a"), store("b"), "--out", model("g"))
    assert (code, "1,500 in 2 pass" in out) == (0, True)
    code, out, _ = command("grow", model("a"), store("b"), "--out", model("j"), "--json")
    told = json.loads(out)
    assert (code, told["added"]) == (0, N - 700)
    assert 0.0 < told["added_trace_error"]["x"] < 0.2
    merged, grown = load(model("m")), load(model("g"))
    assert_allclose(merged.expect("p > 5", X[:20]), grown.expect("p > 5", X[:20]), rtol=1e-11)
    assert_array_equal(merged.y.cells.atoms, grown.y.cells.atoms)
    assert_allclose(grown.masses.sum(), 1.0)
    # What is refused leaves nothing behind, and says so in a sentence.
    code, _, err = command("merge", model("a"), "--out", model("n"))
    assert (code, "at least two" in err, model("n").exists()) == (2, True, False)
    code, _, err = command("merge", model("a"), model("b"), "--out", model("m"))
    assert (code, "exists" in err) == (2, True)
    assert command(*fit[:3], model("z"), "--growing", "--residual", "yes")[0] == 2
