"""Parquet, NumPy and Zarr tables: what is read, in what memory, and what is refused."""

import datetime
import decimal
import io
import itertools
import sys
import tracemalloc
import zipfile

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask import JointDistribution, open_sample
from cme_dask.data import tables
from cme_dask.data.ingest import find_sources, ingest
from cme_dask.data.readers import NumpySource, ParquetSource
from cme_dask.data.tables import Kind
from cme_dask.data.zarr_reader import ZarrTableSource
from cme_dask.errors import DataError, ResourceError, StoreError
from cme_dask.kernels import Gaussian

N = 1_000
LOCAL = fsspec.filesystem("file")


def frame(n=N):
    """Numbers with gaps, labels, times."""
    rng = np.random.default_rng(3)
    a = rng.normal(size=n)
    a[rng.random(n) < 0.05] = np.nan
    return pd.DataFrame(
        {
            "a": a,
            "PM2.5": rng.integers(0, 500, n),
            "wd": np.array(["N", "SSE", "W"])[rng.integers(0, 3, n)],
            "date": pd.date_range("2013-03-01", periods=n, freq="h"),
            "w": rng.random(n),
        }
    )


def read(source, wanted, kinds=None, position=None):
    """The rows of all batches as one table, and each batch's first row and position."""
    kinds = dict.fromkeys(wanted, Kind.NUMBER) | (kinds or {})
    batches = list(source.batches(wanted, kinds, (), position))
    rows = pa.Table.from_batches([b.columns for b in batches]).unify_dictionaries()
    return rows, batches


def small_batches(monkeypatch, size=1 << 12):
    monkeypatch.setattr(tables, "BATCH_BYTES", size)


WANTED = {
    "x": ["a", "wd"],
    "y": ["PM2.5"],
    "weights": "w",
    "group": "wd",
    "time": ["date"],
    "categorical": ["wd"],
}


def arrays(path):
    """All arrays of a store, and its description."""
    group = zarr.open_group(str(path), mode="r")
    names = ["x", "y", "weights", "group", "time"]
    names = [n for n in names if n in group] + [
        f"row_sample/{n}" for n in sorted(dict(group["row_sample"].arrays()))
    ]
    return {n: group[n][...] for n in names}, dict(group.attrs["cme_dask"])


def assert_same_stores(one, other):
    (values, about), (others, about_other) = arrays(one), arrays(other)
    assert values.keys() == others.keys()
    for name in values:
        np.testing.assert_array_equal(values[name], others[name], err_msg=name)
    assert about == about_other


def write_zarr(path, chunk=130, **kept):
    table = frame().assign(date=lambda f: f["date"].to_numpy("datetime64[us]"))
    group = zarr.open_group(str(path), mode="w", **kept)
    for name in table:
        values = table[name].to_numpy()
        values = values.astype("U3") if name == "wd" else values
        values = values.astype("int64") / 1e6 if name == "date" else values
        group.create_array(name, data=values, chunks=(chunk,))
    return path


def write_npz(path, save=np.savez):
    table = frame()
    columns = {n: table[n].to_numpy() for n in table}
    save(path, **(columns | {"wd": columns["wd"].astype("U3"), "version": np.array(3)}))
    return path


def write_records(path):
    table = frame().assign(wd=lambda f: f["wd"].to_numpy("U3"))
    kinds = {"wd": "U3", "date": "M8[s]"}
    np.save(path, table.to_records(index=False, column_dtypes=kinds).view(np.ndarray))
    return path


FORMATS = {
    "parquet": lambda folder: [frame().to_parquet(folder / "t.parquet"), folder / "t.parquet"][1],
    "pq in row groups": lambda folder: [
        frame().to_parquet(folder / "t.pq", row_group_size=77),
        folder / "t.pq",
    ][1],
    "csv.gz": lambda folder: [
        frame().to_csv(folder / "t.csv.gz", index=False),
        folder / "t.csv.gz",
    ][1],
    "npz": lambda folder: write_npz(folder / "t.npz"),
    "npz compressed": lambda folder: write_npz(folder / "t.npz", np.savez_compressed),
    "npy of records": lambda folder: write_records(folder / "t.npy"),
    "zarr 2": lambda folder: write_zarr(folder / "t.zarr", zarr_format=2),
}


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrDeprecationWarning")
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_store_of_the_csv(tmp_path, monkeypatch, form):
    small_batches(monkeypatch)
    frame().to_csv(tmp_path / "plain.csv", index=False)
    ingest([tmp_path / "plain.csv"], tmp_path / "expected", **WANTED)
    report = ingest([FORMATS[form](tmp_path)], tmp_path / "found", **WANTED)
    assert_same_stores(tmp_path / "found", tmp_path / "expected")
    assert report.rows_read == N
    assert report.missing["a"] == report.rows_dropped == int(frame()["a"].isna().sum())


# Parquet


@settings(max_examples=25)
@given(
    groups=st.integers(1, 400),
    batch=st.integers(64, 1 << 14),
    start=st.integers(0, N - 1),
)
def test_parquet_resumes_at_any_row(tmp_path_factory, groups, batch, start):
    path = tmp_path_factory.mktemp("p") / "t.parquet"
    table = frame()
    table.to_parquet(path, row_group_size=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BATCH_BYTES", batch)
        source = ParquetSource(LOCAL, str(path))
        labels = {"wd": Kind.CATEGORY}
        found, batches = read(source, ("wd", "PM2.5"), labels, {"row": start} if start else None)
        assert batches[0].first_row == start
        following = [b.position for b in batches]
        assert following[-1] == {"row": N}
        for before, after in itertools.pairwise(batches):
            assert after.first_row == before.position["row"]
    expected = table.loc[start:, ["wd", "PM2.5"]].reset_index(drop=True)
    found = found.to_pandas().astype({"wd": expected["wd"].dtype})
    pd.testing.assert_frame_equal(found, expected)


def test_a_row_group_of_any_size_is_read_in_bounded_memory(tmp_path):
    rows = 1_000_000
    values = np.random.default_rng(0).normal(size=(rows, 8))
    table = pa.table({f"c{i}": values[:, i] for i in range(8)})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=rows)
    del values, table
    source = ParquetSource(LOCAL, str(tmp_path / "t.parquet"))
    assert source.columns() == tuple(f"c{i}" for i in range(8))
    wanted = source.columns()
    tracemalloc.start()  # bytes of the file; those of Arrow are in its own pool
    total, before = 0, pa.total_allocated_bytes()
    most = 0
    try:
        for batch in source.batches(wanted, dict.fromkeys(wanted, Kind.NUMBER), (), None):
            total += batch.columns.num_rows
            most = max(most, pa.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == rows
    # The row group has 64 MB. Two batches of 8 MB, and a column a buffer, a page and a dictionary.
    assert peak < 24e6
    assert most < 2 * 8.4e6 + 8 * 3.2e6


def test_parquet_types(tmp_path):
    n = 6
    day = datetime.date(2020, 1, 2)
    table = pa.table(
        {
            "decimal": pa.array([decimal.Decimal("1.25")] * n, pa.decimal128(9, 2)),
            "half": pa.array(np.arange(n, dtype=np.float16)),
            "flag": pa.array([True, False] * 3),
            "null": pa.array([1.5, None] * 3),
            "large": pa.array(["u", "v"] * 3, pa.large_string()),
            "coded": pa.array(["p", "q", None] * 2).dictionary_encode(),
            "date": pa.array([day] * n, pa.date32()),
            "zoned": pa.array([datetime.datetime(2020, 1, 2)] * n, pa.timestamp("ms", tz="+01:00")),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    ingest(
        [tmp_path / "t.parquet"],
        tmp_path / "s",
        x=["decimal", "half", "flag"],
        y=["large", "zoned"],
        group="coded",
        time=["date"],
        categorical=["large"],
        datetime={"zoned": ["hour"]},
    )
    values, about = arrays(tmp_path / "s")
    assert len(values["x"]) == 4  # of the codes two are missing
    np.testing.assert_array_equal(values["x"][:, :2], [[1.25, 0], [1.25, 1], [1.25, 3], [1.25, 4]])
    np.testing.assert_array_equal(values["x"][:, 2], [1, 0, 0, 1])
    np.testing.assert_array_equal(values["y"], [[0, 0, 1], [1, 0, 1], [1, 0, 1], [0, 0, 1]])
    np.testing.assert_array_equal(values["group"], [0, 1, 0, 1])
    np.testing.assert_array_equal(values["time"], [18263 * 86400.0] * 4)
    assert about["group_labels"] == ["p", "q"]


def test_parquet_names_with_dots_are_no_paths(tmp_path):
    table = pa.table({"PM2": [1.0, 2.0], "PM2.5": [3.0, 4.0], "PM2.5.x": [5.0, 6.0]})
    pq.write_table(table, tmp_path / "t.parquet")
    found, _ = read(ParquetSource(LOCAL, str(tmp_path / "t.parquet")), ("PM2.5",))
    assert found.column_names == ["PM2.5"]
    np.testing.assert_array_equal(found["PM2.5"], [3.0, 4.0])


def test_bad_parquet(tmp_path):
    path = tmp_path / "t.parquet"

    def refused(match, *, x=("a",), y=("b",), **options):
        with pytest.raises(DataError, match=match) as caught:
            ingest([path], tmp_path / "s", x=list(x), y=list(y), **options)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.glob("*s*")) == []

    b = np.arange(100.0)
    nested = pa.array([{"p": 1.0}] * 100)
    pq.write_table(pa.table({"a": nested, "b": b}), path)
    refused(r"column 'a' of .*t.parquet has the type struct<p: double>: numbers, text or times")
    refused(r"t.parquet lacks column 'c': there are 'a', 'b'", x=["c"])
    pq.write_table(pa.table({"a": pa.array([b"u"] * 100), "b": b}), path)
    refused("column 'a' .* has the type binary")
    pq.write_table(pa.table({"a": ["u"] * 100, "b": b}), path)
    refused("column 'a' .* holds text, numbers were expected: give it as categorical")
    pq.write_table(pa.table({"a": b[:0], "b": b[:0]}), path)
    refused("t.parquet has columns but no rows: leave it out")
    late = np.where(np.arange(100) == 70, np.inf, b)
    pq.write_table(pa.table({"a": late, "b": b}), path, row_group_size=30)
    refused("column 'a' .* 1 infinite value .* first in row 70")
    bad_text = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], "i4")), pa.py_buffer(b"\xff\xfe")]
    )
    pq.write_table(pa.table({"a": bad_text, "b": [1.0, 2.0]}), path)
    refused("t.parquet is no readable Parquet file.*UTF8", categorical=["a"])
    pq.write_table(pa.table({"a": b, "b": b}), path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    refused("t.parquet is no readable Parquet file, it is corrupt or cut off")
    path.write_bytes(b"PAR1" + bytes(800) + whole[804:])  # the header of the first page
    refused("t.parquet .* corrupt or cut off")
    path.write_bytes(b"")
    refused("t.parquet is no readable Parquet file")
    path.unlink()
    refused("there is no file .*t.parquet")


def test_a_nested_column_aside_does_no_harm(tmp_path):
    table = pa.table({"n": pa.array([[1], [2, 3]] * 5), "a": np.arange(10.0), "b": np.ones(10)})
    pq.write_table(table, tmp_path / "t.parquet")
    assert ParquetSource(LOCAL, str(tmp_path / "t.parquet")).columns() == ("n", "a", "b")
    ingest([tmp_path / "t.parquet"], tmp_path / "s", x=["a"], y=["b"])
    np.testing.assert_array_equal(arrays(tmp_path / "s")[0]["x"][:, 0], np.arange(10.0))


# NumPy


@settings(max_examples=40)
@given(
    n=st.integers(1, 60),
    width=st.integers(1, 4),
    order=st.sampled_from("CF"),
    kind=st.sampled_from(["f8", ">f4", "i2", "u1", "?", "f2"]),
    form=st.sampled_from(["npy", "npz", "compressed"]),
    batch=st.integers(8, 400),
    data=st.data(),
)
def test_numpy_files_are_read_as_numpy_reads_them(
    tmp_path_factory, n, width, order, kind, form, batch, data
):
    rows = np.arange(n * width).reshape(n, width).astype(kind).copy(order)
    folder = tmp_path_factory.mktemp("n")
    if form == "npy":
        path, name = folder / "t.npy", "x"
        np.save(path, rows)
    else:
        path, name = folder / "t.npz", "m"
        (np.savez if form == "npz" else np.savez_compressed)(path, m=rows, other=np.ones((2, 2, 2)))
    places = data.draw(st.lists(st.integers(0, width - 1), min_size=1, unique=True))
    start = data.draw(st.integers(0, n - 1))
    source = NumpySource(LOCAL, str(path))
    assert source.columns() == tuple(f"{name}{i}" for i in range(width))
    wanted = tuple(f"{name}{i}" for i in places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BATCH_BYTES", batch)
        found, batches = read(source, wanted, position={"row": start})
    assert batches[0].first_row == start
    for place, column in zip(places, wanted, strict=True):
        np.testing.assert_array_equal(found[column].to_numpy(), rows[start:, place])


def test_columns_of_numpy_files(tmp_path):
    np.save(tmp_path / "one.npy", np.arange(5.0))
    assert NumpySource(LOCAL, str(tmp_path / "one.npy")).columns() == ("x",)
    np.savez(tmp_path / "t.npz", a=np.arange(3), m=np.ones((3, 2)), r=np.ones(3, "f8,i4"), s=1.0)
    source = NumpySource(LOCAL, str(tmp_path / "t.npz"))
    assert source.columns() == ("a", "m0", "m1", "f0", "f1")


def test_wide_numpy_files_are_read_in_bounded_memory(tmp_path, monkeypatch):
    """The batch counts the columns beside the wanted ones, which lie between them."""
    small_batches(monkeypatch, 1 << 16)
    np.save(tmp_path / "t.npy", np.ones((2_000, 512)))
    source = NumpySource(LOCAL, str(tmp_path / "t.npy"))
    tracemalloc.start()
    try:
        total = sum(
            b.columns.num_rows for b in source.batches(("x1",), {"x1": Kind.NUMBER}, (), None)
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 2_000
    assert peak < 1e6  # of 8 MB


def test_bad_numpy(tmp_path):
    def refused(path, match, x=("a",), y=("b",)):
        with pytest.raises(DataError, match=match) as caught:
            ingest([path], tmp_path / "s", x=list(x), y=list(y))
        assert "\n" not in str(caught.value)
        assert list(tmp_path.glob("*s")) == []

    npy, npz = tmp_path / "t.npy", tmp_path / "t.npz"
    two = ["x0"], ["x1"]
    np.save(npy, np.ones((9, 2)) * 1j)
    refused(npy, "column 'x0' .* holds values of type complex128: expected numbers", *two)
    np.save(npy, np.ones((9, 2), "m8[s]"))
    refused(npy, "column 'x0' .* holds values of type timedelta64", *two)
    np.save(npy, np.array([[{}, 1]] * 9))
    refused(npy, "'x' in .*t.npy holds Python objects", *two)
    np.save(npy, np.ones((3, 2, 2)))
    refused(npy, r"holds 'x' of shape \(3, 2, 2\): expected arrays of shape", *two)
    np.save(npy, np.ones((0, 2)))
    refused(npy, "t.npy has columns but no rows", *two)
    np.save(npy, np.ones((900, 2)))
    npy.write_bytes(npy.read_bytes()[:-100])
    refused(npy, r"t.npy is corrupt or cut off \(its rows end early\)", *two)
    npy.write_bytes(b"nothing of the kind")
    refused(npy, "t.npy is no readable NumPy file: .*magic", *two)
    np.savez(npz, a=np.ones(9), b=np.ones(8))
    refused(npz, "must have equally many rows, but 'a' has 9, 'b' has 8")
    np.savez(npz, a=np.ones(9), b=np.ones(9), c=np.ones(4))
    ingest([npz], tmp_path / "fine", x=["a"], y=["b"])  # c is of no concern
    refused(npz, "lacks column 'd': there are 'a', 'b', 'c'", y=["d"])
    np.savez_compressed(npz, a=np.random.default_rng(0).normal(size=5_000), b=np.ones(5_000))
    whole = bytearray(npz.read_bytes())
    whole[9_000] ^= 0xFF
    npz.write_bytes(whole)
    refused(npz, "t.npz is corrupt or cut off")
    npz.write_bytes(whole[:9_000])
    refused(npz, "t.npz is corrupt or cut off .*not a zip file")
    with zipfile.ZipFile(npz, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(npz, "t.npz is no readable NumPy file")


# Zarr


def foreign(path, n=500, **arrays):
    group = zarr.open_group(str(path), mode="w")
    for name, (values, chunks) in arrays.items():
        group.create_array(name, data=values, chunks=chunks)
    return ZarrTableSource(str(path))


def count_reads(monkeypatch):
    """Chunks read, each time, by key; metadata aside."""
    keys = []
    original = zarr.storage.LocalStore.get

    async def get(self, key, prototype, byte_range=None):
        if "zarr.json" not in key and not key.endswith((".zarray", ".zattrs", ".zgroup")):
            keys.append(key)
        return await original(self, key, prototype, byte_range)

    monkeypatch.setattr(zarr.storage.LocalStore, "get", get)
    return keys


@settings(max_examples=15)
@given(
    chunks=st.tuples(st.integers(4, 120), st.integers(1, 3)),
    single=st.integers(4, 120),
    batch=st.integers(8, 2_000),
    start=st.integers(0, 99),
)
def test_any_chunks_give_the_same_rows_and_each_is_read_once(
    tmp_path_factory, chunks, single, batch, start
):
    rng = np.random.default_rng(0)
    m, v = rng.normal(size=(100, 3)), rng.integers(0, 9, 100).astype("i2")
    source = foreign(tmp_path_factory.mktemp("z") / "z", m=(m, chunks), v=(v, (single,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BATCH_BYTES", batch)
        keys = count_reads(patch)
        found, _ = read(source, ("v", "m2", "m0"), position={"row": start})
    np.testing.assert_array_equal(found["v"], v[start:])
    np.testing.assert_array_equal(found["m2"], m[start:, 2])
    np.testing.assert_array_equal(found["m0"], m[start:, 0])
    assert len(keys) == len(set(keys))
    bands = {0 // chunks[1], 2 // chunks[1]}
    expected = len(bands) * (-(-100 // chunks[0]) - start // chunks[0])
    assert len([k for k in keys if k.startswith("m")]) == expected


def test_columns_of_zarr_groups(tmp_path):
    source = foreign(tmp_path / "z", x=(np.ones((9, 2)), (9, 1)), y=(np.ones(9), (3,)))
    assert source.columns() == ("x0", "x1", "y")
    zarr.create_array(str(tmp_path / "one"), data=np.ones((9, 2)), chunks=(3, 2))
    assert ZarrTableSource(str(tmp_path / "one")).columns() == ("x0", "x1")


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("version", [2, 3])
def test_datasets_of_xarray(tmp_path, monkeypatch, version):
    small_batches(monkeypatch)
    table = frame()
    counts = table["PM2.5"].where(table["PM2.5"] > 20)
    data = xr.Dataset(
        {
            "a": ("time", table["a"]),
            "counts": ("time", counts),
            "scaled": ("time", np.arange(N) / 4),
            "wd": ("time", table["wd"].to_numpy("U3")),
            "m": (("time", "height"), np.arange(2.0 * N).reshape(N, 2)),
        },
        coords={"time": table["date"].to_numpy(), "height": ["low", "high"]},
    )
    encoding = {
        "counts": {"dtype": "i4", "_FillValue": -9},
        "scaled": {"dtype": "i2", "scale_factor": 0.25, "add_offset": 1.0, "_FillValue": -32768},
        "a": {"_FillValue": -999.0},
    }
    path = tmp_path / "z.zarr"
    data.to_zarr(path, zarr_format=version, encoding=encoding)
    source = ZarrTableSource(str(path))
    assert sorted(source.columns()) == ["a", "counts", "high", "low", "scaled", "time", "wd"]
    report = ingest(
        [path],
        tmp_path / "s",
        x=["a", "wd", "high"],
        y=["counts", "scaled"],
        time=["time"],
        categorical=["wd"],
    )
    table = table.assign(counts=counts, scaled=np.arange(N) / 4, high=np.arange(1.0, 2 * N, 2))
    table["wd"] = pd.factorize(table.loc[~(table["a"].isna() | counts.isna()), "wd"])[
        1
    ].get_indexer(table["wd"])
    kept = table.dropna()
    values, about = arrays(tmp_path / "s")
    np.testing.assert_array_equal(values["x"], kept[["a", "wd", "high"]])
    np.testing.assert_array_equal(values["y"], kept[["counts", "scaled"]])
    seconds = kept["date"].to_numpy("datetime64[s]").astype(float)
    np.testing.assert_array_equal(values["time"], seconds)
    assert report.missing["counts"] == int(counts.isna().sum())
    assert about["roles"] == {"time": "time"}


def test_conventions_without_xarray(tmp_path, monkeypatch):
    source = foreign(tmp_path / "z", t=(np.arange(9), (3,)), y=(np.ones(9), (3,)))
    zarr.open_group(str(tmp_path / "z"))["t"].attrs["units"] = "hours since 2020-01-01"
    found, _ = read(source, ("t",))
    assert found["t"][1].as_py().hour == 1
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ResourceError, match=r"'t' .* needs xarray: install cme-dask\[xarray\]"):
        read(source, ("t",))
    zarr.open_group(str(tmp_path / "z"))["t"].attrs["units"] = "hours"
    found, _ = read(source, ("t",))
    np.testing.assert_array_equal(found["t"], np.arange(9))


@pytest.mark.parametrize("fill", ["NaN", -1, -1.0, "AAAAAAAA8L8="])
def test_fill_values(tmp_path, fill):
    values = np.array([3.0, -1.0, 2.0])
    source = foreign(tmp_path / "z", t=(values, (3,)))
    zarr.open_group(str(tmp_path / "z"))["t"].attrs["_FillValue"] = fill
    found, _ = read(source, ("t",))
    expected = values if fill == "NaN" else [3.0, np.nan, 2.0]
    np.testing.assert_array_equal(found["t"].to_numpy(), expected)


@pytest.mark.parametrize("fill", ["none", [1, 2], ""])
def test_bad_fill_values(tmp_path, fill):
    source = foreign(tmp_path / "z", t=(np.ones(3), (3,)))
    zarr.open_group(str(tmp_path / "z"))["t"].attrs["_FillValue"] = fill
    with pytest.raises(DataError, match=r"'t' has the fill value .* a number was expected"):
        source.columns()


def test_bad_zarr(tmp_path):
    def refused(path, match, x=("a",), y=("b",), error=DataError):
        with pytest.raises(error, match=match) as caught:
            ingest([path], tmp_path / "s", x=list(x), y=list(y))
        assert "\n" not in str(caught.value)
        assert list(tmp_path.glob("*s")) == []

    z = tmp_path / "z"
    foreign(z, a=(np.ones(9), (3,)), b=(np.ones(8), (3,)))
    refused(z, "must have equally many rows, but 'a' has 9, 'b' has 8")
    refused(z, "lacks column 'c': there are 'a', 'b'", y=["c"])
    foreign(z, a=(np.ones(9) * 1j, (3,)), b=(np.ones(9), (3,)))
    refused(z, "column 'a' .* holds values of type complex128")
    foreign(z, a=(np.ones((2, 2, 2)), (1, 1, 1)))
    refused(z, r"holds 'a' of shape \(2, 2, 2\): expected arrays of shape")
    foreign(z)
    refused(z, "holds no arrays: expected arrays")
    foreign(z, a=(np.ones(0), (3,)), b=(np.ones(0), (3,)))
    refused(z, "has columns but no rows")
    foreign(z, a=(np.arange(9.0), (3,)), b=(np.ones(9), (3,)))
    (z / "a" / "c" / "1").write_bytes(b"broken")
    refused(z, "chunk a/c/1 .*rows 3 to 5.* is truncated or corrupt", error=StoreError)
    (z / "a" / "zarr.json").write_text("{")
    refused(z, "the description of an array of .*z is damaged", error=StoreError)


# Which reader


def test_the_reader_goes_by_name_and_metadata(tmp_path):
    frame(9).to_parquet(tmp_path / "a.PARQUET")
    frame(9).to_parquet(tmp_path / "b.pq")
    np.save(tmp_path / "c.npy", np.ones((3, 2)))
    np.savez(tmp_path / "d.npz", a=np.ones(3))
    foreign(tmp_path / "e", a=(np.ones(3), (3,)))
    frame(9).to_csv(tmp_path / "f.csv")
    found = find_sources([tmp_path / "*"])
    assert [type(source).__name__ for source in found] == [
        "ParquetSource",
        "ParquetSource",
        "NumpySource",
        "NumpySource",
        "ZarrTableSource",
        "CsvSource",
    ]
    assert [s.name for s in found] == sorted(str(p) for p in tmp_path.iterdir())


def test_fingerprints_change_with_the_table(tmp_path):
    frame(9).to_parquet(tmp_path / "a.parquet")
    np.save(tmp_path / "c.npy", np.ones((3, 2)))
    foreign(tmp_path / "e", a=(np.ones(30), (3,)))
    sources = find_sources([tmp_path / "*"])
    before = [source.fingerprint() for source in sources]
    assert before == [source.fingerprint() for source in sources]
    frame(10).to_parquet(tmp_path / "a.parquet")
    np.save(tmp_path / "c.npy", np.ones((4, 2)))
    zarr.open_group(str(tmp_path / "e"))["a"][4] = 2.0
    after = [source.fingerprint() for source in sources]
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_tables_in_other_file_systems(tmp_path):
    memory = fsspec.filesystem("memory")
    raw = io.BytesIO()
    frame().to_parquet(raw)
    memory.pipe("/readers/t.parquet", raw.getvalue())
    raw = io.BytesIO()
    np.save(raw, frame()[["a", "w"]].to_numpy())
    memory.pipe("/readers/t.npy", raw.getvalue())
    (parquet,) = find_sources(["memory://readers/t.parquet"])
    found, _ = read(parquet, ("a", "w"))
    (npy,) = find_sources(["memory://readers/t.npy"])
    other, _ = read(npy, ("x0", "x1"))
    np.testing.assert_array_equal(found["w"], frame()["w"])
    np.testing.assert_array_equal(found["a"], other["x0"])
    assert parquet.name == "memory:///readers/t.parquet"
    memory.rm("/readers", recursive=True)


# Tables in memory


def mixed():
    """Every type of column that has a meaning as numbers or labels."""
    return pd.DataFrame(
        {
            "a": np.linspace(0, 1, 300),
            "counts": pd.array(np.arange(300) % 7, dtype="Int64"),
            "wd": np.array(["W", "N", "SSE"])[np.arange(300) % 3],
            "level": pd.Categorical(["low", "high"] * 150, categories=["high", "low", "never"]),
            "flag": np.arange(300) % 2 == 0,
            "date": pd.date_range("2020-01-01", periods=300, freq="h"),
        }
    )


def values_of(sample):
    return [source.read(0, sample.n_rows) for source in sample.sources]


def test_labels_of_a_data_frame(tmp_path):
    table = mixed()
    sample = open_sample(table, x_columns=["a", "wd", "flag"], y_columns=["level", "counts"])
    x, y = values_of(sample)
    np.testing.assert_array_equal(x[:, 0], table["a"])
    np.testing.assert_array_equal(x[:, 1], np.arange(300) % 3)
    np.testing.assert_array_equal(x[:, 2], 1.0 * table["flag"])
    np.testing.assert_array_equal(y[:, 0], [1.0, 0.0] * 150)
    np.testing.assert_array_equal(y[:, 1], np.arange(300) % 7)
    assert sample.columns[0].categories == {"wd": ("W", "N", "SSE")}
    assert sample.columns[1].categories == {"level": ("high", "low", "never")}
    # As the same table ingested.
    table.to_parquet(tmp_path / "t.parquet")
    ingest(
        [tmp_path / "t.parquet"],
        tmp_path / "s",
        x=["a", "wd", "flag"],
        y=["level", "counts"],
        categorical=["wd", "level"],
    )
    stored = open_sample(tmp_path / "s")
    np.testing.assert_array_equal(values_of(stored)[0], x)
    assert stored.columns[0].categories == sample.columns[0].categories
    assert stored.columns[1].categories == {"level": ("low", "high")}  # as they occur


def test_one_column_of_labels():
    table = mixed()
    sample = open_sample(table["wd"], table["a"])
    assert sample.columns[0].names == ("wd",)
    assert sample.columns[0].categories == {"wd": ("W", "N", "SSE")}
    nameless = open_sample(pd.Series(["u", "v", "u"]), np.ones(3))
    assert nameless.columns[0].categories == {"x0": ("u", "v")}


def test_missing_labels_are_missing_values():
    table = mixed()
    table.loc[4, "wd"] = None
    table.loc[7, "level"] = np.nan
    table.loc[9, "counts"] = pd.NA
    sample = open_sample(table, x_columns=["wd", "level"], y_columns=["counts"])
    x, y = values_of(sample)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(x[:, 0])), [4])
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(x[:, 1])), [7])
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(y[:, 0])), [9])


@pytest.mark.parametrize("dtype", [object, "U3"])
def test_labels_of_xarray(dtype):
    table = mixed()
    data = xr.Dataset({n: ("t", table[n].to_numpy()) for n in ("a", "flag")})
    data["wd"] = "t", table["wd"].to_numpy(dtype)
    sample = open_sample(data, x_columns=["wd", "a"], y_columns=["flag"])
    x, y = values_of(sample)
    np.testing.assert_array_equal(x, np.stack([np.arange(300) % 3, table["a"]], axis=1))
    np.testing.assert_array_equal(y[:, 0], 1.0 * table["flag"])
    assert sample.columns[0].categories == {"wd": ("W", "N", "SSE")}
    alone = open_sample(data["wd"], data["a"])
    np.testing.assert_array_equal(values_of(alone)[0][:, 0], np.arange(300) % 3)
    assert alone.columns[0].categories == {"wd": ("W", "N", "SSE")}


def test_names_in_datasets_need_not_be_texts():
    table = mixed()
    data = xr.Dataset(
        {3: ("t", table["a"]), "wd": ("t", table["wd"]), 7: ("t", 1.0 * table["flag"])}
    )
    sample = open_sample(data, x_columns=["wd", 3], y_columns=["7"])
    assert sample.columns[0].names == ("wd", "3")
    x, y = values_of(sample)
    np.testing.assert_array_equal(x[:, 1], table["a"])
    np.testing.assert_array_equal(y[:, 0], table["flag"])
    whole = open_sample(data[[7, 3]])
    assert whole.columns[0].names == ("7", "3")
    with pytest.raises(DataError, match="variables 3 and '3' of a Dataset would both be"):
        open_sample(data.rename(wd="3"))


def test_tables_in_memory_that_are_refused():
    table = mixed()
    data = xr.Dataset({n: ("t", table[n].to_numpy()) for n in ("a", "date")})
    data["wd"] = "t", table["wd"].to_numpy(object)
    for match, arguments, wanted in (
        ("column 'date' of x holds times .* hour .* datetime=", [table], (["date"], ["a"])),
        ("column 'date' of y holds times", [table["a"], table["date"]], ()),
        ("column 'date' of x holds times", [data], (["date"], ["a"])),
        (r"column 'z' of x must be numeric or text", [table.assign(z=[{}] * 300)], (["z"], ["a"])),
        ("column 'z' of x must be numeric or text", [table.assign(z=1j)], (["z"], ["a"])),
        ("unknown column 'nothing': there are 'a'", [table], (["nothing"], ["a"])),
        ("unknown column 'nothing': there are 'a'", [data], (["nothing"], ["a"])),
        ("column 'wd' holds labels .* not in memory: .load", [data.chunk(t=9)], (["wd"], ["a"])),
        ("x holds labels or times .* not in memory", [data.chunk(t=9)["wd"], data["a"]], ()),
        ("must share one dimension, .* name those", [data.assign(m=(("t", "u"), [[1]] * 300))], ()),
        ("x has 300, y has 299", [table["wd"], table["a"][1:]], ()),
    ):
        with pytest.raises(DataError, match=match) as caught:
            open_sample(*arguments, **dict(zip(("x_columns", "y_columns"), wanted, strict=False)))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["csv.gz", "parquet", "xarray", "pandas"])
def test_a_fit_is_the_same_from_every_input(tmp_path, kind):
    rng = np.random.default_rng(1)
    table = pd.DataFrame(rng.normal(size=(400, 2)), columns=["a", "b"])
    x, y = ["a"], ["b"]
    if kind == "pandas":
        sample = open_sample(table, x_columns=x, y_columns=y)
    elif kind == "xarray":
        data = xr.Dataset({n: ("t", table[n]) for n in table})
        sample = open_sample(data, x_columns=x, y_columns=y)
    else:
        path = tmp_path / f"t.{kind}"
        (table.to_csv if kind == "csv.gz" else table.to_parquet)(path, index=False)
        ingest([path], tmp_path / "s", x=x, y=y)
        sample = open_sample(tmp_path / "s")
    settings = {"kernel_x": Gaussian(1.0), "kernel_y": Gaussian(1.0), "tol": 1e-1}
    law = JointDistribution(**settings).fit(sample)
    expected = JointDistribution(**settings).fit(table[x].to_numpy(), table[y].to_numpy())
    found = law.expect("b", table[x].to_numpy()[:9])
    np.testing.assert_allclose(found, expected.expect("y0", table[x].to_numpy()[:9]), rtol=1e-9)
