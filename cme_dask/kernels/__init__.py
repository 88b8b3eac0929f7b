"""Kernels: one formula each; sums, products, scalings and column subsets compose.

A kernel is a small frozen value. ``kernel(X, Z)`` is the block of all pairs, ``kernel.diagonal(X)``
its values k(x, x); both run on any array library that follows the array API standard, and neither
looks at the data for errors: data are validated where they enter, and ``kernel.check(d)`` says
whether the kernel fits d columns. ``to_dict`` and :func:`from_dict` carry kernels through files as
plain JSON values; nothing in a file is ever executed.

A kernel states its formula once, in plain arithmetic that an autodiff namespace can trace
(``kernel.formula(jax.numpy, X, Z)``, ``kernel.with_parameters(values)``). Blocks are the largest
arrays of a pass and allocating one can cost more than filling it, so ``kernel.evaluator(Z)`` writes
them into memory that is given, in place and solved for on the way.

In the docstrings n and m are numbers of rows and d the number of columns.
"""

from cme_dask.kernels.base import KERNELS, MAX_DEPTH, Columns, Kernel, Product, Scaled, Sum, Unit
from cme_dask.kernels.discrete import Categorical, Custom, Delta, Features, Linear, Polynomial
from cme_dask.kernels.files import from_dict
from cme_dask.kernels.network import Network
from cme_dask.kernels.stationary import (
    Gaussian,
    Laplace,
    LengthScale,
    Matern,
    RationalQuadratic,
    Stationary,
)
from cme_dask.kernels.transforms import (
    ColumnTransform,
    PoolRare,
    Scores,
    Standard,
    Transform,
    TransformedKernel,
)

__all__ = [
    "KERNELS",
    "MAX_DEPTH",
    "Categorical",
    "ColumnTransform",
    "Columns",
    "Custom",
    "Delta",
    "Features",
    "Gaussian",
    "Kernel",
    "Laplace",
    "LengthScale",
    "Linear",
    "Matern",
    "Network",
    "Polynomial",
    "PoolRare",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "Scores",
    "Standard",
    "Stationary",
    "Sum",
    "Transform",
    "TransformedKernel",
    "Unit",
    "from_dict",
]
