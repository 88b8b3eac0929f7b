"""Spectra of the kernels over the rows, traces that pivots leave, and pictures of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np

from cme_dask.codec import Shape
from cme_dask.errors import DataError
from cme_dask.models.plots import FEW, PALETTE, drawing

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel, Variable
    from cme_dask.numerics.moments import Moments


Array = Any

_OTHERS: dict[str, Any] = {"lw": 0.8, "alpha": 0.45}  # lines of all members but the best


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What the rows say of one kernel in the span of its pivots.

    Attributes
    ----------
    squares
        E N_j(X)^2 of the Newton functions in the order of the pivots, shape (m,): what each pivot
        takes from the trace.
    eigenvalues
        Of E[N(X) N(X)^T], in descending order, shape (m,): those of K / n up to the trace error.
    trace
        E k(X, X).
    """

    squares: Annotated[Array, Shape("m")]
    eigenvalues: Annotated[Array, Shape("m")]
    trace: float

    def _validate(self) -> None:
        """DataError unless the trace is positive."""
        if not self.trace > 0.0:
            raise DataError("the traces of kernels are positive")

    @classmethod
    def of(cls, gram: Array, trace: float) -> Self:
        """From E[N N^T], shape (m, m), and E k(X, X)."""
        eigenvalues = np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0)
        return cls(np.diagonal(gram).copy(), eigenvalues, trace)

    @property
    def residual_trace(self) -> Array:
        """trace(K - L_j L_j^T) / trace(K) after j = 0, ..., m pivots, shape (m + 1,)."""
        left = 1.0 - np.concatenate([[0.0], np.cumsum(self.squares)]) / self.trace
        return np.maximum(left, np.finfo(np.float64).eps)


SpectrumPair = tuple[Spectrum, Spectrum]
"""Of the kernels of x and of y."""


def spectra_of(means: Sequence["Moments"]) -> tuple[SpectrumPair, ...]:
    """Return the spectra of x and of y from the moments of each member."""
    pairs = []
    for mean in means:
        x, y = (Spectrum.of(mean.blocks[v, v], mean.traces[v]) for v in "xy")
        pairs.append((x, y))
    return tuple(pairs)


def spectra(model: "JointModel") -> tuple[SpectrumPair, ...]:
    """Return the spectra of x and of y of each member of a model, the best one first."""
    if model.spectra:
        return model.spectra
    return spectra_of([model.moment_sums().means()])


def plot_spectrum(model: "JointModel", *, ax: Any = None) -> Any:
    """Draw the eigenvalues of both kernels over the rows, in descending order.

    They are those of the kernel matrix K / n, up to the trace error of the bases. Of averaged
    models those of the best member are drawn, and those of the others in thin lines.

    Parameters
    ----------
    model
        The model.
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
    result = spectra(model)
    with drawing(ax) as ax:
        _draw(ax, model, [[_positive(one.eigenvalues) for one in pair] for pair in result], 1)
        ax.set(xlabel="number of the eigenvalue", ylabel="eigenvalue λ", xscale="log")
        ax.set(yscale="log", title="Spectra of both kernels")
        ax.legend(loc="lower left")
    return ax


def plot_residual_trace(model: "JointModel", *, ax: Any = None) -> Any:
    """Draw what the first pivots of each basis leave of the trace of its kernel over all rows.

    That is trace(K - L_j L_j^T) / trace(K) after j of them. Of averaged models the best member is
    drawn, and the others in thin lines.

    Parameters
    ----------
    model
        The model.
    ax
        Axes to draw into; default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DataError
        If the bases are partitions of unity, which approximate no kernel.
    ResourceError
        If matplotlib is not installed.
    """
    if None in model.about["trace_error"].values():
        raise DataError(
            "partitions of unity approximate no kernel and have no residual trace: "
            "see plot_spectrum"
        )
    result = spectra(model)
    with drawing(ax) as ax:
        _draw(ax, model, [[one.residual_trace for one in pair] for pair in result], 0)
        ax.set(xlabel="number of pivots", ylabel="relative residual trace τ", yscale="log")
        ax.set_title("What the pivots leave of the kernels' traces")
        ax.legend(loc="best")
    return ax


def _draw(ax: Any, model: "JointModel", lines: Sequence[Sequence[Array]], first: int) -> None:
    """A line of x and of y for each member, the best one on top, from this abscissa on."""
    sides = [("x", model.x), ("y", model.y)]
    more = len(lines) - 1
    for i, ((name, variable), colour) in enumerate(zip(sides, PALETTE, strict=False)):
        label = _described(name, variable) + (f", best of {len(lines)}" if more else "")
        best = lines[0][i]
        ax.plot(first + np.arange(len(best)), best, color=colour, lw=1.8, label=label, zorder=3)
    for i, colour in zip((0, 1), PALETTE, strict=False):
        for pair in lines[1:]:
            ax.plot(first + np.arange(len(pair[i])), pair[i], color=colour, **_OTHERS)
    if more:
        ax.plot([], [], color="#555555", label="other members", **_OTHERS)


def _positive(values: Array) -> Array:
    return values[values > 0.0]


def _described(name: str, variable: "Variable") -> str:
    names = variable.columns.names
    return f"{name}: {', '.join(names) if len(names) <= FEW else f'{len(names)} columns'}"
