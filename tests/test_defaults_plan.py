"""The plan of a fit with learned kernels holds all finalists of its search."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from cme_dask import JointDistribution, Tuning
from cme_dask.cli.tables import plan_tables

BRIEF = Tuning(rows=300, max_rank=60, evaluations=4)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(BRIEF, id="by default"),
        pytest.param(replace(BRIEF, finalists=4, averaged=3), id="averaged"),
    ],
)
def planned(request):
    """A fit with learned kernels and a location model, and two plans."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 1))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=(300, 1))
    law = JointDistribution(tuning=request.param, max_rank=60)
    plans = [law.plan(x, y), law.plan(x, y)]
    return law.fit(x, y), plans


def test_the_plan_holds_the_ranks_of_all_finalists(planned):
    fit, (plan, _) = planned
    assert plan.finalists == len(fit.search_.finalists) == fit.tuning.n_finalists
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
        several = f"{plan.finalists} finalists of rank {listed} ({sum(variable.ranks)} pivots"
        assert (several if plan.finalists > 1 else f"rank {listed}") in text
    least, most = told["residual_seconds"]
    assert least == 0.0 < most  # auto: where it does not pay nothing is done
    assert f"one more search and pass, 0 to {most:.3g} s" in text


def test_two_plans_count_the_same(planned):
    _, (one, other) = planned
    for name in ("rows", "tasks", "strips", "workers", "bytes_read"):
        assert getattr(one.moment_pass, name) == getattr(other.moment_pass, name)
    assert one.variables == other.variables
    assert one.memory.predicted == other.memory.predicted
