"""What a solver found, measured on what it returned and never taken from its own word."""

import warnings
from dataclasses import dataclass

from cme_dask.errors import ConvergenceError, ConvergenceWarning, remedy


@dataclass(frozen=True)
class Outcome:
    """How good a solution is.

    Attributes
    ----------
    solver
        ``"closed form"``, ``"interior point"``, ``"ADMM"``, ``"Clarabel"``, ``"OSQP"``.
    status
        ``"optimal"``, or what the solver said instead.
    primal_residual
        Largest violation of a constraint, absolutely.
    dual_residual
        |gradient of the Lagrangian|, relative to the gradient at G = 0.
    kkt_residual
        The largest of both and of the complementarity, relative to what the problem can gain; each
        solver says how.
    gap
        (primal - dual objective) / max(1, |primal objective|).
    iterations
        Of the solver; 0 for closed forms.
    seconds
        Time that the solver took.
    tol
        The KKT residual that was asked for.
    """

    solver: str
    status: str
    primal_residual: float
    dual_residual: float
    kkt_residual: float
    gap: float
    iterations: int
    seconds: float
    tol: float

    @property
    def converged(self) -> bool:
        """Whether the KKT residual is what was asked for; NaN is not."""
        return self.kkt_residual <= self.tol

    def check(self, convergence: str) -> None:
        """Let nothing pass that is worse than it looks.

        Parameters
        ----------
        convergence
            ``"raise"`` or ``"warn"``.

        Raises
        ------
        ConvergenceError
            If the tolerance was missed.
        """
        if self.converged:
            return
        message = (
            f"{self.solver} ended with KKT residual {self.kkt_residual:.1e} after "
            f"{self.iterations} iterations ({self.status}), {self.tol:.1e} was asked for: allow "
            "more iterations, raise tol or reg, or lower the rank"
        )
        if convergence == "raise":
            keeps = remedy("; convergence='warn' keeps such a solution", "")
            raise ConvergenceError(message + keeps)
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
