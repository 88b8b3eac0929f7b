"""Kernels of neural networks: inner products of the features that a network computes of a row."""

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from array_api_compat import device
from scipy.special import ndtri

from cme_dask.codec import FLOAT32_TEXT
from cme_dask.errors import DataError
from cme_dask.kernels.base import Array, check_integer, check_number
from cme_dask.kernels.discrete import Features

Convolution = Callable[[Any, Array, Array], Array]
"""From a namespace, images (n, h, w, c) and filters (s, s, c, f) to responses (n, h, w, f)."""

_TAIL = 0.02275  # of the normal law beyond two standard deviations, where weights are cut off
_CUT_DEVIATION = 0.8796  # standard deviation of what is left
_BIAS = 0.1
_IMAGES = 32  # at once: patches of more would not stay in cache


@dataclass(frozen=True, repr=False)
class Network(Features):
    r"""The kernel :math:`k(x, z) = \varphi(x)^T \varphi(z)` of a neural network.

    The features are the last of some fully connected layers :math:`h \mapsto \max(W h + b, 0)`. For
    rows that are images, convolutions come before these, each followed by a rectifier and by max
    pooling of 2 x 2. A :class:`cme_dask.MulticlassEmbedding` with this kernel is a conditional
    embedding network of Hsu, Nock and Ramos (2018), and learns the weights; until then they are
    random.

    Parameters
    ----------
    layers : tuple of int
        Widths of the fully connected layers; that of the last is the number of features. The
        paper's CEN-1 is (16, 32, 8), its CEN-2 (96, 32).
    image : tuple of int, optional
        Height and width of the image in a row, and its number of channels if there are several: a
        row holds the pixels line by line, with the channels of a pixel side by side.
    filters : tuple of int
        Number of filters of each convolution, at least one for images.
    filter_size : int
        Their height and width, odd. Borders are padded with zeros.
    dropout : float
        Share of the features that learning sets to zero at random, row by row, in [0, 1).
    weights : bytes or (w,) array, optional
        All weights and biases in float32, layer by layer.

    Raises
    ------
    DataError
        On sizes that are no positive integers, or images that pooling does not divide.
    """

    layers: tuple[int, ...]
    image: tuple[int, ...] | None = None
    filters: tuple[int, ...] = ()
    filter_size: int = 5
    dropout: float = 0.0
    weights: bytes | None = field(default=None, repr=False)

    fixed: ClassVar[tuple[str, ...]] = (
        *("layers", "image", "filters", "filter_size", "dropout", "weights"),
    )

    def __post_init__(self) -> None:
        for name in ("layers", "filters", "image"):
            given = getattr(self, name)
            if given is None:
                continue
            items = given if isinstance(given, (list, tuple)) else (given,)
            sizes = tuple(check_integer(f"a size in {name}", item, 1) for item in items)
            object.__setattr__(self, name, sizes)
        object.__setattr__(self, "filter_size", check_integer("filter_size", self.filter_size, 1))
        object.__setattr__(self, "dropout", check_number("dropout", self.dropout, zero=True))
        if not self.layers:
            raise DataError("layers must hold the width of one layer or more")
        if self.dropout >= 1.0:
            raise DataError(f"dropout must be below 1, got {self.dropout!r}")
        if (self.image is None) != (not self.filters):
            raise DataError("image and filters belong together: give both or none")
        if self.image is not None:
            fold = 1 << len(self.filters)
            if len(self.image) not in (2, 3) or any(size % fold for size in self.image[:2]):
                raise DataError(
                    f"image must be a height and a width that {fold} divides, for so many "
                    f"convolutions, and perhaps a number of channels, got {self.image}"
                )
            if self.filter_size % 2 == 0:
                raise DataError(f"filter_size must be odd, got {self.filter_size}")
        object.__setattr__(self, "weights", _as_bytes(self.weights))

    def __repr__(self) -> str:
        given = [f"{self.layers}"]
        for each in fields(self)[1:-1]:
            if getattr(self, each.name) != each.default:
                given.append(f"{each.name}={getattr(self, each.name)!r}")
        return f"Network({', '.join(given)})"

    def measures(self, column: int) -> bool:
        """True."""
        return True

    def check(self, n_columns: int) -> None:
        """Raise DataError if images or weights are not of so many columns."""
        if self.image is not None and math.prod(self.image) != n_columns:
            raise DataError(
                f"an image of {' x '.join(map(str, self.image))} has {math.prod(self.image)} "
                f"columns, the data have {n_columns}"
            )
        count = sum(math.prod(shape) for shape in self.shapes(n_columns))
        if self.weights is not None and len(self.weights) != 4 * count:
            raise DataError(
                f"{self!r} of {n_columns} columns has {count:,} weights, got "
                f"{len(self.weights) // 4:,}"
            )

    def shapes(self, n_columns: int) -> list[tuple[int, ...]]:
        """Shapes of filters or matrix and of biases, layer by layer.

        Parameters
        ----------
        n_columns
            Number of columns of the rows.
        """
        result: list[tuple[int, ...]] = []
        width = n_columns
        if self.image is not None:
            channels = self.image[2] if len(self.image) == 3 else 1
            for count in self.filters:
                result += [(self.filter_size, self.filter_size, channels, count), (count,)]
                channels = count
            width = channels * (self.image[0] * self.image[1] >> 2 * len(self.filters))
        for count in self.layers:
            result += [(width, count), (count,)]
            width = count
        return result

    def started(self, n_columns: int, seed: int = 0) -> Self:
        """The network with its weights or, where there are none, with random ones.

        They are normal, cut off at two standard deviations, with variance 2 / (number of inputs),
        and biases are 0.1.

        Parameters
        ----------
        n_columns
            Number of columns of the rows.
        seed
            Of the weights.
        """
        if self.weights is not None:
            return self
        rng, parts = np.random.default_rng(seed), []
        for shape in self.shapes(n_columns):
            if len(shape) == 1:
                parts.append(np.full(shape, _BIAS))
                continue
            deviation = math.sqrt(2.0 / math.prod(shape[:-1])) / _CUT_DEVIATION
            parts.append(deviation * ndtri(rng.uniform(_TAIL, 1.0 - _TAIL, math.prod(shape))))
        return self.with_weights(np.concatenate(parts))

    @property
    def vector(self) -> Array:
        """Weights and biases one after the other, in float32; empty before there are any."""
        return np.frombuffer(self.weights or b"", dtype=np.float32)

    def with_weights(self, vector: Array) -> Self:
        """The network with other weights and biases, shape (w,)."""
        return replace(self, weights=vector)

    def features(self, xp: Any, X: Array) -> Array:
        """Return the last layer, (n, m), computed in float32."""
        network = self.started(X.shape[1])
        vector = xp.asarray(network.vector, device=device(X))
        rows, step = xp.astype(X, xp.float32), _IMAGES if self.filters else max(X.shape[0], 1)
        parts = [
            network.propagated(xp, vector, rows[start : start + step, :])
            for start in range(0, max(X.shape[0], 1), step)
        ]
        values = parts[0] if len(parts) == 1 else xp.concat(parts)
        return xp.astype(values, X.dtype)

    def propagated(
        self, xp: Any, vector: Array, X: Array, convolution: Convolution | None = None
    ) -> Array:
        """The last layer, shape (n, m), in an autodiff namespace too.

        Parameters
        ----------
        xp
            The namespace.
        vector
            Weights and biases, shape (w,).
        X
            Rows, shape (n, d), of the same type.
        convolution
            Of images; default by products with the patches around all pixels.
        """
        shapes, start, n = iter(self.shapes(X.shape[1])), 0, X.shape[0]

        def following() -> Array:
            nonlocal start
            shape = next(shapes)
            stop = start + math.prod(shape)
            values, start = xp.reshape(vector[start:stop], shape), stop
            return values

        if self.image is not None:
            X = xp.reshape(X, (n, *self.image[:2], -1))
            for _ in self.filters:
                X = (convolution or _by_patches)(xp, X, following())
                X = _pooled(xp, xp.maximum(X + following(), xp.zeros_like(X)))
            X = xp.reshape(X, (n, math.prod(X.shape[1:])))
        for _ in self.layers:
            X = X @ following()
            X = xp.maximum(X + following(), xp.zeros_like(X))
        return X

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes and, as base64 text, the weights; model files hold these as arrays."""
        described = super().to_dict()
        if self.weights is not None:
            described["weights"] = {FLOAT32_TEXT: base64.b64encode(self.weights).decode()}
        return described


def _as_bytes(weights: Any) -> bytes | None:
    """Weights of any form in float32."""
    if weights is None or isinstance(weights, bytes):
        result = weights
    elif isinstance(weights, Mapping) and isinstance(weights.get(FLOAT32_TEXT), str):
        try:
            result = base64.b64decode(weights[FLOAT32_TEXT], validate=True)
        except ValueError as error:
            raise DataError(f"weights are no base64 text ({error})") from error
    else:
        try:
            result = np.asarray(weights).astype(np.float32).tobytes()
        except (TypeError, ValueError) as error:
            raise DataError(f"weights must be finite numbers ({error})") from error
    if result is not None and (
        len(result) % 4 or not np.isfinite(np.frombuffer(result, dtype=np.float32)).all()
    ):
        raise DataError("weights must be finite numbers")
    return result


def _by_patches(xp: Any, X: Array, filters: Array) -> Array:
    size, _, channels, count = filters.shape
    n, height, width, _ = X.shape
    border = size // 2
    padded = xp.pad(X, ((0, 0), (border, border), (border, border), (0, 0)))
    patches = xp.concat(
        [padded[:, i : i + height, j : j + width, :] for i in range(size) for j in range(size)],
        axis=3,
    )
    rows = xp.reshape(patches, (n * height * width, size * size * channels))
    matrix = xp.reshape(filters, (size * size * channels, count))
    return xp.reshape(rows @ matrix, (n, height, width, count))


def _pooled(xp: Any, X: Array) -> Array:
    """The largest of each 2 x 2 neighbours."""
    n, height, width, channels = X.shape
    pairs = xp.reshape(X, (n, height // 2, 2, width // 2, 2, channels))
    return xp.max(pairs, axis=(2, 4))
