"""``RidgePath``: the losses of all ridges that a fit compared, as a table and a picture."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.display import brief_repr
from cme_dask.models.plots import BLUE, drawing

Array = Any


def within_one_error(losses: Array, errors: Array) -> Array:
    """Positions of losses within one standard error of the smallest, ascending."""
    best = int(np.argmin(losses))
    return np.flatnonzero(losses <= losses[best] + errors[best])


@dataclass(frozen=True, eq=False)
class RidgePath:
    """Losses of a ridge regression for each ridge.

    Attributes
    ----------
    regs
        Ridges r, ascending, shape (R,); lambda = n r.
    losses, errors
        Loss on rows that the fit has not seen, and its standard error, shapes (R,).
    validation
        ``"folds"`` or ``"leave-one-out"``.
    criterion
        ``"surrogate"`` or ``"squared"``.
    chosen
        Position of the ridge of the fit.
    """

    regs: Array
    losses: Array
    errors: Array
    validation: str
    criterion: str
    chosen: int

    __repr__ = brief_repr

    @property
    def one_standard_error(self) -> float:
        """The largest ridge whose loss is within one standard error of the smallest."""
        return float(self.regs[within_one_error(self.losses, self.errors)[-1]])

    def plot(self, *, ax: Any = None) -> Any:
        """Draw losses and standard errors against the ridge.

        Parameters
        ----------
        ax
            Axes to draw into; default those of a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ResourceError
            If matplotlib is not installed.
        """
        finite = np.isfinite(self.losses) & (self.regs > 0.0)
        with drawing(ax) as ax:
            ax.errorbar(
                self.regs[finite],
                self.losses[finite],
                self.errors[finite],
                fmt="o-",
                color=BLUE,
                ms=3,
                elinewidth=0.8,
            )
            ax.axvline(self.regs[self.chosen], color="#888888", lw=0.8, ls="--")
            ax.set(xscale="log", xlabel="ridge r", ylabel=f"{self.criterion} loss")
            ax.set_title(f"Loss by {self.validation} (dashed: the ridge of the fit)")
        return ax
