"""Moments of a sample in given spaces, and the operators that follow from them.

Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cme_dask.data.sample import Sample
from cme_dask.data.sources import RowFunction
from cme_dask.display import brief_repr
from cme_dask.errors import DataError
from cme_dask.estimators.cholesky import one_variable
from cme_dask.estimators.growing import on_columns
from cme_dask.models.operators import Operator, check_same
from cme_dask.models.spaces import MeanEmbeddings, RKHSFunctions, Space
from cme_dask.numerics.embedding import ConditionalEmbedding
from cme_dask.numerics.moments import FeatureBlock, Function, MomentReduction, Moments
from cme_dask.numerics.operators import (
    Expansion,
    check_effective_size,
    density_ratio_slope,
    joint_ratio,
)
from cme_dask.numerics.reduction import Reduction
from cme_dask.numerics.weighted import WeightedMoments
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.run import PassReport
from cme_dask.reductions import run

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
        return MeanEmbeddings(self.moments.means[variable][None], self.space(variable))

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
        matrix = self.moments.blocks[to, domain] if self.space(to) else None
        return self._operator("covariance", self.space(domain), self.space(to), matrix)

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
        y = self.space("y")
        matrix = ConditionalEmbedding.of(self.moments, reg).operator(self.moments)
        return self._operator("conditional expectation", y, self.space("x"), matrix, reg)

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
        x = self.space("x")
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
        first = float(self.moments.function_means("x")[place])
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
        x, target = self.space("x"), self.space("y" if name is None else "x")
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
        if all(name in names for names in self.functions) and len(self.functions) > 1:
            raise DataError(
                f"{name!r} is a column of x and one of y: fit their spaces on columns with names"
            )
        for variable, names in zip("xy", self.functions, strict=False):
            if name in names:
                place, shift = names.index(name), self.moments.shifts[variable]
                target = self.moments.blocks["x", f"f({variable})"] + np.outer(
                    self.moments.means["x"], shift
                )
                return self.space("x").function(embedding.slope(target[:, [place]])[:, 0])
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
        x = self.space("x")
        if (difference := x.difference(other.space("x"))) is not None:
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
        x, y = self.space("x"), self.space("y")
        if not (np.isfinite(reg) and reg > 0.0):
            raise DataError(f"reg must be a positive number, got {reg!r}")
        matrix = joint_ratio(self.moments, reg)
        return self._operator("joint density ratio", x, y, matrix, reg)

    def space(self, variable: str) -> Space:
        """The space of ``"x"`` or ``"y"``; DataError if it was not measured."""
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
    sample = in_spaces(sample, spaces)
    given = dict(functions_x or {}), dict(functions_y or {})
    _check_names(spaces, given)
    blocks = tuple(
        FeatureBlock(space.basis, space.columns.names, functions)
        for space, functions in zip(spaces, given, strict=False)
    )
    reductions: list[Reduction[Any, Any]] = [MomentReduction(blocks)]
    if given[0]:
        reductions.append(weighted_moments(spaces, given[0]))
    (sums, *weighted), report = run(sample, reductions, options)
    return OperatorMoments(
        spaces,
        sums.means(),
        weighted[0] if weighted else {},
        tuple(block.names for block in blocks),
        report,
    )


def in_spaces(sample: Any, spaces: tuple[Space, ...]) -> Sample:
    """The variables of a sample that have a space; DataError unless their columns fit."""
    if not isinstance(sample, Sample):
        raise DataError(f"sample must come from open_sample, got {type(sample).__name__}")
    opened: Sample = one_variable(sample) if len(spaces) == 1 else sample
    if len(opened.sources) != len(spaces):
        raise DataError("there are only rows of x: give no y, or a sample with rows of y")
    return on_columns(opened, [space.columns for space in spaces])


def _check_names(spaces: Sequence[Space], functions: Sequence[Mapping[str, Function]]) -> None:
    """DataError if a function has the name of a column, or of a function of the other variable."""
    columns = {name for space in spaces for name in space.columns.names}
    for name in (*functions[0], *functions[1]):
        if name in columns or all(name in each for each in functions):
            other = "a column" if name in columns else "a function of the other variable"
            raise DataError(f"the function {name!r} has the name of {other}: choose another one")


def weighted_moments(
    spaces: tuple[Space, ...], functions: Mapping[str, Function]
) -> WeightedMoments:
    """Moments of the spaces, weighted by functions of x."""
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
