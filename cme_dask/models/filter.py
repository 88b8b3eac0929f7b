r"""The fitted kernel Bayes filter: laws of hidden states given observations, step by step.

A law of the state is non-negative weights of the cells of a support, and what a step hands to the
next one is their embedding, as many numbers as the rank of the state's basis. A step of a sequence
takes three products of a vector with a matrix of cells by rank, the two that give the density of
the predicted law and the likelihood at the cells, and the one that embeds the posterior law: no
system is solved and no matrix is updated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from cme_dask.codec import Shape, Within
from cme_dask.data.columns import Columns, check_points
from cme_dask.display import missing_lines, passes
from cme_dask.errors import DataError
from cme_dask.models.base import Model
from cme_dask.models.events import FunctionsLike
from cme_dask.models.law import ConditionalLaw
from cme_dask.models.operators import Operator, Reweighting
from cme_dask.models.points import FloatArray, Labels, gathered, query_points
from cme_dask.models.spaces import MeanEmbeddings, Space
from cme_dask.numerics.basis import NewtonBasis
from cme_dask.numerics.cells import CellStatistics
from cme_dask.numerics.labels import missing_labels
from cme_dask.numerics.measure import CellLaw

Array = Any
Step = tuple[Array, Array]  # positions of sequences among those of a block, and of their rows

_HELD = 1 << 22  # weights of cells that are held at once


@dataclass(frozen=True, eq=False)
class FilteredVariable:
    """The state as a variable whose laws are answered.

    Attributes
    ----------
    columns, basis, cells
        Its columns, its basis, and the cells of the rows of the fit.
    """

    columns: Columns
    basis: NewtonBasis
    cells: CellStatistics


class StateLaw(ConditionalLaw):
    """Laws of a hidden state, one for each row of observations.

    Made by :meth:`FilterModel.filter` and :meth:`FilterModel.smooth`. Answers are those of
    :class:`cme_dask.ConditionalLaw`: means, covariances, quantiles, probabilities, expectations of
    any function, draws; all of the same non-negative weights. There are no densities.

    Parameters
    ----------
    model
        The model.
    points
        Of each row the embedding of the state one step before, for smoothing that of one step
        after, and the observation, NaN where it is missing, shape (n, m + d_Y) or (n, 2 m + d_Y).
    labels
        Of the answers.
    functions
        Functions of the state by name, or a list of events, for later queries by name.
    last
        Embeddings of the state at the last row of each sequence.

    Attributes
    ----------
    last : MeanEmbeddings
        With it as ``previous``, the next rows of the same sequences are filtered.
    """

    model: Any
    _given_columns = None  # points are embeddings and observations

    def __init__(
        self,
        model: Any,
        points: Array,
        labels: Labels,
        functions: FunctionsLike | None = None,
        last: MeanEmbeddings | None = None,
    ) -> None:
        super().__init__(model, False, points, labels, functions)
        self.last = last

    def __reduce__(self) -> Any:
        kind, (model, _, points, labels, functions) = super().__reduce__()
        return kind, (model, points, labels, functions, self.last)

    def embed(self) -> MeanEmbeddings:
        """The embeddings of the laws in the space of the state."""
        sections = self.model.sections
        return MeanEmbeddings(self._fill(lambda weights: weights @ sections), self.model.space)

    def log_likelihood(self) -> FloatArray:
        """Log densities of the observations given those before, shape (n,).

        Of smoothed laws, given all others. Relative to the density over the rows of the fit: 0
        where an observation is missing or says nothing, and minus infinity where it contradicts
        the state, which then ignores it.
        """
        evidence = self._fill(lambda evidence: evidence, at=self.model.evidence)
        with np.errstate(divide="ignore"):
            return self._labels.wrap(np.log(evidence), "log_likelihood")

    def effective_support(self) -> FloatArray:
        """Effective number of cells of each law, 1 / sum of their squared weights, shape (n,).

        Of few cells, laws are narrower than the support resolves: raise ``support_size``.
        """
        size = self._fill(lambda weights: 1.0 / np.square(weights).sum(axis=1))
        return self._labels.wrap(size, "effective_support")

    def _log_pdf(self, points: Array, paired: bool, bandwidth: Any = None) -> Array:
        raise DataError("laws of states have no density: ask for quantiles or probabilities")

    _log_marginal = _log_pdf


@dataclass(frozen=True, eq=False, repr=False)
class FilterModel(Model):
    r"""Kernel Bayes filter: laws of a hidden Markov state x_t given observations y_1, ..., y_t.

    .. math:: w_s(t) \propto v_s \, g(x_{t-1} \to z_s)_+ \, g(z_s \to y_t)_+

    at the cells z_s of the state with shares v_s, where both density ratios are
    :math:`g(a \to b) = 1 + N(b)^T H N(a)`: the sum rule gives that of the next state, averaged over
    the law before, and Bayes' rule multiplies by that of the observation. Made by
    :class:`cme_dask.KernelBayesFilter` or :func:`cme_dask.load`; needs neither data nor Dask.

    Attributes
    ----------
    columns, observed_columns
        Columns of the states and of the observations.
    basis, observed
        Newton bases N of both.
    transition
        H from states to next ones, shape (m, m).
    observation
        H from states to observations, shape (m_Y, m).
    cells
        Cells of the state.
    about
        What it was fitted on and how.
    """

    _made_by = "KernelBayesFilter"

    columns: Columns
    observed_columns: Columns
    basis: Annotated[NewtonBasis, Within(d="columns.names")]
    observed: Annotated[NewtonBasis, Within(d="observed_columns.names")]
    transition: Annotated[Array, Shape("basis.rank", "basis.rank")]
    observation: Annotated[Array, Shape("observed.rank", "basis.rank")]
    cells: Annotated[CellStatistics, Within(d="columns.names")]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def space(self) -> Space:
        """The space of the state."""
        return Space(self.columns, self.basis)

    @property
    def sections(self) -> Array:
        """N at the cells, shape (S, m)."""
        return self._ahead.sections

    def filter(
        self,
        Y: Any,
        *,
        group: Any = None,
        previous: Any = None,
        functions: FunctionsLike | None = None,
    ) -> StateLaw:
        """The law of the state at each row, given the observations up to it.

        All sequences advance together: the only loop goes over the steps of the longest one.

        Parameters
        ----------
        Y
            Observations in the order of time, shape (n, d_Y), or a table with the columns by name.
            A row of NaN, nulls or masked values is a missing one: there the state is predicted.
        group
            The sequence of each row, shape (n,); default one sequence.
        previous
            What is known of the state one step before the first row of each sequence, in the order
            in which these begin: states, shape (number, d), or embeddings, as ``last`` of the laws
            of earlier rows. Default: the law of the rows of the fit.
        functions
            Functions of the state by name, or a list of events, for later queries by name.

        Raises
        ------
        DataError
            On wrong columns, rows of which a part is NaN, other numbers of rows or sequences, or
            embeddings in another space.
        """
        Y = gathered(Y)
        rows = self._rows(Y)
        sequences = _Sequences.of(group, len(rows))
        before = self._start(previous, sequences.count)
        points, last = self._advance(rows, sequences, before, self._ahead)
        embeddings = MeanEmbeddings(last, self.space)
        labels = Labels.of(Y, len(rows), self.observed_columns)
        return StateLaw(self, points, labels, functions, embeddings)

    def smooth(
        self,
        Y: Any,
        *,
        group: Any = None,
        previous: Any = None,
        functions: FunctionsLike | None = None,
    ) -> StateLaw:
        """The law of the state at each row, given all observations of its sequence.

        Parameters
        ----------
        Y, group, previous, functions
            As in :meth:`filter`, whose errors these are.
        """
        law = self.filter(Y, group=group, previous=previous, functions=functions)
        rank, sequences = self.basis.rank, _Sequences.of(group, len(law))
        behind = self._start(None, sequences.count)
        rows = law.points[:, rank:]
        after, _ = self._advance(rows, sequences.reversed, behind, self._behind)
        points = np.hstack([law.points[:, :rank], after])
        return StateLaw(self, points, law._labels, functions, law.last)

    def score(self, Y: Any, group: Any = None) -> float:
        """Mean log likelihood of the observations given those before, see :class:`StateLaw`.

        Parameters
        ----------
        Y, group
            As in :meth:`filter`.
        """
        return float(np.mean(self.filter(Y, group=group).log_likelihood()))

    # What laws ask

    @property
    def x(self) -> FilteredVariable:
        """The state before; only its columns are known."""
        return self.y

    @property
    def y(self) -> FilteredVariable:
        """The state."""
        return FilteredVariable(self.columns, self.basis, self.cells)

    def law(self, reverse: bool = False) -> CellLaw:
        """Laws of the state by rows of :class:`StateLaw`."""
        return CellLaw(self.cells, self.weights)

    def weights(self, points: Array) -> Array:
        """Weights of the cells, shape (n, S), of rows of :class:`StateLaw`."""
        return self._laws(points)[0]

    def evidence(self, points: Array) -> Array:
        """Density ratio of each observation given those before, shape (n,)."""
        return self._laws(points)[1]

    def contents(self) -> dict[str, Any]:
        """JSON form of the columns and functions that queries accept."""
        return {
            "columns": {"x": self.columns.to_dict(), "y": self.observed_columns.to_dict()},
            "functions": list(self.cells.names),
            "ranks": [self.basis.rank, self.observed.rank],
        }

    def summary(self) -> list[tuple[str, str]]:
        """Lines of ``repr``: label and text."""
        fit = self.about
        ridges = ", ".join(f"{float(fit['reg'][name]):.3g} of the {name}" for name in fit["reg"])
        return [
            ("states", f"{self.columns.listed()}, in {self.cells.size} cells"),
            ("observations", self.observed_columns.listed()),
            ("bases", f"ranks {self.basis.rank} and {self.observed.rank}"),
            ("ridges", ridges),
            ("rows", f"{int(fit['rows']):,}, in {passes(fit['passes'])}"),
            *missing_lines(fit),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    # The steps

    @cached_property
    def _ahead(self) -> Reweighting:
        """Laws of the next state by the embedding of a state: the sum rule."""
        move = Operator(self.space, self.space, self.transition)
        return Reweighting(move.T, self.cells.means, self.cells.masses)

    @cached_property
    def _behind(self) -> Reweighting:
        """Likewise laws of the state before."""
        return replace(self._ahead, ratio=self._ahead.ratio.T)

    @cached_property
    def _likelihood(self) -> Reweighting:
        """Laws of the state by an observation: Bayes' rule."""
        seen = Space(self.observed_columns, self.observed)
        return replace(self._ahead, ratio=Operator(self.space, seen, self.observation))

    def _laws(self, points: Array) -> tuple[Array, Array]:
        """Weights of the cells, shape (n, S), and densities of the observations, shape (n,)."""
        rank, d = self.basis.rank, len(self.observed_columns.names)
        prior, _ = self._ahead.reweight(points[:, :rank])
        if points.shape[1] > rank + d:
            prior, _ = self._behind.reweight(points[:, rank : 2 * rank], prior)
        return self._posterior(prior, points[:, -d:])

    def _posterior(self, prior: Array, rows: Array) -> tuple[Array, Array]:
        """Weights by Bayes' rule, and densities of the rows; those of missing rows are 1."""
        seen = ~np.isnan(rows).any(axis=1)
        if seen.all():
            return self._likelihood.reweight(self.observed(rows), prior)
        density = np.ones(len(rows))
        if seen.any():
            newton = self.observed(rows[seen])
            prior[seen], density[seen] = self._likelihood.reweight(newton, prior[seen])
        return prior, density

    def _advance(
        self, rows: Array, sequences: "_Sequences", before: Array, move: Reweighting
    ) -> tuple[Array, Array]:
        """Points of laws at the rows, and the embeddings at the ends of sequences."""
        rank = self.basis.rank
        points = np.hstack(
            [np.empty((len(rows), rank)), rows[:, -len(self.observed_columns.names) :]]
        )
        last = before.copy()
        for steps in sequences.blocks(max(_HELD // self.cells.size, 1)):
            for which, here in steps:
                points[here, :rank] = last[which]
                prior, _ = move.reweight(last[which])
                weights, _ = self._posterior(prior, points[here, rank:])
                last[which] = weights @ self.sections
        return points, last

    def _rows(self, Y: Any) -> Array:
        """Observations (n, d_Y), those that are missing as rows of NaN."""
        variable = Space(self.observed_columns, self.observed)
        rows = query_points(Y, variable, "Y", missing=True)
        missing = np.isnan(rows).all(axis=1, keepdims=True)
        # Rows of which a part is missing are refused, with their numbers in Y.
        check_points(np.where(missing, 0.0, rows), self.observed_columns)
        return rows

    def _start(self, previous: Any, count: int) -> Array:
        """Embeddings from which sequences start, shape (count, m)."""
        if previous is None:
            return np.zeros((count, self.basis.rank))  # a density ratio of 1
        if isinstance(previous, MeanEmbeddings):
            if (difference := previous.space.difference(self.space)) is not None:
                raise DataError(f"previous must be embeddings of the state, but {difference}")
            coef = previous.coef
        else:
            coef = self.basis(query_points(previous, self.space, "previous"))
        if len(coef) != count:
            raise DataError(
                f"previous must have a row for each of the {count} sequences, got {len(coef)}"
            )
        return np.array(coef)


@dataclass(frozen=True)
class _Sequences:
    """Rows of several sequences, each in the order of time.

    Attributes
    ----------
    order
        Rows, one sequence after the other.
    starts, lengths
        Where each sequence begins in that order, and its number of rows; shape (count,).
    """

    order: Array
    starts: Array
    lengths: Array

    @classmethod
    def of(cls, group: Any, rows: int) -> "_Sequences":
        """By the group of each row, in the order in which groups begin."""
        numbers = np.zeros(rows, dtype=np.int64) if group is None else np.asarray(group)
        if numbers.shape != (rows,):
            raise DataError(f"group must have shape ({rows},), got {numbers.shape}")
        gone = missing_labels(numbers)
        if gone.any():
            raise DataError(
                f"group must be known, but {gone.sum():,} rows lack it (first row {gone.argmax()})"
            )
        _, first, code = np.unique(numbers, return_index=True, return_inverse=True)
        place = np.argsort(np.argsort(first))[code]
        lengths = np.bincount(place, minlength=len(first))
        return cls(np.argsort(place, kind="stable"), np.cumsum(lengths) - lengths, lengths)

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def reversed(self) -> "_Sequences":
        """The same sequences, each from its end."""
        last = self.starts + self.lengths - 1
        step = np.arange(len(self.order)) - np.repeat(self.starts, self.lengths)
        backwards = self.order[np.repeat(last, self.lengths) - step]
        return _Sequences(backwards, self.starts, self.lengths)

    def blocks(self, size: int) -> Iterator[Iterator[Step]]:
        """So many sequences at a time, step by step: those that go on, and their rows."""
        for start in range(0, self.count, size):
            yield self._steps(np.arange(start, min(start + size, self.count)))

    def _steps(self, which: Array) -> Iterator[Step]:
        for t in range(int(self.lengths[which].max())):
            on = which[self.lengths[which] > t]
            yield on, self.order[self.starts[on] + t]
