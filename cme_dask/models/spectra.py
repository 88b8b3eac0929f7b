"""Pictures of fitted bases: their eigenvalues, and what they leave of their kernels' traces."""

from typing import TYPE_CHECKING, Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.models.drawing import FEW, PALETTE, drawing

if TYPE_CHECKING:
    from cme_dask.models.joint import JointModel, Variable

Array = Any


def plot_spectrum(model: "JointModel", *, ax: Any = None) -> Any:
    """Draw the eigenvalues of both bases, in L2 of the data, in descending order.

    Parameters
    ----------
    model
        The model; of averaged ones the eigenvalues of all.
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
    with drawing(ax) as ax:
        for (name, variable), colour in zip(_sides(model), PALETTE, strict=False):
            found = np.sort(np.asarray(variable.basis.eigenvalues))[::-1]
            found = found[found > 0.0]
            label = _described(name, variable)
            ax.plot(1 + np.arange(len(found)), found, color=colour, lw=1.8, label=label)
        ax.set(xlabel="number of the eigenvalue", ylabel="eigenvalue λ", xscale="log")
        ax.set(yscale="log", title="Spectra of both bases")
        ax.legend(loc="lower left")
    return ax


def plot_residual_trace(model: "JointModel", *, ax: Any = None) -> Any:
    """Draw what the first functions of each basis leave of the trace of its kernel over all rows.

    By pivots, trace(K - L_j L_j^T) / trace(K) after j of them, where the model stores its moments;
    of averaged models, which store none, by the eigenvalues of the first: what the best j functions
    would leave.

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
    traces = [(*residual_trace(model, name), name, variable) for name, variable in _sides(model)]
    with drawing(ax) as ax:
        for (found, how, name, variable), colour in zip(traces, PALETTE, strict=False):
            label = f"{_described(name, variable)} ({how})"
            ax.plot(np.arange(len(found)), found, color=colour, lw=1.8, label=label)
        ax.set(xlabel="rank", ylabel="relative residual trace τ", yscale="log")
        ax.set_title("What the bases leave of the kernels' traces")
        ax.legend(loc="best")
    return ax


def residual_trace(model: "JointModel", name: str) -> tuple[Array, str]:
    """Relative residual trace of the kernel of x or y after 0, 1, ... functions, and which.

    From the stored moments, exactly, after each pivot: trace(K - L_j L_j^T) / trace(K) over all
    rows. Of several bases, whose moments are not stored, from the eigenvalues of the first and the
    trace error: what the best functions would leave.

    Raises
    ------
    DataError
        If the bases are partitions of unity, which approximate no kernel.
    """
    error = model.about["trace_error"][name]
    if error is None:
        raise DataError(
            "partitions of unity approximate no kernel and have no residual trace: "
            "see plot_spectrum"
        )
    variable = model.x if name == "x" else model.y
    if "gram" in model.moments:
        first = 0 if name == "x" else model.x.basis.newton.rank
        ranks = [side.basis.newton.rank for side in (model.x, model.y)]
        # Lower triangles of [N_X, N_Y, 1, ...], row by row.
        i = np.append(first + np.arange(variable.basis.newton.rank), sum(ranks))
        squares = np.asarray(model.moments["gram"])[:, i * (i + 1) // 2 + i].sum(axis=0)
        traces = np.asarray(model.moments["traces"])[:, "xy".index(name)].sum()
        return _left(squares[:-1], float(traces)), "by pivots"
    found = np.sort(np.asarray(_first_eigenvalues(variable)))[::-1]
    return _left(found, float(found.sum() / (1.0 - error))), "by eigenvalues"


def _left(parts: Array, total: float) -> Array:
    left = 1.0 - np.concatenate([[0.0], np.cumsum(parts)]) / total
    return np.maximum(left, np.finfo(np.float64).eps)


def _first_eigenvalues(variable: "Variable") -> Array:
    parts = getattr(variable.basis, "parts", (variable.basis,))
    return parts[0].eigenvalues


def _sides(model: "JointModel") -> list[tuple[str, "Variable"]]:
    return [("x", model.x), ("y", model.y)]


def _described(name: str, variable: "Variable") -> str:
    names = variable.columns.names
    return f"{name}: {', '.join(names) if len(names) <= FEW else f'{len(names)} columns'}"
