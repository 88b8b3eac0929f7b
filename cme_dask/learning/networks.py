"""Algorithm 2: learning features by the Rademacher bound, those of neural networks among them.

With k(x, z) = phi(x)^T phi(z) and p features the objective of n rows and its gradient take
O(n p^2 + p^3), not O(n^3). Gradients in the weights of networks come from JAX; everything else is
NumPy, and a learned network needs no JAX.
"""

import math
from typing import Any, cast

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from cme_dask.errors import DataError
from cme_dask.kernels import Features, Kernel, Network
from cme_dask.learning.autodiff import extra
from cme_dask.learning.rademacher import (
    Bound,
    Coordinates,
    KernelCoordinates,
    LabelledRows,
    clipped_loss,
)
from cme_dask.numerics.scoring import column_deviations

Array = Any

_PADDED = 64  # batches are filled up to a multiple of as many rows: JAX compiles for each number
_DROPOUT = 0x64726F70  # of seeds
_FAR = 1e5  # means in standard deviations, from which on features are off by a hundredth or more


def coordinates_of(
    x: Array, importance: Array, seed: int, kernel: Kernel, reg: float, *, learn_reg: bool
) -> Coordinates:
    """The coordinates in which a kernel is learned.

    Parameters
    ----------
    x, importance
        Some rows, shape (n, d), and their weights, which have sum 1: by them the columns of
        networks are standardised.
    seed
        Of the first weights of networks, and of what they draw while they learn.
    kernel, reg
        Where learning begins.
    learn_reg
        Whether the ridge is learned.
    """
    if isinstance(kernel, Network):
        return NetworkCoordinates(x, importance, seed, kernel, reg, learn_reg=learn_reg)
    kind = FeatureCoordinates if isinstance(kernel, Features) else KernelCoordinates
    return kind(kernel, reg, learn_reg=learn_reg)


def feature_bound(
    features: Array,
    reg: float,
    rows: LabelledRows,
    *,
    labels: int,
    multiplier: float,
    epsilon: float,
    validation: LabelledRows | None = None,
    validation_features: Array = None,
) -> tuple[Bound, Array, Array]:
    r"""The objective (12) or (13) of explicit features, and its gradient in them.

    .. math:: W = (Z^T D Z + r)^{-1} Z^T D Y, \quad f(x) = W^T \varphi(x), \quad
              q = \sum_i v_i \bigl(-\log [f_{y_i}(x_i)]_\epsilon^1\bigr)
              + \tau |W|_F \max_i |\varphi(x_i)|

    with the features Z of the rows and their weights D, which have sum 1: the function ``bound`` of
    the kernel phi(x)^T phi(z) by Woodbury's identity.

    Parameters
    ----------
    features
        phi of the rows, shape (n, p).
    reg, rows, labels, multiplier, epsilon, validation
        As of :func:`cme_dask.learning.rademacher.bound`.
    validation_features
        phi of the rows for validation, shape (n_v, p).

    Returns
    -------
    bound : Bound
        Its gradient is that in the ridge.
    slope, validation_slope
        The gradient in the features, shapes (n, p) and (n_v, p), the latter with no rows where
        there are none for validation.

    Notes
    -----
    With G the gradient in W and U = (Z^T D Z + r)^-1 G, that in Z is D (Y - Z W) U^T - D Z U W^T,
    and that in r is -<U, W>. Source: Hsu, Nock and Ramos (2018), Algorithm 2, whose line 8 lacks a
    solve.
    """
    z, share = features, (rows.weights / rows.weights.sum())[:, None]
    onehot = np.eye(labels)[rows.codes]
    gram = z.T @ (share * z)
    gram[np.diag_indices(len(gram))] += reg
    factor = cho_factor(gram, lower=True, overwrite_a=True)
    w = cho_solve(factor, z.T @ (share * onehot))
    fitted = z @ w
    held, held_z = rows, z
    if validation is not None:
        held, held_z = validation, validation_features
    loss, slope = clipped_loss(fitted if validation is None else held_z @ w, held, epsilon)
    norms = (z * z).sum(axis=1)
    widest = int(norms.argmax())
    radius, square = float(norms[widest]), float((w * w).sum())
    complexity = math.sqrt(radius * square)
    by_square, by_radius = (
        0.5 * multiplier * complexity / each if each > 0.0 else 0.0 for each in (square, radius)
    )
    u = cho_solve(factor, held_z.T @ slope + 2.0 * by_square * w)
    in_z = share * ((onehot - fitted) @ u.T - (z @ u) @ w.T)
    in_z[widest] += 2.0 * by_radius * z[widest]
    in_held = slope @ w.T
    if validation is None:
        in_z, in_held = in_z + in_held, in_held[:0]
    in_reg = np.array([-float((u * w).sum())])
    result = Bound(loss + multiplier * complexity, loss, complexity, in_reg)
    return result, in_z, in_held


class FeatureCoordinates(KernelCoordinates):
    """Logarithms of the positive parameters of features and of the ridge."""

    def _bound(
        self, kernel: Kernel, reg: float, rows: LabelledRows, options: dict[str, Any]
    ) -> Bound:
        functions, held = cast(Features, kernel), options["validation"]
        x = (rows.x,) if held is None else (rows.x, held.x)
        z = [functions.features(np, part) for part in x]
        result, *slopes = feature_bound(
            z[0], reg, rows, **options, validation_features=z[-1] if held is not None else None
        )
        in_kernel = sum(
            np.array(functions.feature_gradient(part, slope))
            for part, slope in zip(x, slopes, strict=False)
        )
        return result._replace(gradient=np.append(in_kernel, result.gradient))


class NetworkCoordinates:
    """Weights of a network and, if it is learned, the logarithm of the ridge.

    Weights that begin at random are those for standardised columns, or for images of mean square 1;
    the first layer of :meth:`at` takes rows in their units.
    """

    reach = math.inf
    dtype: Any = np.float32

    def __init__(
        self,
        x: Array,
        importance: Array,
        seed: int,
        kernel: Network,
        reg: float,
        *,
        learn_reg: bool,
    ) -> None:
        self._network, self._seed = kernel.started(x.shape[1], seed), seed
        self._reg, self._learn_reg = reg, learn_reg
        self._shift, self._scale = np.zeros(1), np.ones(1)
        if kernel.weights is None:
            if kernel.image is None:
                self._shift = importance @ x
                self._scale = column_deviations(x, importance)  # infinite: no weights
                self._check_offsets()
            else:
                scale = np.sqrt((importance @ x**2).mean(keepdims=True))
                self._scale = np.where(scale > 0.0, scale, 1.0)
        self._compiled: tuple[Any, Any] | None = None
        logarithm = [math.log(reg)] if learn_reg else []
        self.start = np.append(self._network.vector.astype(np.float64), logarithm)
        self._shapes = self._network.shapes(x.shape[1])

    def _check_offsets(self) -> None:
        """DataError on columns whose deviations float32 would lose beside their means."""
        ratio = np.abs(self._shift) / self._scale
        far = np.flatnonzero(ratio > _FAR)
        if len(far):
            raise DataError(
                f"column {far[0]} of x has a mean of {self._shift[far[0]]:.3g} and a standard "
                f"deviation of {self._scale[far[0]]:.3g}: networks compute in float32, which holds "
                "a difference so small beside its offset badly; subtract the mean of the column"
            )

    def at(self, vector: Array) -> tuple[Network, float]:
        """The network and the ridge."""
        weights, reg = self._parts(vector)
        first, biases = (math.prod(shape) for shape in self._shapes[:2])
        matrix = weights[:first].reshape(-1, biases) / self._scale.reshape(-1, 1)
        moved = weights[first : first + biases]
        if self._shift.any():
            moved = moved - self._shift @ matrix
        rest = weights[first + biases :]
        return self._network.with_weights(np.concatenate([matrix.ravel(), moved, rest])), reg

    def bound(
        self, vector: Array, rows: LabelledRows, step: int, **options: Any
    ) -> tuple[Bound, Array]:
        """The objective, and its gradient in the vector."""
        weights, reg = self._parts(vector)
        held = options["validation"]
        x = rows.x if held is None else np.concatenate([rows.x, held.x])
        values, pull = self._propagated(weights, x)
        mask = self._mask(values.shape, step)
        values = values if mask is None else mask * values
        seen, unseen = values[: len(rows.x)], values[len(rows.x) :]
        result, *slopes = feature_bound(seen, reg, rows, **options, validation_features=unseen)
        slope = np.concatenate(slopes)
        gradient = pull(slope if mask is None else mask * slope)
        return result, np.append(gradient, reg * result.gradient[: int(self._learn_reg)])

    def _parts(self, vector: Array) -> tuple[Array, float]:
        if not self._learn_reg:
            return vector, self._reg
        return vector[:-1], math.exp(vector[-1])

    def _mask(self, shape: tuple[int, ...], step: int) -> Array | None:
        """What features are multiplied with at a step: 0 where they are dropped."""
        share = self._network.dropout
        if not share:
            return None
        kept = np.random.default_rng((_DROPOUT, self._seed, step)).random(shape) >= share
        return kept / (1.0 - share)

    def _propagated(self, weights: Array, x: Array) -> tuple[Array, Any]:
        """Features in float64, shape (n, m), and the map from slopes in them to the weights."""
        jax = extra("jax")
        if self._compiled is None:

            def features(weights: Array, x: Array) -> Any:
                def of_weights(vector: Array) -> Array:
                    return self._network.propagated(jax.numpy, vector, x, _convolution)

                return jax.vjp(of_weights, weights)

            self._compiled = jax.jit(features), jax.jit(lambda pull, slope: pull(slope)[0])
        forward, backward = self._compiled
        padded = np.zeros((-(-len(x) // _PADDED) * _PADDED, x.shape[1]), dtype=self.dtype)
        padded[: len(x)] = (x - self._shift) / self._scale
        values, pull = forward(weights.astype(self.dtype), padded)

        def gradient(slope: Array) -> Array:
            whole = np.zeros(values.shape, dtype=self.dtype)
            whole[: len(slope)] = slope
            return np.asarray(backward(pull, whole), dtype=np.float64)

        return np.asarray(values, dtype=np.float64)[: len(x)], gradient


def _convolution(xp: Any, x: Array, filters: Array) -> Array:
    """The fastest one of JAX, of three that were tried."""
    lax = extra("jax").lax
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=layout)
