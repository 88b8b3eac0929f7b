"""The command compare: its options, its work and its tables."""

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    Shown,
    examples,
    json_option,
    log_option,
    out_option,
    overwrite_option,
    section_options,
    x_option,
)
from cme_dask.cli.values import columns, count
from cme_dask.data.atomic import check_output, json_file, work_folder, write_json

if TYPE_CHECKING:
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.data.sample import Sample

COMPARISON = json_file("comparison")

_TABLE_FIELDS = (
    *("weights", "group", "time", "categorical", "datetime", "cyclic", "missing", "null_values"),
)
"""Options of tables, which a store has settled when it was made."""

_MEANS = {
    "crps": "CRPS",
    "log_score": "log score",
    "coverage": "coverage",
    "width": "width",
    "pinball": "pinball",
    "rmse": "RMSE",
}
_EXCESSES = {key: _MEANS[key] for key in ("crps", "log_score", "coverage", "pinball", "rmse")}
_TIMES = {"fit_seconds": "fit", "answer_seconds": "answers", "cpu_seconds": "CPU"}


@cli.command(
    short_help="Compare our laws with other methods on the same held-out rows.",
    epilog=examples(
        "cme-dask compare table.csv --y target",
        "cme-dask compare table.parquet --y target --methods joint,quantile-forest --folds 5",
        "cme-dask compare s.zarr --fold-by 7d --splits 3 --out comparison.json",
        "cme-dask compare table.csv --y target --test-rows test_0.txt --test-rows test_1.txt",
    ),
)
@click.argument("files", metavar="TABLE...", nargs=-1, required=True)
@x_option
@click.option("--y", metavar="COLUMN", help="Column to predict.  [default: that of the store]")
@click.option(
    "--methods",
    type=columns,
    help="Of joint, joint-boosting, quantile-forest, ngboost, lightgbm, hist-boosting, normal, "
    "separated by commas.  [default: all]",
)
@click.option(
    "--splits",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of random splits.",
)
@click.option(
    "--hold-out",
    type=float,
    metavar="SHARE",
    default=0.1,
    show_default=True,
    help="Share of the units that each split holds out, in (0, 1).",
)
@click.option("--folds", type=click.IntRange(2), help="So many folds instead, each held out once.")
@click.option(
    "--test-rows",
    "test_files",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    multiple=True,
    help="File of the row numbers (from 0) that a split holds out, instead; repeatable.",
)
@section_options("FitSection", "fold_by", fold_by="rows")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Seed of splits and methods.",
)
@click.option(
    "--rows",
    type=count,
    default=100_000,
    show_default=True,
    help="Most training rows of the methods that hold them in memory: all but joint and "
    "joint-boosting.",
)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of each method.  [default: one per core]"
)
@section_options("IngestSection", *_TABLE_FIELDS)
@out_option("JSON file of all scores; a run that was interrupted goes on.", required=False)
@log_option
@overwrite_option
@json_option
def compare(
    files: tuple[str, ...],
    x: tuple[str, ...] | None,
    y: str | None,
    given: dict[str, Any],
    test_files: tuple[Path, ...],
    out: Path | None,
    overwrite: bool,
    **options: Any,
) -> Shown:
    """Compare laws of one column of a table by several methods, on the same held-out rows.

    TABLE is a sample store, or one or several files (CSV, also compressed, Parquet, NumPy), which
    are streamed into a temporary store. Every method is fitted without the rows that a split
    holds out, and scored on them: CRPS, log score of the density, coverage and width of 90 %
    intervals, pinball loss, RMSE of the mean, and times. Methods whose package is missing are left
    out; the extra `bench` installs all (docs/installation.md).
    """
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.estimators.comparison import compare as run

    if out is not None:
        check_output(out, COMPARISON, overwrite)
    if test_files:
        options["test_rows"] = [_row_numbers(path) for path in test_files]
    fold_by = given.pop("fold_by", None)
    aside = None if out is None else work_folder(out)
    begin = time.perf_counter()
    with (
        ProgressLines() as progress,
        _opened(files, x, y, given, bool(test_files), progress) as sample,
    ):
        comparison = run(
            sample, **options, fold_by=fold_by, checkpoint=aside, progress=progress.say
        )
    result = {
        "input": list(files),
        **comparison.to_dict(),
        "seconds": time.perf_counter() - begin,
        "out": None if out is None else str(out),
    }
    if out is not None:
        write_json(out, COMPARISON, result, overwrite=overwrite)
    if aside is not None:
        aside.unlink(missing_ok=True)
    return result, comparison_tables(result)


def _row_numbers(path: Path) -> list[int]:
    """The row numbers in a text file, separated by white space."""
    from cme_dask.data.atomic import disk_errors
    from cme_dask.errors import DataError

    with disk_errors(path):
        words = path.read_text(encoding="utf-8", errors="replace").split()
    try:
        numbers = [float(word) for word in words]  # some published lists say 12.0
        exact = [int(number) for number in numbers]
    except (OverflowError, ValueError) as error:
        raise DataError(
            f"{path} must hold row numbers separated by white space: {error}"
        ) from error
    if not words or exact != numbers:
        raise DataError(f"{path} must hold row numbers, whole ones, separated by white space")
    return exact


@contextlib.contextmanager
def _opened(
    files: Sequence[str],
    x: Sequence[str] | None,
    y: str | None,
    given: dict[str, Any],
    numbered: bool,
    progress: "ProgressLines",
) -> "Iterator[Sample]":
    """The rows of a store, or of tables that go into a temporary one."""
    from cme_dask.errors import DataError
    from cme_dask.passes.sources import open_sample

    if len(files) == 1 and _is_store(files[0]):
        if given:
            options = click.get_current_context().command.params
            flag = next(option.opts[0] for option in options if option.name in given)
            raise DataError(f"{flag} is for tables: {files[0]} is a store, which has settled it")
        yield open_sample(files[0], x_columns=x, y_columns=None if y is None else [y])
        return
    if y is None:
        raise click.UsageError("Missing option '--y': the column of the table to predict.")
    if given.get("missing") == "keep":
        raise click.UsageError(
            "--missing keep: the methods take no missing values; drop these rows"
        )
    with tempfile.TemporaryDirectory(prefix="cme-dask-") as folder:
        store = Path(folder) / "rows.zarr"
        dropped = _stream(files, x, y, given, store, progress)
        if dropped and numbered:
            raise DataError(
                f"{dropped:,} rows lack a value and are left out, so that row numbers would mean "
                "others: fill or remove these rows first"
            )
        yield open_sample(store)


def _is_store(path: str) -> bool:
    return Path(path).is_dir() if "://" not in path else path.rstrip("/").endswith(".zarr")


def _stream(
    files: Sequence[str],
    x: Sequence[str] | None,
    y: str,
    given: dict[str, Any],
    store: Path,
    progress: "ProgressLines",
) -> int:
    """Write tables to a store; the number of rows that lack a value."""
    from cme_dask.config import NULL_VALUES
    from cme_dask.data.ingest import find_sources, ingest

    pairs = {key: dict(given.get(key, ())) for key in ("datetime", "cyclic")}
    if x is None:
        others = {y, given.get("weights"), given.get("group"), *given.get("time", ())}
        x = [name for name in find_sources(files)[0].columns() if name not in others]
    null_values = (*NULL_VALUES, *given.get("null_values", ()))
    options = {**given, **pairs, "null_values": null_values}
    report = ingest(files, store, x=x, y=[y], **options, progress=progress.ingest)
    if report.rows_dropped:
        progress.say(f"left out {report.rows_dropped:,} rows that lack a value")
    return report.rows_dropped


def comparison_tables(result: dict[str, Any]) -> list[Any]:
    """Scores of each method, how far each is from the best one, and times."""
    from cme_dask import display
    from cme_dask.cli import tables
    from cme_dask.estimators.comparison import LEVEL

    methods, unit = result["methods"], result["unit"]
    threads = result["settings"]["threads"]
    many = f"{threads} threads" if threads > 1 else "one thread"
    target = result["target"] if unit is None else f"{result['target']} ({unit})"

    def cells(name: str, scores: Iterable[str]) -> list[str]:
        known = methods[name]
        return [display.number(known[s]["mean"]) if s in known else "-" for s in scores]

    def beyond(name: str, score: str) -> str:
        each = methods[name].get(score)
        if each is None:
            return "-"
        if each["best"] == name:
            return "best"
        return display.with_error(each["excess"], each["excess_error"])

    splits = f"{result['splits']} splits" if result["splits"] > 1 else "one split"
    title = f"{target} in {result['rows']:,} rows, {splits}"
    shown = [
        tables.grid(
            title,
            ("method", *_MEANS.values()),
            [(name, *cells(name, _MEANS)) for name in methods],
            f"Means over the splits. Coverage and width are those of {LEVEL:.0%} intervals. CRPS, "
            "width, pinball loss and RMSE are in the unit of the column, the log score is in nats; "
            f"lower is better, but the coverage should be {LEVEL:.0%}. Methods that predict "
            "quantiles have no density.",
        ),
        "",
        tables.grid(
            "More than the best",
            ("method", *_EXCESSES.values()),
            [(name, *(beyond(name, score) for score in _EXCESSES)) for name in methods],
            "± one standard error of the differences on the same rows, over the splits. Of "
            "coverages the best is the nearest to the level.",
        ),
        "",
        tables.grid(
            "Seconds",
            ("method", *_TIMES.values()),
            [(name, *cells(name, _TIMES)) for name in methods],
            f"Means over the splits, with {many}. Answers are all scores of the rows held out; the "
            "CPU's seconds are of both.",
        ),
    ]
    return [*shown, *(["", *result["missing"].values()] if result["missing"] else [])]
