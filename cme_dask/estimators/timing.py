"""The wall time of a fit."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def timed_fit(fit: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``fit`` or ``partial_fit`` so that ``report_.seconds`` is the time of the call.

    The pass that makes the moments is only a part of a fit: the row sample, the search for kernels,
    pivots, further passes and the solution are others.
    """

    @functools.wraps(fit)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        begin = time.perf_counter()
        fitted = fit(*args, **kwargs)
        estimator: Any = args[0]
        estimator.report_ = replace(estimator.report_, seconds=time.perf_counter() - begin)
        return fitted

    return timed
