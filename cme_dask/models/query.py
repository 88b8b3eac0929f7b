"""Queries of conditional laws and of embeddings for batches of points: answers and shapes."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cme_dask.config import ANSWERS, EMBEDDING_ANSWERS, INTERVAL, LEVELS
from cme_dask.data.outputs import AnswerArray
from cme_dask.errors import DataError, UnseenCategoryWarning, remedy
from cme_dask.models.answers import event_shares
from cme_dask.models.embedding import LinearEmbedding
from cme_dask.models.events import Event, comparison
from cme_dask.models.joint import JointModel

Array = Any


@dataclass(frozen=True)
class Query(ABC):
    """Answers of a model at rows of one of its variables, about the other one.

    Numeric columns are answered by means, standard deviations and quantiles, categorical ones by
    the probabilities of their labels, which come after those of the events.

    Parameters
    ----------
    model
        The model.
    reverse
        X given Y.
    answers
        Which of ``known``; default all, intervals only where ``interval`` is given.
    levels
        Of the quantiles, in (0, 1).
    events
        Texts such as ``PM2.5 > 75``, of columns of the answered variable.
    interval
        Probability of the intervals, in (0, 1), which are then among the answers; default 0.9.
    conformal
        Whether intervals are made of conformity scores, see :meth:`ConditionalLaw.interval`.

    Raises
    ------
    DataError
        On unknown answers or events, levels out of range, events whose probability is not among
        the answers, conformal intervals that are not among them or that the model can't make, or
        answers that would have no values.
    """

    known: ClassVar[tuple[str, ...]]
    subject: ClassVar[str]
    parts: ClassVar[str]

    model: Any
    reverse: bool = False
    answers: tuple[str, ...] = ()
    levels: tuple[float, ...] = LEVELS
    events: tuple[str, ...] = ()
    interval: float | None = None
    conformal: bool = False

    def __post_init__(self) -> None:
        answers = self.answers or tuple(name for name in self.known if name != "interval")
        if self.interval is not None and "interval" not in answers:
            answers = (*answers, "interval")
        object.__setattr__(self, "answers", answers)
        if self.interval is None and "interval" in answers:
            object.__setattr__(self, "interval", INTERVAL)
        for name in self.answers:
            if name not in self.known:
                raise DataError(f"unknown answer {name!r}: there are {', '.join(self.known)}")
        for level in self.levels:
            if not 0.0 < level < 1.0:
                raise DataError(f"levels of quantiles lie between 0 and 1, got {level:g}")
        if len(set(self.levels)) < len(self.levels):
            named = ", ".join(f"{level:g}" for level in self.levels)
            raise DataError(f"levels of quantiles must differ, got {named}")
        if self.interval is not None and not 0.0 < self.interval < 1.0:
            raise DataError(
                f"the probability of an interval lies between 0 and 1, got {self.interval:g}"
            )
        if self.conformal and "interval" not in self.answers:
            raise DataError(
                f"conformal intervals are not among the answers {', '.join(self.answers)}: give "
                f"{remedy('interval=0.9', '--interval 0.9')}, or leave conformal out"
            )
        columns = self.answered.columns
        for text in self.events:
            Event.parse(text, columns.names, columns.categories)
        self._check()
        if self.events and "probability" not in self.answers:
            raise DataError(
                "an event is answered by its probability, the answers are "
                f"{', '.join(self.answers)}: add probability to them, or leave out the event"
            )
        if not self.fields:
            raise DataError(
                f"{', '.join(self.answers)} of {', '.join(columns.names)} has no values: "
                "probabilities need events (such as 'y0 > 1') or categorical columns, "
                "quantiles need levels, and means, standard deviations, quantiles and intervals "
                "need numeric columns"
            )

    @abstractmethod
    def _check(self) -> None:
        """DataError if the model cannot answer."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Numbers that an answer at one row is made of."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of functions of the row from which each of them follows."""

    def _of_labels(self, rows: Array) -> Array:
        """Probabilities of all chances where y is one column of labels, shape (b, k)."""
        columns, shares = self.answered.columns, np.asarray(self.model.predict_proba(rows))
        events = (Event.parse(text, columns.names, columns.categories) for text in self.events)
        of_labels = dict(zip(self._each_label, shares.T, strict=True))
        if self.events:
            of_labels |= zip(self.events, event_shares(events, shares).T, strict=True)
        return np.stack([of_labels[text] for text in self.chances], axis=-1)

    @abstractmethod
    def _at(self, rows: Array) -> dict[str, Callable[[], Array]]:
        """What answers at rows of numbers and codes, by the name of the answer."""

    @property
    def given(self) -> Any:
        """The variable whose values are given."""
        return self.model.y if self.reverse else self.model.x

    @property
    def answered(self) -> Any:
        """The variable whose law is answered."""
        return self.model.x if self.reverse else self.model.y

    @property
    def numeric(self) -> tuple[str, ...]:
        """Numeric columns of the answered variable."""
        columns = self.answered.columns
        return tuple(name for name in columns.names if name not in columns.categories)

    @property
    def chances(self) -> tuple[str, ...]:
        """The events, then one for each label of a categorical column."""
        return (*self.events, *(text for text in self._each_label if text not in self.events))

    @property
    def _each_label(self) -> list[str]:
        labels = self.answered.columns.categories
        return [comparison(name, label) for name, all_ in labels.items() for label in all_]

    @property
    def fields(self) -> tuple[AnswerArray, ...]:
        """The arrays that answer; those that would be empty are left out."""
        names, levels, chances = self.numeric, self.levels, self.chances
        short = [f"{level:g}" for level in levels]
        named = short if len(set(short)) == len(short) else [repr(level) for level in levels]
        known = {
            "mean": (("column",), (len(names),), [f"{n} mean" for n in names]),
            "std": (("column",), (len(names),), [f"{n} std" for n in names]),
            "quantile": (
                ("level", "column"),
                (len(levels), len(names)),
                [f"{n} q{level}" for level in named for n in names],
            ),
            "interval": (
                ("end", "column"),
                (2, len(names)),
                [f"{n} {end}" for end in ("lower", "upper") for n in names],
            ),
            "probability": (("event",), (len(chances),), [f"P({text})" for text in chances]),
            "effective_support": ((), (), ["effective support"]),
        }
        return tuple(
            AnswerArray(name, dims, shape, tuple(labels))
            for name, (dims, shape, labels) in known.items()
            if name in self.answers and all(shape)
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all values of a row."""
        return tuple(label for field in self.fields for label in field.labels)

    def __call__(self, rows: Array) -> list[Array]:
        """The answers at rows (b, d), an array (b, ...) for each field."""
        with warnings.catch_warnings():
            # Unseen labels have been reported where their codes were made.
            warnings.simplefilter("ignore", UnseenCategoryWarning)
            answers = self._at(rows)
            return [
                np.asarray(answers[field.name]()).reshape(len(rows), *field.shape)
                for field in self.fields
            ]

    def flat(self, rows: Array) -> Array:
        """The answers at rows (b, d) side by side, shape (b, len(labels))."""
        return np.concatenate([part.reshape(len(rows), -1) for part in self(rows)], axis=1)


@dataclass(frozen=True)
class LawQuery(Query):
    """Answers of the laws of Y given X = x, or of X given Y = y."""

    known = ANSWERS
    subject, parts = "laws", "cells"

    model: JointModel

    def _check(self) -> None:
        if self.answered.cells is None:
            raise DataError("this model has no laws to ask: fit it with support_size of at least 1")
        if self.conformal:  # the law says what is missing
            self._intervals(self._law(np.empty((0, len(self.given.columns.names)))))

    @property
    def size(self) -> int:
        """Number of cells of a law."""
        return int(self.answered.cells.size)

    @property
    def rank(self) -> int:
        """Number of functions of x."""
        return len(self.model.coef)

    def _law(self, rows: Array) -> Any:
        return self.model.conditional(Y=rows) if self.reverse else self.model.conditional(rows)

    def _intervals(self, law: Any) -> Array:
        """Lower and upper ends, shape (b, 2) or (b, 2, d)."""
        return np.stack(law.interval(self.interval, conformal=self.conformal), axis=1)

    def _at(self, rows: Array) -> dict[str, Callable[[], Array]]:
        law: Any = self._law(rows)

        def probability() -> Array:
            if self.model.classifies and not self.reverse:
                return self._of_labels(rows)
            return np.stack([law.probability(text) for text in self.chances], axis=-1)

        return {
            "mean": law.mean,
            "std": law.std,
            "quantile": lambda: law.quantile(self.levels),
            "interval": lambda: self._intervals(law),
            "probability": probability,
            "effective_support": law.effective_support,
        }


@dataclass(frozen=True)
class EmbeddingQuery(Query):
    """Answers of an embedding of Y given X = x, those of ``expect`` and ``predict_proba``.

    Those of events are signed. Where y is one column of labels, these and events are answered by
    ``predict_proba``.
    """

    known = EMBEDDING_ANSWERS
    subject, parts = "expectations", "functions"

    model: LinearEmbedding

    def _check(self) -> None:
        if self.reverse:
            raise DataError("an embedding answers y given x alone: leave --reverse out")
        if self.events and not self._one_label:
            self._signed(np.empty((0, len(self.given.columns.names))))

    @property
    def chances(self) -> tuple[str, ...]:
        """The events, then one for each label where y is one column of them."""
        return super().chances if self._one_label else self.events

    @property
    def _one_label(self) -> bool:
        columns = self.answered.columns
        return len(columns.names) == len(columns.categories) == 1

    @property
    def size(self) -> int:
        """Number of functions of x."""
        return int(self.given.basis.newton.rank)

    @property
    def rank(self) -> int:
        """The same."""
        return self.size

    def _signed(self, rows: Array) -> Array:
        return self.model.expect(list(self.events), rows)

    def _at(self, rows: Array) -> dict[str, Callable[[], Array]]:
        return {
            "mean": lambda: self.model.expect(list(self.numeric), rows),
            "probability": lambda: (self._of_labels if self._one_label else self._signed)(rows),
        }
