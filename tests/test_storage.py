"""Stores, row samples, strips and saved models: what goes in comes out, or a clear error does."""

import contextlib
import copy
import itertools
import json
from dataclasses import dataclass, replace

import dask.array as da
import fsspec
import numpy as np
import pytest
import zarr
from conftest import write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import cme_dask
from cme_dask import JointDistribution, kernels, open_sample
from cme_dask.codec import Codec
from cme_dask.data import store as zarr_files
from cme_dask.data.atomic import PICTURE, writing
from cme_dask.data.columns import Columns
from cme_dask.data.model_file import ModelState, read_model
from cme_dask.data.sources import ArraySource, in_strips
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError, StoreError
from cme_dask.models.joint import JointModel
from cme_dask.numerics.folds import draw, fold_of_rows, merge, number_hash, uniform
from cme_dask.passes import fit as gather
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows

EXAMPLES = settings(
    max_examples=15,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SERIAL = RunOptions("synchronous").executor()


def table(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2)), rng.normal(size=(n, 1)), rng.exponential(size=n)


def cuts(n, pieces):
    """Borders of consecutive batches of these lengths, repeated until the rows are used up."""
    borders, i = [0], 0
    while borders[-1] < n:
        borders.append(min(n, borders[-1] + pieces[i % len(pieces)]))
        i += 1
    return itertools.pairwise(borders)


def write(path, parts, batches, chunk_rows, columns=None, **options):
    x, y, w = parts
    columns = columns or (Columns(("a", "b")), Columns(("c",)))
    with writing_sample(
        path, columns, weights=w is not None, chunk_rows=chunk_rows, **options
    ) as writer:
        for low, high in cuts(len(x), batches):
            writer.append(x[low:high], y[low:high], None if w is None else w[low:high])
        assert writer.n_rows == len(x)
    return path


# Stores --------------------------------------------------------------------------------------


@EXAMPLES
@given(
    n=st.integers(2, 100),
    batches=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    chunk_rows=st.integers(1, 50),
    weighted=st.booleans(),
)
def test_round_trip(tmp_path_factory, n, batches, chunk_rows, weighted):
    x, y, w = table(n)
    w = w if weighted else None
    columns = (
        Columns(("a", "b"), {"a": "m/s"}, {"b": ("low", "high")}),
        Columns(("Größe, °C",), {"Größe, °C": "°C"}),
    )
    path = tmp_path_factory.mktemp("s") / "s"
    write(path, (x, y, w), batches, chunk_rows, columns, sample_size=20, seed=4)
    sample = open_sample(path)
    assert sample.columns == columns
    assert sample.n_rows == n
    np.testing.assert_array_equal(sample.sources[0].read(0, n), x)
    np.testing.assert_array_equal(sample.sources[1].read(0, n), y)
    assert (sample.weights is None) == (not weighted)
    if weighted:
        np.testing.assert_array_equal(sample.weights.read(0, n)[:, 0], w)
    # The row sample: the first of all rows, sorted by their keys, whatever the batches were.
    drawn = draw(np.arange(n), (), w, 20, 4)
    first, kept = drawn.index, sample.row_sample
    np.testing.assert_array_equal(kept.index, first)
    np.testing.assert_array_equal(kept.keys, drawn.keys)
    np.testing.assert_array_equal(kept.parts[0], x[first])
    np.testing.assert_array_equal(kept.parts[1], y[first])
    for size in (1, 7, 20):
        prefix = kept.prefix(size)
        np.testing.assert_array_equal(prefix.index, first[:size])
        assert len(prefix) == min(size, n)
    group = zarr.open_group(str(path), mode="r")
    assert group["x"].chunks == (chunk_rows, 2)


def test_the_callers_buffer_may_be_used_again(tmp_path):
    x, y, _ = table(100)
    buffer = np.empty((10, 2))
    with writing_sample(tmp_path / "s", (Columns(("a", "b")), Columns(("c",)))) as writer:
        for low in range(0, 100, 10):
            buffer[...] = x[low : low + 10]
            writer.append(buffer, y[low : low + 10])
            buffer[...] = np.nan
    np.testing.assert_array_equal(open_sample(tmp_path / "s").sources[0].read(0, 100), x)


def test_columns_of_a_store_are_read_alone(tmp_path):
    x, y, w = table(500)
    sample = open_sample(write(tmp_path / "s", (x, y, w), [90], 64), x_columns=["b"])
    np.testing.assert_array_equal(sample.sources[0].read(100, 200), x[100:200, 1:])
    np.testing.assert_array_equal(sample.row_sample.parts[0], x[sample.row_sample.index, 1:])
    assert sample.columns[0].names == ("b",)
    swapped = open_sample(tmp_path / "s", x_columns=["b", "a"])
    np.testing.assert_array_equal(swapped.sources[0].read(0, 9), x[:9, ::-1])
    again = swapped.select(["a"])
    np.testing.assert_array_equal(again.sources[0].read(0, 9), x[:9, :1])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((np.ones((3, 1)), np.ones((3, 1))), r"expected 2 columns, got shape \(3, 1\)"),
        ((np.ones(3), np.ones((3, 1))), r"expected 2 columns, got shape \(3,\)"),
        ((np.ones((3, 2)), np.ones((4, 1))), "numbers of rows differ"),
        ((np.ones((3, 2)), np.ones((3, 1)), np.ones(3)), "weights must come with every batch"),
    ],
)
def test_batches_that_do_not_fit(tmp_path, batch, message):
    columns = (Columns(("a", "b")), Columns(("c",)))
    with pytest.raises(DataError, match=message), writing_sample(tmp_path / "s", columns) as writer:
        writer.append(*batch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_rows(tmp_path, n):
    columns = (Columns(("a", "b")), Columns(("c",)))
    with (
        pytest.raises(DataError, match=f"at least 2 rows are needed, got {n}"),
        writing_sample(tmp_path / "s", columns) as writer,
    ):
        writer.append(np.ones((n, 2)), np.ones((n, 1)))
    assert list(tmp_path.iterdir()) == []


# Row samples and hashes ----------------------------------------------------------------------


@EXAMPLES
@given(
    n=st.integers(1, 400),
    size=st.integers(1, 50),
    batches=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    weighted=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_merging_is_drawing_from_the_whole(n, size, batches, weighted, seed):
    x, _, w = table(n)
    w = np.where(np.arange(n) % 3 == 0, 0.0, w) if weighted else None
    whole = draw(np.arange(n), (x,), w, size, seed)
    pieces = [
        draw(np.arange(a, b), (x[a:b],), None if w is None else w[a:b], size, seed)
        for a, b in cuts(n, batches)
    ]
    together = merge(pieces, size)
    np.testing.assert_array_equal(together.index, whole.index)
    np.testing.assert_array_equal(together.keys, whole.keys)
    np.testing.assert_array_equal(together.parts[0], x[whole.index])
    backwards = merge([merge(pieces[1:], size), pieces[0]], size) if len(pieces) > 1 else whole
    np.testing.assert_array_equal(backwards.index, whole.index)
    if weighted:
        assert (w[whole.index] > 0).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("spare", "chunks"),
    # With -3 rows of the sample lie above the bound, however these are cut.
    [(gather._SPARE, 999), (gather._SPARE, 4096), (gather._SPARE, 10_000), (-3.0, 999)],
)
def test_gathered_samples_equal_the_stored_one(tmp_path, monkeypatch, weighted, chunks, spare):
    monkeypatch.setattr(gather, "_SPARE", spare)
    x, y, w = table(10_000)
    w = w if weighted else None
    stored = open_sample(write(tmp_path / "s", (x, y, w), [3000], 1000, seed=9)).row_sample
    group = zarr.open_group(str(tmp_path / "foreign"), mode="w")
    arrays = [
        group.create_array(name, data=part, chunks=(chunks, *part.shape[1:]))
        for name, part in (("x", x), ("y", y), ("w", x[:, 0] if w is None else w))
    ]
    sources = [
        open_sample(x, y, weights=w),
        open_sample(arrays[0], arrays[1], weights=None if w is None else arrays[2]),
        open_sample(
            da.from_array(x, chunks=(chunks, 1)),
            da.from_array(y, chunks=777),
            weights=None if w is None else da.from_array(w, chunks=chunks),
        ),
    ]
    executor = RunOptions("threads", 2).executor()
    for sample in sources:
        for size in (50, 9_000, 10_000):
            found, _ = sample_rows(sample, size, 9, executor)
            np.testing.assert_array_equal(found.index, stored.index[:size])
            np.testing.assert_array_equal(found.keys, stored.keys[:size])
            for ours, theirs in zip(found.parts, stored.parts, strict=True):
                np.testing.assert_array_equal(ours, theirs[:size])


def test_a_sample_is_uniform():
    """Rows drawn from cells of the table, over seeds: a fixed seed, so the p-value is fixed too."""
    counts = np.zeros(50)
    for seed in range(60):
        chosen = draw(np.arange(10_000), (), None, 500, seed).index
        assert len(np.unique(chosen)) == 500
        counts += np.bincount(chosen // 200, minlength=50)
    assert chisquare(counts).pvalue > 0.01
    # Sampling without replacement varies a little less than chi-square; not much less, either.
    assert chisquare(counts).pvalue < 0.9999


def test_weights_are_frequencies():
    """The first row drawn is row i with probability w_i / sum w; over seeds, also the second."""
    weights = np.array([1.0, 2.0, 3.0, 4.0, 0.0])
    first, second = np.zeros(5), np.zeros(5)
    for seed in range(4000):
        chosen = draw(np.arange(5), (), weights, 2, seed).index
        first[chosen[0]] += 1
        second[chosen[1]] += 1
    p = weights / weights.sum()
    chance = sum(np.where(np.arange(5) == i, 0, p[i] * p / (1 - p[i])) for i in range(4))
    assert first[4] == second[4] == 0
    assert chisquare(first[:4], 4000 * p[:4]).pvalue > 0.01
    assert chisquare(second[:4], 4000 * chance[:4]).pvalue > 0.01


def test_tiny_weights_still_count():
    weights = np.array([0.0, 5e-324, 1e-310, 0.0])
    with np.errstate(all="raise", under="ignore"):
        chosen = draw(np.arange(4), (), weights, 4, 0).index
    assert sorted(chosen) == [1, 2]


def test_folds_are_uniform_and_independent_of_the_priority():
    n = 200_000
    folds = fold_of_rows(0, n, 10)
    assert chisquare(np.bincount(folds, minlength=10)).pvalue > 0.01
    for seed in (0, 1, 0x666F6C64):  # the last is the salt of the folds itself
        keys = uniform(seed, np.arange(n))
        assert chisquare(np.bincount((keys * 16).astype(int), minlength=16)).pvalue > 0.01
        cells = np.bincount(folds * 16 + (keys * 16).astype(int), minlength=160)
        assert chisquare(cells).pvalue > 0.01, seed


@EXAMPLES
@given(a=st.integers(0, 10**12), n=st.integers(0, 500), m=st.integers(0, 500))
def test_hashes_are_functions_of_the_row_alone(a, n, m):
    numbers = np.arange(a, a + n + m, dtype=np.uint64)
    whole = number_hash(7, numbers)
    np.testing.assert_array_equal(whole[:n], number_hash(7, numbers[:n]))
    np.testing.assert_array_equal(whole[n:], number_hash(7, numbers[n:]))
    assert len(np.unique(whole)) == n + m
    np.testing.assert_array_equal(
        fold_of_rows(a, a + n + m, 10)[n:], fold_of_rows(a + n, a + n + m, 10)
    )


# Strips --------------------------------------------------------------------------------------


class Counting:
    """Rows in chunks; it counts how often each chunk is read."""

    def __init__(self, rows, chunk):
        self._rows, self._chunk = rows, chunk
        self.shape, self.chunk_rows = rows.shape, chunk
        self.reads = np.zeros(-(-len(rows) // chunk), dtype=int)
        self.most = 0

    def read(self, start, stop):
        assert 0 <= start < stop <= len(self._rows)
        self.reads[start // self._chunk : -(-stop // self._chunk)] += 1
        self.most = max(self.most, stop - start)
        return self._rows[start:stop].copy()


@settings(EXAMPLES, max_examples=150)
@given(st.data())
def test_strips_read_each_chunk_once(data):
    n = data.draw(st.integers(1, 200))
    chunk, length = data.draw(st.integers(1, 250)), data.draw(st.integers(1, 250))
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    rows = np.arange(2.0 * n).reshape(n, 2)
    source = Counting(rows, chunk)
    strips = list(in_strips(source.read, source.chunk_rows, start, stop, length))
    assert [len(s) for s in strips[:-1]] == [length] * (len(strips) - 1)
    assert 0 < len(strips[-1]) <= length
    np.testing.assert_array_equal(np.concatenate(strips), rows[start:stop])
    touched = np.zeros(len(source.reads), dtype=int)
    touched[start // chunk : -(-stop // chunk)] = 1
    np.testing.assert_array_equal(source.reads, touched)
    assert source.most <= length + chunk
    plain = list(in_strips(ArraySource(rows).read, None, start, stop, length))
    assert all(np.array_equal(a, b) for a, b in zip(strips, plain, strict=True))


# Columns -------------------------------------------------------------------------------------


def test_columns():
    columns = Columns(("a", "b", "c"), {"a": "m"}, {"c": ("no", "yes")})
    assert columns.positions(["c", "a"]) == (2, 0)
    assert columns.only(["c"]) == Columns(("c",), {}, {"c": ("no", "yes")})
    assert Columns.from_dict(json.loads(json.dumps(columns.to_dict()))) == columns
    with pytest.raises(DataError, match="must be unique, a came more than once"):
        Columns(("a", "b", "a"))
    with pytest.raises(DataError, match="units or categories of unknown columns: y, z"):
        Columns(("a",), {"z": "m"}, {"y": ("no",)})
    with pytest.raises(DataError, match="unknown column 'q', 'r': there are 'a', 'b', 'c'"):
        columns.positions(["q", "a", "r"])
    with pytest.raises(DataError, match="a list of column names, got the text 'ab'"):
        columns.positions("ab")


@pytest.mark.parametrize(
    "damage",
    [
        {"names": 3},
        {"names": [1]},
        {"names": None},
        {"units": []},
        {"units": {"a": 1}},
        {"categories": {"a": 3}},
        {"categories": {"a": [3]}},
    ],
)
def test_descriptions_of_columns_that_are_damaged(damage):
    with pytest.raises(StoreError, match="the description of the columns is damaged"):
        Columns.from_dict({"names": ["a"], "units": {}, "categories": {}} | damage)


# Outputs are whole or absent -----------------------------------------------------------------


def snapshot(folder):
    return {p.relative_to(folder): p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, DataError])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failure_leaves_the_old_store_untouched(tmp_path, error, after):
    x, y, w = table(500)
    write(tmp_path / "s", (x, y, w), [100], 64)
    before = snapshot(tmp_path)

    def fail(path, overwrite):
        columns = (Columns(("a", "b")), Columns(("c",)))
        with writing_sample(path, columns, chunk_rows=200, overwrite=overwrite) as writer:
            for _ in range(after):
                writer.append(x, y)
            raise error("in the middle")

    for path, overwrite in ((tmp_path / "s", True), (tmp_path / "new", False)):
        with pytest.raises(error, match="in the middle"):
            fail(path, overwrite)
        assert snapshot(tmp_path) == before


def test_a_failing_swap_brings_the_old_store_back(tmp_path, monkeypatch):
    x, y, w = table(50)
    write(tmp_path / "s", (x, y, w), [100], 64)
    before = snapshot(tmp_path)

    def rename(source, target, how):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("cme_dask.data.atomic._rename", rename)
    with pytest.raises(cme_dask.errors.ResourceError, match="can't be written: Input/output error"):
        write(tmp_path / "s", (y @ [[1.0, 1.0]], y, w), [100], 64, overwrite=True)
    assert snapshot(tmp_path) == before


def test_overwriting_replaces_the_store(tmp_path):
    x, y, w = table(500)
    write(tmp_path / "s", (x, y, w), [100], 16)
    write(tmp_path / "s", (x[:90] + 1, y[:90], None), [50], 64, overwrite=True)
    sample = open_sample(tmp_path / "s")
    np.testing.assert_array_equal(sample.sources[0].read(0, 90), x[:90] + 1)
    assert (sample.n_rows, sample.weights) == (90, None)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert not (tmp_path / "s" / "weights").exists()


def test_an_output_is_not_there_before_it_is_whole(tmp_path):
    with writing(tmp_path / "out", PICTURE) as aside:
        aside.write_text("half")
        assert not (tmp_path / "out").exists()
        assert aside.parent.parent == tmp_path  # the same disk, so that the last step is a rename
    assert (tmp_path / "out").read_text() == "half"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# URLs and saved models -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    x, y, w = table(300)
    root = tmp_path_factory.mktemp("urls")
    store = write_store(root / "s", x, y, w, chunk_rows=64)
    kernel = kernels.Gaussian((1.0, 2.0)) * kernels.Matern(3.0, 2.5)[1] + kernels.Linear(0.5)
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernels.Laplace(1.0), tol=0.05, n_folds=3)
    fit.fit(store, functions={"high": high})
    fit.save(root / "m")
    return fit, root


def high(y):
    return y[:, 0] > 1


def answers(model):
    x, y, _ = table(20, seed=1)
    return [
        *model.expect(["y0", "high"], x, return_std=True),
        *model.expect(Y=y, return_std=True),
        model.density_ratio(x, y),
    ]


def assert_same_answers(model, other):
    for one, two in zip(answers(model), answers(other), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("url", ["memory://cme-dask-test", "file"])
def test_stores_and_models_from_urls(fitted, url, tmp_path):
    fit, root = fitted
    url = f"file://{tmp_path}/copy" if url == "file" else url
    for path in root.rglob("*"):
        if path.is_file():
            with fsspec.open(f"{url}/{path.relative_to(root)}", "wb") as file:
                file.write(path.read_bytes())
    sample = open_sample(f"{url}/s")
    np.testing.assert_array_equal(sample.sources[0].read(0, 300), table(300)[0])
    again = JointDistribution(**fit.get_params()).fit(f"{url}/s", functions={"high": high})
    assert_same_answers(again, fit)
    assert_same_answers(cme_dask.load(f"{url}/m"), fit)
    with pytest.raises(StoreError, match=r"is no readable Zarr store|nothing does not exist"):
        cme_dask.load(f"{url}/nothing")


def test_saved_models_answer_bit_for_bit(fitted, tmp_path):
    fit, root = fitted
    model = cme_dask.load(root / "m")
    assert_same_answers(model, fit.model_)
    assert repr(model) == repr(fit.model_)
    assert model.about == json.loads(json.dumps(fit.model_.about))
    for name, values in fit.model_.moments.items():
        np.testing.assert_array_equal(model.moments[name], values)
    model.save(tmp_path / "again")
    assert_same_answers(cme_dask.load(tmp_path / "again"), fit)
    fit.save(tmp_path / "again", overwrite=True)
    with pytest.raises(DataError, match="already exists"):
        fit.save(tmp_path / "again")


def cosine(X, Z):
    return np.cos(X[:, :1] - Z[:, :1].T) + 1.0


def twos(X):
    return np.full(len(X), 2.0)


def test_custom_kernels_come_from_the_caller(tmp_path):
    x, y, _ = table(300)
    kernel = kernels.Custom("cosine", cosine, twos)
    fit = JointDistribution(kernel_x=kernel, kernel_y=kernels.Gaussian(1.0), tol=0.05).fit(x, y)
    fit.save(tmp_path / "m")
    model = cme_dask.load(tmp_path / "m", kernels={"cosine": kernel})
    np.testing.assert_array_equal(model.expect("y0", x[:9]), fit.expect("y0", x[:9]))
    for given_kernels in (None, {}, {"other": kernel}):
        with pytest.raises(DataError, match=r"'cosine' is a user's own .* pass kernels="):
            cme_dask.load(tmp_path / "m", kernels=given_kernels)
    with pytest.raises(DataError, match="must be a kernel"):
        cme_dask.load(tmp_path / "m", kernels={"cosine": cosine})


# Hostile model states ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state(fitted):
    return read_model(fitted[1] / "m")


def paths_of(value, prefix=()):
    """Paths to every node of a JSON value."""
    yield prefix
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_of(item, (*prefix, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from paths_of(item, (*prefix, i))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["x0", "y0", "Gaussian", "Custom", "Sum", "kernel"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kernel", "names", "x", "y", "left", "q"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def mutated(data, about):
    about = copy.deepcopy(about)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([p for p in paths_of(about) if p]))
        parent = about
        for key in path[:-1]:
            parent = parent[key]
        if data.draw(st.booleans()):
            parent[path[-1]] = data.draw(JSON)
        else:
            del parent[path[-1]]
    return about


def use(model):
    """What a loaded model is asked for."""
    repr(model)
    model._repr_html_()
    x, y = (np.zeros((2, len(variable.columns.names))) for variable in (model.x, model.y))
    model.expect(list(model.function_names[0]), x)
    model.density_ratio(x, y)


@settings(EXAMPLES, max_examples=200)
@given(data=st.data())
def test_hostile_descriptions_give_clear_errors(state, data):
    hostile = ModelState(state.type, mutated(data, state.description), state.arrays)
    with contextlib.suppress(DataError), np.errstate(all="ignore"):
        use(JointModel.from_state(hostile))


CHANGES = {
    "gone": lambda a: None,
    "a column less": lambda a: a[..., :-1],
    "a row less": lambda a: a[:-1],
    "an axis more": lambda a: a[None],
    "flat": lambda a: a.ravel(),
    "text": lambda a: a.astype(str),
    "complex": lambda a: a.astype(complex),
    "boolean": lambda a: a > 0,
    "empty": lambda a: a[:0],
    "a scalar": lambda a: np.zeros(()),
}

OPTIONAL = ("x_basis_newton_rows", "y_basis_newton_rows")


@pytest.mark.parametrize("change", CHANGES)
def test_hostile_arrays_give_clear_errors(state, change):
    for name, array in state.arrays.items():
        value = CHANGES[change](array)
        arrays = {key: item for key, item in state.arrays.items() if key != name}
        if value is not None:
            arrays[name] = value
        hostile = ModelState(state.type, state.description, arrays)
        if value is None and name in OPTIONAL:
            use(JointModel.from_state(hostile))
        elif value is None or value.shape != array.shape or value.dtype.kind not in "fi":
            with pytest.raises(StoreError, match=r"the model('s| lacks the array)"):
                JointModel.from_state(hostile)


def test_messages_are_of_a_length_whatever_files_hold(state):
    kernel = {"kernel": "x" * 100_000}
    about = copy.deepcopy(state.description)
    about["x"]["basis"]["newton"]["kernel"] = kernel
    with pytest.raises(DataError, match=r"^unknown kernel 'xxx") as caught:
        JointModel.from_state(ModelState(state.type, about, state.arrays))
    assert len(str(caught.value)) < 2100


def test_arrays_beyond_a_chunk_are_cut(tmp_path, monkeypatch):
    """As Blosc, which takes 2 GB at once, asks for."""
    monkeypatch.setattr(zarr_files, "_LARGEST", 800)
    group = zarr.open_group(str(tmp_path / "g"), mode="w", zarr_format=3)
    values = np.random.default_rng(0).normal(size=(30, 7))
    arrays = {"long": values[:, 0], "wide": values, "deep": values.reshape(10, 3, 7)}
    for name, array in arrays.items():
        written = zarr_files.write_array(group, name, array)
        found = zarr_files.open_zarr(str(tmp_path / "g"))
        assert np.array_equal(zarr_files.read_array(found, name, "g", written), array)
    assert group["wide"].nchunks == 3
    (tmp_path / "g" / "wide" / "c" / "1" / "0").unlink()
    with pytest.raises(StoreError, match="'wide' of g lacks a chunk"):
        zarr_files.read_array(found, "wide", "g")


def test_a_singular_factor_is_refused(state):
    for value, message in {0.0: "is singular", -1.0: "is singular", np.nan: "not finite"}.items():
        name = "x_basis_newton_factor"
        factor = state.arrays[name].copy()
        factor[2, 2] = value
        hostile = ModelState(state.type, state.description, state.arrays | {name: factor})
        with pytest.raises(StoreError, match=rf"factor.* {message}"):
            JointModel.from_state(hostile)


def test_a_wrong_shape_is_named(state):
    rank = len(state.arrays["x_basis_newton_points"])
    for name, change, expected in (
        ("x_basis_newton_factor", lambda a: a[:, :-1], rf"\({rank}, {rank}\), .* \({rank}, "),
        ("x_basis_transform", lambda a: a[:-1], rf"\({rank}, k\), it is float64"),
        ("y_cells_support_points", lambda a: a[:, :0], r"\(S, 1\), it is float64"),
        ("y_cells_counts", lambda a: a.astype(float), "int64 of shape"),
        ("x_basis_newton_points", lambda a: a.astype(np.int64), "floating-point of shape"),
        ("x_basis_transform", lambda a: a.astype(np.int8), "numeric of shape"),
    ):
        hostile = replace(state, arrays=state.arrays | {name: change(state.arrays[name])})
        with pytest.raises(StoreError, match=rf"array '{name}' should be .*{expected}"):
            JointModel.from_state(hostile)


@dataclass(frozen=True)
class Nested:
    inner: "Nested | None"


def test_objects_within_objects_end():
    codec = Codec({}, {}, {"Nested": Nested})
    described = codec.encode(Nested(Nested(None)), {})
    assert codec.decode(Nested, described, {}, {}) == Nested(Nested(None))
    for _ in range(20):
        described = {"inner": described}
    with pytest.raises(StoreError, match="too deep"):
        codec.decode(Nested, described, {}, {})
