"""Events: joined, chained and listed, with the answers of NumPy's own expressions."""

import re
from collections.abc import Sequence
from typing import get_args, get_type_hints

import numpy as np
import pytest
from conftest import BRIEF
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    Tuning,
    kernels,
)
from cme_dask.errors import DataError
from cme_dask.models.events import Event

NAMES = ("y0", "PM2.5", "a-b", "temp (C)", "wd")
LABELS = {"wd": ("N", "NE", "and so", "<5")}
WRITTEN = ("y0", "PM2.5", "a-b", "`temp (C)`")
IN_NUMPY = ("r[:, 0]", "r[:, 1]", "r[:, 2]", "r[:, 3]")


def rows(n=60, seed=0):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-3, 4, size=(n, 4)) / 2
    return np.column_stack([numbers, rng.integers(0, 4, n)])


# Texts of events, each beside the same in NumPy.

numbers = st.integers(-6, 6).map(lambda k: k / 2)


def column():
    return st.integers(0, 3).map(lambda j: (WRITTEN[j], IN_NUMPY[j]))


def operands():
    leaf = column() | numbers.map(lambda x: (repr(x), f"np.float64({x!r})"))

    def more(inner):
        joined = st.tuples(inner, st.sampled_from("+-*"), inner) | st.tuples(
            inner, st.just("/"), column()
        )
        return joined.map(lambda p: tuple(f"({p[0][i]} {p[1]} {p[2][i]})" for i in (0, 1)))

    return st.recursive(leaf, more, max_leaves=3)


signs = st.sampled_from(["<=", "<", ">=", ">", "==", "!="])


def comparisons():
    def chained(p):
        first, sign, middle, other, last = p
        text = f"{first[0]} {sign} {middle[0]} {other} {last[0]}"
        return text, f"(({first[1]} {sign} {middle[1]}) & ({middle[1]} {other} {last[1]}))"

    plain = st.tuples(column(), signs, operands()).map(
        lambda p: tuple(f"{p[0][i]} {p[1]} {p[2][i]}" for i in (0, 1))
    )
    label = st.tuples(st.sampled_from(["==", "!="]), st.integers(0, 3)).map(
        lambda p: (f"wd {p[0]} '{LABELS['wd'][p[1]]}'", f"r[:, 4] {p[0]} {p[1]}")
    )
    member = st.sets(st.integers(0, 3), min_size=1).map(
        lambda s: (
            f"wd in ({', '.join(repr(LABELS['wd'][k]) for k in s)},)",
            f"np.isin(r[:, 4], {sorted(s)})",
        )
    )
    chain = st.tuples(operands(), signs, column(), signs, operands()).map(chained)
    return (plain | label | member | chain).map(lambda p: (p[0], f"({p[1]})"))


def events():
    def more(inner):
        pairs = st.tuples(inner, st.sampled_from([("and", "&"), ("or", "|")]), inner).map(
            lambda p: tuple(f"({p[0][i]} {p[1][i]} {p[2][i]})" for i in (0, 1))
        )
        return pairs | inner.map(lambda p: (f"(not {p[0]})", f"(~{p[1]})"))

    return st.recursive(comparisons(), more, max_leaves=4)


@settings(max_examples=60)
@given(pair=events())
def test_joined_events_are_numpys(pair):
    text, expression = pair
    r = rows()
    with np.errstate(all="ignore"):
        expected = eval(expression, {"np": np, "r": r})  # noqa: S307 (our own texts)
    found = Event.parse(text, NAMES, LABELS)(r)
    np.testing.assert_array_equal(found, np.broadcast_to(expected, len(r)).astype(float))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y0 > 0 and PM2.5 > 0", lambda r: (r[:, 0] > 0) & (r[:, 1] > 0)),
        ("not y0 > 0 and PM2.5 > 0", lambda r: ~(r[:, 0] > 0) & (r[:, 1] > 0)),
        ("y0>0 or PM2.5>0 and a-b>0", lambda r: (r[:, 0] > 0) | (r[:, 1] > 0) & (r[:, 2] > 0)),
        ("-1 < y0 <= .5e0", lambda r: (r[:, 0] > -1) & (r[:, 0] <= 0.5)),
        ("wd == and so or wd == <5", lambda r: r[:, 4] >= 2),
        ("(wd == NE) and y0 > 0", lambda r: (r[:, 4] == 1) & (r[:, 0] > 0)),
        ("'N' == wd", lambda r: r[:, 4] == 0),
        ("wd not in ['N', 'NE']", lambda r: r[:, 4] >= 2),
        ("y0 in (0, 1)", lambda r: np.isin(r[:, 0], (0, 1))),
        ("temp (C) * 2 >= -y0", lambda r: r[:, 3] * 2 >= -r[:, 0]),
    ],
)
def test_joined_events(text, expected):
    r = rows()
    np.testing.assert_array_equal(Event.parse(text, NAMES, LABELS)(r), expected(r).astype(float))


@pytest.mark.parametrize(
    ("text", "problem", "character"),
    [
        ("y0 > 1 and PM10 > 2", "unknown column 'PM10'", 12),
        ("y0 > 1 and", "an event reads", 11),
        ("y0 = 1", "write == for equality", 4),
        ("y0 > 1 & a-b > 2", "write and", 8),
        ("y0 > 1 and wd == 'S'", "'wd' has no label 'S'", 18),
        ("y0 > 1 and wd in ('N', 'S')", "'wd' has no label 'S'", 24),
        ("y0 + wd > 1", "'wd' holds labels", 6),
        ("y0 > 1 / 0", "divided by 0", 6),
        ("1 < 2", "without a column", 1),
        ("abs(y0) > 1", "an event reads", 1),
        ("y0 > `7`", "unknown column '7'", 6),
        ("", "an event reads", 1),
    ],
)
def test_bad_events_name_the_place(text, problem, character):
    message = f"{re.escape(problem)}.*at character {character} of"
    with pytest.raises(DataError, match=message):
        Event.parse(text, NAMES, LABELS)


def test_a_column_that_reads_as_a_number_needs_backquotes():
    r = np.array([[0.0, 5.0], [9.0, 5.0]])
    with pytest.raises(DataError, match="'1' is a number and a column: write `1`"):
        Event.parse("1 > 2", ("0", "1"))
    np.testing.assert_array_equal(Event.parse("`0` > 1.0", ("0", "1"))(r), [0, 1])


# On the laws and expectations of a default fit.


@pytest.fixture(scope="module")
def fit():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 1))
    y = np.column_stack([np.sin(x[:, 0]), x[:, 0]]) + 0.3 * rng.normal(size=(400, 2))
    return JointDistribution(tuning=Tuning(**BRIEF)).fit(x, y, functions=["y0 > 0"])


POINTS = np.array([[-1.0], [0.0], [1.5]])


def test_lists_of_events_are_asked_of_laws(fit):
    law = fit.conditional(POINTS)
    texts = ["0 < y0 < 0.75", "y0 > 0 and y1 > 1", "not (y0 > 0 or y1 > 0)"]
    plain = [
        lambda y: (y[:, 0] > 0) & (y[:, 0] < 0.75),
        lambda y: (y[:, 0] > 0) & (y[:, 1] > 1),
        lambda y: ~((y[:, 0] > 0) | (y[:, 1] > 0)),
    ]
    found = law.probability(texts)
    assert found.shape == (3, 3)
    np.testing.assert_array_equal(found, np.stack([law.probability(f) for f in plain], axis=1))
    np.testing.assert_array_equal(law.expect(texts), found)
    assert law.probability([]).shape == (3, 0)
    with pytest.raises(DataError, match="an event is a text or a function, got 3"):
        law.probability(["y0 > 0", 3])


def test_declared_events_are_expected(fit):
    signed = fit.expect("y0 > 0", POINTS)
    assert signed.shape == (3,)
    assert np.abs(signed - fit.conditional(POINTS).probability("y0 > 0")).max() < 0.2
    with pytest.raises(DataError, match=r"not declared.*functions=\['y1 > 1'\].*conditional\(x\)"):
        fit.expect("y1 > 1", POINTS)
    with pytest.raises(DataError, match=r"functions_x=\['x0 > 1'\].*conditional\(Y=y\)"):
        fit.expect("x0 > 1", Y=[[0.0, 0.0]])
    with pytest.raises(DataError, match="unknown column 'y7': there are 'y0', 'y1', 'y0 > 0'"):
        fit.expect("y7", POINTS)
    with pytest.raises(DataError, match=r"nor an event .*unknown column 'y7'.*at character 1"):
        fit.expect("y7 > 0", POINTS)


def test_events_are_declared_by_text_or_name():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(300, 1))
    y = x + 0.3 * rng.normal(size=x.shape)
    options = {"kernel_x": kernels.Gaussian(1.0), "kernel_y": kernels.Gaussian(1.0), "tol": 0.1}
    by_name = {"high": "y0 > 0.5 or y0 < -2"}
    callable_ = {"high": lambda y: (y[:, 0] > 0.5) | (y[:, 0] < -2)}
    found = [
        JointDistribution(**options).fit(x, y, functions=functions).expect("high", POINTS)
        for functions in (by_name, callable_)
    ]
    np.testing.assert_array_equal(*found)
    embedding = ConditionalMeanEmbedding(**options).fit(x, y, functions=list(by_name.values()))
    assert embedding.expect(by_name["high"], POINTS).shape == (3,)
    with pytest.raises(DataError, match="unknown column 'z'"):
        JointDistribution(**options).fit(x, y, functions=["z > 1"])
    with pytest.raises(DataError, match=r"got 5: give .* list events such as \['y0 > 0'\]"):
        JointDistribution(**options).fit(x, y, functions=5)


DECLARING = (ConditionalMeanEmbedding, EmbeddingClassifier, JointClassifier, JointDistribution)


@pytest.mark.parametrize("kind", DECLARING)
def test_signatures_say_that_functions_may_be_a_list_of_events(kind):
    for name in ("fit", "plan", "partial_fit"):
        hints = get_type_hints(getattr(kind, name))
        for key in {"functions", "functions_x"} & set(hints):
            assert Sequence[str] in get_args(hints[key])


def test_listed_events_beside_labels_and_with_more_rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 1))
    labels, events = np.where(x[:, 0] > 0, "up", "down"), ["y == 'up'"]
    classes = EmbeddingClassifier(kernel_x="median", reg=1e-3).fit(x, labels, functions=events)
    assert_allclose(classes.expect(events[0], x), classes.expect("class 1", x), atol=1e-12)
    quick = {"kernel_x": "median", "kernel_y": "median", "reg": 1e-3, "residual": False}
    growing = (JointDistribution(**quick), ConditionalMeanEmbedding(kernel_x="median", reg=1e-3))
    for model in growing:
        for _ in range(2):
            model.partial_fit(x, x[:, 0], functions=["y0 > 0"])
        assert model.expect("y0 > 0", x[:3]).shape == (3,)
        with pytest.raises(DataError, match="was fitted with the functions"):
            model.partial_fit(x, x[:, 0], functions=["y0 > 1"])
    judged = Tuning(criterion="validation", **BRIEF)
    JointDistribution(tuning=judged, residual=False).fit(x, x[:, 0], functions=["y0 > 0"])
