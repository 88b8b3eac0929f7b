"""Job files: what they may say, and one sentence on what they may not."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from cme_dask.config import ACCURACY, N_FOLDS, NULL_VALUES, SAMPLE_SIZE, SCENARIOS
from cme_dask.constraints import parse
from cme_dask.data.columns import Columns
from cme_dask.errors import DataError
from cme_dask.kernels import Kernel
from cme_dask.kernels.text import SYNTAX, Specification, kernel_of, read_specification
from cme_dask.numerics.folds import Folding

Model = TypeVar("Model", bound=BaseModel)

TUNING_OPTIONS = ("criterion", "rows", "max_rank", "evaluations", "finalists", "averaged")
"""Options of :class:`cme_dask.Tuning`, of which a job may give some."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class IngestSection(_Section):
    """Tables and what to take from them; see :func:`cme_dask.data.ingest.ingest`."""

    files: list[str] = Field(min_length=1)
    x: list[str] = Field(min_length=1)
    y: list[str] = Field(min_length=1)
    weights: str | None = None
    group: str | None = None
    time: list[str] = []
    categorical: list[str] = []
    datetime: dict[str, list[Literal["hour", "weekday", "season"]]] = {}
    cyclic: dict[str, float] = {}
    missing: Literal["drop", "error"] = "drop"
    units: dict[str, str] = {}
    null_values: list[str] = list(NULL_VALUES)


class SampleSection(_Section):
    """A generated three-dimensional normal sample; see ``cme_dask.data.generate.Normal3``."""

    rows: int = Field(ge=2)
    scenario: str = "medium"
    seed: int = Field(default=0, ge=0, lt=1 << 63)

    @field_validator("scenario")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SCENARIOS:
            raise ValueError(f"must be one of {', '.join(SCENARIOS)}")
        return value


class FitSection(_Section):
    """Parameters of ``cme_dask.JointDistribution`` and the events whose laws are wanted."""

    events: list[str] = []
    events_x: list[str] = []
    tol: float | None = Field(default=None, gt=0.0, lt=1.0)
    max_rank: int | None = Field(default=None, ge=1)
    reg: float | tuple[float, float] | None = None
    reg_form: Literal["two-sided", "single"] = "two-sided"
    constraint: str | dict[str, Any] = "normalized"
    folds: int = Field(default=N_FOLDS, ge=1)
    fold_by: str = "rows"
    pivots: Literal["sampled", "greedy", "random"] = "sampled"
    span: float = Field(default=1.0, gt=0.0, le=1.0)
    accuracy: float = Field(default=ACCURACY, ge=0.0)
    sample_size: int = Field(default=SAMPLE_SIZE, ge=2)
    kernel_x: str | dict[str, Any] | None = None
    kernel_y: str | dict[str, Any] | None = None
    residual: bool | Literal["auto"] = "auto"
    calibration: bool | Literal["auto"] = "auto"
    tuning: dict[str, Any] = {}

    @field_validator("fold_by")
    @classmethod
    def _foldable(cls, value: str) -> str:
        return str(Folding.parse(value))

    @field_validator("constraint")
    @classmethod
    def _asked_for(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        parse(value)
        return value

    @field_validator("kernel_x", "kernel_y", mode="before")
    @classmethod
    def _readable(cls, value: Any) -> Specification:
        if value is None:
            return None
        if not isinstance(value, (str, dict)):
            raise ValueError(f"expected {SYNTAX}")
        return read_specification(value)

    @field_validator("tuning")
    @classmethod
    def _searchable(cls, value: dict[str, Any]) -> dict[str, Any]:
        unknown = set(value) - set(TUNING_OPTIONS)
        if unknown:
            raise ValueError(f"takes {', '.join(TUNING_OPTIONS)}, got {', '.join(sorted(unknown))}")
        return value

    def kernels(
        self, columns: Sequence[Columns]
    ) -> tuple[Kernel | str | None, Kernel | str | None]:
        """Return the kernels of x and y: None for learned ones, ``"median"`` for the heuristic.

        Parameters
        ----------
        columns
            Columns of x and of y.

        Raises
        ------
        DataError
            If a kernel doesn't fit its columns.
        """
        x, y = (
            _kernel(key, specification, each)
            for key, specification, each in zip(
                ("kernel_x", "kernel_y"), (self.kernel_x, self.kernel_y), columns, strict=True
            )
        )
        return x, y


def _kernel(key: str, specification: Specification, columns: Columns) -> Kernel | str | None:
    try:
        return kernel_of(specification, columns.names, columns.categories)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


class EvaluateSection(_Section):
    """Rows that are held out, by the units of ``fit.fold_by``, and scored in one more pass.

    ``boosting``: scikit-learn's gradient boosting on the same columns beside the model, fitted in
    memory on at most ``boosting_rows`` of the other rows.
    """

    hold_out: float = Field(default=0.2, gt=0.0, lt=1.0)
    seed: int = Field(default=0, ge=0, lt=1 << 62)
    boosting: bool = False
    boosting_rows: int = Field(default=1_000_000, ge=2)


class PointSection(_Section):
    """One value of x to report on: numbers, and labels of categorical columns."""

    name: str
    x: dict[str, FiniteFloat | str]


class CurveSection(_Section):
    """Laws along one column of x, which runs from ``low`` to ``high`` from a stated point on.

    ``of``: the column of y whose quantiles are drawn; ``event``: one whose probability is.
    """

    point: str
    along: str
    low: FiniteFloat
    high: FiniteFloat
    of: str | None = None
    event: str | None = None

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low:g} and {self.high:g}")
        if self.of is None and self.event is None:
            raise ValueError("give of, a column of y, or an event")
        return self


class ReportSection(_Section):
    """What to report: functions, the points beside their nearest rows, and laws along columns."""

    functions: list[str] | None = None
    nearest: int = Field(default=2000, ge=2, le=100_000)
    points: list[PointSection] = []
    curves: list[CurveSection] = []


class Job(_Section):
    """A whole job: get a sample, fit, report."""

    title: str
    ingest: IngestSection | None = None
    sample: SampleSection | None = None
    fit: FitSection = FitSection()
    evaluate: EvaluateSection | None = None
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.ingest is None) == (self.sample is None):
            raise ValueError("a job needs exactly one of the tables [ingest] and [sample]")
        return self


def read_job(path: Path, changes: Sequence[str] = ()) -> Job:
    """Read a job file, or one that comes with cme_dask by name, with ``KEY=VALUE`` changes.

    Raises
    ------
    DataError
        If the file is missing or no TOML, or a key or value is not one of the schema.
    """
    ours = Path(__file__).parent / f"{path.name}.toml"
    file = ours if path == Path(path.name) and not path.exists() and ours.exists() else path
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no TOML file: {error}") from error
    for change in changes:
        _apply(data, change)
    return checked(Job, data, str(path))


def checked(model: type[Model], data: dict[str, Any], place: str) -> Model:
    """A section made from plain values.

    Raises
    ------
    DataError
        On the first unusable key or value, by name.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # A union reports one error per member; the member's type is no key of the file.
        keys = [str(part) for part in first["loc"] if part not in ("float", "tuple[float,float]")]
        where = ": ".join(filter(None, (place, ".".join(keys))))
        raise DataError(f"{where}: {_reason(first)}") from error


def _reason(found: Any) -> str:
    """One clause on an error of pydantic."""
    known = {
        "extra_forbidden": "unknown key",
        "missing": "this key is required",
        "model_type": "this must be a table",
        "dict_type": "this must be a table",
    }
    if found["type"] in known:
        return known[found["type"]]
    message = str(found["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    return message if isinstance(found["input"], dict) else f"{message}, got {found['input']!r}"


def _apply(data: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    *tables, last = key.strip().split(".")
    if not equals or not all((*tables, last)):
        raise DataError(f"--set takes KEY=VALUE such as fit.tol=1e-4, got {change!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise DataError(
            f"--set {change}: {text!r} is no TOML value (texts need double quotes inside the "
            f"shell's: '{key}=\"text\"')"
        ) from error
    for name in tables:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise DataError(f"--set {change}: {name} is no table")
    data[last] = value
