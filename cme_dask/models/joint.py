"""The fitted joint distribution: small frozen arrays and the queries on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self, cast, overload

import numpy as np

from cme_dask.data.columns import Columns
from cme_dask.data.model_file import ModelState
from cme_dask.display import passes, rank_text
from cme_dask.errors import DataError, StoreError
from cme_dask.models.answers import ConditionalExpectation, PredictedMeans
from cme_dask.models.base import Custom, Model
from cme_dask.models.files import (
    AnyBasis,
    basis_arrays,
    basis_description,
    cells_arrays,
    read_basis,
    read_cells,
)
from cme_dask.models.law import ConditionalLaw, law_of
from cme_dask.models.location import (
    LocationModel,
    read_residual,
    residual_arrays,
    residual_description,
)
from cme_dask.models.points import (
    FloatArray,
    Labels,
    OutOfCore,
    is_out_of_core,
    lazy_answers,
    query_points,
)
from cme_dask.models.relevance import LengthScales, length_scales, plot_relevance, scales_line
from cme_dask.models.spectra import (
    SpectrumPair,
    plot_residual_trace,
    plot_spectrum,
    read_spectra,
    spectra_arrays,
)
from cme_dask.numerics.blocks import MomentSums
from cme_dask.numerics.calibration import Calibration
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.joint import StackedBasis, ranks_of
from cme_dask.numerics.measure import Law
from cme_dask.numerics.partition import PartitionBasis
from cme_dask.numerics.support import Support

Array = Any
Function = Callable[[Array], Array]

_QUERY_ROWS = 4096  # points per block: memory does not grow with the number of points


@dataclass(frozen=True, eq=False)
class Variable:
    """One variable: columns, basis, answers about the other one given it, cells of its own laws."""

    columns: Columns
    basis: AnyBasis
    answers: ConditionalExpectation
    cells: CellStatistics | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of pivots of each member of an averaged model, else the one of the basis."""
        return ranks_of(self.basis.newton)

    def points(self, values: Any, name: str) -> Array:
        """Query points of this variable, see :func:`query_points`."""
        return query_points(values, self.columns, name, self.basis.newton.kernel)


@dataclass(frozen=True, eq=False, repr=False)
class JointModel(Model, PredictedMeans):
    """Joint distribution dP = g dP_X dP_Y with g(x, y) = base + psi_Y(y)^T H psi_X(x).

    Made by :class:`cme_dask.JointDistribution` or :func:`cme_dask.load`; needs neither data nor
    Dask.

    Attributes
    ----------
    x, y
        The variables.
    coef
        H, shape (k_Y, k_X), in the bases of the variables.
    about
        What it was fitted on and how: rows, tol, trace errors, constraint, reg.
    moments
        Moments by fold as plain arrays (``MomentSums.to_arrays``), for growing and merging.
    base
        1; or 0 for ``coupling``, where psi = b are partitions of unity and H = C >= 0, so that g is
        a sum of products of non-negative numbers.
    residual
        A location of y given x and the joint distribution of x and what is left: then laws of y
        given x are made from these.
    spectra
        Of averaged models, whose moments are not stored: spectra of both kernels of each member.
    """

    _made_by = "JointDistribution or `cme-dask fit`"
    plot_spectrum, plot_residual_trace = plot_spectrum, plot_residual_trace
    plot_relevance = plot_relevance

    x: Variable
    y: Variable
    coef: Array
    about: dict[str, Any]
    moments: dict[str, Array]
    base: float = 1.0
    residual: LocationModel | None = None
    spectra: tuple[SpectrumPair, ...] = ()

    def _answered(self) -> Columns:
        return self.y.columns

    def _means(self, X: Any) -> Array:
        signed = self.support is None  # there is no law to ask
        return self.expect(None, X) if signed else self.conditional(X).mean()

    def _shares(self, X: Any) -> Array:
        result = self.conditional(X).predict_proba()
        return result if is_out_of_core(X) else np.asarray(result)

    @property
    def support(self) -> Support | None:
        """Cells of y on which conditional laws live, if the fit summed their rows."""
        return None if self.y.cells is None else self.y.cells.support

    @property
    def masses(self) -> Array:
        """Shares v of all rows in the cells of the support, shape (S,)."""
        if self.y.cells is None:
            raise DataError(
                "this model has no support for conditional laws: fit with support_size of at least "
                "1"
            )
        return self.y.cells.masses

    @property
    def answering(self) -> "JointModel":
        """The model whose weights laws of Y given X have: that of (x, e) with a location."""
        return self if self.residual is None else self.residual.model

    @cached_property
    def calibration(self) -> Calibration | None:
        """How the laws of Y given X are calibrated; None where they are not."""
        metadata = self.about.get("calibration")
        if not (metadata and metadata["kept"]):
            return None
        return Calibration.from_list(metadata["exponents"], len(self.y.columns.names))

    @property
    def function_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names that ``expect`` knows: given X (functions of y), and given Y (functions of x)."""
        return self.x.answers.names, self.y.answers.names

    @property
    def columns_x(self) -> Columns:
        """Columns of x: names, units, and labels of those that hold labels."""
        return self.x.columns

    @property
    def columns_y(self) -> Columns:
        """Columns of y: names, units, and labels of those that hold labels."""
        return self.y.columns

    @property
    def length_scales(self) -> LengthScales:
        """Length scale and relevance of each column, of x first, see :class:`ColumnRelevance`."""
        return length_scales(
            [(key, v.columns, v.basis) for key, v in (("x", self.x), ("y", self.y))]
        )

    @overload
    def expect(
        self,
        f: str | Sequence[str] | None = None,
        X: Any = None,
        *,
        Y: Any = None,
        return_std: Literal[False] = False,
    ) -> FloatArray: ...

    @overload
    def expect(
        self,
        f: str | Sequence[str] | None = None,
        X: Any = None,
        *,
        Y: Any = None,
        return_std: Literal[True],
    ) -> tuple[FloatArray, FloatArray]: ...

    @overload
    def expect(
        self,
        f: str | Sequence[str] | None = None,
        X: Any = None,
        *,
        Y: Any = None,
        return_std: bool,
    ) -> FloatArray | tuple[FloatArray, FloatArray]: ...

    def expect(
        self,
        f: str | Sequence[str] | None = None,
        X: Any = None,
        *,
        Y: Any = None,
        return_std: bool = False,
    ) -> FloatArray | tuple[FloatArray, FloatArray]:
        """Conditional expectations E[f(Y) | X = x] = E f + psi_X(x)^T H^T E[psi_Y f^T].

        The signed estimator: exact moments over all rows, so it adds up but may leave the range of
        f where the data say little. With ``Y`` given instead of ``X``, E[f(X) | Y = y].

        Parameters
        ----------
        f
            A numeric column, declared function or declared event of the other variable, or
            several; default its numeric columns. Other events are answered by the law:
            ``conditional(x).probability(event)``.
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives Dask arrays; nothing is computed then.
        Y
            Points, shape (n, d_Y): the other direction.
        return_std
            Also return standard errors by the jackknife over the fixed folds.

        Returns
        -------
        values : (n,) for one name, (n, len(f)) for several; in the units of f
        std : same shape, if ``return_std``

        Raises
        ------
        DataError
            On unknown names, columns of labels, events that were not declared, wrong columns,
            NaN, or folds that the fit did not keep.
        """
        if (X is None) == (Y is None):
            raise DataError("expect takes points of one variable: X=... or Y=...")
        reverse = X is None
        variable, other = (self.y, self.x) if reverse else (self.x, self.y)
        values = Y if reverse else X
        if is_out_of_core(values):
            return cast(
                FloatArray,
                lazy_answers().lazy_method(
                    self, "expect", values, variable, reverse=reverse, f=f, return_std=return_std
                ),
            )
        points = variable.points(values, "Y" if reverse else "X")
        names = variable.answers.select(f, other.columns, reverse)
        return variable.answers.expect(names, variable.basis, points, return_std)

    def expect_interval(
        self,
        f: str | Sequence[str] | None = None,
        X: Any = None,
        *,
        Y: Any = None,
        level: float = 0.95,
    ) -> tuple[FloatArray, FloatArray]:
        """Bounds value - t std and value + t std of conditional expectations, as of ``expect``.

        The factor t is the quantile of Student's law with one degree of freedom less than there are
        folds. Standard errors measure the variance between samples alone, so an interval holds the
        *mean of the estimator* at its level, and the truth less often: it leaves out the bias of
        smoothing, and what choosing kernels on the same rows costs. The guide has a table.

        Parameters
        ----------
        f, X, Y
            As in :meth:`expect`.
        level
            Of the interval, in (0, 1).

        Raises
        ------
        DataError
            As :meth:`expect`, or on another level.
        """
        answers = (self.x if Y is None else self.y).answers
        value, std = self.expect(f, X, Y=Y, return_std=True)
        margin = answers.factor(level) * std
        return value - margin, value + margin

    def density_ratio(self, X: Any, Y: Any) -> FloatArray:
        """Radon-Nikodym derivative g(x_i, y_j) = dP / d(P_X x P_Y), shape (n_X, n_Y), no units.

        Parameters
        ----------
        X, Y
            Points, shapes (n_X, d_X) and (n_Y, d_Y), or tables with the columns by name. X out of
            core gives a Dask array.

        Raises
        ------
        DataError
            On wrong columns or NaN.
        """
        if is_out_of_core(X):
            y = self.y.points(Y, "Y")
            return cast(
                FloatArray, lazy_answers().lazy_method(self, "density_ratio", X, self.x, Y=y)
            )
        points = self.x.points(X, "X")
        right = self.coef.T @ self.y.basis(self.y.points(Y, "Y")).T
        shape = (1, len(points), right.shape[1])
        result: FloatArray = _in_blocks(
            lambda rows: (self.base + self.x.basis(rows) @ right)[None], points, shape
        )[0]
        return result

    def weights(self, X: Any) -> FloatArray:
        r"""Conditional laws of Y on the cells of the support, shape (n, S): non-negative, sum 1.

        The L2 projection of the signed ratio onto densities: w_s(x) = v_s max(g(x, y_s) - t(x), 0)
        with t(x) such that they add up to one. If the true ratio is a density on the support, w / v
        is never farther from it in L2(v) than g. Where the fit learned a calibration, it follows,
        see :class:`cme_dask.numerics.calibration.Calibration`.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. Points out of core give a
            Dask array.

        Raises
        ------
        DataError
            On wrong columns or NaN, or if the model has no support.
        """
        if is_out_of_core(X):
            return cast(FloatArray, lazy_answers().lazy_method(self, "weights", X, self.x))
        plain = self if self.residual is None else replace(self, residual=None)
        return cast(FloatArray, plain.conditional(X).weights())

    @overload
    def conditional(
        self, X: OutOfCore, *, Y: None = None, functions: Mapping[str, Function] | None = None
    ) -> Any: ...

    @overload
    def conditional(
        self,
        X: None = None,
        *,
        Y: OutOfCore,
        functions: Mapping[str, Function] | None = None,
    ) -> Any: ...

    @overload
    def conditional(
        self, X: Any = None, *, Y: Any = None, functions: Mapping[str, Function] | None = None
    ) -> ConditionalLaw: ...

    def conditional(
        self, X: Any = None, *, Y: Any = None, functions: Mapping[str, Function] | None = None
    ) -> ConditionalLaw:
        """The law of Y given X = x, or of X given Y = y, at points.

        Parameters
        ----------
        X
            Points, shape (n, d_X), or a table with the columns by name. A Dask array, a Zarr array
            or a store gives a :class:`cme_dask.LazyLaw`, whose answers are Dask arrays.
        Y
            Points, shape (n, d_Y): the other direction.
        functions
            Functions of the answered variable by name, for later queries by name.

        Raises
        ------
        DataError
            On wrong columns, NaN, or a model without cells.
        """
        if (X is None) == (Y is None):
            raise DataError("conditional takes points of one variable: X=... or Y=...")
        if is_out_of_core(X) or is_out_of_core(Y):
            law = lazy_answers().lazy_law(self, X, Y=Y, functions=functions)
            return cast(ConditionalLaw, law)
        reverse = X is None
        values = Y if reverse else X
        points = self.y.points(Y, "Y") if reverse else self.x.points(X, "X")
        return ConditionalLaw(self, reverse, points, Labels.of(values), functions or {})

    def moment_sums(self) -> MomentSums:
        """The moments by fold, with named blocks.

        Raises
        ------
        DataError
            If the model is a mean of several, which holds none.
        """
        if not self.moments:
            raise DataError("this model is a mean of several, which holds no moments")
        constants = self.y.answers.constant, self.x.answers.constant
        ranks = tuple(v.basis.newton.rank for v in (self.x, self.y))
        unknown = tuple(map(np.zeros_like, constants))
        sums = MomentSums.from_arrays(self.moments, ranks, unknown)
        if self.base == 0.0:
            return replace(sums, shifts=constants)
        # Shifts are not stored: constants are the shifts and the means of the shifted functions.
        mean = sums.means()
        shifts = (c - mean.function_mean(v) for v, c in zip("xy", constants, strict=True))
        return replace(sums, shifts=tuple(shifts))

    def __getstate__(self) -> dict[str, Any]:
        # Laws hold functions that can't be pickled; they are made again when they are needed.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def law(self, reverse: bool = False) -> Law:
        """The law of Y given X = x, or with ``reverse`` of X given Y = y, at any point."""
        made: dict[bool, Law] = self.__dict__.setdefault("_laws", {})
        if reverse not in made:
            made[reverse] = law_of(self, reverse)
        return made[reverse]

    def _stored(self) -> tuple[dict[str, Any], dict[str, Array]]:
        arrays = {"coef": self.coef, **spectra_arrays(self.spectra)}
        arrays |= {f"moments_{name}": values for name, values in self.moments.items()}
        variables: dict[str, Any] = {}
        for key, variable in (("x", self.x), ("y", self.y)):
            answers = variable.answers
            arrays |= basis_arrays(key, variable.basis)
            arrays |= {
                f"{key}_constant": answers.constant,
                f"{key}_slope": answers.slope,
                f"{key}_fold_constant": answers.fold_constant,
                f"{key}_fold_slope": answers.fold_slope,
            }
            if variable.cells is not None:
                arrays |= cells_arrays(key, variable.cells)
            described = basis_description(variable.columns, variable.basis)
            variables[key] = {**described, "answers": list(answers.names)}
        described = {"variables": variables, "base": self.base}
        if self.residual is not None:
            arrays |= residual_arrays(self.residual)
            described["residual"] = residual_description(self.residual)
        return described, arrays

    @classmethod
    def _restored(cls, state: ModelState, custom: Custom) -> Self:
        x, y = (_variable(state, key, custom) for key in "xy")
        x = replace(x, cells=_cells(state, "x", x, y.answers))
        y = replace(y, cells=_cells(state, "y", y, x.answers))
        widths = len(x.columns.names), len(y.columns.names)
        return cls(
            x,
            y,
            state.array("coef", (y.basis.rank, x.basis.rank)),
            state.about.get("fit", {}),
            _moments(state, (x, y)),
            _base(state, (x, y)),
            read_residual(state, widths, cls.from_state, custom),
            _spectra(state, (x, y)),
        )

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns and functions that queries accept, and the held-out errors."""
        sides = {"x": self.x, "y": self.y}
        return {
            "columns": {key: side.columns.to_dict() for key, side in sides.items()},
            "functions": {key: list(side.answers.names) for key, side in sides.items()},
            "length_scales": self.length_scales.to_list(),
            "held_out": self.about.get("held_out", {}),
        }

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit = self.about
        lines = [
            (
                name,
                f"{', '.join(v.columns.names)}: {_size(name, v, fit)}, {_kernels(v)}",
            )
            for name, v in (("x", self.x), ("y", self.y))
        ]
        given_x, given_y = self.function_names
        scales = scales_line(self.length_scales)
        return [
            *lines,
            *([] if scales is None else [("scales", scales)]),
            ("rows", f"{fit['rows']:,} in {passes(fit['passes'])}, {fit['folds']} folds"),
            ("constraint", f"{fit['constraint']}, reg {_ridges(fit['reg'])} ({fit['reg_form']})"),
            *([] if self.residual is None else [("residual", _residual(fit["residual"]))]),
            *_calibrated(self.answering),
            ("E[. | x]", ", ".join(given_x)),
            ("E[. | y]", ", ".join(given_y)),
        ]


def _ridges(regs: Any) -> str:
    """The ridge, or those of y and of x where they differ."""
    y, x = (f"{float(r):.2g}" for r in regs)
    return y if y == x else f"({y}, {x})"


def _size(name: str, variable: Variable, fit: dict[str, Any]) -> str:
    error = fit["trace_error"][name]
    if error is None:
        return f"{variable.basis.newton.rank} landmarks"
    return f"{rank_text(variable.ranks, variable.basis.rank)}, trace error {error:.2e}"


def _residual(about: dict[str, Any]) -> str:
    """What the location model gained."""
    plain, moved = about["crps"]
    return f"laws moved to mu(x): held-out CRPS {moved:.4g}, plain {plain:.4g}"


def _calibrated(model: "JointModel") -> list[tuple[str, str]]:
    """What the calibration of the laws gained, if they are calibrated."""
    if model.calibration is None:
        return []
    gain = model.about["calibration"]["gain"]
    return [("laws", f"calibrated: held-out log density {gain:+.3g}")]


def _kernels(variable: Variable) -> str:
    """The kernel, or the first of several."""
    basis = variable.basis
    more = len(basis.parts) - 1 if isinstance(basis, StackedBasis) else 0
    return f"{basis.newton.kernel!r}" + (f" and {more} more" if more else "")


def _variable(state: ModelState, key: str, custom: Custom) -> Variable:
    names = tuple(map(str, state.about["variables"][key]["answers"]))
    columns, basis = read_basis(state, key, custom)
    m, k, q = basis.newton.rank, basis.rank, len(names)
    fold_constant = state.array(f"{key}_fold_constant", (None, q))
    return Variable(
        columns,
        basis,
        ConditionalExpectation(
            names,
            state.array(f"{key}_constant", (q,)),
            state.array(f"{key}_slope", (k, q)),
            fold_constant,
            state.array(f"{key}_fold_slope", (len(fold_constant), m, q)),
        ),
    )


def _base(state: ModelState, variables: tuple[Variable, ...]) -> float:
    """The stored base of g, which partitions of unity and nothing else bring to zero."""
    stacked = [isinstance(v.basis, StackedBasis) for v in variables]
    if stacked[0] != stacked[1]:
        raise StoreError("one of the model's bases is stacked and one is not: fit it again")
    partitions = [isinstance(v.basis.newton, PartitionBasis) for v in variables]
    base = state.about["base"]
    if base not in (0.0, 1.0) or partitions != [base == 0.0] * len(partitions):
        raise StoreError(
            f"the model's base {base!r} does not fit its bases: 0 belongs to two partitions of "
            "unity, 1 to two others; restore it or fit it again"
        )
    return float(base)


def _cells(
    state: ModelState, key: str, variable: Variable, given: ConditionalExpectation
) -> CellStatistics | None:
    """The stored cells of a variable, whose declared functions the other one answers for."""
    d, newton = len(variable.columns.names), variable.basis.newton
    rank = newton.rank if isinstance(newton, PartitionBasis) else None
    return read_cells(state, key, d, rank, given.names[d:])


def _moments(state: ModelState, variables: tuple[Variable, ...]) -> dict[str, Array]:
    """The stored moments, of the shapes that belong to the variables."""
    if any(isinstance(v.basis, StackedBasis) for v in variables):
        return {}
    width = 1 + sum(v.basis.newton.rank + len(v.answers.names) for v in variables)
    gram = state.array("moments_gram", (None, width * (width + 1) // 2))
    folds = len(gram)
    return {
        "gram": gram,
        "traces": state.array("moments_traces", (folds, len(variables))),
        "rows": state.array("moments_rows", (folds,)),
    }


def _spectra(state: ModelState, variables: tuple[Variable, ...]) -> tuple[SpectrumPair, ...]:
    """The stored spectra of the members of an averaged model."""
    x, y = variables
    if not all(isinstance(variable.basis, StackedBasis) for variable in variables):
        return ()
    return read_spectra(state, (x.ranks, y.ranks))


def _in_blocks(
    function: Callable[[Array], Array], points: Array, shape: tuple[int, int, int]
) -> FloatArray:
    """Fill an array of this shape, rows along axis 1, block by block."""
    result = np.empty(shape)
    for rows in _slices(len(points)):
        result[:, rows] = function(points[rows])
    return result


def _slices(n: int) -> Iterator[slice]:
    for start in range(0, n, _QUERY_ROWS):
        yield slice(start, min(start + _QUERY_ROWS, n))
