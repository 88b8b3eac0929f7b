"""The sum rule, Bayes' rule and the change of a prior, as products of operators.

Source: Grünewälder, Gretton and Shawe-Taylor (2013), Smooth operators.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cme_dask.config import SAMPLE_SIZE
from cme_dask.errors import DataError
from cme_dask.estimators.cholesky import one_variable
from cme_dask.models.joint import JointModel
from cme_dask.models.operators import Operator, Reweighting, check_same
from cme_dask.models.points import is_out_of_core, query_points
from cme_dask.models.reweighted import ReweightedModel
from cme_dask.models.spaces import MeanEmbeddings
from cme_dask.numerics.cells import CellReduction
from cme_dask.numerics.embedding import ConditionalEmbedding
from cme_dask.numerics.moments import Function
from cme_dask.numerics.operators import Expansion, InverseDensity, posterior_matrix
from cme_dask.numerics.reweighting import JointCells
from cme_dask.numerics.support import SUPPORT_SIZE, make_support
from cme_dask.operators.measured import REG, OperatorMoments, in_spaces, weighted_moments
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.held_out import rows_of
from cme_dask.passes.sources import open_sample
from cme_dask.reductions import run


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
    x = prior.space("x")
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
    (means,), report = run(in_spaces(sample, (y,)), [weighted_moments((y,), functions)], options)
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
    x, y = moments.space("x"), moments.space("y")
    each = [priors] if isinstance(priors, MeanEmbeddings) else list(priors)
    for prior in each:
        if (difference := prior.space.difference(x)) is not None:
            raise DataError(f"a prior belongs to the space of x, here {difference}")
    coef = np.concatenate([prior.coef for prior in each])
    slopes = ConditionalEmbedding.of(moments.moments, reg).slope(coef.T)
    weights = {f"prior {i}": Expansion(x.basis, slope) for i, slope in enumerate(slopes.T)}
    (means,), report = run(in_spaces(sample, (x, y)), [weighted_moments((x, y), weights)], options)
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
