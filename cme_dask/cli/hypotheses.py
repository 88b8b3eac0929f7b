"""The commands test independence, conditional and two-sample: options, work and tables."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cme_dask.cli.app import SentenceGroup, cli
from cme_dask.cli.options import (
    Shown,
    checkpoint_options,
    compute_options,
    device_options,
    examples,
    json_option,
    overwrite_option,
    section_options,
    together,
    x_option,
    y_option,
)
from cme_dask.cli.values import columns, count, kernel, numbers

if TYPE_CHECKING:
    from cme_dask.cli.compute import CheckpointOptions, Compute
    from cme_dask.data.columns import Columns
    from cme_dask.data.sample import Sample
    from cme_dask.estimators.hypotheses import SignificanceResult
    from cme_dask.kernels import Kernel

_method_option = click.option(
    "--method",
    type=click.Choice(["auto", "chi2", "bootstrap"]),
    default="auto",
    show_default=True,
    help="P-value by a mixture of chi-squares, or by random signs of the moments of folds, "
    "also for weighted or dependent rows; auto: bootstrap for these, else chi2.",
)
_test_options = together(
    section_options("FitSection", "tol", "max_rank", tol="1e-3", max_rank="200"),
    click.option(
        "--folds",
        "n_folds",
        type=click.IntRange(1),
        help="Folds of the bootstrap.  [default: 128, fewer for large bases]",
    ),
    section_options("FitSection", "fold_by"),
    click.option(
        "--resamples",
        "n_resamples",
        type=count,
        default=9999,
        help="Random signs of the bootstrap.  [default: 9999]",
    ),
    section_options("FitSection", "sample_size"),
    checkpoint_options,
    compute_options,
    device_options,
    overwrite_option,
    json_option,
)


@cli.group(
    "test",
    cls=SentenceGroup,
    short_help="Test independence, also given columns, or equality of two laws.",
    epilog=examples(
        "cme-dask test independence s.zarr --x TEMP --y PM2.5",
        "cme-dask test conditional s.zarr --x TEMP --y PM2.5 --given PRES,DEWP",
        "cme-dask test two-sample winter.zarr summer.zarr",
    ),
)
def test() -> None:
    """Kernel tests from one pass over the rows, with p-values."""


@test.command(
    short_help="Test whether x and y are independent.",
    epilog=examples(
        "cme-dask test independence s.zarr",
        "cme-dask test independence s.zarr --x TEMP --y PM2.5 --fold-by 7d",
    ),
)
@click.argument("store")
@x_option
@y_option
@section_options("FitSection", "kernel_x", "kernel_y", kernel_x="median", kernel_y="median")
@_method_option
@_test_options
def independence(
    store: str,
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    given: dict[str, Any],
    **options: Any,
) -> Shown:
    """Test whether x and y of the rows in STORE (path or URL) are independent, in one pass.

    The statistic is the Hilbert-Schmidt independence criterion.
    """
    from cme_dask.estimators.hypotheses import independence_test
    from cme_dask.passes.sources import open_sample

    sample = open_sample(store, x_columns=x, y_columns=y).fold_by(given.pop("fold_by", "rows"))
    options |= _kernels(given, sample.columns)
    title = f"{store} (independence of x and y)"
    return _tested(title, "HSIC", independence_test, (sample,), {**given, **options})


@test.command(
    short_help="Test whether x and y are independent given columns of x.",
    epilog=examples(
        "cme-dask test conditional s.zarr --given PRES,DEWP",
        "cme-dask test conditional s.zarr --x TEMP --y PM2.5 --given PRES,DEWP --fold-by 7d",
    ),
)
@click.argument("store")
@click.option(
    "--given",
    "names",
    type=columns,
    required=True,
    help="Columns of x, separated by commas, given which the others are tested.",
)
@click.option("--x", type=columns, help="Columns of x to test.  [default: all but the given ones]")
@y_option
@section_options("FitSection", "kernel_x", "kernel_y", kernel_x="median", kernel_y="median")
@click.option(
    "--kernel-z",
    "kernel_z",
    type=kernel,
    metavar="KERNEL",
    help="Kernel of the given columns.  [default: median]",
)
@click.option(
    "--reg",
    type=numbers,
    help="Ridge of the regressions on the given columns, or several, separated by commas.  "
    "[default: 19 from 1e-9 to 1]",
)
@_test_options
def conditional(
    store: str,
    names: tuple[str, ...],
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    given: dict[str, Any],
    **options: Any,
) -> Shown:
    """Test whether x and y of the rows in STORE (path or URL) are independent given columns of x.

    The statistic is the squared norm of the mean covariance of features of x and y given these
    columns, by residuals of regressions, in one pass.
    """
    from cme_dask.estimators.hypotheses import conditional_independence_test, with_z
    from cme_dask.passes.sources import open_sample

    requested = x and tuple(dict.fromkeys((*x, *names)))
    sample = open_sample(store, x_columns=requested, y_columns=y)
    sample = sample.fold_by(given.pop("fold_by", "rows"))
    given["kernel_z"] = options.pop("kernel_z")
    options |= _kernels(given, with_z(sample, names).columns)
    title = f"{store} (independence of x and y given {', '.join(names)})"
    test = partial(conditional_independence_test, Z=names)
    return _tested(title, "covariance given z", test, (sample,), {**given, **options})


@test.command(
    "two-sample",
    short_help="Test whether two stores come from one law.",
    epilog=examples(
        "cme-dask test two-sample winter.zarr summer.zarr",
        "cme-dask test two-sample winter.zarr summer.zarr --y PM2.5 --json",
    ),
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@x_option
@click.option("--y", type=columns, help="Columns of y to compare, instead of those of x.")
@click.option(
    "--kernel",
    type=kernel,
    metavar="KERNEL",
    help="Kernel, such as gaussian:TEMP=8,DEWP=10.  [default: median]",
)
@_method_option
@_test_options
def two_sample(
    first: str,
    second: str,
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    kernel: str | None,
    given: dict[str, Any],
    **options: Any,
) -> Shown:
    """Test whether the rows in A and B (paths or URLs) come from one law, reading each row once.

    The statistic is the squared maximum mean discrepancy.
    """
    from cme_dask.estimators.hypotheses import two_sample_test
    from cme_dask.passes.sources import open_sample

    if x is not None and y is not None:
        raise click.UsageError("--x and --y: compare columns of one of the two")
    fold_by = given.pop("fold_by", "rows")
    a, b = (
        open_sample(store, x_columns=x, y_columns=y).fold_by(fold_by) for store in (first, second)
    )
    place = 0 if y is None else 1
    options |= {"variable": "xy"[place], "kernel": _kernel(kernel, a.columns[place])}
    title = f"{first}, {second} (equal laws)"
    return _tested(title, "MMD^2", two_sample_test, (a, b), {**given, **options})


def _kernels(given: dict[str, Any], columns: Sequence["Columns"]) -> dict[str, "Kernel | str"]:
    """The kernels of the variables, taken out of the options."""
    texts = {key: given.pop(key, None) for key in ("kernel_x", "kernel_y", "kernel_z")}
    # Of the variables that there are: without a y the test says so.
    pairs = zip(texts.items(), columns, strict=False)
    return {key: _kernel(text, each) for (key, text), each in pairs}


def _kernel(text: Any, described: "Columns") -> "Kernel | str":
    from cme_dask.errors import DataError
    from cme_dask.kernels.text import kernel_of, read_specification

    if text is None:
        return "median"
    kernel = kernel_of(read_specification(text), described.names, described.categories)
    if kernel is None:
        raise DataError("tests learn no kernels: state them, or leave the median heuristic")
    return kernel


def _tested(
    title: str,
    statistic: str,
    test: Any,
    samples: Sequence["Sample"],
    options: dict[str, Any],
) -> Shown:
    """Run a test, show its progress, and describe the result."""
    from cme_dask.cli.fitting import describe_memory
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.cli.run_report import PeakMemory

    compute: Compute = options.pop("compute")
    checkpoint: CheckpointOptions = options.pop("checkpoint")
    del options["overwrite"]  # of the report
    checkpoint.check()
    with ProgressLines() as progress, compute.open() as scheduler, PeakMemory(scheduler) as memory:
        result: SignificanceResult = test(
            *samples,
            progress=progress.fit,
            checkpoint=checkpoint.folder,
            **options,
            **compute.place(scheduler),
        )
        checkpoint.finish()
    plan = max((report.memory for report in result.reports), key=lambda each: each.predicted)
    described = {
        "statistic": result.statistic,
        "pvalue": result.pvalue,
        "null_mean": result.null_mean,
        "method": result.method,
        "rows": list(result.rows),
        "kernels": list(map(repr, result.kernels)),
        "ranks": list(result.ranks),
        "trace_errors": list(result.trace_errors),
        "regs": list(result.regs),
        "passes": result.passes,
        "seconds": sum(report.seconds for report in result.reports),
        "memory": describe_memory(plan, memory),
    }
    return described, _tables(title, statistic, described)


def _tables(title: str, statistic: str, result: dict[str, Any]) -> list[Any]:
    from cme_dask.cli import tables
    from cme_dask.display import number

    bases = zip(result["kernels"], result["ranks"], result["trace_errors"], strict=True)
    pvalue = f"{result['pvalue']:.3g}" if result["pvalue"] else "below 1e-300"
    rows = " and ".join(map(number, result["rows"]))
    lines = [
        ("p-value", f"{pvalue} ({result['method']})"),
        (
            statistic,
            f"{result['statistic']:.4g}, {result['null_mean']:.4g} expected under the null "
            "hypothesis",
        ),
        *(
            ("kernel", f"{kernel}, rank {rank}, trace error {error:.1e}")
            for kernel, rank, error in bases
        ),
        *(
            (f"ridge of {variable}", f"{reg:.2g}")
            for variable, reg in zip("yx", result["regs"], strict=False)
        ),
        ("pass", f"{result['passes']} over {rows} rows: {result['seconds']:.3g} s"),
        ("peak memory", tables.memory_line(result["memory"])),
    ]
    return [tables.facts(title, lines)]
