"""Folds and parts as functions of a row's unit alone."""

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from cme_dask import open_sample
from cme_dask.errors import DataError
from cme_dask.numerics.folds import (
    BY_ROWS,
    Folding,
    Split,
    fold_of_rows,
    uniform,
)

HOUR, DAY = 3600.0, 86_400.0
N = 100_000
ROWS = np.arange(N)


@pytest.mark.parametrize(
    ("text", "by", "block"),
    [
        ("rows", "rows", None),
        ("group", "group", None),
        ("7d", "time", 7 * DAY),
        ("1w", "time", 7 * DAY),
        ("12h", "time", 12 * HOUR),
        ("30min", "time", 1800.0),
        ("90s", "time", 90.0),
        ("1.5d", "time", 36 * HOUR),
    ],
)
def test_what_a_text_means(text, by, block):
    found = Folding.parse(text)
    assert (found.by, found.block) == (by, block)
    assert Folding.parse(str(found)) == found
    assert Folding.parse(found) is found


@pytest.mark.parametrize("text", ["", "days", "d", "0d", "-1d", "7 d", "7y", "7D", "7d!", None, 7])
def test_what_no_folding_is(text):
    with pytest.raises(
        DataError, match=r"by 'rows', by 'group', or by blocks of time such as '7d'"
    ):
        Folding.parse(text)


@pytest.mark.parametrize(
    ("by", "block"),
    [("time", None), ("rows", 1.0), ("time", 0.0), ("time", np.nan), ("time", np.inf)],
)
def test_blocks_belong_to_time(by, block):
    with pytest.raises(DataError, match="positive number of seconds"):
        Folding(by, block)
    with pytest.raises(DataError, match="by rows, group or time, got 'week'"):
        Folding("week")


def test_rows_are_in_the_folds_they_always_were():
    np.testing.assert_array_equal(BY_ROWS.folds(ROWS, {}, 10), fold_of_rows(0, N, 10))
    assert not BY_ROWS.folds(ROWS, {}, 1).any()


@given(
    values=st.lists(st.floats(-1e12, 1e12) | st.integers(-(2**40), 2**40), min_size=1, max_size=40),
    block=st.sampled_from([1.0, 60.0, HOUR, 7 * DAY]),
    n_folds=st.integers(1, 255),
    seed=st.integers(0, 2**62 - 1),
)
def test_equal_units_are_never_divided(values, block, n_folds, seed):
    """Whatever the rows are, and however they are cut into strips."""
    column = np.array(values, dtype=np.float64)
    rows = np.arange(len(column)) + 7
    for folding, units in (
        (Folding("group"), column),
        (Folding("time", block), np.floor(column / block)),
    ):
        columns = {folding.by: column}
        folds = folding.folds(rows, columns, n_folds)
        part = Split(folding, 0.4, seed, True)
        kept = part.selects(rows, columns)
        for unit in units:
            same = units == unit
            assert len(set(folds[same])) == 1
            assert len(set(kept[same])) == 1
        some = slice(len(rows) // 3, None)
        cut = {folding.by: column[some]}
        np.testing.assert_array_equal(folding.folds(rows[some], cut, n_folds), folds[some])
        np.testing.assert_array_equal(part.selects(rows[some] + 99, cut), kept[some])


def test_advice_on_large_groups_can_be_followed():
    x = np.zeros((40, 1))
    numbers = 2**60 + np.arange(40) % 4
    with pytest.raises(DataError, match=r"below 2\*\*53.* in memory \(no Dask array\) of texts"):
        Folding("group").units(np.arange(40), {"group": numbers * 1.0})
    open_sample(x, group=numbers.astype(str)).fold_by("group")
    with pytest.raises(DataError, match="groups of a Dask array must be numbers"):
        open_sample(x, group=da.from_array(numbers.astype(str), chunks=20))


def test_zeros_of_either_sign_are_one_unit():
    folding = Folding("group")
    zeros = {"group": np.array([0.0, -0.0])}
    assert len(set(folding.units(np.arange(2), zeros))) == 1


@pytest.mark.parametrize("unit", ["rows", "group", "time"])
def test_folds_parts_and_row_samples_are_independent(unit):
    """Of as many units: chi-square over their cells, at a fixed seed and hence with a fixed p."""
    folding = {"rows": BY_ROWS, "group": Folding("group"), "time": Folding("time", HOUR)}[unit]
    columns = {"group": ROWS.astype(np.float64), "time": 1.7e9 + HOUR * ROWS}
    folds = folding.folds(ROWS, columns, 10)
    keys = (uniform(3, ROWS) * 8).astype(int)
    # With the seed of the row sample, too: its first rows must not all be held out.
    parts = [Split(folding, 0.25, seed, True).selects(ROWS, columns) for seed in (3, 1)]
    for part in parts:
        assert abs(part.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / N)
    for one, two in ((folds, parts[0]), (folds, keys), (parts[0], keys), (parts[0], parts[1])):
        cells = np.zeros((int(one.max()) + 1, int(two.max()) + 1))
        np.add.at(cells, (one.astype(int), two.astype(int)), 1)
        expected = cells.sum(axis=1, keepdims=True) * cells.sum(axis=0) / N
        p = chisquare(cells.ravel(), expected.ravel(), ddof=sum(cells.shape) - 2).pvalue
        assert 0.001 < p < 0.9999


def test_both_sides_of_a_split_are_all_rows():
    columns = {"group": ROWS // 50.0}
    for folding in (BY_ROWS, Folding("group")):
        held, rest = (Split(folding, 0.3, 5, side).selects(ROWS, columns) for side in (True, False))
        assert (held ^ rest).all()
        assert abs(held.mean() - 0.3) < 0.05
        other = Split(folding, 0.3, 6, True).selects(ROWS, columns)
        assert (other != held).any()
        more = Split(folding, 0.5, 5, True).selects(ROWS, columns)
        assert (more >= held).all()  # a larger share holds out more units, not others


def test_weeks_begin_on_thursdays_at_midnight():
    week = Folding.parse("7d")
    edges = np.array(["1970-01-01", "2013-03-07", "2017-02-23"], "datetime64[s]").astype(float)
    for edge in edges:
        times = {"time": edge + np.array([-1.0, 0.0, 7 * DAY - 1.0, 7 * DAY])}
        before, first, last, after = week.units(np.arange(4), times)
        assert first == last
        assert len({before, first, after}) == 3


@pytest.mark.parametrize(
    ("share", "seed", "message"),
    [
        (0.0, 0, "share held out must lie between 0 and 1, exclusively, got 0.0"),
        (1.0, 0, "exclusively, got 1.0"),
        (np.nan, 0, "exclusively, got nan"),
        ("0.2", 0, "share held out must be a number, got '0.2'"),
        (True, 0, "share held out must be a number, got True"),
        (0.2, -1, "seed must be an integer from 0 to 2\\*\\*62 - 1, got -1"),
        (0.2, 1 << 62, "seed must be an integer"),
        (0.2, 0.5, "seed must be an integer"),
    ],
)
def test_what_no_part_is(share, seed, message):
    with pytest.raises(DataError, match=message):
        Split(BY_ROWS, share, seed, True)


def test_a_part_says_what_it_is():
    part = Split(Folding.parse("7d"), 0.2, 3, True)
    assert str(part) == "0.2 by 7d"
    assert str(Split(BY_ROWS, 0.2, 3, False)) == "all but 0.2 by rows"
    assert part.to_dict() == {"by": "7d", "share": 0.2, "seed": 3, "held_out": True}


@pytest.mark.parametrize("by", ["rows", "group"])
def test_k_folds_hold_out_each_unit_once(by):
    x = np.arange(3000.0)
    sample = open_sample(x, x, group=ROWS[:3000] // 7).fold_by(by)
    columns = {"group": ROWS[:3000] // 7 * 1.0}
    held = []
    for rest, held_out in sample.k_fold(7, seed=3):
        assert rest.part == held_out.part.other
        selected = [s.part.selects(ROWS[:3000], columns) for s in (rest, held_out)]
        assert (selected[0] ^ selected[1]).all()
        held.append(selected[1])
    assert (np.sum(held, axis=0) == 1).all()
    assert min(map(np.sum, held)) > 3000 / 7 / 2
    for part in (rest.part, held_out.part):
        assert [each.part for each in sample.split_as(part)] == [rest.part, held_out.part]
    first, last = (Split(BY_ROWS, 1 / 7, 3, True, k / 7) for k in (0, 6))
    assert first.to_dict() == {"by": "rows", "share": 1 / 7, "seed": 3, "held_out": True}
    for part in (first, last):
        assert Split.from_dict(part.to_dict()) == part
    assert str(last) == "0.143 from 0.857 on by rows"
    for n_folds in (1, 2.0, True):
        with pytest.raises(DataError, match="n_folds must be an integer of at least 2"):
            sample.k_fold(n_folds)
    with pytest.raises(DataError, match="this is a part already"):
        rest.k_fold(3)
    with pytest.raises(DataError, match="this is a part already"):
        rest.split_as(held_out.part)
    with pytest.raises(DataError, match=r"start of a part must lie in \[0, 1\), got 1"):
        Split(BY_ROWS, 0.1, 0, True, 1)
