"""The schema of job files, from which the options of commands follow, and its errors."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import click
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from cme_dask.cli.values import (
    SEED,
    Flag,
    Switch,
    calendar,
    columns,
    count,
    kernel,
    label_weights,
    numbers,
    periodic,
    ridge,
    support_of,
    unit_pairs,
)
from cme_dask.cli.values import constraint as constraint_text
from cme_dask.cli.values import support as support_text
from cme_dask.config import (
    ACCURACY,
    COUPLING_REG,
    N_FOLDS,
    NULL_VALUES,
    SAMPLE_SIZE,
    SCENARIOS,
)
from cme_dask.constraints import parse
from cme_dask.data.columns import Columns
from cme_dask.errors import DataError
from cme_dask.kernels import Kernel
from cme_dask.kernels.text import SYNTAX, Specification, kernel_of, read_specification
from cme_dask.learning.candidates import Tuning
from cme_dask.numerics.embedding import SCHEDULES
from cme_dask.numerics.folds import Folding
from cme_dask.numerics.values import check_support

Model = TypeVar("Model", bound=BaseModel)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class IngestSection(_Section):
    """Tables and what to take from them; see :func:`cme_dask.data.ingest.ingest`."""

    files: list[str] = Field(min_length=1)
    x: Annotated[list[str], Flag(type=columns)] = Field(
        min_length=1, description="Columns of x, such as TEMP,DEWP."
    )
    y: Annotated[list[str], Flag(type=columns)] = Field(min_length=1, description="Columns of y.")
    weights: Annotated[str | None, Flag(metavar="COLUMN", default="all equal")] = Field(
        None, description="Column of row weights."
    )
    group: Annotated[str | None, Flag(metavar="COLUMN")] = Field(
        None, description="Column of groups that folds keep together."
    )
    time: Annotated[list[str], Flag(type=columns)] = Field(
        [],
        description="Column of times (ISO, UTC; or seconds), or the columns year,month,day,hour.",
    )
    categorical: Annotated[list[str], Flag(type=columns)] = Field(
        [], description="Columns that hold labels."
    )
    datetime: Annotated[
        dict[str, list[Literal["hour", "weekday", "season"]]],
        Flag(type=calendar, metavar="COLUMN=PART,...", repeatable=True),
    ] = Field({}, description="Column of times to expand into hour, weekday, season; repeatable.")
    cyclic: Annotated[
        dict[str, float], Flag(type=periodic, metavar="COLUMN=PERIOD", repeatable=True)
    ] = Field({}, description="Column of numbers that repeat, such as hour=24; repeatable.")
    missing: Annotated[Literal["drop", "error", "keep"], Flag()] = Field(
        "drop",
        description="What to do with rows that lack a value; keep: store them, for `fit "
        "--missing`.",
    )
    null_values: Annotated[
        list[str], Flag("--null-value", metavar="TEXT", default="", repeatable=True)
    ] = Field(list(NULL_VALUES), description="Another text that marks a missing value; repeatable.")
    units: Annotated[
        dict[str, str], Flag(type=unit_pairs, metavar="COLUMN=UNIT,...", repeatable=True)
    ] = Field({}, description="Units of columns, such as TEMP=degC,PRES=hPa; repeatable.")


class SampleSection(_Section):
    """A generated three-dimensional normal sample; see ``cme_dask.data.generate.Normal3``."""

    rows: Annotated[int, Flag(type=count)] = Field(
        ge=2, description="Rows, such as 10000000, 1e7 or 10M."
    )
    scenario: Annotated[str, Flag(type=click.Choice(list(SCENARIOS)))] = Field(
        "medium", description="Correlations of y1, y2 and x."
    )
    seed: Annotated[int, Flag(type=SEED)] = Field(
        0, ge=0, lt=1 << 63, description="Seed of the draws."
    )

    @field_validator("scenario")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SCENARIOS:
            raise ValueError(f"must be one of {', '.join(SCENARIOS)}")
        return value


class TuningSection(_Section):
    """Options of :class:`cme_dask.Tuning`, of which a job may give some."""

    criterion: Annotated[Literal["auto", "joint+crps", "joint", "crps", "validation"], Flag()] = (
        Field(
            "auto",
            description="Loss on held-out rows: the joint loss, the sliced CRPS, both, or the "
            "squared error of the events (validation).",
        )
    )
    rows: Annotated[int, Flag(type=count)] = Field(2048, description="Rows used by the search.")
    max_rank: int | None = None
    evaluations: Annotated[
        int | None,
        Flag(
            type=click.IntRange(0),
            default="30, or with --reg-form single 40, and 5 for each column",
        ),
    ] = Field(None, description="Pairs of kernels tried after the grid.")
    finalists: int | None = None
    averaged: Annotated[int, Flag(type=click.IntRange(1))] = Field(
        1, description="Number of learned kernels whose density ratios are averaged."
    )
    trees: list[Literal["boosting", "shallow", "forest"]] | None = None

    def tuning(self) -> Tuning:
        """As the estimators take it."""
        return Tuning(**self.model_dump(exclude_unset=True))


class FitSection(_Section):
    """The estimator with its parameters, and the declared events.

    ``estimator``: ``cme_dask.JointDistribution``, ``ConditionalMeanEmbedding``,
    ``SparseEmbedding``, ``EmbeddingClassifier`` or ``MulticlassEmbedding``. Options that it does
    not take are refused; the defaults are its own.
    """

    estimator: Annotated[
        Literal["joint", "embedding", "sparse", "classifier", "multiclass"], Flag()
    ] = Field(
        "joint",
        description="Joint distribution; conditional mean embedding, or a sparse one; classifier "
        "by the embedding of a label, or one whose kernel is learned by the Rademacher bound. "
        "Options that it does not take are refused.",
    )
    events: Annotated[list[str], Flag("--event", repeatable=True)] = Field(
        [], description='Event of y, such as "PM2.5 > 75" or "y1 <= y2 - 0.5"; repeatable.'
    )
    events_x: Annotated[list[str], Flag("--event-x", repeatable=True)] = Field(
        [], description="Event of x; repeatable."
    )
    tol: Annotated[float | None, Flag(default="1e-5, or the error at --max-rank")] = Field(
        None, gt=0.0, lt=1.0, description="Relative trace error, in (0, 1)."
    )
    max_rank: Annotated[int | None, Flag(default="500 if learned")] = Field(
        None, ge=1, description="Largest number of pivots per basis."
    )
    reg: Annotated[
        float | tuple[float, float] | str | None,
        Flag(type=ridge, default=f"learned; of couplings {COUPLING_REG:g}"),
    ] = Field(
        None,
        description="Ridge r, or rY,rX; no unit. Of embeddings also a schedule in the number of "
        "rows, finite-rank or slow-decay.",
    )
    reg_form: Annotated[Literal["two-sided", "single"], Flag()] = Field(
        "two-sided", description="Form of the ridge."
    )
    constraint: Annotated[
        str | dict[str, Any], Flag(type=constraint_text, metavar="NAME[,OPTION=VALUE...]")
    ] = Field(
        "normalized",
        description="Constraint on densities: none, normalized, certified, pointwise or coupling, "
        "with options of cme_dask.constraints such as certified,bounds=observed or "
        "coupling,landmarks=64.",
    )
    folds: Annotated[int, Flag()] = Field(
        N_FOLDS, ge=1, description="Folds for standard errors; 1: none."
    )
    fold_by: Annotated[str, Flag(metavar="rows|group|LENGTH")] = Field(
        "rows",
        description="Units that folds and hold-outs keep together: single rows, groups, or blocks "
        "of time such as 7d, 12h or 30min.",
    )
    pivots: Annotated[Literal["sampled", "greedy", "random"], Flag()] = Field(
        "sampled",
        description="sampled: from the row sample, without a pass. greedy, random: from all "
        "rows, in rounds of one pass each.",
    )
    span: Annotated[float, Flag()] = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Of greedy pivots, in (0, 1]: 1 selects the largest residuals exactly, 0.5 "
        "needs a quarter of the rounds.",
    )
    accuracy: Annotated[float, Flag()] = Field(
        ACCURACY,
        ge=0.0,
        description="Largest change of density ratios tolerated from faster arithmetic; 0: none.",
    )
    missing: Annotated[Literal["error", "drop", "impute"], Flag()] = Field(
        "error",
        description="What to do with missing values, which `ingest --missing keep` stores: refuse "
        "them, drop the rows, or fill in those of x and drop the rows without y.",
    )
    sample_size: Annotated[int, Flag(type=count)] = Field(
        SAMPLE_SIZE, ge=2, description="Rows from which pivots are chosen."
    )
    kernel_x: Annotated[
        str | dict[str, Any] | None, Flag(type=kernel, metavar="KERNEL", default="learned")
    ] = Field(
        None,
        description="Kernel of x, with length scales in the units of the columns: gaussian:0.3, "
        "matern32:TEMP=8,DEWP=10, products such as 'gaussian:TEMP=8 * categorical:wd=0.7', or "
        "JSON. Names: gaussian, laplace, matern12, matern32, matern52, categorical.",
    )
    kernel_y: Annotated[
        str | dict[str, Any] | None, Flag(type=kernel, metavar="KERNEL", default="learned")
    ] = Field(None, description="Kernel of y, as --kernel-x.")
    residual: Annotated[bool | Literal["auto"], Flag(type=Switch())] = Field(
        "auto",
        description="Fit a location of y and laws of its residuals, in one more pass; auto: if "
        "held-out scores improve.",
    )
    calibration: Annotated[bool | Literal["auto"], Flag(type=Switch())] = Field(
        "auto",
        description="Calibrate the laws on held-out rows; auto: if kernels are learned and the "
        "held-out log density rises.",
    )
    conformal: Annotated[bool | Literal["auto"], Flag(type=Switch())] = Field(
        "auto",
        description="Score held-out rows for conformal intervals, which cover new rows; auto: if "
        "kernels are learned.",
    )
    conformal_by: Annotated[str | None, Flag(metavar="COLUMN", default="all rows")] = Field(
        None,
        min_length=1,
        description="Column of labels of x: conformal intervals cover the rows of each label, by "
        "their own scores.",
    )
    location: Annotated[
        list[str] | None, Flag(type=columns, metavar="COLUMN,...", default="learned")
    ] = Field(
        None,
        min_length=1,
        description="Columns of x with predictions of y that were made elsewhere, one for each "
        "column of y: laws are those of what is left of y, in the same pass.",
    )
    support: Annotated[
        str | list[float] | dict[str, str | list[float]],
        Flag(type=support_text, metavar="KIND|LOW:HIGH|VALUE,..."),
    ] = Field(
        "auto",
        description="Values that y takes: auto, continuous, discrete or bounded by those of the "
        "rows; bounds such as 0:1 or 0: for none above; a list of values; or JSON of these by "
        "column.",
    )
    tuning: TuningSection | None = None
    criterion: Literal["surrogate", "squared"] | None = None
    validation: Annotated[
        Literal["folds", "leave-one-out"] | None,
        Flag(type=click.Choice(["folds", "leave-one-out"]), default="folds"),
    ] = Field(
        None,
        description="What the ridge of an embedding is chosen on; leave-one-out takes one more "
        "pass.",
    )
    method: Literal["pivots", "exact"] | None = None
    penalty: Annotated[
        Literal["l1", "rows", "columns", "rows-and-columns"] | None,
        Flag(type=click.Choice(["l1", "rows", "columns", "rows-and-columns"]), default="l1"),
    ] = Field(
        None,
        description="Of sparse: what is few, coefficients (l1), points of x (rows), of y (columns) "
        "or of both.",
    )
    gamma: Annotated[
        float | list[float] | None,
        Flag(type=numbers, metavar="NUMBER,...", default="chosen on held-out folds"),
    ] = Field(None, description="Of sparse: strength of the penalty, or several of them.")
    n_gammas: int | None = Field(None, ge=1)
    gamma_ratio: Annotated[float | None, Flag(default="0.001")] = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Of sparse: smallest over largest of the strengths that are tried.",
    )
    relax: Annotated[bool | None, Flag(metavar="yes|no", default="no")] = Field(
        None,
        description="Of sparse: solve again for the coefficients that are not zero, without the "
        "penalty.",
    )
    batch_size: Annotated[int | None, Flag(type=count, default="1000")] = Field(
        None, ge=2, description="Of multiclass: rows of a batch from which the kernel is learned."
    )
    max_iter: Annotated[int | None, Flag(default="200")] = Field(
        None, ge=0, description="Of multiclass: steps of learning at most; 0 keeps the kernel."
    )
    learning_rate: Annotated[float | None, Flag(default="0.1")] = Field(
        None, gt=0.0, description="Of multiclass: length of the steps."
    )
    complexity_weight: Annotated[float | None, Flag(default="0.01")] = Field(
        None, ge=0.0, description="Of multiclass: multiplier of the Rademacher complexity."
    )
    class_weight: Annotated[
        str | dict[str, float] | None,
        Flag(type=label_weights, metavar="balanced|LABEL=NUMBER,...", default="all 1"),
    ] = Field(
        None, description="Of multiclass: what weights of rows are multiplied with, by label."
    )
    optimizer: Literal["adam", "gradient"] | None = None
    epsilon: float | None = Field(None, gt=0.0, lt=1.0)
    batch_validation: float | None = Field(None, ge=0.0, le=0.9)
    validation_fraction: float | None = Field(None, ge=0.0, le=0.9)
    n_iter_no_change: int | None = Field(None, ge=1)

    @field_validator("class_weight")
    @classmethod
    def _weighable(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "balanced":
            raise ValueError("must be 'balanced' or a table of numbers by label")
        return value

    @field_validator("fold_by")
    @classmethod
    def _foldable(cls, value: str) -> str:
        return str(Folding.parse(value))

    @field_validator("reg")
    @classmethod
    def _scheduled(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in SCHEDULES:
            raise ValueError(
                f"must be a number, a pair of them or a schedule ({', '.join(SCHEDULES)})"
            )
        return value

    @field_validator("support")
    @classmethod
    def _takable(cls, value: Any) -> Any:
        check_support("support", support_of(value))
        return value

    @field_validator("constraint")
    @classmethod
    def _parsable(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
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

    @field_validator("tuning", mode="before")
    @classmethod
    def _searchable(cls, value: Any) -> Any:
        known = TuningSection.model_fields
        unknown = set(value) - set(known) if isinstance(value, dict) else ()
        if unknown:
            raise ValueError(f"takes {', '.join(known)}, got {', '.join(sorted(unknown))}")
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
    """A whole job: make a sample, fit it, report."""

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
        types = ("float", "tuple[float,float]", "list[float]")
        keys = [str(part) for part in first["loc"] if part not in types]
        where = ": ".join(filter(None, (place, ".".join(keys))))
        raise DataError(f"{where}: {_reason(first)}") from error


def _reason(error: Any) -> str:
    """One clause on an error of pydantic."""
    known = {
        "extra_forbidden": "unknown key",
        "missing": "this key is required",
        "model_type": "this must be a table",
        "dict_type": "this must be a table",
    }
    if error["type"] in known:
        return known[error["type"]]
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    return message if isinstance(error["input"], dict) else f"{message}, got {error['input']!r}"


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
