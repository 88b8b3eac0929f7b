"""Kernel tests of (conditional) independence and of equal laws, from one pass over the rows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from cme_dask.config import SAMPLE_SIZE, VARIABLES
from cme_dask.data.columns import Columns
from cme_dask.data.sample import Sample
from cme_dask.errors import DataError, remedy
from cme_dask.estimators.base import CHECKS, check_choice
from cme_dask.estimators.cholesky import one_variable
from cme_dask.estimators.context import FitContext, Pivots, choose_kernel
from cme_dask.kernels import Kernel
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.problems import EMBEDDING_REGS as REGS
from cme_dask.numerics.embedding import check_ridges
from cme_dask.numerics.folds import RowSample, merge
from cme_dask.numerics.independence import (
    NullComparison,
    check_residuals,
    compare_by_signs,
    compare_by_spectrum,
    flip_signs,
    residual_inflation,
    residual_ridges,
    residual_terms,
)
from cme_dask.numerics.moments import MomentSums
from cme_dask.passes.driver import (
    MomentFitKeywords,
    RunOptions,
    options_of,
    with_run_options,
)
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.progress import listening
from cme_dask.passes.run import PassReport, run_pass
from cme_dask.passes.sources import open_sample, recoded

Array = Any

METHODS = ("auto", "chi2", "bootstrap")
RANK, TOLERANCE, RESAMPLES = 200, 1e-3, 9999
"""Defaults of the tests."""

FEWEST_FOLDS, FOLDS = 32, 128
"""Folds of the bootstrap. With F of them its power is that of a test that estimates the scale of
the statistic from F - 1 numbers, as Student's t does: of 32 it lacks 0.03, of 128 below 0.02."""

RIDGE_FOLDS, FINER = 10, 1e-2
"""Folds by which ridges of regressions on z are chosen, and the trace error of the basis of z, in
which they are made, over that of x and y."""

_MOMENTS_OF_FOLDS = 1 << 23  # numbers that moments of folds may take, unless n_folds is given

_MOST_COUNTED = 10**8  # rows that random draws without replacement are counted among


@dataclass(frozen=True)
class SignificanceResult:
    """The result of a test; ``statistic, pvalue = result`` unpacks the two.

    Attributes
    ----------
    statistic
        Squared distance of the joint law from the product of its marginals (HSIC), or of two laws
        (MMD), or squared norm of the covariance given z: 0 under the null hypothesis up to
        ``null_mean``, whatever the number of rows.
    pvalue
        Probability of a statistic at least as large under the null hypothesis.
    null_mean
        Mean of the statistic under the null hypothesis; it falls as 1 / n.
    method
        ``chi2`` or ``bootstrap``.
    kernels
        The kernel of each variable.
    ranks, trace_errors
        Number of pivots of each variable, and their relative trace error over all rows.
    rows
        Number of rows of each sample.
    passes
        Times that each row was read: once, and the row sample of chunked arrays.
    reports
        Time and memory of the pass over each sample.
    regs
        Of a test given z, the ridges of the regressions of y and of x on it.
    """

    statistic: float
    pvalue: float
    null_mean: float
    method: str
    kernels: tuple[Kernel, ...]
    ranks: tuple[int, ...]
    trace_errors: tuple[float, ...]
    rows: tuple[int, ...]
    passes: int
    reports: tuple[PassReport, ...] = field(repr=False)
    regs: tuple[float, ...] = ()

    def __iter__(self) -> Iterator[float]:
        return iter((self.statistic, self.pvalue))


@with_run_options
def independence_test(
    X: Any,
    Y: Any = None,
    *,
    weights: Any = None,
    kernel_x: Kernel | str = "median",
    kernel_y: Kernel | str = "median",
    method: str = "auto",
    tol: float = TOLERANCE,
    max_rank: int = RANK,
    n_folds: int | None = None,
    n_resamples: int = RESAMPLES,
    sample_size: int = SAMPLE_SIZE,
    random_state: int | None = None,
    **keywords: Unpack[MomentFitKeywords],
) -> SignificanceResult:
    r"""Test whether x and y are independent, by the Hilbert-Schmidt independence criterion.

    .. math:: \mathrm{HSIC} = \| \mathrm E[\psi_Y \psi_X^T] - c_Y c_X^T \|^2
              = \frac1{n^2} \mathrm{tr}(K_X H K_Y H), \quad H = 1 - \frac1n

    with the kernels that the pivots span. It is 0 for independent variables, and for Gaussian
    kernels for these alone. With columns of labels as y it tests whether several laws are equal.

    Parameters
    ----------
    X, Y, weights
        Rows, shapes (n, d), or a store or :class:`Sample` that holds them, as in
        :meth:`JointDistribution.fit`.
    kernel_x, kernel_y
        Kernels; ``"median"``: Gaussian with length scales by the median heuristic, times a
        categorical kernel for columns of labels.
    method
        How the p-value is computed: ``"chi2"``, by the limiting law of the statistic, a mixture of
        chi-squares with products of the eigenvalues of both centred covariances as weights;
        ``"bootstrap"``, by random signs of the moments of folds, which also holds for weighted
        rows and for rows that depend on others of their fold (``Sample.fold_by``).
        ``"auto"``: ``"bootstrap"`` for such rows, else ``"chi2"``.
    tol, max_rank
        Relative trace error of the bases, and their largest rank. Both tests have their level at
        any rank; a low one hides fine structure.
    n_folds, n_resamples
        Folds of the bootstrap, and random signs; the signs of up to 14 folds are enumerated. By
        default there are 128 folds, and fewer, but at least 32, where their moments would take more
        than 64 MB.
    sample_size
        Rows of the row sample, from which pivots are chosen.
    random_state
        Seed of the row sample of arrays and of random signs; default 0.
    **keywords
        As in :class:`RunOptions`.

    Returns
    -------
    SignificanceResult

    Raises
    ------
    DataError
        On unusable rows or parameters; on a variable that does not vary; on weights with
        ``"chi2"``; with fewer than six folds for the bootstrap.
    ResourceError
        If memory would not suffice; nothing has been read then but the row sample.

    Notes
    -----
    Sources: Gretton et al. (2008), A kernel statistical test of independence; Zhang et al. (2012),
    Kernel-based conditional independence test, section 3, for the eigenvalues.

    Examples
    --------
    >>> x = np.linspace(-1.0, 1.0, 200)
    >>> independence_test(x, x**2).pvalue < 1e-6
    True
    """
    sample = open_sample(X, Y, weights=weights)
    if len(sample.sources) != 2:
        raise DataError("a test of independence needs rows of x and of y: give Y, or a store")
    test = _Test(method, tol, max_rank, n_folds, n_resamples, sample_size, random_state or 0)
    options = options_of(keywords, MomentFitKeywords)
    return test.run((sample,), {"kernel_x": kernel_x, "kernel_y": kernel_y}, options)


@with_run_options
def two_sample_test(
    A: Any,
    B: Any,
    *,
    variable: str = "x",
    kernel: Kernel | str = "median",
    method: str = "auto",
    tol: float = TOLERANCE,
    max_rank: int = RANK,
    n_folds: int | None = None,
    n_resamples: int = RESAMPLES,
    sample_size: int = SAMPLE_SIZE,
    random_state: int | None = None,
    **keywords: Unpack[MomentFitKeywords],
) -> SignificanceResult:
    r"""Test whether two samples come from one law, by the maximum mean discrepancy.

    .. math:: \mathrm{MMD}^2 = \| \mathrm E_A \psi - \mathrm E_B \psi \|^2
              = \frac1{n_A^2} \sum_{ij} k(a_i, a_j) + \frac1{n_B^2} \sum_{ij} k(b_i, b_j)
              - \frac2{n_A n_B} \sum_{ij} k(a_i, b_j)

    with the kernel that the pivots span. It is 0 for equal laws, and for a Gaussian kernel for
    these alone. Each row of both samples is read once.

    Parameters
    ----------
    A, B
        Rows with the same columns: anything :func:`open_sample` takes, samples with weights too.
    variable
        ``"x"`` or ``"y"``: which variable of samples that hold both.
    kernel
        As ``kernel_x`` of :func:`independence_test`, from the rows of both samples.
    method, tol, max_rank, n_folds, n_resamples, sample_size, random_state
        As in :func:`independence_test`; ``"chi2"`` has the eigenvalues of the centred covariance
        over the rows of both samples as weights.
    **keywords
        As in :class:`RunOptions`.

    Returns
    -------
    SignificanceResult

    Raises
    ------
    DataError
        As :func:`independence_test`, or if the samples have different columns, labels or units.
    ResourceError
        If memory would not suffice; nothing has been read then but the row samples.

    Notes
    -----
    Source: Gretton et al. (2012), A kernel two-sample test, Journal of Machine Learning Research
    13, 723, section 5.

    Examples
    --------
    >>> a = np.linspace(-1.0, 1.0, 200)
    >>> two_sample_test(a, a + 0.5).pvalue < 1e-6
    True
    """
    check_choice("variable", variable, ("x", "y"))
    place = "xy".index(variable)
    first, second = (one_variable(open_sample(each), place) for each in (A, B))
    test = _Test(method, tol, max_rank, n_folds, n_resamples, sample_size, random_state or 0)
    options = options_of(keywords, MomentFitKeywords)
    return test.run(_alike(first, second), {"kernel": kernel}, options)


def _alike(first: Sample, second: Sample) -> tuple[Sample, Sample]:
    """Both samples with the columns of the first, and with codes of the labels of both."""
    columns, others = first.columns[0], second.columns[0]
    if set(columns.names) != set(others.names):
        raise DataError(
            f"the samples have different columns, {columns.listed()} and {others.listed()}: select "
            "the same ones"
        )
    columns.check_units(others.only(columns.names), "in the first sample it is in")
    for name in columns.names:
        if (name in columns.categories) != (name in others.categories):
            place = "first" if name in columns.categories else "second"
            raise DataError(
                f"column {name!r} holds labels in the {place} sample alone, numbers in the other: "
                "give labels in both, or numbers"
            )
    labels = {
        name: tuple(dict.fromkeys((*each, *others.categories[name])))
        for name, each in columns.categories.items()
    }
    both = (Columns(columns.names, columns.units, labels),)
    return recoded(first, both), recoded(second.select(list(columns.names)), both)


@with_run_options
def conditional_independence_test(
    X: Any,
    Y: Any = None,
    Z: Any = None,
    *,
    weights: Any = None,
    kernel_x: Kernel | str = "median",
    kernel_y: Kernel | str = "median",
    kernel_z: Kernel | str = "median",
    reg: float | Sequence[float] | None = None,
    tol: float = TOLERANCE,
    max_rank: int = RANK,
    n_folds: int | None = None,
    n_resamples: int = RESAMPLES,
    sample_size: int = SAMPLE_SIZE,
    random_state: int | None = None,
    **keywords: Unpack[MomentFitKeywords],
) -> SignificanceResult:
    r"""Test whether x and y are independent given z, by residuals of regressions on z.

    .. math:: \| \mathrm E[R_Y R_X^T] \|^2, \quad R_Y = \psi_Y(y) - \hat{\mathrm E}[\psi_Y | z],
              \quad R_X = \psi_X(x) - \hat{\mathrm E}[\psi_X | z]

    with kernel ridge regressions, which the moments of one pass give. It estimates the squared norm
    of the mean conditional covariance of the features of x and y, which is 0 where x and y are
    independent given z.

    Parameters
    ----------
    X, Y, weights
        Rows as in :func:`independence_test`.
    Z
        Rows of z, as of x; or the names of the columns of x that are z, and which x then lacks.
    kernel_x, kernel_y, kernel_z
        Kernels, as in :func:`independence_test`.
    reg
        Ridge of both regressions, or several to choose among: the one with the least variance of
        held-out residuals is taken, for each regression. Default: 19 from 1e-9 to 1.
    tol, max_rank, n_folds, n_resamples, sample_size, random_state
        As in :func:`independence_test`; the basis of z has a hundredth of this trace error.
    **keywords
        As in :class:`RunOptions`.

    Returns
    -------
    SignificanceResult
        By ``method="bootstrap"``: random signs of the moments of folds.

    Raises
    ------
    DataError
        As :func:`independence_test`, or if there are no columns besides those of z.
    ResourceError
        If memory would not suffice; nothing has been read then but the row sample.

    Notes
    -----
    No test has level and power for all laws (Shah and Peters 2020, The hardness of conditional
    independence testing, Annals of Statistics 48, 1514). This one has its level in the limit if n
    times the product of the mean squared errors of both regressions tends to 0 (Lundborg, Shah and
    Peters 2022, Conditional independence testing in Hilbert spaces, Journal of the Royal
    Statistical Society B 84, 1821): if both are smooth functions of few columns. It has power where
    the covariance of the features given z does not vanish in the mean over z. With the columns of z
    among those of X as well, its products with functions of z need not vanish either (Zhang et al.
    2012, Kernel-based conditional independence test).

    Examples
    --------
    >>> z, a, b = np.random.default_rng(0).normal(size=(3, 500))
    >>> x, y = z + a, z + b
    >>> independence_test(x, y).pvalue < 0.01 < conditional_independence_test(x, y, z).pvalue
    True
    """
    sample = open_sample(X, Y, weights=weights)
    if len(sample.sources) != 2:
        raise DataError("a test of independence needs rows of x and of y: give Y, or a store")
    if Z is None:
        raise DataError("a test given z needs z: give Z, rows or the names of columns of x")
    regs = check_ridges(REGS if reg is None else reg)
    if not len(regs):
        raise DataError("reg holds no ridge: give one or more, or leave it out")
    test = _Test("bootstrap", tol, max_rank, n_folds, n_resamples, sample_size, random_state or 0)
    kernels = {"kernel_x": kernel_x, "kernel_y": kernel_y, "kernel_z": kernel_z}
    options = options_of(keywords, MomentFitKeywords)
    return test.run((with_z(sample, Z),), kernels, options, regs)


def with_z(sample: Sample, Z: Any) -> Sample:
    """The sample with a third variable z: further rows, or columns of x by their names."""
    names = (Z,) if isinstance(Z, str) else Z
    if isinstance(names, (list, tuple)) and names and all(isinstance(each, str) for each in names):
        described, rows = sample.columns[0], sample.row_sample
        rest = [name for name in described.names if name not in names]
        if not rest:
            raise DataError(
                f"all columns of x are those of z ({', '.join(names)}): x needs others to test"
            )
        # Functions of one source, which a pass reads once.
        x, z = (_ColumnsAt(described.positions(each)) for each in (rest, names))
        sources = [sample.sources[0].map(each, len(each.positions)) for each in (x, z)]
        columns = [described.only(each) for each in (rest, names)]
        if rows is not None:
            parts = (x(rows.parts[0]), *rows.parts[1:], z(rows.parts[0]))
            rows = replace(rows, parts=parts)
    else:
        given, rows = one_variable(open_sample(Z)), None
        sources = [sample.sources[0], given.sources[0]]
        columns = [sample.columns[0], given.columns[0]]
        if columns[1] == Columns.default("x", len(columns[1].names)):
            columns[1] = Columns.default("z", len(columns[1].names))
    return replace(
        sample,
        sources=(sources[0], *sample.sources[1:], sources[1]),
        columns=(columns[0], *sample.columns[1:], columns[1]),
        row_sample=rows,
    )


@dataclass(frozen=True)
class _ColumnsAt:
    """From rows to their columns at some positions."""

    positions: tuple[int, ...]

    def __call__(self, rows: Array) -> Array:
        return rows[:, list(self.positions)]


@dataclass(frozen=True)
class _Test:
    """What the tests share: their parameters, the row sample, pivots, and a pass."""

    method: str
    tol: float
    max_rank: int
    n_folds: int | None
    n_resamples: int
    sample_size: int
    random_state: int

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        for name in ("tol", "max_rank", "sample_size", "random_state"):
            CHECKS[name](name, getattr(self, name))
        if self.n_folds is not None:
            CHECKS["n_folds"]("n_folds", self.n_folds)
        CHECKS["max_rank"]("n_resamples", self.n_resamples)

    def run(
        self,
        samples: Sequence[Sample],
        kernels: dict[str, Any],
        options: RunOptions,
        regs: Sequence[float] = (),
    ) -> SignificanceResult:
        """The test of independence of the variables of one sample, or of two samples.

        With a third variable, x and y are tested given this one; ``regs`` are the ridges of
        regressions on it.
        """
        weighted = any(sample.weights is not None for sample in samples)
        grouped = any(sample.folding.by != "rows" for sample in samples)
        method = self.method
        if method == "auto":
            method = "bootstrap" if weighted or grouped else "chi2"
        elif method == "chi2" and weighted:
            raise no_mixture()
        name = "independence test" if len(samples) == 1 else "two-sample test"
        with (
            options.opened(name, {**asdict(self), **kernels}, *samples) as executor,
            listening(options.progress) as listener,
        ):
            drawn = [
                sample_rows(each, self.sample_size, self.random_state, executor) for each in samples
            ]
            rows = drawn[0][0]
            if len(drawn) > 1:
                counts = [each.n_rows for each in samples]
                rows = _both(rows, drawn[1][0], counts, self.sample_size, self.random_state)
            columns = samples[0].columns
            names = VARIABLES[: len(columns)]
            pivots = Pivots.of_each(
                "sampled", names, columns, self.tol, self.max_rank, None, 1.0, self.random_state
            )
            pivots = tuple(
                replace(each, tol=FINER * each.tol) if each.variable == "z" else each
                for each in pivots
            )
            context = FitContext(
                samples[0],
                rows,
                [
                    choose_kernel(kernel, rows, i, columns[i], name)
                    for i, (name, kernel) in enumerate(kernels.items())
                ],
                pivots,
                [{} for _ in columns],
                self.random_state,
                (self.n_folds or FEWEST_FOLDS) if method == "bootstrap" else 1,
                executor,
                None,
                max(passes for _, passes in drawn),
                0.0,
            )
            bases, *_ = context.bases(context.kernels, top_up=False)
            spec = context.moments_on(bases)
            if method == "bootstrap" and self.n_folds is None:
                spec = replace(spec, n_folds=folds_of_width(spec.width))
            around = context.choice_cost(max(spec.ranks))
            sums, reports = [], []
            for sample in samples:
                (moments,), report = run_pass(sample, [spec], executor, listener, around=around)
                sums.append(moments)
                reports.append(report)
        with one_blas_thread():
            (statistic, pvalue, null_mean), taken = self._compared(method, sums, regs)
        errors = np.max([each.means().trace_error for each in sums], axis=0)
        return SignificanceResult(
            statistic,
            pvalue,
            null_mean,
            method,
            tuple(context.kernels),
            spec.ranks,
            tuple(errors.tolist()),
            tuple(report.rows for report in reports),
            context.passes + 1,
            tuple(reports),
            taken,
        )

    def _compared(
        self, method: str, sums: Sequence[MomentSums], regs: Sequence[float]
    ) -> tuple[NullComparison, tuple[float, ...]]:
        """The comparison, and the ridges of the regressions on z if there is one."""
        signs = {"n_resamples": self.n_resamples, "seed": self.random_state}
        if len(sums[0].ranks) == len(VARIABLES):
            taken = residual_ridges(sums[0].coarser(RIDGE_FOLDS), regs)
            check_residuals(sums[0], taken)
            terms, inflation = residual_terms(sums[0], taken), residual_inflation(sums[0], taken)
            return flip_signs(terms, **signs, inflation=inflation), taken
        if method == "bootstrap":
            return compare_by_signs(*sums, **signs), ()
        return compare_by_spectrum(*sums), ()


def no_mixture() -> DataError:
    """The error of a test by chi-squares of rows that have weights."""
    return DataError(
        "the statistic of weighted rows follows no mixture of known eigenvalues: give "
        + remedy("method='bootstrap'", "--method bootstrap")
    )


def folds_of_width(width: int) -> int:
    """Folds of the bootstrap where rows of the moments have so many numbers."""
    return min(max(_MOMENTS_OF_FOLDS // width**2, FEWEST_FOLDS), FOLDS)


def _both(a: RowSample, b: RowSample, counts: Sequence[int], size: int, seed: int) -> RowSample:
    """A uniform sample of the rows of both samples, from row samples that are long enough.

    Pivots are closer to their own rows than to others. So that they favour none of the samples,
    each has as many of them as chance gives it.
    """
    n = sum(counts)
    scale = 1 + n // _MOST_COUNTED
    first, second = (count // scale for count in counts)
    rng = np.random.default_rng(seed)
    share = rng.hypergeometric(first, second, min(size, first + second))
    parts = []
    for rows, most in ((a, share), (b, size - share)):
        rows = rows.prefix(max(int(most), 1))
        parts.append(
            replace(rows, keys=rows.keys / rows.keys[-1], weights=rows.importance, units={})
        )
    parts[1] = replace(parts[1], index=parts[1].index + int(a.index.max()) + 1)
    return merge(parts, len(a) + len(b))
