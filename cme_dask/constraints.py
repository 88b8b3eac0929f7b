"""Constraints on the density ratio g of a joint distribution, as plain descriptions.

``JointDistribution(constraint="certified")`` takes the defaults,
``JointDistribution(constraint=Certified(bounds="observed"))`` says more.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

from cme_dask.errors import DataError

BOUNDS = ("analytic", "sample", "observed")
FORMULATIONS = ("centred", "paper")
PROGRAM_SOLVERS = ("clarabel", "osqp")
LANDMARKS = ("pivots", "kmeans")


@dataclass(frozen=True)
class Constraint:
    """What is asked of g = dP / d(P_X x P_Y)."""

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, see :func:`parse`."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class Unconstrained(Constraint):
    """Nothing: H = -A/D, entry by entry (joint paper, (38))."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True)
class Normalized(Constraint):
    """E_Y g(x, Y) = 1 and E_X g(X, y) = 1 at every x and y (joint paper, (19))."""

    name: ClassVar[str] = "normalized"


@dataclass(frozen=True)
class Certified(Constraint):
    """Normalized, and g >= 0 by one inequality on the coefficients (joint paper, (20)).

    Parameters
    ----------
    bounds : {"analytic", "sample", "observed"}
        What is known of the basis functions. ``analytic``: |psi| <= sqrt(sup k), so g >= 0 at every
        point, seen or not. ``sample``: the ranges of psi over the row sample; ``observed``: over
        all rows, in one more pass. These two allow more, and certify g >= 0 at those rows only.
    formulation : {"centred", "paper"}
        ``centred``: in the centred basis, where the solution is closed. ``paper``: (37) in the
        spectral basis, with the constraints (35), (36) as rows; another certificate, which takes a
        quadratic program.
    solver : {"clarabel", "osqp"}
        Of the paper's formulation.
    """

    bounds: str = "analytic"
    formulation: str = "centred"
    solver: str = "clarabel"
    name: ClassVar[str] = "certified"

    def __post_init__(self) -> None:
        _check_choice("bounds", self.bounds, BOUNDS)
        _check_choice("formulation", self.formulation, FORMULATIONS)
        _check_choice("solver", self.solver, PROGRAM_SOLVERS)
        if self.formulation == "paper" and self.bounds != "analytic":
            raise DataError(
                f"the paper's formulation takes analytic bounds, got bounds={self.bounds!r}"
            )


@dataclass(frozen=True)
class Pointwise(Constraint):
    """Normalized, and g >= 0 on landmarks x_s times landmarks y_t (joint paper, later version).

    Parameters
    ----------
    landmarks : int or (int, int)
        Their number, of x and y: the pivots first, then distinct rows of the row sample.
    tol : float
        Relative residual at which the iteration ends.
    max_iterations : int
        At most so many.
    """

    landmarks: int | tuple[int, int] = 200
    tol: float = 1e-6
    max_iterations: int = 20_000
    name: ClassVar[str] = "pointwise"

    def __post_init__(self) -> None:
        _check_pair("landmarks", self.landmarks)
        _check_iteration(self.tol, self.max_iterations)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of landmarks of x and of y."""
        return _check_pair("landmarks", self.landmarks)


@dataclass(frozen=True)
class Coupling(Constraint):
    """Non-negative and normalized everywhere: g = b_Y^T C b_X with partitions of unity b.

    b(x) is the softmax of log k(x, p) over landmarks p, C >= 0, c_Y^T C = 1^T, C c_X = 1 with c the
    means of b.

    Parameters
    ----------
    landmarks : int, (int, int) or None
        Their number, of x and y; None: chosen by the held-out loss on the row sample.
    choice : {"pivots", "kmeans"}
        Landmarks are pivots, or centres of k-means on the row sample.
    tol : float
        Relative KKT residual at which the iteration ends.
    max_iterations : int
        At most so many.
    """

    landmarks: int | tuple[int, int] | None = None
    choice: str = "pivots"
    tol: float = 1e-6
    max_iterations: int = 20_000
    name: ClassVar[str] = "coupling"

    def __post_init__(self) -> None:
        if self.landmarks is not None:
            _check_pair("landmarks", self.landmarks)
        _check_choice("choice", self.choice, LANDMARKS)
        _check_iteration(self.tol, self.max_iterations)

    @property
    def counts(self) -> tuple[int, int] | None:
        """Numbers of landmarks of x and of y, if they were given."""
        return None if self.landmarks is None else _check_pair("landmarks", self.landmarks)


KINDS: dict[str, type[Constraint]] = {
    kind.name: kind for kind in (Unconstrained, Normalized, Certified, Pointwise, Coupling)
}


def parse(constraint: Any) -> Constraint:
    """A constraint from itself, its name, or its JSON form.

    Raises
    ------
    DataError
        On anything else.
    """
    if isinstance(constraint, Constraint):
        return constraint
    if isinstance(constraint, str) and constraint in KINDS:
        return KINDS[constraint]()
    if isinstance(constraint, Mapping) and constraint.get("name") in KINDS:
        values = {key: value for key, value in constraint.items() if key != "name"}
        try:
            return KINDS[constraint["name"]](**values)
        except TypeError as error:
            raise DataError(f"constraint {constraint['name']!r}: {error}") from error
    raise DataError(
        f"constraint must be one of {', '.join(KINDS)}, or made by cme_dask.constraints, got "
        f"{constraint!r}"
    )


def _check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DataError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _check_pair(name: str, value: Any) -> tuple[int, int]:
    pair = (value, value) if _is_count(value) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_count, pair)):
        raise DataError(f"{name} must be a positive integer, or one for x and one for y: {value!r}")
    return int(pair[0]), int(pair[1])


def _check_iteration(tol: Any, max_iterations: Any) -> None:
    if isinstance(tol, bool) or not isinstance(tol, Real) or not 0.0 < float(tol) < 1.0:
        raise DataError(f"tol must lie between 0 and 1, exclusively, got {tol!r}")
    if not _is_count(max_iterations):
        raise DataError(f"max_iterations must be a positive integer, got {max_iterations!r}")
