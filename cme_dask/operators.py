r"""Operators on functions and laws, learned in one pass over the rows, which can be multiplied.

:func:`measure` takes the moments of a sample in given spaces; what follows from these are
multiplication, quotient, composition, conditional expectation and change of measure, each a small
:class:`Operator`. The sum rule, the chain rule and Bayes' rule are products of such operators.

Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cme_dask.config import SAMPLE_SIZE
from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowFunction
from cme_dask.display import brief_repr
from cme_dask.errors import DataError
from cme_dask.estimators.cholesky import one_variable
from cme_dask.models.joint import JointModel
from cme_dask.models.operators import (
    Eigenvalues,
    Operator,
    Reweighting,
    SingularValues,
    check_same,
)
from cme_dask.models.points import is_out_of_core, query_points
from cme_dask.models.reweighted import ReweightedModel
from cme_dask.models.spaces import MeanEmbeddings, RKHSFunctions, Space
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.embedding import ConditionalEmbedding
from cme_dask.numerics.moments import FeatureBlock, Function, MomentReduction, Moments
from cme_dask.numerics.operators import (
    Expansion,
    InverseDensity,
    Reciprocal,
    check_effective_size,
    density_ratio_slope,
    joint_ratio,
    posterior_matrix,
)
from cme_dask.numerics.reduction import Reduction
from cme_dask.numerics.reweighting import JointCells
from cme_dask.numerics.support import SUPPORT_SIZE, make_support
from cme_dask.numerics.weighted import WeightedMoments
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.held_out import rows_of
from cme_dask.passes.run import PassReport
from cme_dask.passes.sources import open_sample
from cme_dask.reductions import run

__all__ = [
    "Eigenvalues",
    "MeanEmbeddings",
    "Operator",
    "OperatorMoments",
    "RKHSFunctions",
    "Reciprocal",
    "ReweightedModel",
    "Reweighting",
    "Risk",
    "SingularValues",
    "Space",
    "bayes",
    "change_prior",
    "composition",
    "kernel_bayes",
    "measure",
    "reweighting",
    "sum_rule_bound",
]

REG = 1e-6
"""The ridge, unless another one is given."""

_OUTSIDE = 0.1  # trace error of mapped rows above which phi leaves the support


class Risk(NamedTuple):
    """The risk of an operator over some rows.

    Attributes
    ----------
    natural
        Largest mean squared error among functions of norm 1.
    surrogate
        The mean squared RKHS norm that regressions minimise, at least as large.
    """

    natural: float
    surrogate: float


@dataclass(frozen=True, eq=False)
class OperatorMoments:
    """Moments of a sample in the spaces of its variables, from one pass, and their operators.

    Made by :func:`measure`.

    Attributes
    ----------
    spaces
        Of x, or of x and y.
    moments
        Means over the rows.
    weighted
        Means weighted by the functions, by name.
    functions
        Names of the functions of each variable.
    report
        How the pass went.
    """

    spaces: tuple[Space, ...]
    moments: Moments
    weighted: Mapping[str, Moments]
    functions: tuple[tuple[str, ...], ...]
    report: PassReport

    __repr__ = brief_repr

    def mean(self, variable: str = "x") -> MeanEmbeddings:
        r"""The mean embedding of the law of a variable, one element of its space.

        .. math:: m = \mathrm E[k(X, \cdot)], \quad \langle m, f \rangle = \mathrm E f(X)

        Parameters
        ----------
        variable
            ``"x"`` or ``"y"``.

        Notes
        -----
        Source: Smooth operators, section 4.1, where it estimates expectations under a prior.
        """
        return MeanEmbeddings(self.moments.means[variable][None], self._space(variable))

    def covariance(self, domain: str = "x", codomain: str | None = None) -> Operator:
        r"""The uncentred covariance operator C, shape (m_codomain, m_domain).

        .. math:: \langle C f, g \rangle = \mathrm E[f(X) g(Y)], \quad C = \mathrm E[N_Y N_X^T]

        It is the embedding of the joint law: the Hilbert-Schmidt product with that of a function
        h(x, y), see :meth:`Operator.interpolate`, is E h(X, Y), whatever is integrated first
        (Fubini).

        Parameters
        ----------
        domain, codomain
            Variables, ``"x"`` or ``"y"``; of one variable, its second moments.

        Notes
        -----
        Source: Smooth operators, section 3 and its supplement on products and Fubini's theorem.
        """
        to = domain if codomain is None else codomain
        matrix = self.moments.blocks[to, domain] if self._space(to) else None
        return self._operator("covariance", self._space(domain), self._space(to), matrix)

    def conditional_expectation(self, reg: float = REG) -> Operator:
        r"""The operator of functions h of y to functions of x, (E h)(x) = E[h(Y) | x].

        .. math:: E = (S_{XX} + r)^{-1} S_{XY}, \text{ shape } (m_X, m_Y)

        Its adjoint maps the embedding of a law of x to that of y (sum rule), and
        ``E.T @ covariance`` of a law of x is the embedding of the joint law (chain rule). Where y
        is a function of x, this is the composition with it.

        Parameters
        ----------
        reg
            Ridge r.

        Raises
        ------
        DataError
            If there is no y, or on a negative ridge.

        Notes
        -----
        Source: Smooth operators, section 3.2.
        """
        y = self._space("y")
        matrix = ConditionalEmbedding.of(self.moments, reg).operator(self.moments)
        return self._operator("conditional expectation", y, self._space("x"), matrix, reg)

    def multiplication(self, name: str, reg: float = REG) -> Operator:
        r"""Multiplication by a declared function f of x, (M h)(x) = f(x) h(x).

        .. math:: M = (S + r)^{-1} \mathrm E[f N N^T], \text{ shape } (m, m)

        With the :class:`Reciprocal` of f it is the quotient by f.

        Parameters
        ----------
        name
            Of the function.
        reg
            Ridge r.

        Raises
        ------
        DataError
            On an unknown name, or a negative ridge.

        Notes
        -----
        Source: Smooth operators, section 2.6; quotients: its supplement A.3.
        """
        self._position(name)
        matrix = ConditionalEmbedding.of(self.moments, reg).slope(
            self.weighted[name].blocks["x", "x"]
        )
        x = self._space("x")
        return self._operator(f"multiplication by {name}", x, x, matrix, reg)

    def change_of_measure(self, name: str, reg: float = REG) -> Operator:
        r"""The operator R of functions of x with E_P[R f] = E_Q[f] for a density ratio r = dQ/dP.

        It is the multiplication by r over its mean, which is 1 but for errors of estimation.

        Parameters
        ----------
        name
            Of a declared function, such as a :meth:`density_ratio` or known weights.
        reg
            Ridge.

        Raises
        ------
        DataError
            On an unknown name, or if the effective sample size (E r)^2 / E r^2 is below one
            percent of the rows.

        Notes
        -----
        Source: Smooth operators, section 3.1.
        """
        place = self._position(name)
        first = float(self.moments.means["f(x)"][place])
        second = float(self.moments.blocks["f(x)", "f(x)"][place, place])
        check_effective_size(first, second, f"the ratio {name!r}")
        return (1.0 / first) * self.multiplication(name, reg)

    def risk(self, operator: Operator, name: str | None = None, square: str | None = None) -> Risk:
        r"""The natural risk of an operator A over these rows, and its surrogate.

        .. math:: \sup_{\|h\| \leq 1} \mathrm E (h(Y) - (A h)(x))^2
                  \leq \mathrm E \| l(Y, \cdot) - A' k(x, \cdot) \|^2

        The left side is the largest eigenvalue of the second moments of l(Y, .) - A' k(x, .), and
        the right side their trace. Functions h outside the space count with what the basis misses
        of the trace. Where y is a function of x, as for a composition, the left side is the natural
        risk of the paper. Of a conditional expectation it is that risk and the noise,
        E (E[h | x] - A h)^2 + E Var(h | x) at the worst h, so that it bounds the risk from above
        and does not vanish with more rows.

        Parameters
        ----------
        operator
            From the space of y to that of x: a conditional expectation or composition; or within
            the space of x: a multiplication. It should be learned from other rows than these.
        name, square
            Of a multiplication: names of its function f, and of the function f^2, both declared.

        Raises
        ------
        DataError
            On another space, an unknown name, or for a multiplication in a space whose kernel has
            no constant k(x, x).

        Notes
        -----
        Source: Smooth operators, sections 2.1, 2.2 and 3.2.
        """
        x, target = self._space("x"), self._space("y" if name is None else "x")
        for own, other in ((operator.domain, target), (operator.codomain, x)):
            check_same(own, other, "a risk needs an operator between the measured spaces")
        mean, A = self.moments, operator.matrix
        if name is None:
            cross, gram = mean.blocks["x", "y"], mean.blocks["y", "y"]
            trace = mean.traces["y"]
        else:
            self._position(square or "")
            place = self._position(name)
            diagonal = x.basis.kernel.diagonal(x.basis.points)
            if np.ptp(diagonal) > 1e-12 * diagonal.max():
                raise DataError(
                    "the risk of a multiplication needs a kernel with constant k(x, x), such as a "
                    f"Gaussian, got {x.basis.kernel!r}"
                )
            cross, gram = (self.weighted[each].blocks["x", "x"] for each in (name, square or ""))
            trace = float(mean.blocks["f(x)", "f(x)"][place, place]) * float(diagonal[0])
        linear = cross.T @ A
        error = gram - linear - linear.T + A.T @ mean.blocks["x", "x"] @ A
        outside = max(trace - float(np.trace(gram)), 0.0)
        largest = max(float(np.linalg.eigvalsh(error)[-1]), 0.0)
        return Risk(largest + outside, max(float(np.trace(error)), 0.0) + outside)

    def smooth(self, name: str, reg: float = REG) -> RKHSFunctions:
        r"""The ridge regression of a declared function f of x or y on x, in the space of x.

        .. math:: (S_{XX} + r)^{-1} \mathrm E[N_X f]

        Parameters
        ----------
        name
            Of a column or function.
        reg
            Ridge r.

        Raises
        ------
        DataError
            On an unknown name, or a negative ridge.

        Notes
        -----
        Source: Smooth operators, section 2.2, for one function in place of an operator.
        """
        embedding = ConditionalEmbedding.of(self.moments, reg)
        for variable, names in zip("xy", self.functions, strict=False):
            if name in names:
                place, shift = names.index(name), self.moments.shifts[variable]
                target = self.moments.blocks["x", f"f({variable})"] + np.outer(
                    self.moments.means["x"], shift
                )
                return self._space("x").function(embedding.slope(target[:, [place]])[:, 0])
        known = ", ".join(repr(each) for names in self.functions for each in names)
        raise DataError(f"unknown function {name!r}: there are {known}")

    def density_ratio(
        self, other: "OperatorMoments", reg: float = REG, *, non_negative: bool = False
    ) -> Expansion:
        r"""The density ratio r = dQ/dP of the rows x of another sample to these, by least squares.

        .. math:: r(x) = 1 + N(x)^T (S_P + r)^{-1} (\mathrm E_Q N - \mathrm E_P N)

        Parameters
        ----------
        other
            Moments of Q in the same space of x.
        reg
            Ridge.
        non_negative
            Whether negative values become 0; the mean over P is then above 1, and
            :meth:`change_of_measure` divides by it.

        Returns
        -------
        ratio : callable
            From rows (n, d) to values (n,): declare it as a function of :func:`measure`.

        Raises
        ------
        DataError
            On another space, or if the effective sample size is below one percent of the rows.

        Notes
        -----
        Source: Kanamori, Hido and Sugiyama (2009), JMLR 10, 1391 (uLSIF).
        """
        x = self._space("x")
        if (difference := x.difference(other._space("x"))) is not None:
            raise DataError(f"a density ratio needs one space of x, here {difference}")
        mean = self.moments
        slope = density_ratio_slope(mean, other.moments.means["x"], reg)
        along = float(slope @ mean.means["x"])
        second = 1.0 + 2.0 * along + float(slope @ mean.blocks["x", "x"] @ slope)
        check_effective_size(1.0 + along, second, "this ratio")
        return Expansion(x.basis, slope, 1.0, non_negative)

    def joint_ratio(self, reg: float = REG) -> Operator:
        r"""The operator H of the density ratio of x and y, by least squares.

        .. math:: g(x, y) = \frac{dP_{XY}}{d(P_X \otimes P_Y)} = 1 + N_Y(y)^T H N_X(x), \quad
                  H = B_Y (\Lambda_Y + r)^{-1} B_Y^T S_{YX} B_X (\Lambda_X + r)^{-1} B_X^T

        with orthonormal bases B of what is orthogonal to the means, in which the covariances are
        diagonal, so that g has mean 1 over each variable. :func:`reweighting` by its positive part
        is Bayes' rule with non-negative weights.

        Parameters
        ----------
        reg
            Ridge r > 0.

        Raises
        ------
        DataError
            If there is no y, or the ridge is not positive.

        Notes
        -----
        Source: Adaptive joint distribution learning, (19), with a two-sided ridge.
        """
        x, y = self._space("x"), self._space("y")
        if not (np.isfinite(reg) and reg > 0.0):
            raise DataError(f"reg must be a positive number, got {reg!r}")
        matrix = joint_ratio(self.moments, reg)
        return self._operator("joint density ratio", x, y, matrix, reg)

    def _space(self, variable: str) -> Space:
        variables = dict(zip("xy", self.spaces, strict=False))
        if variable not in variables:
            raise DataError(f"no variable {variable!r} was measured, only {', '.join(variables)}")
        return variables[variable]

    def _position(self, name: str) -> int:
        """Place of a function of x that the pass weighted by."""
        if name not in self.weighted or name not in self.functions[0]:
            known = ", ".join(map(repr, self.weighted)) or "none"
            raise DataError(
                f"unknown function {name!r} of x: declared are {known}; give it to measure as "
                f"functions_x={{{name!r}: ...}}"
            )
        return self.functions[0].index(name)

    def _operator(
        self, kind: str, domain: Space, codomain: Space, matrix: Any, reg: float | None = None
    ) -> Operator:
        about: dict[str, Any] = {"kind": kind, "rows": self.report.rows}
        return Operator(domain, codomain, matrix, about | ({} if reg is None else {"reg": reg}))


def measure(
    sample: Any,
    x: Any,
    y: Any = None,
    *,
    functions_x: Mapping[str, Function] | None = None,
    functions_y: Mapping[str, Function] | None = None,
    options: RunOptions | None = None,
) -> OperatorMoments:
    """Moments of a sample in given spaces, in one pass over its rows.

    Parameters
    ----------
    sample : Sample
        The rows, from :func:`cme_dask.open_sample`.
    x, y
        The spaces of the variables: fits, as :meth:`Space.of` takes them. Without ``y`` the rows of
        x alone count.
    functions_x
        Functions of x by name, from rows (n, d) to values (n,), to multiply by.
    functions_y
        Functions of y by name, whose regressions :meth:`OperatorMoments.smooth` gives.
    options
        Where and how to run.

    Raises
    ------
    DataError
        On other columns than those of the spaces, functions that return no finite numbers, or
        unusable rows.
    StoreError
        On damaged stores.
    ResourceError
        If the memory does not suffice.
    """
    spaces = tuple(Space.of(each) for each in (x, y) if each is not None)
    if len(spaces) == 1 and functions_y:
        raise DataError("functions of y need a space of y: give y")
    sample = _in_spaces(sample, spaces)
    given = dict(functions_x or {}), dict(functions_y or {})
    blocks = tuple(
        FeatureBlock(space.basis, space.columns.names, functions)
        for space, functions in zip(spaces, given, strict=False)
    )
    reductions: list[Reduction[Any, Any]] = [MomentReduction(blocks)]
    if given[0]:
        reductions.append(_weighted(spaces, given[0]))
    (sums, *weighted), report = run(sample, reductions, options)
    return OperatorMoments(
        spaces,
        sums.means(),
        weighted[0] if weighted else {},
        tuple(block.names for block in blocks),
        report,
    )


def _in_spaces(sample: Any, spaces: tuple[Space, ...]) -> Sample:
    """The variables of a sample that have a space; DataError unless their columns fit."""
    if not isinstance(sample, Sample):
        raise DataError(f"sample must come from open_sample, got {type(sample).__name__}")
    opened: Sample = one_variable(sample) if len(spaces) == 1 else sample
    if len(opened.sources) != len(spaces):
        raise DataError("there are only rows of x: give no y, or a sample with rows of y")
    for variable, space, columns in zip("xy", spaces, opened.columns, strict=False):
        if len(columns.names) != len(space.columns.names):
            raise DataError(
                f"{variable} has {len(columns.names)} columns, its space has "
                f"{len(space.columns.names)} ({space.columns.listed()})"
            )
    return opened


def _weighted(spaces: tuple[Space, ...], functions: Mapping[str, Function]) -> WeightedMoments:
    return WeightedMoments(tuple(space.basis for space in spaces), (functions,))


def composition(
    sample: Any,
    phi: RowFunction,
    x: Any,
    y: Any,
    *,
    reg: float = REG,
    options: RunOptions | None = None,
) -> Operator:
    r"""Composition with a map phi, (C h)(x) = h(phi(x)), in one pass over the rows of x.

    .. math:: (S_{XX} + r)^{-1} \mathrm E[N_X(x) N_Y(\phi(x))^T], \text{ shape } (m_X, m_Y)

    Nothing is copied: rows are mapped when they are read.

    Parameters
    ----------
    sample : Sample
        Rows of x, those of y are not read.
    phi
        From rows (n, d_X) to rows (n, d_Y).
    x, y
        The spaces, as in :func:`measure`.
    reg
        Ridge r.
    options
        Where and how to run.

    Raises
    ------
    DataError
        If phi returns other shapes, or leaves the support of the basis of y, or as
        :func:`measure`.

    Notes
    -----
    Source: Smooth operators, section 2.7.
    """
    if not isinstance(sample, Sample):
        raise DataError(f"sample must come from open_sample, got {type(sample).__name__}")
    sample = one_variable(sample)
    rows = sample.row_sample
    twice = replace(
        sample,
        sources=sample.sources * 2,
        columns=sample.columns * 2,
        row_sample=rows and replace(rows, parts=rows.parts * 2),
    )
    moments = measure(twice.map(y=phi), x, y, options=options)
    error = moments.moments.trace_error[1]
    if error > _OUTSIDE:
        raise DataError(
            f"phi leaves the support of the basis of y: its pivots miss {error:.0%} of the kernel "
            f"at phi(x), at most {_OUTSIDE:.0%} are allowed; choose pivots among rows phi(x)"
        )
    return moments.conditional_expectation(reg)


def sum_rule_bound(
    conditional: Operator,
    held_out: OperatorMoments,
    prior: OperatorMoments,
    largest_ratio: float,
    *,
    confidence: float = 0.95,
) -> float:
    r"""A bound of the error of the sum rule m_Y = E' m under a prior Q of x.

    .. math:: \sup_{\|h\| \leq 1} |\mathrm E_Q h(Y) - \langle m_Y, h \rangle|
              \leq \sqrt{b R} + \|E\| \, \|m - \mathrm E_Q k(X, \cdot)\|, \quad
              \|m - \mathrm E_Q k(X, \cdot)\| \leq \sqrt{\kappa / n}
              + \sqrt{2 \kappa \log(1 / (1 - c)) / n}

    with the natural risk R of E over held-out rows of P, b >= dQ/dP, n rows of the prior and
    kappa >= k(x, x); the second inequality holds with probability c. It follows from
    E_Q h(Y) = E_Q E[h | x], and from the inequalities of Jensen and of Cauchy and Schwarz. R holds
    the noise of y given x, so the bound does not vanish with more rows: it tells which priors an
    operator serves, not how large its error is.

    Parameters
    ----------
    conditional
        E, learned from other rows than ``held_out``.
    held_out
        Moments of held-out rows of x and y. R is a mean over them.
    prior
        Moments of n rows of the prior, of equal weight, with the mean m.
    largest_ratio
        b, which you know: an estimated ratio has no upper bound.
    confidence
        c.

    Raises
    ------
    DataError
        If the spaces differ, the kernel of x is unbounded, ``largest_ratio`` is below 1 or
        ``confidence`` not between 0 and 1.

    Notes
    -----
    Source: Smooth operators, theorem 4.1, with the natural risk in place of its bound. Mean
    embeddings: Tolstikhin, Sriperumbudur and Muandet (2017), JMLR 18 (86), proposition A.1.
    """
    if not (largest_ratio >= 1.0 and np.isfinite(largest_ratio)):
        raise DataError(f"largest_ratio bounds a density, so it is at least 1, got {largest_ratio}")
    if not 0.0 < confidence < 1.0:
        raise DataError(f"confidence must lie between 0 and 1, exclusively, got {confidence}")
    x = prior._space("x")
    risk = held_out.risk(conditional).natural
    check_same(conditional.codomain, x, "the sum rule needs a prior in the space of x")
    if (bound := x.basis.bound) is None:
        raise DataError(f"the bound needs a bounded kernel of x, got {x.basis.kernel!r}")
    spread = bound / np.sqrt(prior.report.rows)
    error = spread * (1.0 + np.sqrt(-2.0 * np.log1p(-confidence)))
    return float(np.sqrt(largest_ratio * risk) + conditional.norm() * error)


def bayes(
    conditional: Operator,
    prior: OperatorMoments,
    sample: Any,
    *,
    reg: float = REG,
    least: float = 1e-3,
    options: RunOptions | None = None,
) -> Operator:
    r"""Bayes' rule: the operator of functions f of x to functions of y, (G f)(y) = E_Q[f(X) | y].

    .. math:: G = (S_R + r)^{-1} \mathrm E_R[N_Y N_Y^T / m_Y] \, E^T S_Q,
              \quad m_Y = E^T \mathrm E_Q N_X

    with the conditional expectation E of y given x under P, a prior Q of x, and any law R of y,
    restricted to where m_Y is positive: the quotient by m_Y after the chain rule. One pass over the
    rows of R. A section of the kernel of y
    stands for a point, so that its width smooths the answers.

    Parameters
    ----------
    conditional
        E, from :meth:`OperatorMoments.conditional_expectation`.
    prior
        Moments of rows of the prior in the space of x.
    sample : Sample
        Rows y, as its ``x``, at which the rule is fitted: such as those of the joint sample.
    reg
        Ridge r.
    least
        Rows with m_Y of at most this share of its largest value at the pivots are left out.
    options
        Where and how to run.

    Raises
    ------
    DataError
        If the spaces differ, or m_Y is positive nowhere.

    Notes
    -----
    Source: Smooth operators, section 4.2.
    """
    y = conditional.domain
    joint = conditional.T @ prior.covariance("x")  # first: it checks the spaces
    (density,) = conditional.T(prior.mean("x")).coef
    top = float((y.basis(y.basis.points) @ density).max())
    if not top > 0.0:
        raise DataError(
            "under this prior the embedding of y is positive at no pivot: its rows lie where the "
            "conditional expectation was not learned"
        )
    inverse = InverseDensity(y.basis, density, least * top)
    # Rows that are left out count in neither mean: else they would pull the ratio towards 0.
    functions: dict[str, Function] = {"1 / m": inverse, "m > 0": inverse.positive}
    (means,), report = run(_in_spaces(sample, (y,)), [_weighted((y,), functions)], options)
    slope = ConditionalEmbedding.of(means["m > 0"], reg).slope(means["1 / m"].blocks["x", "x"])
    about = {"kind": "Bayes' rule", "rows": report.rows, "reg": reg}
    return Operator(joint.domain, y, slope @ joint.matrix, about)


def reweighting(ratio: Operator, points: Any, weights: Any = None) -> Reweighting:
    r"""Bayes' rule, or the sum rule, by non-negative weights of the points of a prior.

    .. math:: w_s(y) \propto v_s \max(1 + \langle l(y, \cdot), H k(z_s, \cdot) \rangle, 0)

    No pass: the weights of the points are all that there is. The prior has a few thousand points at
    most, such as cells of a support, since all are reweighted for each y.

    Parameters
    ----------
    ratio
        H of :meth:`OperatorMoments.joint_ratio`, for Bayes' rule; its adjoint for the sum rule.
    points
        Points z of the prior in the domain of the ratio, shape (S, d), or a table.
    weights
        Their shares v, non-negative, shape (S,); default equal ones.

    Raises
    ------
    DataError
        On wrong columns or NaN, or weights that are unusable.

    Notes
    -----
    Source: Smooth operators, sections 3.1, 4.1 and 4.2; see :class:`Reweighting`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(5000, 1))
    >>> y = x + 0.5 * rng.normal(size=x.shape)
    >>> of_x, of_y = (PivotedCholesky(kernels.Gaussian(1.0), tol=1e-4).fit(z) for z in (x, y))
    >>> ratio = measure(open_sample(x, y), of_x, of_y).joint_ratio(1e-3)
    >>> posterior = reweighting(ratio, rng.normal(size=(500, 1)))
    >>> bool(0.7 < posterior.expect(lambda x: x[:, 0], [[1.0]])[0] < 0.9)
    True
    """
    rows = query_points(points, ratio.domain, "points")
    masses = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=np.float64)
    if masses.shape != (len(rows),) or not (np.isfinite(masses).all() and (masses >= 0.0).all()):
        raise DataError(
            f"weights of {len(rows)} points must be non-negative numbers of shape ({len(rows)},), "
            f"got shape {masses.shape}"
        )
    if not masses.any():
        raise DataError("all weights of the points are zero")
    return Reweighting(ratio, np.asarray(rows), masses / masses.sum())


def kernel_bayes(
    sample: Any,
    priors: Sequence[MeanEmbeddings] | MeanEmbeddings,
    moments: OperatorMoments,
    *,
    reg: float = REG,
    reg_posterior: float = REG,
    options: RunOptions | None = None,
) -> list[Operator]:
    r"""Fukumizu's kernel Bayes rule for some priors, from one pass over the rows.

    .. math:: (C_{YY}^2 + \delta)^{-1} C_{YY} C_{YX}, \quad
              C_{YX} = \mathrm E[\beta N_Y N_X^T], \quad \beta(x) = N_X(x)^T (S_{XX} + r)^{-1} m

    with rows reweighted by beta, which is signed.

    Parameters
    ----------
    sample : Sample
        Rows of x and y.
    priors
        Embeddings m of laws of x.
    moments
        Those of the same rows, from :func:`measure`.
    reg, reg_posterior
        Ridges r and delta.
    options
        Where and how to run.

    Returns
    -------
    operators
        For each prior the operator of functions of x to functions of y, f -> E[f(X) | y].

    Raises
    ------
    DataError
        If a prior belongs to another space, or as :func:`measure`.

    Notes
    -----
    Source: Fukumizu, Song and Gretton (2013), JMLR 14, 3753.
    """
    x, y = moments._space("x"), moments._space("y")
    each = [priors] if isinstance(priors, MeanEmbeddings) else list(priors)
    for prior in each:
        if (difference := prior.space.difference(x)) is not None:
            raise DataError(f"a prior belongs to the space of x, here {difference}")
    coef = np.concatenate([prior.coef for prior in each])
    slopes = ConditionalEmbedding.of(moments.moments, reg).slope(coef.T)
    weights = {f"prior {i}": Expansion(x.basis, slope) for i, slope in enumerate(slopes.T)}
    (means,), report = run(_in_spaces(sample, (x, y)), [_weighted((x, y), weights)], options)
    about = {"kind": "kernel Bayes rule", "rows": report.rows, "reg": reg_posterior}
    return [
        Operator(
            x,
            y,
            posterior_matrix(mean.blocks["y", "y"], mean.blocks["y", "x"], reg_posterior),
            about,
        )
        for mean in means.values()
    ]


def change_prior(
    model: Any,
    X: Any,
    *,
    weights: Any = None,
    support_size: int = SUPPORT_SIZE,
    options: RunOptions | None = None,
) -> ReweightedModel:
    r"""A joint distribution with another law of x: its law of y, and Bayes' rule for it.

    .. math:: Q(dx, dy) = Q(dx) \, P(dy \mid x), \quad
              Q(dx \mid y) = \frac{g(x, y)}{\mathrm E_Q g(X, y)} \, Q(dx)

    with the laws of y given x of the model, whose density ratios g >= 0 are normalised: unlike
    :func:`bayes` and :func:`kernel_bayes` no weight is negative. One pass over the rows of the
    prior, none over those of the fit.

    Parameters
    ----------
    model
        A fitted :class:`cme_dask.JointDistribution`, or its model, with cells.
    X
        Rows of the prior Q: an array or table with the columns of x, a store or a ``Sample``.
    weights
        Weights of the rows, non-negative, shape (n,): then Q is the weighted law.
    support_size
        Cells of the prior: if it has no more distinct rows, each is a cell and the posterior is
        exact for each row. Otherwise rows of a cell share the posterior of their cell.
    options
        Where and how to run.

    Raises
    ------
    DataError
        If the model has no laws, the rows have other columns, or weights are unusable.
    ResourceError
        If the memory does not suffice.

    Notes
    -----
    Source: Smooth operators, sections 3.1 and 4.2; Fukumizu, Song and Gretton (2013), JMLR 14,
    3753, for the rule with signed weights.

    Examples
    --------
    >>> x = np.linspace(-1.0, 1.0, 200)[:, None]
    >>> fit = JointDistribution(kernel_x=kernels.Gaussian(0.5), kernel_y=kernels.Gaussian(0.5))
    >>> prior = fit.fit(x, x) and operators.change_prior(fit, x[x[:, 0] > 0.5])
    >>> bool(prior.marginal().mean()[0] > 0.5)
    True
    """
    fitted = getattr(model, "model_", model)
    if not isinstance(fitted, JointModel):
        raise DataError(
            f"a prior is changed of a fitted joint distribution, got {type(model).__name__}"
        )
    _ = fitted.masses  # DataError without laws
    options = options or RunOptions()
    if is_out_of_core(X):
        X, weights = one_variable(open_sample(X, weights=weights)), None
    sample = rows_of(fitted, X, None, weights)
    rows, _ = sample_rows(sample, SAMPLE_SIZE, 0, options.executor())
    categorical = fitted.x.columns.categorical
    support = make_support(rows.parts[0], rows.importance, support_size, categorical)
    cells = CellReduction.of(rows, 0, sample.n_rows, 1, support, {})
    (joint, sums), report = run(sample, [JointCells(fitted, support), cells], options)
    about = {**fitted.about, "prior_rows": report.rows}
    return ReweightedModel(fitted, cells.statistics(sums), joint, about)
