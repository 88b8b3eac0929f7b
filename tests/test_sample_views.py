"""Mapped samples and mini-batches: views of rows that nobody copies."""

from dataclasses import replace

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, kernels, open_sample
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import DataError, StoreError


def polar(x):
    return np.column_stack([np.hypot(x[:, 0], x[:, 1]), np.arctan2(x[:, 1], x[:, 0])])


def squared(y):
    return y**2


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9000, 2))
    y = np.hypot(x[:, :1], x[:, 1:]) + 0.1 * rng.normal(size=(9000, 1))
    return x, y


@pytest.fixture(scope="module")
def store(rows, tmp_path_factory):
    return written(tmp_path_factory.mktemp("views") / "s.zarr", *rows)


def written(path, x, y):
    columns = Columns.default("x", x.shape[1]), Columns.default("y", y.shape[1])
    with writing_sample(path, columns, chunk_rows=2048) as writer:
        writer.append(x, y)
    return path


def fitted(sample, **options):
    law = JointDistribution(
        kernel_x=kernels.Gaussian(0.7), kernel_y=kernels.Gaussian(0.7), tol=1e-3, sample_size=500
    )
    return law.fit(sample, **options)


def test_a_mapped_sample_is_the_sample_of_mapped_rows(rows, store, tmp_path):
    """The same model, to the last bit, as of rows that were mapped and stored before."""
    before = fitted(open_sample(polar(rows[0]), squared(rows[1])))
    for sample in (
        open_sample(*rows),
        open_sample(da.from_array(rows[0], chunks=1000), da.from_array(rows[1], chunks=700)),
    ):
        after = fitted(sample.map(polar, squared), scheduler="threads", workers=2)
        np.testing.assert_array_equal(after.coef_, before.coef_)
    stored, names = open_sample(store), ["radius", "angle"]
    before = fitted(open_sample(written(tmp_path / "m.zarr", polar(rows[0]), squared(rows[1]))))
    sample = stored.map(polar, squared, x_columns=names)
    after = fitted(sample, scheduler="processes", workers=2)
    np.testing.assert_array_equal(after.coef_, before.coef_)
    assert after.columns_x.names == tuple(names)
    assert fitted(stored.map(x=polar)).columns_y == stored.columns[1]


def test_columns_of_an_array_of_one_dimension_are_picked(rows, tmp_path):
    x = zarr.create_array(tmp_path / "x", data=rows[0], chunks=(1000, 2))
    y = zarr.create_array(tmp_path / "y", data=rows[1][:, 0], chunks=(1000,))
    sample = open_sample(x, y)
    law = fitted(sample.select(y=sample.columns[1].names))
    np.testing.assert_array_equal(law.coef_, fitted(sample).coef_)


def test_a_mapped_sample_copies_no_rows(store):
    """What is read is made of the store's rows then; columns picked are those of the result."""
    sample = open_sample(store).map(polar, x_columns=["radius", "angle"])
    angle = sample.select(x=["angle"])
    whole = sample.sources[0].read(100, 200)
    np.testing.assert_array_equal(angle.sources[0].read(100, 200), whole[:, 1:])
    np.testing.assert_array_equal(angle.row_sample.parts[0], sample.row_sample.parts[0][:, 1:])
    assert not sample.sources[0].in_memory
    twice = angle.map(squared, x_columns=["squared angle"])
    np.testing.assert_array_equal(twice.sources[0].read(100, 200), whole[:, 1:] ** 2)


def test_a_mapped_sample_keeps_parts_and_folds(rows):
    """What is held out does not depend on what is made of the rows."""
    group = np.arange(9000) // 10
    sample = open_sample(*rows, group=group).fold_by("group")
    rest, out = (part.map(polar) for part in sample.split(0.25))
    assert fitted(rest).report_.rows + fitted(out).report_.rows == 9000
    assert rest.part == sample.split(0.25)[0].part


def test_a_checkpoint_knows_the_map_of_a_sample(rows, tmp_path):
    sample = open_sample(*rows)
    fitted(sample.map(polar), checkpoint=tmp_path / "c")
    with pytest.raises(StoreError, match="values of x"):
        fitted(sample.map(squared), checkpoint=tmp_path / "c")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:, 0], "expected .*return one row for each row"),
        (lambda x: x[:-1], "expected"),
        (lambda x: x - x.mean(axis=0), "of its own row alone"),
        (lambda x: x[:, :0], "no columns"),
        (lambda x: [["a"]] * len(x), "maps rows to numbers"),
    ],
)
def test_functions_that_do_not_map_rows_are_refused(rows, function, message):
    with pytest.raises(DataError, match=message):
        open_sample(*rows).map(x=function)


def test_names_labels_and_a_missing_y_are_refused(rows):
    sample = open_sample(*rows)
    with pytest.raises(DataError, match="x_columns has 1 names for 2 columns"):
        sample.map(polar, x_columns=["radius"])
    with pytest.raises(DataError, match="only rows of x"):
        open_sample(rows[0]).map(y=squared)
    table = pd.DataFrame({"kind": ["a", "b"] * 50, "v": np.arange(100.0), "y": np.arange(100.0)})
    with pytest.raises(DataError, match="'kind' of x hold labels"):
        open_sample(table, x_columns=["kind", "v"], y_columns=["y"]).map(x=squared)


@settings(max_examples=25)
@given(
    n=st.integers(1, 300),
    chunk=st.integers(1, 40),
    size=st.integers(1, 70),
    seed=st.integers(0, 5),
    start=st.integers(0, 12),
)
def test_batches_hold_every_row_once_and_go_on_where_they_were(n, chunk, size, seed, start):
    x = np.arange(n, dtype=float)
    sample = open_sample(da.from_array(x[:, None], chunks=(chunk, 1)), x, weights=x + 1.0)
    whole = list(sample.batches(size, seed))
    index = np.concatenate([batch.index for batch in whole])
    assert sorted(index) == list(range(n))
    assert [len(batch) for batch in whole[:-1]] == [size] * (len(whole) - 1)
    assert [batch.number for batch in whole] == list(range(len(whole)))
    for batch in whole:
        np.testing.assert_array_equal(batch.x[:, 0], batch.index)
        np.testing.assert_array_equal(batch.y[:, 0], batch.index)
        np.testing.assert_array_equal(batch.weights, batch.index + 1.0)
    later = list(sample.batches(size, seed, start=start))
    assert [batch.number for batch in later] == list(range(start, len(whole)))
    for batch, other in zip(later, whole[start:], strict=True):
        np.testing.assert_array_equal(batch.index, other.index)


def test_batches_differ_between_epochs_and_leave_out_other_parts(rows, store):
    sample = open_sample(store)
    first, second = (next(sample.batches(100, 0, epoch=epoch)).index for epoch in (0, 1))
    assert len(set(first) & set(second)) < 50
    rest, out = sample.split(0.3)
    found = [np.sort(np.concatenate([b.index for b in s.batches(64, 1)])) for s in (rest, out)]
    assert sorted(np.concatenate(found)) == list(range(9000))
    whole = list(out.batches(64, 1))
    later = list(out.batches(64, 1, start=len(whole) - 2))
    np.testing.assert_array_equal(later[0].index, whole[-2].index)
    with pytest.raises(DataError, match="size must be an integer of at least 1"):
        sample.batches(0)
    with pytest.raises(DataError, match="seed must be an integer of at least 0, got -1"):
        sample.batches(10, -1)


def test_an_epoch_reads_every_chunk_once(store):
    sample = open_sample(store)
    read, source = [], sample.sources[0]

    class Counted(type(source)):
        def read(self, start, stop):
            read.append((start, stop))
            return super().read(start, stop)

    counted = Counted(source.array, source.columns, source.whole)
    list(replace(sample, sources=(counted, sample.sources[1])).batches(50, 3))
    assert sorted(read) == [(s, min(s + 2048, 9000)) for s in range(0, 9000, 2048)]


def test_a_batch_of_units_reads_the_chunks_of_one_block_alone(tmp_path):
    n, chunk = 4000, 50
    columns = [da.from_array(np.arange(float(n)) // k, chunks=chunk) for k in (1, 2, 10)]
    sample = open_sample(columns[0], columns[1], group=columns[2]).fold_by("group")
    read = []

    class Counted(type(sample.group)):
        def read(self, start, stop):
            read.append(start)
            return super().read(start, stop)

    x, y, group = (Counted(source.array) for source in (*sample.sources, sample.group))
    rest, _ = replace(sample, sources=(x, y), group=group).split(0.2)
    batches = rest.batches(20, 1)
    assert len(next(batches)) == 20
    assert len(read) == 3 * 8 < 3 * n / chunk
    first = set(read)
    for _ in range(7):
        assert len(next(batches)) == 20
    assert set(read) == first
    assert len(read) == 3 * 8
