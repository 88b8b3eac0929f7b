"""``cme-dask ingest`` with roles and types, and the same in a job file."""

import json

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from benchmarks.ingest import COLUMNS, write_table
from cme_dask import open_sample
from cme_dask.cli.app import cli
from cme_dask.cli.schema import IngestSection
from cme_dask.data.ingest import ingest


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["t,wd,month,date,hour,day,year,p"]
    for i in range(200):
        t = "-999" if i == 5 else f"{rng.normal():.3f}"
        wd = rng.choice(["N", "E"])
        month, day = 1 + i // 24 // 28, 1 + i // 24 % 28
        date = f"2014-{month:02}-{day:02} {i % 24:02}:00"
        lines.append(f"{t},{wd},{month},{date},{i % 24},{day},2014,{rng.gamma(2):.3f}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "t.csv"


def call(*args):
    return CliRunner().invoke(cli, ["ingest", *map(str, args)])


OPTIONS = (
    *("--x", "t,wd,month,date", "--y", "p", "--categorical", "wd", "--cyclic", "month=12"),
    *("--datetime", "date=hour,season", "--group", "day", "--time", "year,month,day,hour"),
    *("--null-value", "-999", "--units", "t=degC", "--target-chunk", "1KiB"),
)


def test_every_option(tmp_path, table):
    found = call(table, "--out", tmp_path / "s", *OPTIONS, "--json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert (result["rows_read"], result["rows_kept"], result["rows_resumed"]) == (200, 199, 0)
    assert result["missing"] == {
        "t": 1,
        **dict.fromkeys(("wd", "month", "date", "p", "day", "year", "hour"), 0),
    }
    columns = {column["name"]: column for column in result["columns"]}
    names = ["t", "wd", "month_sin", "month_cos", "date_hour_sin", "date_hour_cos"]
    assert list(columns) == [*names, "date_season_sin", "date_season_cos", "p"]
    assert columns["date_hour_cos"]["from"] == "date"
    assert sorted(columns["wd"]["labels"]) == ["E", "N"]
    assert sum(columns["wd"]["counts"]) == 199
    group = zarr.open_group(str(tmp_path / "s"), mode="r")
    assert group["x"].chunks == (16, 8)
    hours = [i for i in range(200) if i != 5]
    np.testing.assert_array_equal(group["time"][...], 1388534400 + 3600 * np.array(hours))
    np.testing.assert_array_equal(group["group"][...], 1 + np.array(hours) // 24 % 28)
    shown = call(table, "--out", tmp_path / "s", *OPTIONS, "--overwrite").stdout
    for words in ("x: t [degC]", "2 labels", "rows dropped", "y: p"):
        assert words in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cyclic", "month"), "COLUMN=PERIOD"),
        (("--cyclic", "month=0"), "COLUMN=PERIOD"),
        (("--datetime", "date"), "COLUMN=PART"),
        (("--target-chunk", "8 apples"), "no size"),
        (("--storage-options", "key"), "KEY=VALUE"),
        (("--time", "year,,day"), "COLUMN,COLUMN"),
        (("--time", ""), "COLUMN,COLUMN"),
        (("--time", '"year'), "COLUMN,COLUMN"),
        (("--units", "t"), "COLUMN=UNIT,..."),
        (("--units", "t=K,p="), "COLUMN=UNIT,..."),
        (("--units", '"t=K'), "COLUMN=UNIT,..."),
    ],
)
def test_options_that_do_not_parse(tmp_path, table, options, words):
    found = call(table, "--out", tmp_path / "s", "--x", "t", "--y", "p", *options)
    assert found.exit_code == 2
    assert words in found.output


@pytest.mark.parametrize(
    "options", [["t=degC,p=ug/m3"], ["t=degC", "p=ug/m3"], ["t=degC, p=ug/m3"], ["p=ug/m3,t=degC"]]
)
def test_units_of_several_columns(tmp_path, table, options):
    given = [part for each in options for part in ("--units", each)]
    found = call(table, "--out", tmp_path / "s", "--x", "t", "--y", "p", *given)
    assert found.exit_code == 0, found.output
    x, y = open_sample(tmp_path / "s").columns
    assert (x.units, y.units) == ({"t": "degC"}, {"p": "ug/m3"})


def test_a_unit_may_hold_a_comma(tmp_path, table):
    given = ("--units", "t=degrees, Celsius,p=ug/m3")
    found = call(table, "--out", tmp_path / "s", "--x", "t", "--y", "p", *given)
    assert found.exit_code == 0, found.output
    assert open_sample(tmp_path / "s").columns[0].units == {"t": "degrees, Celsius"}


def test_names_may_hold_commas_and_quotes(tmp_path):
    (tmp_path / "t.csv").write_text('a,"flow, m3","5"" pipe"\n' + "1,2,3\n4,5,6\n")
    given = ("--x", ' "5"" pipe" , a', "--y", '"flow, m3" ', "--units", '"flow, m3=m3/s",a=K')
    found = call(tmp_path / "t.csv", "--out", tmp_path / "s", *given)
    assert found.exit_code == 0, found.output
    x, y = open_sample(tmp_path / "s").columns
    assert (x.names, y.names) == (('5" pipe', "a"), ("flow, m3",))
    assert (x.units, y.units) == ({"a": "K"}, {"flow, m3": "m3/s"})


def test_resume_from_the_command(tmp_path, table, monkeypatch):
    monkeypatch.setattr("cme_dask.data.ingest.CHECKPOINT_BATCHES", 1)
    monkeypatch.setattr("cme_dask.data.csv.BLOCK_BYTES", 1000)

    def cut_off(_):
        raise KeyboardInterrupt

    arguments = {"x": ["month"], "y": ["p"], "progress": cut_off}
    with pytest.raises(KeyboardInterrupt):
        ingest([table], tmp_path / "s", **arguments)
    found = call(table, "--out", tmp_path / "s", "--x", "month", "--y", "p")
    assert found.exit_code != 0
    assert "--resume continues" in found.output
    found = call(table, "--out", tmp_path / "s", "--x", "month", "--y", "p", "--resume", "--json")
    assert 0 < json.loads(found.stdout)["rows_resumed"] < 200


def test_a_job_takes_roles_and_types():
    section = IngestSection.model_validate(
        {
            "files": ["t.csv"],
            "x": ["t", "month"],
            "y": ["p"],
            "cyclic": {"month": 12},
            "time": ["date"],
            "group": "day",
        }
    )
    assert section.cyclic == {"month": 12.0}
    with pytest.raises(ValueError, match="hour"):
        IngestSection.model_validate(
            {"files": ["t.csv"], "x": ["t"], "y": ["p"], "datetime": {"date": ["week"]}}
        )


def test_the_table_of_the_bench(tmp_path):
    write_table(tmp_path / "t.csv", 3000)
    report = ingest([tmp_path / "t.csv"], tmp_path / "s", x=COLUMNS[:6], y=COLUMNS[6:])
    assert (report.rows_read, report.rows_kept) == (3000, 3000)
    assert (tmp_path / "t.csv").stat().st_size > 3000 * 140
