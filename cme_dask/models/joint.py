"""The fitted joint distribution: small frozen arrays and the queries on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, cast, overload

import numpy as np

from cme_dask.codec import Shape, Within
from cme_dask.data.columns import Columns
from cme_dask.data.model_file import ModelState
from cme_dask.display import missing_lines, passes, rank_text
from cme_dask.errors import DataError
from cme_dask.kernels.base import is_a
from cme_dask.kernels.evaluator import each_block
from cme_dask.models.answers import ConditionalExpectation, PairModel
from cme_dask.models.conformal import conformalized
from cme_dask.models.events import FunctionsLike
from cme_dask.models.law import ConditionalLaw
from cme_dask.models.location import LocationModel
from cme_dask.models.points import (
    FloatArray,
    Labels,
    OutOfCore,
    is_out_of_core,
    lazy_answers,
    query_points,
)
from cme_dask.models.relevance import plot_relevance, scales_line
from cme_dask.models.spectra import SpectrumPair, plot_residual_trace, plot_spectrum, spectra
from cme_dask.numerics.basis import LinearBasis, StackedBasis, ranks_of
from cme_dask.numerics.blending import BlendedLaw, near_data
from cme_dask.numerics.calibration import Calibration, Levels
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.conformal import ConformalScores
from cme_dask.numerics.given_location import MixedMean
from cme_dask.numerics.measure import CellLaw, Law, ShiftedLaw, low_rank, project
from cme_dask.numerics.moments import MomentSums
from cme_dask.numerics.support import Support
from cme_dask.numerics.trees import SPREAD
from cme_dask.numerics.values import ValueMap

Array = Any
Function = Callable[[Array], Array]

# Versions of model files from which on moved laws have values of their own, are given how much the
# trees of a forest differ, and have a location that is a mean of a regressor and any other one.
_MOVED, _SPREAD, _MIXED = 3, 4, 6
_SHOWN = 3  # columns, and values of a column, that a summary names


@dataclass(frozen=True, eq=False)
class Variable:
    """One variable: columns, basis, answers about the other one given it, cells of its own laws."""

    columns: Columns
    basis: Annotated[LinearBasis | StackedBasis, Within(d="columns.names")]
    answers: Annotated[ConditionalExpectation, Within(k="basis.rank", m="basis.newton.rank")]
    cells: Annotated[CellStatistics | None, Within(d="columns.names", m="basis.newton.rank")] = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of pivots of each member of an averaged model, else the one of the basis."""
        return ranks_of(self.basis.newton)


@dataclass(frozen=True, eq=False, repr=False)
class JointModel(PairModel):
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
        Moments by fold as plain arrays (``MomentSums.to_arrays``), for growing, merging and drift:
        of averaged models those of the best member. Without folds where nothing can be added.
    base
        1; or 0 for ``coupling``, where psi = b are partitions of unity and H = C >= 0, so that g is
        a sum of products of non-negative numbers.
    residual
        A location of y given x and the joint distribution of x and what is left: then laws of y
        given x are made from these.
    spectra
        Of averaged models, and of those without moments: spectra of both kernels of each member.
    """

    _made_by = "JointDistribution or `cme-dask fit`"
    plot_spectrum, plot_residual_trace = plot_spectrum, plot_residual_trace
    plot_relevance = plot_relevance

    x: Variable
    y: Variable
    coef: Annotated[Array, Shape("y.basis.rank", "x.basis.rank")]
    about: dict[str, Any]
    moments: dict[str, Annotated[Array, Shape()]]
    base: float = 1.0
    residual: Annotated[LocationModel | None, Within(d="x.columns.names", q="y.columns.names")] = (
        None
    )
    spectra: tuple[SpectrumPair, ...] = ()

    def _validate(self) -> None:
        """DataError unless bases, base, cells, moments and spectra belong together."""
        x, y = self.x, self.y
        if not _law_inputs_fit(self):
            raise DataError("the rows, held-out errors, events, calibration or scores of its fit")
        averaged = {len(v.basis.parts) > 1 for v in (x, y)}
        partitions = [v.basis.newton.partition is not None for v in (x, y)]
        if len(averaged) > 1:
            raise DataError("one of the bases is stacked and one is not")
        if self.base not in (0.0, 1.0) or partitions != [self.base == 0.0] * 2:
            raise DataError(
                f"the base {self.base!r} does not fit the bases: 0 belongs to two partitions of "
                "unity, 1 to two others"
            )
        for here, other in ((x, y), (y, x)):
            cells = here.cells
            if cells is None:
                continue
            if other.answers.names[len(here.columns.names) :] != cells.names:
                raise DataError("the functions of the cells are not the declared ones")
            if (cells.components is None) == (self.base == 0.0):
                raise DataError("components of cells belong to partitions of unity")
        if True in averaged:
            pairs = [tuple(len(one.squares) for one in pair) for pair in self.spectra]
            if pairs != list(zip(x.ranks, y.ranks, strict=True)):
                raise DataError("the spectra are not those of the bases")
        width = 1 + sum(v.ranks[0] + len(v.answers.names) for v in (x, y))
        folds = len(self.moments.get("rows", ()))
        shapes = {"gram": (folds, width * (width + 1) // 2), "traces": (folds, 2), "rows": (folds,)}
        if {name: values.shape for name, values in self.moments.items()} != shapes:
            raise DataError(f"the moments should have the shapes {shapes}")

    def _means(self, X: Any) -> Array:
        signed = self.support is None  # there is no law to ask
        return self.expect(None, X) if signed else self.conditional(X).mean()

    def _shares(self, X: Any) -> Array:
        result = self.conditional(X).predict_proba()
        return result if is_out_of_core(X) else np.asarray(result)

    @property
    def classifies(self) -> bool:
        """Whether a classifier was fitted, whose labels have the chances of ``predict_proba``."""
        return "classes" in self.about and self.y.cells is not None

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
        width, pivots = len(self.y.columns.names), metadata.get("pivots")
        return Calibration.from_list(metadata["exponents"], width, pivots)

    @cached_property
    def conformal(self) -> ConformalScores | None:
        """Conformity scores of rows that the laws had not seen; None where there are none."""
        metadata = self.about.get("conformal")
        if not metadata:
            return None
        return ConformalScores.from_dict(
            metadata, self.y.columns.numeric, self.x.columns.categories
        )

    def conformalized(
        self, X: Any, Y: Any, weights: Any = None, by: str | None = None
    ) -> "JointModel":
        """The model with conformity scores of rows that the fit has not seen.

        Then ``conditional(x).interval(L, conformal=True)`` covers a new row with a probability of
        at least L, if it is exchangeable with these rows: see :mod:`cme_dask.models.conformal`.

        Parameters
        ----------
        X, Y
            The rows, shapes (n, d_X) and (n, d_Y), or tables with the columns by name.
        weights
            Of the rows, shape (n,); default equal ones.
        by
            A column of labels of x: rows of each label are covered so, and not only all of them
            together.

        Raises
        ------
        DataError
            On wrong columns, NaN (unless the fit left out rows that lack a value: these are then
            left out, too), different numbers of rows, or a y of labels alone.
        """
        return conformalized(self, X, Y, weights, by)

    @property
    def function_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names that ``expect`` knows: given X (functions of y), and given Y (functions of x)."""
        return self.x.answers.names, self.y.answers.names

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
        points = query_points(values, variable, "Y" if reverse else "X")
        names = variable.answers.select(f, other.columns, reverse, laws=other.cells is not None)
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
            y = query_points(Y, self.y, "Y")
            return cast(
                FloatArray, lazy_answers().lazy_method(self, "density_ratio", X, self.x, Y=y)
            )
        points = query_points(X, self.x, "X")
        right = self.coef.T @ self.y.basis(query_points(Y, self.y, "Y")).T
        result = np.empty((len(points), right.shape[1]))

        def fill(here: slice) -> None:
            result[here] = self.base + self.x.basis(points[here]) @ right

        each_block(fill, len(points))
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
        self, X: OutOfCore, *, Y: None = None, functions: FunctionsLike | None = None
    ) -> Any: ...

    @overload
    def conditional(
        self,
        X: None = None,
        *,
        Y: OutOfCore,
        functions: FunctionsLike | None = None,
    ) -> Any: ...

    @overload
    def conditional(
        self, X: Any = None, *, Y: Any = None, functions: FunctionsLike | None = None
    ) -> ConditionalLaw: ...

    def conditional(
        self, X: Any = None, *, Y: Any = None, functions: FunctionsLike | None = None
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
            Functions of the answered variable by name, or a list of events, for later queries by
            name. They take the place of functions of the fit that have their names.

        Raises
        ------
        DataError
            On wrong columns, NaN, a model without cells, or a function with the name of a column.
        """
        if (X is None) == (Y is None):
            raise DataError("conditional takes points of one variable: X=... or Y=...")
        if is_out_of_core(X) or is_out_of_core(Y):
            law = lazy_answers().lazy_law(self, X, Y=Y, functions=functions)
            return cast(ConditionalLaw, law)
        reverse = X is None
        values, variable, name = (Y, self.y, "Y") if reverse else (X, self.x, "X")
        points = query_points(values, variable, name)
        labels = Labels.of(values, len(points), variable.columns)
        return ConditionalLaw(self, reverse, points, labels, functions)

    def moment_sums(self) -> MomentSums:
        """The moments by fold, with named blocks; of a mean of several models, of the best one."""
        if not len(self.moments["rows"]):
            raise DataError("this model keeps no moments: ask the model whose residuals it is of")
        constants = self.y.answers.constant, self.x.answers.constant
        ranks = self.x.ranks[0], self.y.ranks[0]
        unknown = tuple(map(np.zeros_like, constants))
        sums = MomentSums.from_arrays(self.moments, ranks, unknown)
        if self.base == 0.0:
            return replace(sums, shifts=constants)
        # Shifts are not stored: constants are the shifts and the means of the shifted functions.
        mean = sums.means()
        shifts = (c - mean.means[f"f({v})"] for v, c in zip("xy", constants, strict=True))
        return replace(sums, shifts=tuple(shifts))

    def without_moments(self) -> "JointModel":
        """The same laws without sums over rows, for a model that nothing is added to."""
        empty = {name: values[:0] for name, values in self.moments.items()}
        return replace(self, moments=empty, spectra=spectra(self))

    def to_state(self) -> ModelState:
        """Plain arrays and JSON values; DataError of a model whose location is a regressor."""
        if self.residual is None:
            return super().to_state()
        self.residual.check_stored()
        # No rows are added to a law of residuals, and its moments would be a third of the file.
        residual = replace(self.residual, model=self.residual.model.without_moments())
        state = super(JointModel, replace(self, residual=residual)).to_state()
        location = self.residual.location
        version = _SPREAD if SPREAD in location.covariates else _MOVED
        return replace(state, schema_version=_MIXED if isinstance(location, MixedMean) else version)

    def __getstate__(self) -> dict[str, Any]:
        # Laws hold functions that can't be pickled; they are made again when they are needed.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def law(self, reverse: bool = False) -> Law:
        """The law of Y given X = x, or with ``reverse`` of X given Y = y, at any point.

        With a location it is one of shifted residuals of y near the data, and far from them the law
        without residuals, which tends to the marginal law.

        Raises
        ------
        DataError
            If the model has no cells.
        """
        made: dict[bool, Law] = self.__dict__.setdefault("_laws", {})
        if reverse in made:
            return made[reverse]
        # H goes from the functions of x to those of y.
        given, answered, coef = (
            (self.y, self.x, self.coef) if reverse else (self.x, self.y, self.coef.T)
        )
        cells, basis = answered.cells, given.basis
        if cells is None:
            raise DataError(
                "this model has no cells for conditional laws: fit with support_size of at least 1"
            )
        if self.base == 0.0:
            base = _mixture(basis, coef, cells)
        else:  # the signed ratio at the points of the cells, projected and calibrated
            # The ratio there is a product of few functions of x, whatever the number of pivots.
            slope = answered.basis.slope(coef.T)
            (values,) = answered.basis.newton.combined(slope)(cells.support.points)
            left, right = low_rank(values.T)
            few = basis.newton.combined(basis.slope(left))

            def weigh(x: Array) -> Array:
                (psi,) = few(x)
                ratio = psi @ right
                ratio += self.base
                return project(ratio, cells.masses, out=ratio)[0]

            base, calibration = CellLaw(cells, weigh), None if reverse else self.calibration
            if calibration is not None:
                levels = Levels(cells.means, calibration.columns)
                near = basis.newton.nearness(calibration.pivots)

                def calibrated(x: Array) -> Array:
                    laws = weigh(x)
                    return calibration.weights(laws, levels, near(x), out=laws)

                base = CellLaw(cells, calibrated)
        if self.residual is None or reverse:
            made[reverse] = base
        else:
            inner = cast(CellLaw, self.residual.model.law())  # it has no location
            values = self.residual.values or ValueMap.of_range(cells.values)
            shifted = ShiftedLaw(inner.cells, inner.at, self.residual, values)
            made[reverse] = BlendedLaw(shifted, base, near_data(basis.newton))
        return made[reverse]

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
            *missing_lines(fit),
            ("constraint", f"{fit['constraint']}, reg {_ridges(fit['reg'])} ({fit['reg_form']})"),
            *([] if self.residual is None else [("residual", _residual(fit["residual"]))]),
            *_values(fit.get("support", {})),
            *_calibrated(self.answering),
            ("E[. | x]", ", ".join(given_x)),
            ("E[. | y]", ", ".join(given_y)),
        ]


def _law_inputs_fit(model: JointModel) -> bool:
    """Whether laws can compute with their entries of the description: numbers, texts of events."""
    rows = model.about.get("rows", 1)
    try:
        tables = [model.about.get("held_out", {}).get(key, {}) for key in "xy"]
        errors = [one.get("error", 0.0) for table in tables for one in table.values()]
        texts = [model.about.get("events", {}).get(key, {}) for key in "xy"]
        events = [text for each in texts for text in each.values()]
        _ = model.calibration, model.conformal
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        return False
    numbers = is_a(rows, int) and rows > 0 and all(isinstance(e, float) for e in errors)
    return numbers and all(isinstance(text, str) for text in events)


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
    target = about.get("location", "mu(x)")
    return f"laws moved to {target}: held-out CRPS {moved:.4g}, plain {plain:.4g}"


def _values(support: dict[str, Any]) -> list[tuple[str, str]]:
    """Which values the columns of y take, where they are not any numbers."""
    texts = {name: _column_values(each) for name, each in support.items()}
    named = [f"{name}: {text}" for name, text in texts.items() if text]
    more = [f"{len(named) - _SHOWN} more columns"] if len(named) > _SHOWN else []
    return [("values", "; ".join([*named[:_SHOWN], *more]))] if named else []


def _column_values(about: dict[str, Any]) -> str:
    """The values of one column in words; empty of any numbers."""
    low, high = (None if end is None else f"{float(end):g}" for end in about["bounds"])
    ends = [f"from {low}"] * (low is not None) + [f"to {high}"] * (high is not None)
    values, kind = about.get("values", []), about["kind"]
    if kind == "discrete":
        kind = f"{about['count']} values"
    text = " ".join([kind, *ends] if ends or kind not in ("continuous", "labels") else [])
    if about["kind"] != "semi-discrete":
        return text
    shares = list(zip(values, about.get("shares", []), strict=True))
    atoms = ", ".join(f"{share:.3g} of the rows at {value:g}" for value, share in shares[:_SHOWN])
    more = f" and {about['count'] - _SHOWN} more" if about["count"] > _SHOWN else ""
    return f"{text}, {atoms}{more}"


def _calibrated(model: "JointModel") -> list[tuple[str, str]]:
    """What the calibration of the laws gained, if they are calibrated."""
    if model.calibration is None:
        return []
    gain = model.about["calibration"]["gain"]
    return [("laws", f"calibrated: held-out log density {gain:+.3g}")]


def _kernels(variable: Variable) -> str:
    """The kernel, or the first of several."""
    basis = variable.basis
    more = len(basis.parts) - 1
    return f"{basis.newton.kernel!r}" + (f" and {more} more" if more else "")


# The law of a coupling


def _mixture(basis: Function, coef: Array, cells: CellStatistics) -> CellLaw:
    """The law of a coupling: its components, of weights pi_j(x) = E[b_j] sum_i C_ji b_i(x)."""
    components = cells.components
    if components is None:
        raise DataError("this coupling counted no cells: fit it again")
    masses = components.sum(axis=1)
    shares = np.divide(
        components, masses[:, None], out=np.zeros_like(components), where=masses[:, None] > 0.0
    )

    def mixture(x: Array) -> Array:
        pi = (basis(x) @ coef) * masses
        return np.asarray(pi / pi.sum(axis=1, keepdims=True))

    def weigh(x: Array) -> Array:
        result = mixture(x) @ shares
        return np.asarray(result / result.sum(axis=1, keepdims=True))

    return CellLaw(cells, weigh, mixture)
