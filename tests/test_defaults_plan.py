"""The plan of a default fit holds all finalists of its search."""

import json

import numpy as np
import pytest
from rich.console import Console

from cme_dask import JointDistribution, Tuning
from cme_dask.cli.tables import plan_tables

BRIEF = Tuning(rows=300, max_rank=60, evaluations=4)
"""Few trials; finalists and members as by default."""


@pytest.fixture(scope="module")
def planned():
    """A fit with learned kernels, averaged members and a location model, and two plans."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 1))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=(300, 1))
    law = JointDistribution(tuning=BRIEF, max_rank=60)
    plans = [law.plan(x, y), law.plan(x, y)]
    return law.fit(x, y), plans


def test_the_plan_holds_the_ranks_of_all_finalists(planned):
    fit, (plan, _) = planned
    assert plan.finalists == len(fit.search_.finalists) > 1
    pairs = set(zip(*(variable.ranks for variable in plan.variables), strict=True))
    fitted = [tuple(side.basis.rank for side in m.component.sides) for m in fit.members_]
    assert set(fitted) <= pairs
    assert plan.memory.predicted == fit.report_.memory.predicted


def test_the_plan_says_the_ranks_and_the_range_of_the_residual_step(planned):
    _, (plan, _) = planned
    told = json.loads(json.dumps(plan.to_dict()))
    console = Console(width=300, record=True)
    for table in plan_tables(told | {"store": "s.zarr"}):
        console.print(table)
    text = console.export_text()
    for variable in plan.variables:
        listed = ", ".join(map(str, variable.ranks))
        assert f"{plan.finalists} finalists of rank {listed} ({sum(variable.ranks)} pivots" in text
    least, most = told["residual_seconds"]
    assert least == 0.0 < most  # auto: where it does not pay nothing is done
    assert f"one more search and pass, 0 to {most:.3g} s" in text


def test_two_plans_count_the_same(planned):
    _, (one, other) = planned
    for name in ("rows", "tasks", "strips", "workers", "bytes_read"):
        assert getattr(one.moment_pass, name) == getattr(other.moment_pass, name)
    assert one.variables == other.variables
    assert one.memory.predicted == other.memory.predicted
