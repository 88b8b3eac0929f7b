"""The bench of memory: its shapes, its measurements, and limits that are enforced."""

import sys

import numpy as np
import pytest
import zarr

from benchmarks import memory
from benchmarks.measure import Bench, Size
from benchmarks.memory import SHAPES, Shape, shape_batches, shape_rows, write_shape
from cme_dask.learning.tree_fits import trees_bytes

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the high-water mark is read from /proc"
)


def run_case(tmp_path, monkeypatch, shapes, limited=()):
    """Measurements and values of ratios of the case on these shapes."""
    monkeypatch.setattr(memory, "SHAPES", shapes)
    monkeypatch.setattr(memory, "LIMITED", limited)
    bench = Bench(tmp_path, tmp_path, 2, 1, lambda *_: None)
    memory.memory_case(bench, Size(10**8))
    ratios = [ratio.to_dict(bench.measurements) for ratio in bench.ratios]
    return bench.measurements, {(r["group"], r["name"]): r["value"] for r in ratios}


def test_twelve_shapes_cover_what_fits_differ_in():
    shapes = SHAPES.values()
    assert len(shapes) == 12
    assert {s.scheduler for s in shapes} == {"threads", "processes", "cluster"}
    assert min(s.columns[0] for s in shapes) == 1
    assert max(sum(s.columns) for s in shapes) == 400
    assert {10, 2000} <= {s.functions for s in shapes}
    assert {20, 2000} <= {s.rank for s in shapes}
    assert (min(s.rows for s in shapes), max(s.rows for s in shapes)) == (10**3, 10**8)


def test_chunks_of_a_repeated_table_are_links_that_are_read_as_rows(tmp_path):
    shape = Shape(1000, (2, 1), chunk=64, repeated=True)
    write_shape(shape, tmp_path / "rows.zarr")
    x, y = shape_rows(shape, str(tmp_path / "rows.zarr"))
    assert (x.shape, y.shape) == ((1000, 2), (1000, 1))
    (first, _), *_ = shape_batches(shape, 512)
    np.testing.assert_array_equal(x[:512], first)
    np.testing.assert_array_equal(x[512:1000], first[:488])
    assert (tmp_path / "rows.zarr" / "x" / "c" / "8" / "0").stat().st_nlink > 1
    assert zarr.open_array(tmp_path / "rows.zarr" / "y", mode="r").chunks == (64, 1)


@pytest.mark.slow
def test_a_shape_is_measured_beside_its_prediction(tmp_path, monkeypatch):
    shape = Shape(20_000, (2, 1), chunk=1000, rank=150, scale=0.3)
    measurements, ratios = run_case(tmp_path, monkeypatch, {"small": shape})
    (run,) = measurements["memory/small"].runs
    assert run["place"] == "this machine"
    assert run["ranks"] == [150, 150]
    assert max(run["steps"].values()) == run["measured"]
    assert 0.75 <= ratios["memory/small", "measured / predicted"] <= 1.25


@pytest.mark.slow
def test_what_a_limit_refuses_fails_and_what_it_accepts_fits(tmp_path, monkeypatch):
    shape = Shape(100_000, (3, 2), rank=250, scale=0.3)
    measurements, ratios = run_case(tmp_path, monkeypatch, {"limited": shape}, ("limited",))
    outcomes = {
        key: run["outcome"]
        for key, m in measurements.items()
        for run in m.runs[:1]
        if "outcome" in run
    }
    assert outcomes == {
        "memory/limited, limit below, announced": "refused",
        "memory/limited, limit below": "failed",
        "memory/limited, limit above, announced": "fitted",
    }
    refusal = measurements["memory/limited, limit below, announced"].runs[0]["said"]
    assert "would need" in refusal
    assert min(ratios.values()) > 0.75


def test_trees_need_more_for_more_rows_columns_and_threads():
    few = trees_bytes(1000, (3, 1), 1)
    assert few < trees_bytes(8192, (3, 1), 1) < trees_bytes(32768, (3, 1), 1)
    assert trees_bytes(8192, (3, 1), 2) < trees_bytes(8192, (30, 1), 2)
    assert trees_bytes(8192, (3, 1), 2) < trees_bytes(8192, (3, 20), 2)
    assert trees_bytes(8192, (3, 1), 5) == trees_bytes(8192, (3, 1), 50)
