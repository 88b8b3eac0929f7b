"""The joint loss on rows that a fit has not seen, from their moments."""

from dataclasses import dataclass
from typing import Any

from cme_dask.numerics.means import MeanMoments

Array = Any


@dataclass(frozen=True, eq=False)
class HeldOut:
    r"""Moments of held-out rows in the bases of a solution: then a loss is two small products.

    .. math:: -2 (E_P h - E_{P_X \otimes P_Y} h) + E_{P_X \otimes P_Y} h^2,
              \quad h = g - 1 = \psi_Y^T H \psi_X

    estimates |g - g_0|^2 in L2(P_X x P_Y) up to a constant that no model changes: it is comparable
    across kernels and constraints, and 0 for independence.

    Attributes
    ----------
    gram_x, gram_y, cross
        E[psi psi^T] of x and of y, and E[psi_Y psi_X^T].
    mean_x, mean_y
        E psi.
    """

    gram_x: Array
    gram_y: Array
    cross: Array
    mean_x: Array
    mean_y: Array

    @classmethod
    def of(cls, held: MeanMoments, transform_x: Array, transform_y: Array) -> "HeldOut":
        """In the bases psi = T^T N."""
        assert held.cross is not None
        return cls(
            transform_x.T @ held.gram[0] @ transform_x,
            transform_y.T @ held.gram[1] @ transform_y,
            transform_y.T @ held.cross @ transform_x,
            transform_x.T @ held.mean[0],
            transform_y.T @ held.mean[1],
        )

    def loss(self, coef: Array) -> float:
        """The loss of H, shape (k_Y, k_X)."""
        joint = float((coef * self.cross).sum())
        product = float(self.mean_y @ coef @ self.mean_x)
        square = float(((self.gram_y @ coef @ self.gram_x) * coef).sum())
        return square - 2.0 * (joint - product)
