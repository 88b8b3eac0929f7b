"""Types of option values, and options from fields of the schema of jobs.

Click takes functions as types, and shows their errors with the name of the option.
"""

import csv
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.parse import unquote, urlsplit

import click

from cme_dask.errors import DataError

_MOST = 1 << 53

SEED = click.IntRange(0, 2**63 - 1)
"""A seed of generators and of the row sample."""


def count(value: object) -> int:
    """A count such as 10000000, 10_000_000, 1e7 or 10M."""
    text = str(value).strip()
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    try:
        product = float(text[:-1] if factor > 1 else text) * factor
        exact = int(product)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{text!r} is no count: expected for example 10000000, 1e7 or 10M"
        ) from error
    if exact > _MOST:
        raise click.BadParameter(f"{text!r} is more than 2^53, the largest count there can be")
    if exact != product or exact < 1:
        raise click.BadParameter(f"{text!r} is no whole number of at least 1")
    return exact


def row_number(value: object) -> int:
    """A count, or 0."""
    return 0 if str(value).strip() == "0" else count(value)


def separated(text: str) -> list[str]:
    """The parts between commas; those that hold commas are quoted, as in CSV files.

    Raises
    ------
    ValueError
        If a quote does not end, or something follows it.
    """
    text = re.sub(r'"\s+(,|$)', r'"\1', text)  # CSV takes no blanks after a closing quote
    try:
        (parts,) = csv.reader([text], skipinitialspace=True, strict=True)
    except csv.Error as error:
        raise ValueError(f"{text!r} is no line of CSV: {error}") from error
    return parts


def columns(value: str) -> tuple[str, ...]:
    """Column names, separated by commas; those that hold commas are quoted."""
    names: list[str] = []
    with suppress(ValueError):
        names = [name.strip() for name in separated(value)]
    if not names or not all(names):
        raise click.BadParameter(
            f"{value!r} does not read COLUMN,COLUMN,... (names with commas in double quotes)"
        )
    return tuple(names)


def unit_pairs(value: str) -> tuple[tuple[str, str], ...]:
    """Columns and their units from COLUMN=UNIT,...

    Units may hold commas: one ends where the next part holds an equals sign. Names may, where parts
    are quoted.
    """
    each: list[str] = []
    with suppress(ValueError):
        each = separated(value) if '"' in value else re.split(r",(?=[^,]*=)", value)
    parts = [part.partition("=") for part in each]
    pairs = tuple((name.strip(), text.strip()) for name, _, text in parts)
    if not pairs or not all(name and text for name, text in pairs):
        raise click.BadParameter(f"{value!r} does not read COLUMN=UNIT,..., such as TEMP=degC")
    return pairs


def periodic(value: str) -> tuple[str, float]:
    """A column and its period from COLUMN=PERIOD."""
    name, _, text = value.rpartition("=")
    try:
        period = float(text)
    except ValueError:
        period = 0.0
    if not name or not 0.0 < period < float("inf"):
        raise click.BadParameter(f"{value!r} does not read COLUMN=PERIOD, such as hour=24")
    return name, period


def calendar(value: str) -> tuple[str, tuple[str, ...]]:
    """A column of times and what to make of it from COLUMN=PART,PART,..."""
    name, _, text = value.rpartition("=")
    if not (name and text):
        raise click.BadParameter(f"{value!r} does not read COLUMN=PART,..., such as date=hour")
    return name, columns(text)


def size(value: object) -> int:
    """A number of bytes such as 8MB, 512KiB or 1000000."""
    text = str(value).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG]?)(i?)[bB]?", text)
    if not match:
        raise click.BadParameter(f"{text!r} is no size: expected for example 8MB or 512KiB")
    power = ["", "K", "M", "G"].index(match[2].upper())
    total = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if not total:
        raise click.BadParameter(f"{text!r} is less than a byte")
    return total


def option(value: str) -> tuple[str, object]:
    """A key and its value, JSON or text, from KEY=VALUE."""
    key, _, text = value.partition("=")
    if not (key and text):
        raise click.BadParameter(f"{value!r} does not read KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


def ridge(value: str) -> list[float] | float | str:
    """One number, the pair rY,rX, or the name of a schedule."""
    from cme_dask.numerics.embedding import SCHEDULES

    if value in SCHEDULES:
        return value
    try:
        parts = [float(part) for part in value.split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise click.BadParameter(
            f"{value!r} is neither a number nor a pair rY,rX nor a schedule "
            f"({', '.join(SCHEDULES)})"
        )
    return parts if len(parts) == 2 else parts[0]


def support(value: str) -> Any:
    """Values of y from KIND, LOW:HIGH, VALUE,VALUE,... or JSON of these by column."""
    text = value.strip()
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is no JSON: {error}") from error
    if "," in text:
        try:
            return [float(part) for part in text.split(",")]
        except ValueError as error:
            raise click.BadParameter(f"{value!r} does not read VALUE,VALUE,...") from error
    return text


def support_of(value: Any) -> Any:
    """Values of y as estimators take them, from the form of jobs.

    Raises
    ------
    DataError
        If a text is neither a kind nor LOW:HIGH.
    """
    if isinstance(value, dict):
        return {column: support_of(one) for column, one in value.items()}
    if not (isinstance(value, str) and ":" in value):
        return value
    low, _, high = value.partition(":")
    try:
        return tuple(float(end) if end.strip() else None for end in (low, high))
    except ValueError as error:
        raise DataError(f"support: {value!r} does not read LOW:HIGH, such as 0:1 or 0:") from error


def label_weights(value: str) -> str | dict[str, float]:
    """``balanced``, or weights by label from LABEL=NUMBER,..."""
    if value == "balanced":
        return value
    try:
        pairs = (part.rsplit("=", 1) for part in separated(value))
        return {label: float(weight) for label, weight in pairs}
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} reads neither balanced nor LABEL=NUMBER,..."
        ) from error


def constraint(value: str) -> dict[str, object]:
    """A constraint and its options from NAME or NAME,OPTION=VALUE,... in the JSON form."""
    from cme_dask.constraints import parse

    name, *options = value.split(",")
    result: dict[str, object] = {"name": name}
    for option in options:
        key, _, text = option.partition("=")
        if not (key and text):
            raise click.BadParameter(f"{value!r} does not read NAME,OPTION=VALUE,...")
        result[key] = _plain(text)
    try:
        return parse(result).to_dict()
    except DataError as error:
        raise click.BadParameter(str(error)) from error


def _plain(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def kernel(value: str) -> str:
    """A kernel as text, checked as far as possible without the columns."""
    from cme_dask.kernels.text import read_specification

    try:
        read_specification(value)
    except DataError as error:
        raise click.BadParameter(str(error)) from error
    return value


def numbers(value: str) -> tuple[float, ...]:
    """One number, or several separated by commas."""
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} does not read NUMBER or NUMBER,NUMBER,...") from error


def output(value: str | Path) -> Path:
    """A local path; a URL would silently become one."""
    if "://" in str(value):
        raise click.BadParameter(f"outputs are local paths, got the URL {value}")
    return Path(value)


def output_folder(value: str | Path) -> Path:
    """A local folder that takes several outputs, each of which is replaced by itself."""
    return output(value)


class LocalFile(click.Path):
    """A file that is read by its path; URLs of other places would silently become one."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, also of a ``file://`` URL."""
        text = str(value)
        url = urlsplit(text)
        if url.scheme == "file" and url.netloc in ("", "localhost"):
            text = unquote(url.path)
        if "://" in text:
            self.fail(f"a local file is expected: download it from the URL {text}", param, ctx)
        return super().convert(text, param, ctx)


def source(value: str) -> str:
    """A path or URL that is read."""
    return value


def counts(value: str) -> tuple[int, ...]:
    """Counts, separated by commas."""
    return tuple(count(part) for part in value.split(","))


def column_counts(value: str) -> tuple[int, int]:
    """Numbers of columns of x and of y from X+Y."""
    match = re.fullmatch(r"([1-9]\d{0,4})\+([1-9]\d{0,4})", str(value).strip())
    if not match:
        raise click.BadParameter(f"{value!r} does not read X+Y, such as 10+1")
    return int(match[1]), int(match[2])


def straggling(value: str) -> tuple[float, float]:
    """A share and a factor from SHARE:FACTOR."""
    try:
        share, factor = map(float, str(value).split(":"))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} does not read SHARE:FACTOR, such as 0.01:5") from error
    if not (0.0 <= share <= 1.0 and 1.0 <= factor < math.inf):
        raise click.BadParameter(f"{value!r}: a share in [0, 1] and a factor of at least 1")
    return share, factor


def share(value: str) -> tuple[int, int]:
    """The number of a share, counted from 0, and how many there are, from I/K counted from 1."""
    match = re.fullmatch(r"(\d+)/(\d+)", str(value).strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"{value!r} does not read I/K with I from 1 to K, such as 3/10")
    return int(match[1]) - 1, int(match[2])


class Switch(click.Choice[str]):
    """auto, yes or no, as the schema of jobs has it: ``"auto"``, True or False."""

    def __init__(self) -> None:
        super().__init__(["auto", "yes", "no"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value of the schema."""
        return {"yes": True, "no": False}.get(super().convert(value, param, ctx), "auto")


# Options from fields of the schema of jobs


@dataclass(frozen=True)
class Flag:
    """The option of a field of a section; the description of the field is its help.

    Attributes
    ----------
    name
        Of the option; default that of the field.
    type
        For click; default that of the field.
    metavar
        Stands for the value in the help.
    default
        Text of the default in the help; default that of the field.
    repeatable
        Whether the option can be given several times, for a list or a table.
    """

    name: str | None = None
    type: Any = None
    metavar: str | None = None
    default: str | None = None
    repeatable: bool = False

    def option(self, key: str, field: Any, default: str | None) -> click.Option:
        """The option of a pydantic field; ``default`` is its text in the help."""
        text, kind = default or self.default, self.type
        if text is None and field.default not in (None, [], {}) and not field.is_required():
            text = str(field.default)
        if kind is None and get_origin(field.annotation) is Literal:
            kind = click.Choice(get_args(field.annotation))
        elif kind is None:  # of a union the first member, the type other than None
            kind = (get_args(field.annotation) or (field.annotation,))[0]
        return click.Option(
            [self.name or f"--{key.replace('_', '-')}", key],
            type=kind,
            metavar=self.metavar,
            multiple=self.repeatable,
            required=field.is_required() and default is None,
            help=field.description + (f"  [default: {text}]" if text else ""),
        )
