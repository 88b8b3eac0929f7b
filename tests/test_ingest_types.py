"""Roles and types of columns: labels, times, cyclic columns, groups, statistics."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from cme_dask.data.ingest import ingest
from cme_dask.data.layout import make_layout
from cme_dask.data.sample import open_store
from cme_dask.data.tables import Batch, Kind
from cme_dask.data.typed import Decoder, joined_time
from cme_dask.data.writer import Statistics
from cme_dask.errors import DataError


@pytest.fixture
def frame():
    """Hourly rows at stations with labels and gaps."""
    rng = np.random.default_rng(2)
    rows = 600
    date = pd.Timestamp("2013-12-30 22:00") + pd.to_timedelta(np.arange(rows), "h")
    frame = pd.DataFrame(
        {
            "t": rng.normal(15, 8, rows).round(2),
            "wd": rng.choice(["N", "S", "SW"], rows),
            "code": rng.choice([3, 7, 20], rows),
            "station": rng.choice(["Dongsi", "Wanliu, west", 'the "old" one'], rows),
            "p": rng.gamma(2.0, 40.0, rows).round(1),
            "year": date.year,
            "month": date.month,
            "day": date.day,
            "hour": date.hour,
            "date": date.astype(str),
        }
    )
    for name in ("t", "wd", "p"):
        frame.loc[rng.random(rows) < 0.04, name] = np.nan
    return frame


def made(tmp_path, frame, **options):
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = {"y": ["p"], "overwrite": True, "block_bytes": 2_000} | options
    report = ingest([tmp_path / "t.csv"], tmp_path / "s", **options)
    return report, zarr.open_group(str(tmp_path / "s"), mode="r")


def first_codes(values):
    codes, labels = pd.factorize(values)
    return codes, tuple(str(label) for label in labels)


def test_labels_become_codes_by_first_occurrence(tmp_path, frame):
    report, group = made(tmp_path, frame, x=["t", "wd", "code"], categorical=["wd", "code"])
    kept = frame.dropna(subset=["t", "wd", "p"])
    for place, name in ((1, "wd"), (2, "code")):
        codes, labels = first_codes(kept[name])
        np.testing.assert_array_equal(group["x"][:, place], codes)
        assert report.categories[name] == labels
        assert report.statistics["x"][name]["counts"] == np.bincount(codes).tolist()
    sample = open_store(group, "s")
    assert sample.columns[0].categories == report.categories
    assert report.missing["wd"] == frame["wd"].isna().sum()


@pytest.mark.parametrize("size", [700, 5_000, 1 << 20])
def test_block_size_changes_nothing(tmp_path, frame, size):
    usual = {"x": ["t", "wd", "hour"], "categorical": ["wd"], "cyclic": {"hour": 24}}
    usual |= {"group": "station", "time": ["date"], "chunk_rows": 64}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    made(tmp_path / "one", frame, **usual)
    made(tmp_path / "two", frame, **usual, block_bytes=size)
    assert contents(tmp_path / "one/s") == contents(tmp_path / "two/s")


def contents(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_statistics_match_pandas(tmp_path, frame):
    frame["t"] += 1e6  # digits are lost unless sums are about the mean
    report, group = made(tmp_path, frame, x=["t"], chunk_rows=100)
    kept = frame.dropna(subset=["t", "p"])
    for variable, name in (("x", "t"), ("y", "p")):
        about = report.statistics[variable][name]
        assert about["count"] == len(kept)
        assert about["missing"] == frame[name].isna().sum()
        assert (about["min"], about["max"]) == (kept[name].min(), kept[name].max())
        np.testing.assert_allclose(about["mean"], kept[name].mean(), rtol=1e-14)
        np.testing.assert_allclose(about["std"], kept[name].std(ddof=0), rtol=1e-9)
    assert group.attrs["cme_dask"]["statistics"] == report.statistics
    assert group.attrs["cme_dask"]["schema_version"] == 1


@settings(max_examples=60)
@given(
    shift=st.sampled_from([0.0, 1e3, 1e9]),
    cuts=st.lists(st.integers(1, 199), unique=True, max_size=6),
)
def test_statistics_joined_at_any_borders(shift, cuts):
    rows = np.random.default_rng(0).normal(shift, 1.0, (200, 2))
    running = Statistics(2)
    for part in np.split(rows, sorted(cuts)):
        running.add(part)
    again = Statistics(2)
    again.restore(running.state)
    for column, about in enumerate(again.to_dicts()):
        np.testing.assert_allclose(about["mean"], rows[:, column].mean(), rtol=1e-13)
        np.testing.assert_allclose(about["std"], rows[:, column].std(), rtol=1e-7)
        assert about["max"] == rows[:, column].max()


def test_cyclic_and_calendar_columns(tmp_path, frame):
    report, group = made(
        tmp_path,
        frame,
        x=["hour", "t", "date"],
        cyclic={"hour": 24},
        datetime={"date": ["season", "hour", "weekday"]},
        units={"t": "degC"},
    )
    names = ["hour_sin", "hour_cos", "t", "date_season_sin", "date_season_cos", "date_hour_sin"]
    names += ["date_hour_cos", "date_weekday_sin", "date_weekday_cos"]
    assert list(report.statistics["x"]) == names
    kept = frame.dropna(subset=["t", "p"])
    date = pd.to_datetime(kept["date"])
    year = date.dt.day_of_year - 1 + date.dt.hour / 24
    turns = {"hour": kept["hour"] / 24, "date_hour": date.dt.hour / 24}
    turns |= {"date_season": year / 365.2425, "date_weekday": date.dt.day_of_week / 7}
    for place, name in enumerate(names):
        if name == "t":
            continue
        stem, _, of = name.rpartition("_")
        expected = getattr(np, of)(2 * np.pi * turns[stem])
        np.testing.assert_allclose(group["x"][:, place], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("2013-03-01 14:30", 1362148200.0),
        ("2013-03-01T14:30:00.25", 1362148200.25),
        ("2013-03-01T14:30:00Z", 1362148200.0),
        ("2013-03-01T14:30:00+02:00", 1362141000.0),
        ("2013-03-01", 1362096000.0),
        ("1362148200.5", 1362148200.5),
        ("1900-01-01 00:00", -2208988800.0),
    ],
)
def test_forms_of_time(tmp_path, form, expected):
    (tmp_path / "t.csv").write_text(f"a,b,t\n1,2,{form}\n3,4,\n5,6,{form}\n")
    report = ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], time=["t"])
    group = zarr.open_group(str(tmp_path / "s"), mode="r")
    np.testing.assert_array_equal(group["time"][...], [expected, expected])
    assert report.missing["t"] == 1
    about = group.attrs["cme_dask"]
    assert (about["schema_version"], about["roles"]) == (3, {"time": "t"})


def test_time_from_its_parts(tmp_path, frame):
    _, group = made(
        tmp_path, frame, x=["t", "hour"], cyclic={"hour": 24}, time=["year", "month", "day", "hour"]
    )
    kept = frame.dropna(subset=["t", "p"])
    seconds = (pd.to_datetime(kept["date"]) - pd.Timestamp(0)) / pd.Timedelta("1s")
    np.testing.assert_array_equal(group["time"][...], seconds)
    index = group["row_sample/index"][...]
    np.testing.assert_array_equal(group["row_sample/time"][...], seconds.to_numpy()[index])


@settings(max_examples=60)
@given(
    moment=st.datetimes(
        min_value=pd.Timestamp("1700-01-01").to_pydatetime(),
        max_value=pd.Timestamp("2250-01-01").to_pydatetime(),
    ).map(lambda t: t.replace(microsecond=0))
)
def test_joined_time_equals_pandas(moment):
    names = ("year", "month", "day", "hour", "minute", "second")
    parts = [np.array([float(getattr(moment, name))]) for name in names]
    (seconds,) = joined_time(parts, names, lambda *_: pytest.fail("refused"))
    assert seconds == pd.Timestamp(moment).timestamp()


def test_groups_of_text_integers_and_labels(tmp_path, frame):
    kept = frame.dropna(subset=["t", "p"])
    _, group = made(tmp_path, frame, x=["t"], group="station")
    codes, labels = first_codes(kept["station"])
    np.testing.assert_array_equal(group["group"][...], codes)
    assert group["group"].dtype == np.int64
    assert tuple(group.attrs["cme_dask"]["group_labels"]) == labels
    np.testing.assert_array_equal(
        group["row_sample/group"][...], codes[group["row_sample/index"][...]]
    )
    _, group = made(tmp_path, frame, x=["t"], group="code")
    np.testing.assert_array_equal(group["group"][...], kept["code"])
    assert "group_labels" not in group.attrs["cme_dask"]
    _, group = made(tmp_path, frame, x=["t", "code"], group="code")
    np.testing.assert_array_equal(group["group"][...], kept["code"])
    np.testing.assert_array_equal(group["x"][:, 1], kept["code"])
    _, group = made(tmp_path, frame, x=["t"], group="code", categorical=["code"])
    np.testing.assert_array_equal(group["group"][...], first_codes(kept["code"])[0])
    _, group = made(tmp_path, frame, x=["t", "station"], group="station", categorical=["station"])
    np.testing.assert_array_equal(group["group"][...], group["x"][:, 1])


def test_target_chunk(tmp_path, frame):
    _, group = made(tmp_path, frame, x=["t", "code", "hour"], target_chunk=2_000)
    assert group["x"].chunks == (64, 3)  # 64 rows of 24 bytes are below 2,000, 128 are not
    assert group["y"].chunks == (64, 1)


BAD = {
    "text as number": ({"x": ["wd"]}, "'wd' of .* must be numeric but has .* as categorical"),
    "date as number": ({"x": ["date"]}, "'date' .* must be numeric .* as datetime"),
    "number as date": (
        {"x": ["wd"], "datetime": {"wd": ["hour"]}},
        "column 'wd' of .* has '[NSW]+' in row 2: expected an ISO time",
    ),
    "unknown part": ({"x": ["date"], "datetime": {"date": ["week"]}}, "some of hour, weekday"),
    "part twice": (
        {"x": ["date"], "datetime": {"date": ["hour"] * 2}},
        "each once, got hour, hour",
    ),
    "two types": (
        {"x": ["hour"], "cyclic": {"hour": 24}, "categorical": ["hour"]},
        "column 'hour' has two types",
    ),
    "period": ({"x": ["hour"], "cyclic": {"hour": 0}}, "period of 'hour' must be positive"),
    "spare type": ({"x": ["t"], "categorical": ["wd"]}, "'wd' has a type but is in neither"),
    "stored twice": (
        {"x": ["hour", "hour_sin"], "cyclic": {"hour": 24}},
        "two columns would be stored as 'hour_sin'",
    ),
    "two parts of time": ({"x": ["t"], "time": ["year", "month"]}, "time must be one column, or"),
    "parts out of order": (
        {"x": ["t"], "time": ["year", "day", "month"]},
        r"column 'day' of .*t\.csv has [\d,]+ impossible values? .* the first in row",
    ),
    "group of fractions": ({"x": ["t"], "group": "t"}, "'t' of .* fractional .groups must be"),
    "group of times": (
        {"x": ["date"], "datetime": {"date": ["hour"]}, "group": "date"},
        "group 'date' is a time",
    ),
    "labels as weights": (
        {"x": ["t"], "y": ["code"], "categorical": ["code"], "time": ["code"]},
        "'code' can't be categorical and weights or time",
    ),
    "text for a list": ({"x": ["t"], "time": "date"}, "time must be a list .* got the text 'date'"),
    "unknown group": ({"x": ["t"], "group": "nix"}, "lacks column 'nix'"),
    "missing group": (
        {"x": ["hour"], "y": ["code"], "group": "wd", "missing": "error"},
        r"column 'wd' of .* missing value.* the first in row",
    ),
    "both chunks": ({"x": ["t"], "chunk_rows": 64, "target_chunk": 8}, "give one"),
    "no chunk": ({"x": ["t"], "target_chunk": 0}, "target_chunk must lie between"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(tmp_path, frame, case):
    options, message = BAD[case]
    frame["hour_sin"] = 0.0
    with pytest.raises(DataError, match=message):
        made(tmp_path, frame, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_a_group_that_turns_into_text(tmp_path):
    rows = [f"{i},{i},{i % 7}" for i in range(300)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,g", *rows, "1,2,x9", *rows, ""]))
    options = {"x": ["a"], "y": ["b"], "group": "g", "block_bytes": 900}
    with pytest.raises(DataError, match=r"'g' of .*t.csv has 'x9' in row 302, .* categorical"):
        ingest([tmp_path / "t.csv"], tmp_path / "s", **options)
    ingest([tmp_path / "t.csv"], tmp_path / "s", **options, categorical=["g"], overwrite=True)
    attribute = zarr.open_group(str(tmp_path / "s"), mode="r").attrs["cme_dask"]
    assert attribute["group_labels"] == [*map(str, range(7)), "x9"]


def test_a_time_that_changes_form_names_its_row(tmp_path):
    rows = [f"{i},{i},2013-03-01 {i % 24:02}:00" for i in range(100)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,t", *rows, "1,2,1.3.2013", *rows, ""]))
    with pytest.raises(DataError, match=r"'t' of .*t\.csv has '1\.3\.2013' in row 102"):
        ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], time=["t"])


def test_free_text_is_no_category(tmp_path, monkeypatch):
    monkeypatch.setattr("cme_dask.data.typed.MAX_LABELS", 50)
    (tmp_path / "t.csv").write_text("\n".join(["a,b", *(f"id{i},{i}" for i in range(60)), ""]))
    with pytest.raises(DataError, match="'a' has more than 50 different labels"):
        ingest([tmp_path / "t.csv"], tmp_path / "s", x=["a"], y=["b"], categorical=["a"])


def decoded(column, kind):
    options = {Kind.CATEGORY: {"categorical": ["v"]}, Kind.TIME: {"datetime": {"v": ["hour"]}}}
    layout = make_layout(["v"], ["y"], **options.get(kind, {}))
    batch = pa.record_batch({"v": column, "y": pa.array([1.0] * len(column))})
    return Decoder(layout, "drop", "table.parquet")(Batch(batch, 10, {}))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, None, 3], pa.uint8()), [1, 3]),
        (pa.array([True, None, False]), [1, 0]),
        (pa.array([1.5, np.nan, 2.0], pa.float32()), [1.5, 2.0]),
        (pa.array([1, 2, 3]).dictionary_encode(), [1, 2, 3]),
        (pa.array(["1.25", "2.50"]).cast(pa.decimal128(6, 2)), [1.25, 2.5]),
        (pa.nulls(3), []),
    ],
    ids=["integer", "boolean", "float32", "dictionary", "decimal", "null"],
)
def test_typed_numbers(column, expected):
    np.testing.assert_array_equal(decoded(column, Kind.NUMBER).x[:, 0], expected)


@pytest.mark.parametrize(
    ("column", "labels", "codes"),
    [
        (pa.array(["b", None, "a", "b"]), ["b", "a"], [0, 1, 0]),
        (pa.array(["b", "a", None, "b"]).dictionary_encode()[1:], ["a", "b"], [0, 1]),
        (pa.array([7, None, 3, 7]), ["7", "3"], [0, 1, 0]),
        (pa.array([7.0, np.nan, 3.0]), ["7", "3"], [0, 1]),
        (pa.array([True, False, None]), ["true", "false"], [0, 1]),
    ],
    ids=["text", "dictionary", "integer", "float", "boolean"],
)
def test_typed_labels(column, labels, codes):
    coded = decoded(column, Kind.CATEGORY).coded["v"]
    assert coded.labels.to_pylist() == labels
    np.testing.assert_array_equal(coded.codes, codes)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([np.datetime64("2020-01-01T06:00", "s"), None]),
        pa.array([np.datetime64("2020-01-01T06:00", "ns"), None]).cast(pa.timestamp("ns", "UTC")),
        pa.array(["2020-01-01T06:00", None]),
        pa.array([1577858400, None]),
    ],
    ids=["naive", "zoned", "text", "seconds"],
)
def test_typed_times(column):
    np.testing.assert_allclose(decoded(column, Kind.TIME).x, [[1.0, 0.0]], atol=1e-12)


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        (pa.array(["a"]), Kind.NUMBER, "'v' of table.parquet holds text.*as categorical"),
        (pa.array([np.datetime64("2020-01-01", "s")]), Kind.NUMBER, "holds times .*as datetime"),
        (pa.array([[1]]), Kind.NUMBER, "has the type list"),
        (pa.array([0.5]), Kind.CATEGORY, "holds fractions"),
        (pa.array([np.datetime64("2020-01-01", "s")]), Kind.CATEGORY, "can't be labels"),
        (pa.array([1.0, np.inf]), Kind.NUMBER, "1 infinite value in rows 10 to 11, .* in row 11"),
    ],
)
def test_typed_refusals(column, kind, message):
    with pytest.raises(DataError, match=message):
        decoded(column, kind)


@pytest.mark.parametrize("kind", ["categorical", "group", "time"])
def test_labels_and_times_must_be_utf8(tmp_path, kind):
    rows = b"".join(b"%d,%d,7\n" % (i, i) for i in range(200))
    (tmp_path / "t.csv").write_bytes(b"a,b,v\n" + rows + "1,2,caf\xe9\n".encode("latin-1") + rows)
    options = {"x": ["a", "v"], "categorical": ["v"]} if kind == "categorical" else {"x": ["a"]}
    options |= {"group": {"group": "v"}, "time": {"time": ["v"]}}.get(kind, {})
    with pytest.raises(DataError, match=r"'v' of .*t\.csv .* row 202: its bytes are not UTF-8"):
        ingest([tmp_path / "t.csv"], tmp_path / "s", y=["b"], block_bytes=500, **options)


def test_columns_that_change_between_files(tmp_path):
    (tmp_path / "1.csv").write_text("a,b,v\n1,2,N\n3,4,S\n")
    (tmp_path / "2.csv").write_text("v,b,a\nE,6,5\nN,8,7\n")
    ingest([tmp_path / "*.csv"], tmp_path / "s", x=["a", "v"], y=["b"], categorical=["v"])
    group = zarr.open_group(str(tmp_path / "s"), mode="r")
    np.testing.assert_array_equal(group["x"][...], [[1, 0], [3, 1], [5, 2], [7, 0]])
    (tmp_path / "2.csv").write_text("v,b,a\nE,6,five\nN,8,7\n")
    with pytest.raises(DataError, match=r"'a' of .*2\.csv must be numeric but has 'five' in row 2"):
        ingest([tmp_path / "*.csv"], tmp_path / "n", x=["a"], y=["b"])
    (tmp_path / "2.csv").write_text("v,b\nE,6\n")
    with pytest.raises(DataError, match=r"2\.csv lacks column 'a'"):
        ingest([tmp_path / "*.csv"], tmp_path / "n", x=["a"], y=["b"])


@pytest.mark.parametrize("name", ["t.tsv", "t.tsv.gz"])
def test_tabs(tmp_path, name):
    pd.DataFrame({"a": [1.0, 2.0], "p, q": [3.0, 4.0]}).to_csv(
        tmp_path / name, sep="\t", index=False
    )
    ingest([tmp_path / name], tmp_path / "s", x=["a"], y=["p, q"])
    assert zarr.open_group(str(tmp_path / "s"), mode="r")["y"][:, 0].tolist() == [3.0, 4.0]
