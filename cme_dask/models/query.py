"""A query of conditional laws for batches of points: its answers and their shapes."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from cme_dask.config import ANSWERS, LEVELS
from cme_dask.data.outputs import AnswerArray
from cme_dask.errors import DataError, UnseenCategoryWarning
from cme_dask.models.events import Event, comparison
from cme_dask.models.joint import JointModel, Variable

Array = Any


@dataclass(frozen=True)
class Query:
    """Answers of the laws of Y given X = x, or of X given Y = y, at rows.

    Numeric columns are answered by means, standard deviations and quantiles, categorical ones by
    the probabilities of their labels, which come after those of the events.

    Parameters
    ----------
    model
        The model.
    reverse
        X given Y.
    answers
        Which of ``ANSWERS``.
    levels
        Of the quantiles, in (0, 1).
    events
        Texts such as ``PM2.5 > 75``, of columns of the answered variable.

    Raises
    ------
    DataError
        On unknown answers or events, levels out of range, events whose probability is not among
        the answers, or answers that would have no values.
    """

    model: JointModel
    reverse: bool = False
    answers: tuple[str, ...] = ANSWERS
    levels: tuple[float, ...] = LEVELS
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.answers:
            if name not in ANSWERS:
                raise DataError(f"unknown answer {name!r}: there are {', '.join(ANSWERS)}")
        for level in self.levels:
            if not 0.0 < level < 1.0:
                raise DataError(f"levels of quantiles lie between 0 and 1, got {level:g}")
        columns = self.answered.columns
        for text in self.events:
            Event.parse(text, columns.names, columns.categories)
        if self.answered.cells is None:
            raise DataError("this model has no laws to ask: fit it with support_size of at least 1")
        if self.events and "probability" not in self.answers:
            raise DataError(
                "an event is answered by its probability, the answers are "
                f"{', '.join(self.answers)}: add probability to them, or leave out the event"
            )
        if not self.fields:
            raise DataError(
                f"{', '.join(self.answers) or 'no answer'} of {', '.join(columns.names)} has no "
                "values: probabilities need events (such as 'y0 > 1') or categorical columns, "
                "quantiles need levels, and means, standard deviations and quantiles need numeric "
                "columns"
            )

    @property
    def given(self) -> Variable:
        """The variable whose values are given."""
        return self.model.y if self.reverse else self.model.x

    @property
    def answered(self) -> Variable:
        """The variable whose laws are queried."""
        return self.model.x if self.reverse else self.model.y

    @property
    def numeric(self) -> tuple[str, ...]:
        """Numeric columns of the answered variable."""
        columns = self.answered.columns
        return tuple(name for name in columns.names if name not in columns.categories)

    @property
    def chances(self) -> tuple[str, ...]:
        """The events, then one for each label of a categorical column."""
        labels = self.answered.columns.categories
        each = (comparison(name, label) for name, all_ in labels.items() for label in all_)
        return (*self.events, *(text for text in each if text not in self.events))

    @property
    def fields(self) -> tuple[AnswerArray, ...]:
        """The arrays that answer; those that would be empty are left out."""
        names, levels, chances = self.numeric, self.levels, self.chances
        known = {
            "mean": (("column",), (len(names),), [f"{n} mean" for n in names]),
            "std": (("column",), (len(names),), [f"{n} std" for n in names]),
            "quantile": (
                ("level", "column"),
                (len(levels), len(names)),
                [f"{n} q{level:g}" for level in levels for n in names],
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

    def law(self, rows: Array) -> Any:
        """The conditional laws at rows of numbers and codes."""
        with warnings.catch_warnings():
            # Unseen labels have been reported where their codes were made.
            warnings.simplefilter("ignore", UnseenCategoryWarning)
            return self.model.conditional(Y=rows) if self.reverse else self.model.conditional(rows)

    def __call__(self, rows: Array) -> list[Array]:
        """The answers at rows (b, d), an array (b, ...) for each field."""
        law = self.law(rows)
        answers = {
            "mean": law.mean,
            "std": law.std,
            "quantile": lambda: law.quantile(self.levels),
            "probability": lambda: np.stack([law.probability(t) for t in self.chances], axis=-1),
            "effective_support": law.effective_support,
        }
        return [
            np.asarray(answers[field.name]()).reshape(len(rows), *field.shape)
            for field in self.fields
        ]

    def flat(self, rows: Array) -> Array:
        """The answers at rows (b, d) side by side, shape (b, len(labels))."""
        return np.concatenate([part.reshape(len(rows), -1) for part in self(rows)], axis=1)
