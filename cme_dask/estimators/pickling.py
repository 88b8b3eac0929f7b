"""What pickles and copies of fitted estimators hold: no rows, no sums that only a fit needs."""

from collections.abc import Sequence
from dataclasses import replace

from cme_dask.estimators.tuned import Member
from cme_dask.models.functions import importable
from cme_dask.numerics.moments import Side


def importable_sides(sides: tuple[Side, Side]) -> tuple[Side, Side]:
    """Sides whose declared functions are :func:`importable`."""
    x, y = (replace(side, functions=importable(side.functions)) for side in sides)
    return x, y


def lean_members(members: Sequence[Member]) -> list[Member]:
    """Members without their moments per fold, the largest part of an averaged fit by far."""
    return [
        replace(
            member,
            moments=None,  # type: ignore[arg-type] # documented, and no query reads them
            part=replace(member.part, sides=importable_sides(member.part.sides)),
        )
        for member in members
    ]
