"""Joint distribution g = dP / d(P_X x P_Y) = 1 + psi_Y^T H psi_X from moments, in closed form."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.errors import DataError
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.moments import MeanMoments

Array = Any

CONSTRAINTS = ("none", "normalized")
REG_FORMS = ("two-sided", "single")


@dataclass(frozen=True)
class Regularization:
    """Ridge on H: ``two-sided`` D = (lam_Y + y)(lam_X + x)^T, ``single`` D = lam_Y lam_X^T + x.

    ``single`` is the paper's (34), where lambda is one number; ``two-sided`` damps every direction
    that either basis resolves badly.
    """

    y: float
    x: float
    form: str = "two-sided"

    @classmethod
    def parse(cls, reg: Any, form: str) -> "Regularization":
        """From ``r`` or ``(r_Y, r_X)``; raises DataError on anything else or on negatives."""
        if form not in REG_FORMS:
            raise DataError(f"reg_form must be one of {', '.join(REG_FORMS)}, got {form!r}")
        try:
            values = np.asarray(reg, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.array(np.nan)
        if values.shape not in ((), (2,)) or not np.all(np.isfinite(values)) or np.any(values < 0):
            raise DataError(
                f"reg must be a non-negative number r or a pair (r_Y, r_X), got {reg!r}"
            )
        if form == "single" and values.shape == (2,):
            raise DataError(f"reg_form='single' takes one number for reg, got {reg!r}")
        pair = np.broadcast_to(values, (2,))
        return cls(float(pair[0]), float(pair[1]), form)

    def denominator(self, lam_y: Array, lam_x: Array) -> Array:
        """D, shape (len(lam_y), len(lam_x))."""
        if self.form == "single":
            return np.outer(lam_y, lam_x) + self.x
        return np.outer(lam_y + self.y, lam_x + self.x)

    def quadratic(self, gram_y: Array, coef: Array, gram_x: Array) -> Array:
        """The gradient of the quadratic term at ``coef`` in Newton coordinates."""
        if self.form == "single":
            return gram_y @ coef @ gram_x + self.x * coef
        return (
            gram_y @ coef @ gram_x
            + self.y * coef @ gram_x
            + self.x * (gram_y @ coef + self.y * coef)
        )


@dataclass(frozen=True, eq=False)
class JointSolution:
    """H in bases that diagonalise the quadratic form: g = 1 + (T_Y^T N_Y)^T coef (T_X^T N_X).

    Attributes
    ----------
    coef
        H ("none") or G ("normalized"), shape (k_Y, k_X).
    transform_x, transform_y
        T, shapes (m_X, k_X) and (m_Y, k_Y).
    eigenvalues_x, eigenvalues_y
        lam, shapes (k_X,) and (k_Y,).
    centred
        True if both bases have mean zero ("normalized").
    status
        ``"closed form"``.
    kkt_residual
        |projected gradient|_F / |gradient at H = 0|_F in Newton coordinates; it does not use the
        eigenbases, so it also sees their error and what was pruned.
    """

    coef: Array
    transform_x: Array
    transform_y: Array
    eigenvalues_x: Array
    eigenvalues_y: Array
    centred: bool
    status: str
    kkt_residual: float
    gap: float = 0.0
    iterations: int = 0

    def answer(self, mean: MeanMoments, given: int) -> tuple[Array, Array]:
        """Constants and slopes of E[f | z] = constant + psi(z)^T slope for the other side's f.

        Parameters
        ----------
        mean
            The moments.
        given
            Side of the condition: 0 for E[f(Y) | x], 1 for E[f(X) | y].

        Returns
        -------
        constant : E f, shape (q,)
        slope : H^T E[psi_Y f^T] or H E[psi_X f^T], shape (k, q)
        """
        other = 1 - given
        coef = self.coef.T if given == 0 else self.coef
        transform = (self.transform_x, self.transform_y)[other]
        slope = coef @ (transform.T @ mean.function_cross[other][other])
        if not self.centred:  # a centred basis has mean zero: the shift drops out
            slope = slope + np.outer(coef @ (transform.T @ mean.mean[other]), mean.shift[other])
        return mean.function_mean[other], slope


def solve_joint(mean: MeanMoments, constraint: str, reg: Regularization) -> JointSolution:
    """Minimise <A, H> + <D, H^2> / 2, half of (34), under ``none`` or ``normalized`` (19).

    A = c_Y c_X^T - S_YX. For ``normalized`` the problem is moved into the *centred basis*, the
    orthonormal complement of the means, where the constraints c_Y^T H = 0 and H c_X = 0 hold by
    construction (to 1e-15) and the solution is again -A'/D' entry by entry.

    Without a ridge, directions with lam <= eps m lam_max are rounding and are pruned.

    Source: joint paper, (34) and (38); (37) as printed halves Lambda + lambda I, against (34).
    """
    if constraint not in CONSTRAINTS:
        raise DataError(f"constraint must be one of {', '.join(CONSTRAINTS)}, got {constraint!r}")
    (gram_x, gram_y), (mean_x, mean_y) = mean.gram, mean.mean
    assert mean.cross is not None
    if constraint == "normalized":
        target, centre_x, centre_y = mean.cross, mean_x, mean_y
    else:
        target, centre_x, centre_y = mean.cross - np.outer(mean_y, mean_x), None, None
    transform_x, lam_x = _pruned(*eigenbasis(gram_x, centre_x), reg)
    transform_y, lam_y = _pruned(*eigenbasis(gram_y, centre_y), reg)
    coef = (transform_y.T @ target @ transform_x) / reg.denominator(lam_y, lam_x)
    newton = transform_y @ coef @ transform_x.T
    gradient = _off(centre_y, _off(centre_x, reg.quadratic(gram_y, newton, gram_x) - target, 1), 0)
    scale = float(np.linalg.norm(_off(centre_y, _off(centre_x, target, 1), 0)))
    residual = float(np.linalg.norm(gradient)) / scale if scale else 0.0
    return JointSolution(
        coef,
        transform_x,
        transform_y,
        lam_x,
        lam_y,
        centred=constraint == "normalized",
        status="closed form",
        kkt_residual=residual,
    )


def _pruned(transform: Array, lam: Array, reg: Regularization) -> tuple[Array, Array]:
    if min(reg.y, reg.x) > 0.0:
        return transform, lam
    keep = lam > np.finfo(np.float64).eps * len(lam) * lam.max(initial=0.0)
    return transform[:, keep], lam[keep]


def _off(centre: Array | None, matrix: Array, axis: int) -> Array:
    """Remove the component along ``centre`` from the given axis."""
    if centre is None or not np.any(centre):
        return matrix
    unit = centre / np.linalg.norm(centre)
    if axis == 0:
        return matrix - np.outer(unit, unit @ matrix)
    return matrix - np.outer(matrix @ unit, unit)
