import csv
import gzip
import os
import random
import zipfile
import zlib
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pytest
import zarr

from cme_dask.data import csv as csv_reader
from cme_dask.data import typed
from cme_dask.data.ingest import IngestProgress, ingest
from cme_dask.data.sample import open_store
from cme_dask.errors import DataError, ResourceError

BEIJING = (
    Path(os.environ.get("CME_DASK_DATA", Path(__file__).parents[1].parent / "shared" / "data"))
    / "air_quality"
)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(csv_reader, "BLOCK_BYTES", 1 << 10)


@pytest.fixture
def table():
    """Four numeric columns with 3 % missing values and a text column."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(900, 4)).round(4)
    values[rng.random(values.shape) < 0.03] = np.nan
    frame = pd.DataFrame(values, columns=["a", "b", "c", "w"])
    frame["w"] = frame["w"].abs()
    frame.insert(
        2, "place", [("a, b", "line 1\nline 2", 'a "quoted" one')[i % 3] for i in range(900)]
    )
    return frame


def text(rows, header="a,b"):
    return "\n".join([header, *rows]) + "\n"


def stored(path):
    group = zarr.open_group(str(path), mode="r")
    names = ["x", "y", "row_sample/keys", "row_sample/index", "row_sample/x", "row_sample/y"]
    return {name: group[name][...] for name in names}


def assert_same(one, other):
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])


def test_matches_pandas(tmp_path, table, small_blocks):
    table.to_csv(tmp_path / "t.csv", index=False)
    report = ingest(
        [tmp_path / "t.csv"], tmp_path / "s", x=["c", "a"], y=["b"], units={"a": "K", "b": "m"}
    )
    kept = table.dropna(subset=["a", "b", "c"])
    arrays = stored(tmp_path / "s")
    np.testing.assert_array_equal(arrays["x"], kept[["c", "a"]])
    np.testing.assert_array_equal(arrays["y"], kept[["b"]])
    assert report.files == (str(tmp_path / "t.csv"),)
    assert report.location == str(tmp_path / "s")
    assert (report.rows_read, report.rows_kept) == (900, len(kept))
    assert report.rows_dropped == 900 - len(kept)
    assert report.missing == {n: int(table[n].isna().sum()) for n in "cab"}
    assert report.ranges == {n: (kept[n].min(), kept[n].max()) for n in "cab"}
    sample = open_store(zarr.open_group(str(tmp_path / "s"), mode="r"), "s")
    assert [c.names for c in sample.columns] == [("c", "a"), ("b",)]
    assert [c.units for c in sample.columns] == [{"a": "K"}, {"b": "m"}]


def test_weights(tmp_path, table, small_blocks):
    table.to_csv(tmp_path / "t.csv", index=False)
    report = ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], weights="w")
    kept = table.dropna(subset=["a", "b", "w"])
    weights = zarr.open_group(str(tmp_path / "s"), mode="r")["weights"][...]
    np.testing.assert_array_equal(weights, kept["w"])
    assert report.rows_kept == len(kept)
    assert report.missing["w"] == table["w"].isna().sum()


def test_block_size_does_not_matter(tmp_path, table, monkeypatch):
    table.to_csv(tmp_path / "t.csv", index=False)
    for name, size in (("one", 1 << 20), ("many", 300)):
        monkeypatch.setattr(csv_reader, "BLOCK_BYTES", size)
        ingest([tmp_path / "t.csv"], tmp_path / name, x=["a"], y=["b"], chunk_rows=64)
    assert_same(stored(tmp_path / "one"), stored(tmp_path / "many"))


def test_one_file_or_three(tmp_path, table, small_blocks):
    table.to_csv(tmp_path / "whole.csv", index=False)
    table[:200].to_csv(tmp_path / "part1.csv", index=False)
    table[200:201][["b", "a"]].to_csv(tmp_path / "part2.csv.gz", index=False)
    table[201:][["c", "b", "place", "a"]].to_csv(tmp_path / "part3.csv", index=False)
    ingest([tmp_path / "whole.csv"], tmp_path / "one", x=["a"], y=["b"])
    shuffled = [tmp_path / "part3.csv", tmp_path / "part?.csv", tmp_path / "*.csv.gz"]
    report = ingest(shuffled, tmp_path / "three", x=["a"], y=["b"])
    assert [Path(f).name for f in report.files] == ["part1.csv", "part2.csv.gz", "part3.csv"]
    assert_same(stored(tmp_path / "one"), stored(tmp_path / "three"))


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "csv.bz2", "csv.xz"])
def test_compression(tmp_path, table, ending, small_blocks):
    path = tmp_path / f"t.{ending}"
    table.to_csv(path, index=False)
    report = ingest([path], tmp_path / "s", x=["a"], y=["b"])
    assert report.rows_kept == len(table.dropna(subset=["a", "b"]))


def test_ways_to_name_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd[1].csv").write_text(text(["1,2", "3,4"]))
    (tmp_path / "folder.csv").mkdir()
    path = str(tmp_path / "odd[1].csv")
    entries = ["~/odd[1].csv", "~/*.csv", "odd[1].csv", "folder.csv/../*.csv", f"file://{path}"]
    report = ingest(entries, "s", x=["a"], y=["b"])
    assert report.files == (path,)
    assert report.rows_read == 2


def test_url(tmp_path):
    with fsspec.open_files(["memory://ingest/1.csv", "memory://ingest/2.csv"], "w") as files:
        for file in files:
            file.write(text(["1,2", "3,4"]))
    report = ingest(["memory://ingest/*.csv"], tmp_path / "s", x=["a"], y=["b"])
    assert report.files == ("memory:///ingest/1.csv", "memory:///ingest/2.csv")
    assert report.rows_kept == 4


def test_what_counts_as_missing(tmp_path):
    rows = ["1,2", ",2", "NA,2", '"NA",2', "nan,2", "NaN,2", "null,2", '"",2', "", "3,4"]
    (tmp_path / "t.csv").write_text(text(rows))
    report = ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"])
    assert (report.rows_read, report.rows_kept, report.missing) == (9, 2, {"a": 7, "b": 0})
    (tmp_path / "t.csv").write_text(text(["1,2", "-99,2", "3,4"]))
    report = ingest(
        [tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], null_values=["-99"], overwrite=True
    )
    assert report.rows_kept == 2


@pytest.mark.parametrize("form", ["csv", "parquet", "npz"])
def test_values_that_are_named_are_missing_in_any_file(tmp_path, form):
    numbers, labels = [1.0, -999.0, 3.0, 4.0, 5.0], ["N", "S", "?", "NA", "N"]
    frame = pd.DataFrame({"a": numbers, "wd": labels, "n": [7, 7, 8, -9, 7], "y": 1.0})
    path = tmp_path / f"t.{form}"
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "parquet":
        frame.to_parquet(path)
    else:
        np.savez(path, **{name: frame[name].to_numpy() for name in ("a", "n", "y")}, wd=labels)
    report = ingest(
        [path], tmp_path / "s", x=["a", "wd", "n"], y=["y"], categorical=["wd", "n"],
        null_values=["-999", "?", "-9"], missing="keep",
    )  # fmt: skip
    assert report.missing == {"a": 1, "wd": 1, "n": 1, "y": 0}
    assert report.categories["wd"] == ("N", "S", "NA")
    assert report.categories["n"] == ("7", "8")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_dates_without_dashes_are_dates(tmp_path, form):
    """Read as seconds, all of them would lie in 1970."""
    days = [20130301, 20130601, 20130901, 20131231]
    frame = pd.DataFrame({"date": days, "y": 1.0})
    path = tmp_path / f"t.{form}"
    frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    ingest(
        [path], tmp_path / "s", x=["date"], y=["y"], time=["date"], datetime={"date": ["season"]}
    )
    time = open_store(zarr.open_group(str(tmp_path / "s"), mode="r"), "s").time.read(0, 4)[:, 0]
    expected = pd.to_datetime([str(day) for day in days]).to_numpy("datetime64[s]").astype(float)
    np.testing.assert_array_equal(time, expected)
    values = np.array([20130301.0, 20130230.0])  # the second one is no date, so both are seconds
    np.testing.assert_array_equal(typed._compact_dates(values), values)


def test_a_zip_of_several_files_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("a.csv", text(["1,2"]))
        archive.writestr("b.csv", text(["3,4"]))
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as archive:
        archive.writestr("a.csv", text(["1,2", "3,4"]))
        archive.writestr("__MACOSX/._a.csv", "attributes")
    assert ingest([tmp_path / "mac.zip"], tmp_path / "m", x=["a"], y=["b"]).rows_kept == 2
    with pytest.raises(DataError, match=r"holds 2 files \('a.csv', 'b.csv'\)"):
        ingest([tmp_path / "t.zip"], tmp_path / "s", x=["a"], y=["b"])


def test_byte_order_mark_and_line_ends(tmp_path):
    (tmp_path / "t.csv").write_bytes(b'\xef\xbb\xbf"a","b"\r\n1,2\r\n3,4')
    report = ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"])
    assert report.ranges == {"a": (1.0, 3.0), "b": (2.0, 4.0)}


def test_other_columns_may_hold_anything(tmp_path):
    body = b"caf\xe9,a,caf\xe9,b\n\xff\xfe,1,x,2\n,3,y,4\n"
    (tmp_path / "t.csv").write_bytes(body)
    assert ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"]).rows_kept == 2


def test_progress(tmp_path, table, small_blocks):
    for name in ("1.csv", "2.csv"):
        table.to_csv(tmp_path / name, index=False)
    seen = []
    report = ingest([tmp_path / "*.csv"], tmp_path / "s", x=["a"], y=["b"], progress=seen.append)
    last = str(tmp_path / "2.csv")
    assert seen[-1] == IngestProgress(last, report.rows_read, report.rows_kept, 1, 2)
    counts = [p.rows_read for p in seen]
    assert len(counts) > 20
    assert counts == sorted(counts)
    assert {(Path(p.file).name, p.files_done) for p in seen} == {("1.csv", 0), ("2.csv", 1)}


LONG = [f"{i},{-i}" for i in range(500)]

BAD_FILES = {
    "empty": (b"", "t.csv is empty: expected a header and rows"),
    "blank": (b"\n\n", "t.csv is empty"),
    "header only": (b"a,b\n", "t.csv has a header but no rows"),
    "header only, no line end": (b"a,b", "t.csv has a header but no rows"),
    "lacking": (b"a,c\n1,2\n", "t.csv lacks column 'b': there are 'a', 'c'"),
    "lacking in many": (
        b",".join(b"c%d" % i for i in range(100)) + b"\n",
        "lacks column 'a', 'b': there are 'c0', .* 'c19' and 80 more",
    ),
    "semicolons": (b"a;b\n1;2\n", "lacks column 'a', 'b': there are 'a;b'"),
    "twice": (b"a,b,a\n1,2,3\n", "the header of .*t.csv has 'a' more than once"),
    "ragged": (
        text([*LONG, "1,2,3", *LONG]).encode(),
        "row 502 of .*t.csv has 3 fields, expected 2",
    ),
    "text": (
        text([*LONG, "1,abc", *LONG]).encode(),
        "column 'b' of .*t.csv must be numeric but has 'abc' in row 502",
    ),
    "truth values": (
        b"a,b\n1,True\n0,False\n",
        "column 'b' of .*t.csv must be .* 'True' in row 2: write truth values as 1 and 0",
    ),
    "spaces": (
        b"a,b\n1,2\n3,  \n",
        "'b' of .*t.csv must be numeric but has an empty field, or one of blanks alone, in row 3",
    ),
    "text behind other columns": (
        b"z,c,b,a\n,,1,2\n,,1,zz\n",
        "column 'a' of .*t.csv must be numeric but has 'zz' in row 3",
    ),
    "latin-1": ("a,b\n1,é\n".encode("latin-1"), "column 'b' .* row 2: its bytes are not UTF-8"),
    "latin-1 header": ("a,bé\n1,2\n".encode("latin-1"), r"'b'.*the header is not UTF-8 text"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), "lacks .*the header is not UTF-8 text"),
    "open quote": (text([*LONG, '"1,2', *LONG]).encode(), "longer than 1,024 bytes: a quote"),
    "infinite": (
        text([*LONG, "1,inf", "2,-inf", ",inf", *LONG]).encode(),
        "column 'b' of .*t.csv has 2 infinite values in rows .*, the first in row 502",
    ),
    "overflow": (b"a,b\n1,1e400\n1,2\n", "column 'b' .* 1 infinite value .* row 2"),
    "one row": (b"a,b\n1,2\n", "at least 2 rows are needed, got 1"),
    "no complete row": (b"a,b\n1,\n,2\n", "each of the 2 rows lacks a wanted value$"),
    "all missing": (b"a,b\n1,\n2,NA\n", "each of the 2 rows lacks .*: 'b' has no value in any row"),
}


@pytest.fixture
def former(tmp_path):
    """An earlier store, and a check that a failure left it and nothing else."""
    (tmp_path / "former.csv").write_text(text(["1,2", "3,4", "5,6"]))
    ingest([tmp_path / "former.csv"], tmp_path / "s", x=["a"], y=["b"])
    before = stored(tmp_path / "s")
    (tmp_path / "former.csv").unlink()

    def check(*inputs):
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*inputs, "s"])
        assert_same(before, stored(tmp_path / "s"))

    return check


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(tmp_path, former, small_blocks, case):
    body, message = BAD_FILES[case]
    (tmp_path / "t.csv").write_bytes(body)
    for output, overwrite in (("s", True), ("fresh", False)):
        with pytest.raises(DataError, match=message):
            ingest([tmp_path / "t.csv"], tmp_path / output, x=["a"], y=["b"], overwrite=overwrite)
        former("t.csv")


def test_bad_file_after_good_ones(tmp_path, former, small_blocks):
    (tmp_path / "1.csv").write_text(text(LONG * 20))
    (tmp_path / "2.csv").write_text(text(["1,2", "oops,3"]))
    with pytest.raises(DataError, match=r"column 'a' of .*2.csv .* 'oops' in row 3"):
        ingest(
            [tmp_path / "*.csv"], tmp_path / "s", x=["a"], y=["b"], chunk_rows=64, overwrite=True
        )
    former(".s.partial", "1.csv", "2.csv")  # with a checkpoint made in the first file
    (tmp_path / "2.csv").write_text(text(["1,2", "0,3"]))
    usual = {"x": ["a"], "y": ["b"], "chunk_rows": 64}
    report = ingest([tmp_path / "*.csv"], tmp_path / "s", **usual, overwrite=True, resume=True)
    assert report.rows_resumed > 500
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.csv", "2.csv", "s"]
    ingest([tmp_path / "*.csv"], tmp_path / "whole", **usual)
    assert_same(stored(tmp_path / "s"), stored(tmp_path / "whole"))


def test_headers_are_checked_first(tmp_path, former):
    (tmp_path / "1.csv").write_text(text(LONG))
    (tmp_path / "2.csv").write_text(text(LONG, header="a,c"))
    seen = []
    with pytest.raises(DataError, match=r"2.csv lacks column 'b'"):
        ingest([tmp_path / "*.csv"], tmp_path / "n", x=["a"], y=["b"], progress=seen.append)
    assert seen == []
    former("1.csv", "2.csv")


def _flip(packed):
    middle = len(packed) // 2
    return (
        packed[:middle]
        + bytes(b ^ 0xFF for b in packed[middle : middle + 40])
        + packed[middle + 40 :]
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda packed: packed[:-12], "t.csv.gz is corrupt or cut off"),
        (lambda packed: packed[: len(packed) // 2], "t.csv.gz is corrupt or cut off"),
        (lambda packed: packed[:-8] + bytes(8), "t.csv.gz is corrupt or cut off"),
        (lambda packed: zlib.compress(packed), "t.csv.gz is corrupt or cut off"),
        (_flip, "t.csv.gz"),  # what comes out may fail to parse before it fails to unpack
    ],
    ids=["tail", "half", "checksum", "no gzip", "flipped"],
)
def test_damaged_gz(tmp_path, former, small_blocks, damage, message):
    rng = random.Random(3)
    body = text([f"{rng.random()},{rng.random()}" for _ in range(2000)])
    (tmp_path / "t.csv.gz").write_bytes(damage(gzip.compress(body.encode())))
    with pytest.raises(DataError, match=message):
        ingest([tmp_path / "t.csv.gz"], tmp_path / "s", x=["a"], y=["b"], overwrite=True)
    former("t.csv.gz")


def test_missing_error(tmp_path, former, small_blocks):
    (tmp_path / "t.csv").write_text(text([*LONG, "7,", ",8", "9,", *LONG]))
    with pytest.raises(
        DataError,
        match=r"column 'a' of .*t.csv has 1 missing value in rows .*, the first in row 503",
    ):
        ingest(
            [tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], missing="error", overwrite=True
        )
    former("t.csv")
    (tmp_path / "t.csv").write_text(text(LONG))
    report = ingest([tmp_path / "t.csv"], tmp_path / "n", x=["a"], y=["b"], missing="error")
    assert report.rows_kept == 500


@pytest.mark.parametrize(
    ("weights", "message"),
    [("-1", "column 'w' of .*t.csv has 1 negative value .* row 3"), ("0", "all weights are zero")],
)
def test_bad_weights(tmp_path, former, weights, message):
    rows = ["1,2,0", f"1,2,{weights}", "1,-2,0"]
    (tmp_path / "t.csv").write_text(text(rows, header="a,b,w"))
    with pytest.raises(DataError, match=message):
        ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], weights="w", overwrite=True)
    former("t.csv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": ["a"], "y": ["a"]}, "column 'a' is wanted twice"),
        ({"x": ["a", "a"]}, "column 'a' is wanted twice"),
        ({"weights": "b"}, "column 'b' is wanted twice"),
        ({"x": []}, "x needs at least one column"),
        ({"y": []}, "y needs at least one column"),
        ({"x": "a"}, "x must be a list of column names, got the text 'a'"),
        ({"group": ["a"]}, r"group must be the name of one column, got \['a'\]"),
        ({"weights": ["b"]}, r"weights must be the name of one column, got \['b'\]"),
        ({"missing": "ignore"}, "missing must be 'drop', 'error' or 'keep', got 'ignore'"),
        ({"units": {"z": "m"}}, "units .* unknown columns: z"),
        ({"files": []}, "files must be a list of at least one path"),
        ({"files": "t.csv"}, "files must be a list of at least one path, got 't.csv'"),
        ({"files": ["nowhere.csv"]}, "there is no file nowhere.csv"),
        ({"files": ["t.csv", "nowhere/*.csv"]}, r"no file matches nowhere/\*.csv"),
        ({"files": ["."]}, r"\. is a folder: name its files, such as .*/\*.csv"),
        ({"files": ["nonsense://t.csv"]}, "nonsense://t.csv can't be opened: Protocol not known"),
        ({"output": "t.csv"}, r"the output \(t.csv\) would replace the input .*t.csv"),
        ({"output": "."}, r"the output \(\.\) would replace the input .*t.csv"),
        ({"overwrite": False}, "s already exists"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, former, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(text(LONG))
    usual = {"files": ["t.csv"], "output": "s", "x": ["a"], "y": ["b"], "overwrite": True}
    with pytest.raises(DataError, match=message):
        ingest(**(usual | changes))
    former("t.csv")


def test_missing_package(tmp_path, monkeypatch):
    def url_to_fs(_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("cme_dask.data.ingest.url_to_fs", url_to_fs)
    with pytest.raises(ResourceError, match=r"s3://b/t\.csv can't be opened: Install s3fs"):
        ingest(["s3://b/t.csv"], tmp_path / "s", x=["a"], y=["b"])


def test_unreadable_file(tmp_path, monkeypatch, former):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "t.csv").write_text(text(LONG))
    monkeypatch.setattr(csv_reader, "OpenFile", refuse)
    with pytest.raises(DataError, match=r"t\.csv can't be read: Permission denied"):
        ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], overwrite=True)
    former("t.csv")


def test_an_error_of_the_caller_leaves_nothing(tmp_path, former, small_blocks):
    (tmp_path / "t.csv").write_text(text(LONG))

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest([tmp_path / "t.csv"], tmp_path / "n", x=["a"], y=["b"], progress=stop)
    former("t.csv")


@pytest.mark.skipif(not BEIJING.is_dir(), reason="the Beijing air quality data are not here")
def test_beijing(tmp_path):
    x, y = ["TEMP", "DEWP", "PRES", "WSPM", "hour"], ["PM2.5"]
    report = ingest([BEIJING / "*.csv.gz"], tmp_path / "s", x=x, y=y)
    assert len(report.files) == 12
    assert (report.rows_read, report.rows_kept) == (420_768, 411_625)
    assert report.ranges["hour"] == (0.0, 23.0)
    with gzip.open(report.files[0], "rt", newline="") as file:
        rows = [[r[n] for n in x + y] for r in csv.DictReader(file)]
    expected = np.array([[float(v) for v in row] for row in rows if "NA" not in row])
    group = zarr.open_group(str(tmp_path / "s"), mode="r")
    np.testing.assert_array_equal(group["x"][: len(expected)], expected[:, :5])
    np.testing.assert_array_equal(group["y"][: len(expected)], expected[:, 5:])
