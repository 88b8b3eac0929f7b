"""Length scales at the end of a search: bounds that are widened, columns that are ignored."""

from collections.abc import Callable, Sequence

from cme_dask.kernels.length_scales import IGNORED, SCALES

Scales = tuple[float, ...]

_NEAR = 1.1  # within this factor of a bound a length scale is at it
_LONG, _LONGER = 5.0, 6.0  # deviations, and times the shortest: a column that may not be needed
_WORSE = 2e-4  # of the score: less is no loss


def at_bounds(scales: Sequence[float]) -> bool:
    """Whether a length scale ended at a bound of the first search.

    Parameters
    ----------
    scales
        Of all columns, in standard deviations.
    """
    low, high = SCALES
    return any(s <= low * _NEAR or high / _NEAR <= s < IGNORED for s in scales)


def long_columns(scales: Scales, groups: Sequence[slice]) -> list[int]:
    """Columns much longer than the shortest of their variable, longest first.

    Parameters
    ----------
    scales
        Of the columns of all variables, one after the other.
    groups
        Which of them belong to each variable.
    """
    found = []
    for group in groups:
        shortest = min(scales[group], default=0.0)
        found += [
            j
            for j in range(len(scales))[group]
            if max(_LONG, _LONGER * shortest) <= scales[j] < IGNORED
        ]
    return sorted(found, key=lambda j: -scales[j])


def without(scales: Scales, columns: Sequence[int]) -> Scales:
    """These length scales with some of the columns ignored."""
    return tuple(IGNORED if j in columns else scale for j, scale in enumerate(scales))


def ignored_columns(
    scales: Scales, candidates: Sequence[int], score: Callable[[Scales], float]
) -> list[int]:
    """Those of the candidates without which the score is no worse, by more than 0.02 % of it.

    All of them at once if that will do, else one after the other.

    Parameters
    ----------
    scales
        Of all columns.
    candidates
        The columns that may be ignored.
    score
        Of length scales; the lower the better.
    """
    if not candidates:
        return []
    here = score(scales)
    allowed = here + _WORSE * abs(here)
    if score(without(scales, candidates)) <= allowed:
        return list(candidates)
    ignored: list[int] = []
    for j in candidates if len(candidates) > 1 else ():
        if score(without(scales, [*ignored, j])) <= allowed:
            ignored.append(j)
    return ignored
