"""``Operator``: linear maps between the function spaces of two bases, and ``Reweighting`` by one.

Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators, section 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, overload

import numpy as np
from scipy.linalg import solve_triangular

from cme_dask.codec import Shape
from cme_dask.errors import DataError
from cme_dask.kernels.lapack import singular_vectors
from cme_dask.models.base import Model
from cme_dask.models.points import FloatArray
from cme_dask.models.spaces import MeanEmbeddings, RKHSFunctions, Space

Array = Any
Functions = TypeVar("Functions", bound=RKHSFunctions)


class SingularValues(NamedTuple):
    """A singular value decomposition, A = sum_i s_i left_i right_i^T.

    Attributes
    ----------
    values
        s, descending, shape (k,).
    left, right
        Orthonormal functions of the codomain and of the domain, k of each.
    """

    values: Array
    left: RKHSFunctions
    right: RKHSFunctions


class Eigenvalues(NamedTuple):
    """Eigenvalues and eigenfunctions, A f_i = lambda_i f_i.

    Attributes
    ----------
    values
        lambda, by descending modulus, shape (m,); complex unless all are real.
    functions
        f, of norm 1.
    """

    values: Array
    functions: RKHSFunctions


@dataclass(frozen=True, eq=False, repr=False)
class Operator(Model):
    r"""A linear map between the spaces of two variables.

    .. math:: (A h)(x) = N(x)^T A \, a \quad \text{for} \quad h = \sum_j a_j N_j

    with the orthonormal Newton bases N of both spaces, so that the adjoint is the transpose.
    Operators are added, scaled and composed, ``A @ B``, where their spaces are the same. Made by
    the functions of :mod:`cme_dask.operators` and :func:`cme_dask.load`.

    Attributes
    ----------
    domain, codomain
        The spaces from which and to which the operator maps.
    matrix
        Its matrix in the bases, shape (codomain.rank, domain.rank).
    about
        What it was made of.

    Notes
    -----
    Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators, sections 2.3 and 2.4.

    Examples
    --------
    >>> import numpy as np
    >>> from cme_dask import PivotedCholesky, kernels, open_sample, operators
    >>> x = np.random.default_rng(0).normal(size=(2000, 1))
    >>> space = operators.Space.of(PivotedCholesky(kernels.Gaussian(1.0), tol=1e-6).fit(x))
    >>> moments = operators.measure(open_sample(x), space, functions_x={"x": lambda x: x[:, 0]})
    >>> times_x = moments.multiplication("x")
    >>> h = space.interpolate(lambda x: np.cos(x[:, 0]))
    >>> float(abs((times_x @ times_x)(h)([[0.5]]) - 0.25 * np.cos(0.5)).max()) < 0.01
    True
    """

    _made_by = "cme_dask.operators"
    __array_ufunc__: ClassVar[None] = None
    """Arrays leave products with operators to these."""

    domain: Space
    codomain: Space
    matrix: Annotated[Array, Shape("codomain.rank", "domain.rank")]
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def interpolate(
        cls, h: Callable[[Array, Array], Any], domain: Space, codomain: Space
    ) -> "Operator":
        """The function h(x, y) = <N_Y(y), B N_X(x)> with given values at all pairs of pivots.

        Its Hilbert-Schmidt product with the covariance of x and y is E h(X, Y).

        Parameters
        ----------
        h
            From rows x (n, d_X) and y (n, d_Y) to values (n,).
        domain, codomain
            The spaces of x and of y.

        Raises
        ------
        DataError
            If it returns another shape, or no finite numbers.
        """
        x, y = domain.basis, codomain.basis
        rows = np.tile(x.points, (y.rank, 1)), np.repeat(y.points, x.rank, axis=0)
        values = np.asarray(h(*rows), dtype=np.float64)
        if values.shape != (x.rank * y.rank,) or not np.isfinite(values).all():
            raise DataError(
                f"h must return finite numbers of shape ({x.rank * y.rank},), it returned an array "
                f"of shape {values.shape}"
            )
        left = solve_triangular(y.factor, values.reshape(y.rank, x.rank), lower=True)
        matrix = solve_triangular(x.factor, left.T, lower=True).T
        return cls(domain, codomain, matrix, {"kind": "a function of two variables"})

    @classmethod
    def identity(cls, space: Space) -> "Operator":
        """The identity of a space."""
        return cls(space, space, np.eye(space.rank), {"kind": "identity"})

    @property
    def T(self) -> "Operator":
        """The adjoint A': <A f, g> = <f, A' g>."""
        return Operator(self.codomain, self.domain, self.matrix.T, {"kind": "adjoint"})

    def __matmul__(self, other: "Operator") -> "Operator":
        """First the right one, then the left one; DataError across different spaces."""
        if not isinstance(other, Operator):
            return NotImplemented
        check_same(other.codomain, self.domain, "A @ B needs a B that maps to the domain of A")
        return Operator(
            other.domain, self.codomain, self.matrix @ other.matrix, {"kind": "product"}
        )

    def __add__(self, other: "Operator") -> "Operator":
        """The sum; DataError across different spaces."""
        if not isinstance(other, Operator):
            return NotImplemented
        self._check_parallel(other)
        return Operator(self.domain, self.codomain, self.matrix + other.matrix, {"kind": "sum"})

    def __mul__(self, scalar: Any) -> "Operator":
        """A multiple."""
        if np.ndim(scalar) or not np.isreal(scalar) or isinstance(scalar, Operator):
            return NotImplemented
        matrix = float(scalar) * self.matrix
        return Operator(self.domain, self.codomain, matrix, {"kind": "multiple"})

    __rmul__ = __mul__

    def __neg__(self) -> "Operator":
        return -1.0 * self

    def __sub__(self, other: "Operator") -> "Operator":
        return self + -other

    @overload
    def __call__(self, f: Functions) -> Functions: ...

    @overload
    def __call__(self, f: Callable[[Array], Any]) -> RKHSFunctions: ...

    @overload
    def __call__(self, f: Array) -> FloatArray: ...

    def __call__(self, f: Any) -> Any:
        """The images of functions or embeddings.

        Parameters
        ----------
        f
            Functions or embeddings in the domain; or coordinates, shape (m,) or (n, m); or a
            function of rows, which is interpolated at the pivots first.

        Returns
        -------
        functions or embeddings of the codomain, or coordinates

        Raises
        ------
        DataError
            If they belong to another space.
        """
        if isinstance(f, RKHSFunctions):
            check_same(f.space, self.domain, "an operator maps functions of its domain")
            return type(f)(f.coef @ self.matrix.T, self.codomain)
        if callable(f):
            return self(self.domain.interpolate(f))
        coef = np.asarray(f)
        return (self.domain.function(coef).coef @ self.matrix.T).reshape(*coef.shape[:-1], -1)

    def inner(self, other: "Operator") -> float:
        """The Hilbert-Schmidt inner product tr(A' B); DataError across different spaces."""
        self._check_parallel(other)
        return float((self.matrix * other.matrix).sum())

    def norm(self, kind: str = "operator") -> float:
        """The norm: ``"operator"``, the largest singular value, or ``"hilbert-schmidt"``."""
        if kind not in ("operator", "hilbert-schmidt"):
            raise DataError(f"kind must be operator or hilbert-schmidt, got {kind!r}")
        return float(np.linalg.norm(self.matrix, 2 if kind == "operator" else "fro"))

    def svd(self) -> SingularValues:
        """Singular values and functions."""
        u, s, vt = singular_vectors(self.matrix)
        return SingularValues(s, self.codomain.function(u.T), self.domain.function(vt))

    def eig(self) -> Eigenvalues:
        """Eigenvalues and eigenfunctions of an operator in one space; DataError of others."""
        check_same(self.codomain, self.domain, "eigenfunctions need an operator within one space")
        values, vectors = np.linalg.eig(self.matrix)
        order = np.argsort(-np.abs(values), kind="stable")
        return Eigenvalues(values[order], self.domain.function(vectors.T[order]))

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns of both spaces."""
        return {
            "domain": self.domain.columns.to_dict(),
            "codomain": self.codomain.columns.to_dict(),
            "ranks": [self.domain.rank, self.codomain.rank],
        }

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        lines = [("from", repr(self.domain)), ("to", repr(self.codomain))]
        return lines + [(str(key), str(value)) for key, value in self.about.items()]

    def _check_parallel(self, other: "Operator") -> None:
        for one, two in ((self.domain, other.domain), (self.codomain, other.codomain)):
            check_same(one, two, "sums and products <A, B> need operators between the same spaces")


@dataclass(frozen=True, eq=False)
class Reweighting:
    r"""Sum rule and Bayes' rule with non-negative weights: laws on S points, reweighted by a ratio.

    .. math:: w_s(a) = \frac{v_s \, g_s(a)_+}{\sum_t v_t \, g_t(a)_+}, \quad
              g_s(a) = 1 + \langle a, H k(z_s, \cdot) \rangle

    with points z_s and their shares v_s, and the operator H of a density ratio, see
    :meth:`cme_dask.operators.OperatorMoments.joint_ratio`. For an observation y and
    :math:`a = l(y, \cdot)` these are the posterior weights of the points (Bayes' rule). For the
    embedding a of a law of y they are those of the law of x that follows from it (sum rule). Where
    no point has a positive ratio, the weights are the shares.

    Made by :func:`cme_dask.operators.reweighting`; the steps of
    :class:`cme_dask.KernelBayesFilter` are two of these, one after the other.

    Attributes
    ----------
    ratio
        H, from the space of the points to that of the given variable.
    points
        z, shape (S, d).
    masses
        v >= 0 of sum 1, shape (S,).

    Notes
    -----
    Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators, sections 3.1 and 4.2,
    where a density ratio is constrained to be non-negative; here its positive part is taken.
    """

    ratio: Operator
    points: Array
    masses: Array

    def weights(self, given: Any, prior: Any = None) -> FloatArray:
        """Weights of the points, non-negative and of sum 1, shape (n, S).

        Parameters
        ----------
        given
            Points of the codomain of the ratio, shape (n, d), or a table with the columns by name;
            or embeddings of n laws.
        prior
            Weights of the points to start from, shape (n, S) or (S,), such as those of another
            reweighting, whose sum counts for nothing; default the shares.

        Raises
        ------
        DataError
            On wrong columns or NaN, embeddings in another space, or a prior of another shape or
            without weights >= 0.
        """
        coef = self._coordinates(given)
        if prior is not None:
            prior, shape = np.asarray(prior, dtype=np.float64), (len(coef), len(self.masses))
            if prior.shape not in (shape, shape[1:]):
                raise DataError(f"prior must have shape {shape}, got {prior.shape}")
            total = prior.sum(axis=-1, keepdims=True)
            if not (prior >= 0.0).all() or not (np.isfinite(total) & (total > 0.0)).all():
                raise DataError("prior must hold weights >= 0, at least one of them above 0")
            prior = prior / total
        return np.asarray(self.reweight(coef, prior)[0])

    def embed(self, given: Any) -> MeanEmbeddings:
        """Embeddings of the laws in the space of the points.

        Parameters
        ----------
        given
            As of :meth:`weights`.
        """
        return MeanEmbeddings(self.weights(given) @ self.sections, self.ratio.domain)

    def expect(self, f: Callable[[Array], Any], given: Any) -> FloatArray:
        """Expectations of a function of rows under the laws, shape (n,).

        Parameters
        ----------
        f
            From rows (S, d) to values (S,).
        given
            As of :meth:`weights`.
        """
        return np.asarray(self.weights(given) @ np.asarray(f(self.points)))

    def reweight(self, coef: Array, prior: Array | None = None) -> tuple[Array, Array]:
        """Weights (n, S) of coordinates (n, m) of the given values, and their densities (n,).

        The density of an observation is relative to that over the rows of the moments.

        Parameters
        ----------
        coef
            Coordinates in the codomain of the ratio.
        prior
            As of :meth:`weights`, shape (n, S).
        """
        prior = self.masses if prior is None else prior
        joint = coef @ self._slopes.T
        joint += 1.0
        np.maximum(joint, 0.0, out=joint)
        joint *= prior
        density = joint.sum(axis=1)
        usable = density > np.finfo(np.float64).tiny
        if usable.all():
            joint /= density[:, None]
            return joint, density
        shares = joint / np.where(usable, density, 1.0)[:, None]
        return np.where(usable[:, None], shares, prior), density

    @cached_property
    def sections(self) -> Array:
        """N at the points, shape (S, m)."""
        return np.asarray(self.ratio.domain.basis(self.points))

    @cached_property
    def _slopes(self) -> Array:
        """H N at the points, shape (S, m of the given variable)."""
        return np.asarray(self.sections @ self.ratio.matrix.T)

    def _coordinates(self, given: Any) -> Array:
        if isinstance(given, RKHSFunctions):
            rule = "laws are reweighted by embeddings in the codomain of the ratio"
            check_same(given.space, self.ratio.codomain, rule)
            return np.asarray(given.coef)
        return self.ratio.codomain(given)


def check_same(one: Space, two: Space, rule: str) -> None:
    """DataError unless two spaces are the same."""
    if (difference := one.difference(two)) is not None:
        raise DataError(f"{rule}, but {difference}: make both in the same spaces")
