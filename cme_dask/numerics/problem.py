"""The quadratic program of the joint distribution, in bases that make it diagonal."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cme_dask.errors import DataError, option, remedy
from cme_dask.numerics.basis import eigenbasis
from cme_dask.numerics.means import MeanMoments

Array = Any

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
            single = remedy("reg_form='single'", "--reg-form single")
            raise DataError(f"{single} takes one number for {option('reg')}, got {reg!r}")
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
class JointProblem:
    """Minimise <A, G> + <D, G^2> / 2, half of (34), over G: then g = 1 + psi_Y^T G psi_X.

    Attributes
    ----------
    linear
        A = -T_Y^T S_YX T_X (for uncentred bases of S_YX - c_Y c_X^T), shape (k_Y, k_X).
    quadratic
        D > 0, see :meth:`Regularization.denominator`, same shape.
    transform_x, transform_y
        T with psi = T^T N, shapes (m_X, k_X) and (m_Y, k_Y).
    eigenvalues_x, eigenvalues_y
        lam = E psi^2, shapes (k_X,) and (k_Y,).
    centred
        Whether E psi = 0: in the *centred basis*, the orthonormal complement of the means, the
        constraints c_Y^T H = 0 and H c_X = 0 of (19) hold by construction, to 1e-15.
    """

    linear: Array
    quadratic: Array
    transform_x: Array
    transform_y: Array
    eigenvalues_x: Array
    eigenvalues_y: Array
    centred: bool

    @classmethod
    def of(cls, mean: MeanMoments, reg: Regularization, *, centred: bool) -> "JointProblem":
        """The program of these moments.

        Without a ridge, directions with lam <= eps m lam_max are rounding and are pruned.
        """
        (gram_x, gram_y), (mean_x, mean_y) = mean.gram, mean.mean
        transform_x, lam_x = _pruned(*eigenbasis(gram_x, mean_x if centred else None), reg)
        transform_y, lam_y = _pruned(*eigenbasis(gram_y, mean_y if centred else None), reg)
        return cls(
            -(transform_y.T @ _target(mean, centred) @ transform_x),
            reg.denominator(lam_y, lam_x),
            transform_x,
            transform_y,
            lam_x,
            lam_y,
            centred,
        )

    def ridged(self, reg: Regularization) -> "JointProblem":
        """The same program with another positive ridge: the eigenbases stay."""
        return replace(self, quadratic=reg.denominator(self.eigenvalues_y, self.eigenvalues_x))

    @property
    def free(self) -> Array:
        """The minimiser without further constraints, -A / D (38)."""
        return -self.linear / self.quadratic

    def objective(self, coef: Array) -> float:
        """<A, G> + <D, G^2> / 2."""
        return float((self.linear * coef).sum() + 0.5 * (self.quadratic * coef**2).sum())

    def newton_residual(self, mean: MeanMoments, reg: Regularization, coef: Array) -> float:
        """|projected gradient|_F / |gradient at 0|_F in Newton coordinates.

        It does not use the eigenbases, so it also sees their error and what was pruned.
        """
        centres = mean.mean if self.centred else (None, None)
        target = _target(mean, self.centred)
        newton = self.transform_y @ coef @ self.transform_x.T
        gradient = reg.quadratic(mean.gram[1], newton, mean.gram[0]) - target
        both = [_off(centres[1], _off(centres[0], m, 1), 0) for m in (gradient, target)]
        residual, scale = (float(np.linalg.norm(m)) for m in both)
        return residual / scale if scale else 0.0


def _target(mean: MeanMoments, centred: bool) -> Array:
    assert mean.cross is not None
    return mean.cross if centred else mean.cross - np.outer(mean.mean[1], mean.mean[0])


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
