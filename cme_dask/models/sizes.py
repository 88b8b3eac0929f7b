"""The size of a basis in words."""

from collections.abc import Sequence


def rank_text(ranks: Sequence[int], functions: int) -> str:
    """Return the size of a basis in words.

    Parameters
    ----------
    ranks
        Numbers of pivots, one for each member of an averaged model.
    functions
        Number of functions of the model, all members together.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    low, high = min(ranks), max(ranks)
    each = f"{low}" if low == high else f"{low} to {high}"
    return f"{len(ranks)} members of rank {each} each, {functions} functions"
