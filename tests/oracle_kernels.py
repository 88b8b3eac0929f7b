"""Kernels written down a second time, slowly: differences by broadcasting, in extended precision.

Nothing here is shared with the package.
"""

import numpy as np


def _difference(X, Z, length_scale=1.0):
    X, Z = np.asarray(X, np.longdouble), np.asarray(Z, np.longdouble)
    return (X[:, None, :] - Z[None, :, :]) / np.asarray(length_scale, np.longdouble)


def _distance(X, Z, length_scale):
    return np.sqrt((_difference(X, Z, length_scale) ** 2).sum(axis=-1))


def _inner(X, Z):
    return (np.asarray(X, np.longdouble)[:, None, :] * np.asarray(Z, np.longdouble)).sum(axis=-1)


def gaussian(X, Z, length_scale):
    return np.exp(-(_distance(X, Z, length_scale) ** 2) / 2)


def laplace(X, Z, length_scale):
    return np.exp(-np.abs(_difference(X, Z, length_scale)).sum(axis=-1))


def matern(X, Z, length_scale, nu):
    r = _distance(X, Z, length_scale)
    if nu == 0.5:
        return np.exp(-r)
    if nu == 1.5:
        s = np.sqrt(np.longdouble(3)) * r
        return (1 + s) * np.exp(-s)
    s = np.sqrt(np.longdouble(5)) * r
    return (1 + s + 5 * r**2 / 3) * np.exp(-s)


def rational_quadratic(X, Z, length_scale, alpha):
    # The power as printed would lose alpha eps: more than the tests allow, even with 80 bits.
    return np.exp(-alpha * np.log1p(_distance(X, Z, length_scale) ** 2 / (2 * alpha)))


def delta(X, Z):
    return np.array([[float(all(a == b for a, b in zip(x, z, strict=True))) for z in Z] for x in X])


def linear(X, Z, offset=0.0):
    return _inner(X, Z) + offset


def polynomial(X, Z, degree, offset=1.0, scale=1.0):
    return (scale * _inner(X, Z) + offset) ** degree
