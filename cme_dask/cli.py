"""The command ``cme-dask``, also ``dask cme``: options here, the work in ``cme_dask.jobs``.

Everything heavy is imported inside the commands: ``--help`` is fast, and ``info`` and ``expect``
need neither Dask nor scikit-learn.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cme_dask import __version__
from cme_dask.bench import CASE_NAMES
from cme_dask.cli_group import SentenceGroup
from cme_dask.cli_types import SEED, columns, count, counts, numbers, output, ridge, unit
from cme_dask.defaults import ACCURACY, N_FOLDS, PIVOTS, REG, SAMPLE_SIZE, SCENARIOS, TOL

Command = TypeVar("Command", bound=Callable[..., Any])


def _examples(*lines: str) -> str:
    """An epilog; the backspace tells click to leave the lines as they are."""
    return "\n".join(
        ["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)]
    )


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."
)
overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace an existing output, once the new one is whole."
)
chunk_option = click.option(
    "--chunk-rows",
    type=count,
    help="Rows per chunk.  [default: a power of two, 8 MB at most, features 32 MB]",
)


def compute_options(command: Command) -> Command:
    """Where to run."""
    for option in (
        click.option(
            "--memory-limit",
            metavar="BYTES",
            help="Memory this process, or each worker of a cluster, may use, such as 2GB; a fit "
            "that would need more is refused.  [default: what there is]",
        ),
        click.option(
            "--workers",
            type=click.IntRange(1),
            help="Threads or processes.  [default: one per core]",
        ),
        click.option(
            "--scheduler",
            metavar="NAME|ADDRESS",
            help="threads, processes, synchronous, or a cluster's tcp://HOST:PORT.  "
            "[default: threads]",
        ),
    ):
        command = option(command)
    return command


@click.group(
    "cme",
    cls=SentenceGroup,
    invoke_without_command=True,
    epilog=_examples(
        "cme-dask demo",
        "cme-dask ingest data/*.csv --out s.zarr --x TEMP,DEWP --y PM2.5",
        'cme-dask fit s.zarr --out m.zarr --event "PM2.5 > 75" --max-rank 300',
        'cme-dask expect m.zarr --given TEMP=20,DEWP=5 --of PM2.5 --of "PM2.5 > 75"',
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="cme-dask")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Learn joint and conditional distributions with kernels, out of core, on Dask."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command and exit: 0, 2 data or usage, 3 environment, 130 interrupted."""
    cli(prog_name="cme-dask")


@cli.command(
    short_help="Write a sample of a known three-dimensional law.",
    epilog=_examples(
        "cme-dask sample normal3.zarr --rows 1e7 --scenario strong",
    ),
)
@click.argument("out", type=output)
@click.option("--rows", type=count, required=True, help="Rows, such as 10000000, 1e7 or 10M.")
@click.option(
    "--scenario",
    type=click.Choice(list(SCENARIOS)),
    default="medium",
    show_default=True,
    help="Correlations of y1, y2 and x.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the draws.")
@chunk_option
@overwrite_option
@json_option
def sample(
    out: Path,
    rows: int,
    scenario: str,
    seed: int,
    chunk_rows: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a sample of the three-dimensional normal (x; y1, y2) to the store OUT."""
    from cme_dask.jobs.describe import describe
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines
    from cme_dask.storage.generate import write_normal3

    with ProgressLines() as progress:
        write_normal3(
            out,
            rows,
            scenario=scenario,
            seed=seed,
            chunk_rows=chunk_rows,
            overwrite=overwrite,
            progress=progress.counter("generate", rows),
        )
        progress.say(f"generated {rows:,} rows")
    result = describe(str(out))
    tables.show(result, tables.store_tables(result), as_json)


@cli.command(
    short_help="Stream CSV files into a sample store.",
    epilog=_examples(
        "cme-dask ingest data/*.csv.gz --out s.zarr --x TEMP,DEWP --y PM2.5 --units TEMP=degC",
    ),
)
@click.argument("files", nargs=-1, required=True)
@click.option("--out", required=True, type=output, metavar="PATH", help="Store to make (a folder).")
@click.option("--x", type=columns, required=True, help="Columns of x, such as TEMP,DEWP.")
@click.option("--y", type=columns, required=True, help="Columns of y.")
@click.option("--weights", metavar="COLUMN", help="Column of row weights.  [default: all equal]")
@click.option(
    "--missing",
    type=click.Choice(["drop", "error"]),
    default="drop",
    show_default=True,
    help="What to do with rows that lack a value.",
)
@click.option(
    "--units", metavar="COLUMN=UNIT", type=unit, multiple=True, help="Unit of a column; repeatable."
)
@chunk_option
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the row sample.")
@overwrite_option
@json_option
def ingest(
    files: tuple[str, ...],
    out: Path,
    x: tuple[str, ...],
    y: tuple[str, ...],
    weights: str | None,
    missing: str,
    units: tuple[tuple[str, str], ...],
    chunk_rows: int | None,
    seed: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Stream CSV FILES (paths, URLs or patterns; plain or compressed) into a sample store."""
    from cme_dask.jobs.describe import describe_ingest
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines
    from cme_dask.storage.csv_files import ingest_csv

    with ProgressLines() as progress:
        report = ingest_csv(
            files,
            out,
            x=x,
            y=y,
            weights=weights,
            missing=missing,
            units=dict(units),
            chunk_rows=chunk_rows,
            seed=seed,
            overwrite=overwrite,
            progress=progress.ingest,
        )
    result = describe_ingest(report, dict(units))
    tables.show(result, tables.ingest_tables(result), as_json)


@cli.command(
    short_help="Fit a joint distribution in one pass, and save it.",
    epilog=_examples(
        'cme-dask fit s.zarr --out m.zarr --event "PM2.5 > 75" --max-rank 300',
        "cme-dask fit s.zarr --dry-run --max-rank 300",
        "cme-dask fit s.zarr --out m.zarr --scheduler tcp://10.0.0.1:8786 --memory-limit 2GB",
    ),
)
@click.argument("store")
@click.option("--out", type=output, metavar="PATH", help="Model to make (a folder).  [required]")
@click.option("--x", type=columns, help="Columns of x to use.  [default: all]")
@click.option("--y", type=columns, help="Columns of y to use.  [default: all]")
@click.option(
    "--event",
    "events",
    multiple=True,
    help='Event of y, such as "PM2.5 > 75" or "y1 <= y2 - 0.5"; repeatable.',
)
@click.option("--event-x", "events_x", multiple=True, help="Event of x; repeatable.")
@click.option(
    "--tol", type=float, default=TOL, show_default=True, help="Relative trace error, in (0, 1)."
)
@click.option("--max-rank", type=int, help="Most pivots per basis.  [default: as tol needs]")
@click.option("--reg", type=ridge, help=f"Ridge r, or rY,rX; no unit.  [default: {REG:g}]")
@click.option(
    "--reg-form",
    type=click.Choice(["two-sided", "single"]),
    default="two-sided",
    show_default=True,
    help="Form of the ridge.",
)
@click.option(
    "--constraint",
    type=click.Choice(["normalized", "none"]),
    default="normalized",
    show_default=True,
    help="Whether probabilities integrate to one exactly.",
)
@click.option(
    "--folds",
    type=int,
    default=N_FOLDS,
    show_default=True,
    help="Folds for standard errors; 1: none.",
)
@click.option(
    "--pivots",
    type=click.Choice(PIVOTS),
    default="sampled",
    show_default=True,
    help="sampled: from the row sample, in no pass of their own. greedy, random: over all rows, in "
    "rounds of one pass each.",
)
@click.option(
    "--span",
    type=float,
    default=1.0,
    show_default=True,
    help="Of greedy pivots, in (0, 1]: 1 takes the largest residuals exactly, 0.5 a quarter of the "
    "rounds.",
)
@click.option(
    "--accuracy",
    type=float,
    default=ACCURACY,
    show_default=True,
    help="Change of probabilities that faster arithmetic may cause; 0: none.",
)
@click.option(
    "--sample-size",
    type=count,
    default=SAMPLE_SIZE,
    show_default=True,
    help="Rows from which pivots are chosen.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only tell ranks, passes, seconds by part and peak memory, from the row sample and rates "
    "measured in a second; --out is not needed.",
)
@compute_options
@overwrite_option
@json_option
def fit(
    store: str,
    out: Path | None,
    x: tuple[str, ...] | None,
    y: tuple[str, ...] | None,
    events: tuple[str, ...],
    events_x: tuple[str, ...],
    tol: float,
    max_rank: int | None,
    reg: Any,
    reg_form: str,
    constraint: str,
    folds: int,
    pivots: str,
    span: float,
    accuracy: float,
    sample_size: int,
    dry_run: bool,
    scheduler: str | None,
    workers: int | None,
    memory_limit: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Fit the joint distribution of x and y in STORE (path or URL) in one pass, and save it."""
    from cme_dask.chunked.sources import open_sample
    from cme_dask.jobs.fitting import Compute, fit_and_save, plan_of_fit
    from cme_dask.jobs.schema import FitSection, checked
    from cme_dask.report import tables

    options = {
        "events": list(events),
        "events_x": list(events_x),
        "tol": tol,
        "max_rank": max_rank,
        "reg": reg,
        "reg_form": reg_form,
        "constraint": constraint,
        "folds": folds,
        "pivots": pivots,
        "span": span,
        "accuracy": accuracy,
        "sample_size": sample_size,
    }
    section, compute = checked(FitSection, options, ""), Compute(scheduler, workers, memory_limit)

    def open_rows() -> Any:
        return open_sample(store, x_columns=x, y_columns=y)

    if dry_run:
        result = plan_of_fit(open_rows, section, compute)
        tables.show(result, tables.plan_tables(result), as_json)
        return
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    result = fit_and_save(open_rows, section, compute, out, overwrite)
    tables.show(result, tables.fit_tables(result), as_json)


@cli.command(
    short_help="Fit low-rank kernel features of x, and save them.",
    epilog=_examples(
        "cme-dask features s.zarr --out features.model --tol 1e-3",
        "cme-dask transform s.zarr --model features.model --out features.zarr",
    ),
)
@click.argument("store")
@click.option("--out", required=True, type=output, metavar="PATH", help="Model to make (a folder).")
@click.option("--x", type=columns, help="Columns of x to use.  [default: all]")
@click.option(
    "--length-scale",
    type=numbers,
    metavar="NUMBER,...",
    help="Of the Gaussian kernel: one, or one per column, in its unit.  [default: by the median "
    "heuristic]",
)
@click.option(
    "--tol", type=float, default=TOL, show_default=True, help="Relative trace error, in (0, 1)."
)
@click.option("--max-rank", type=int, help="Most features.  [default: as tol needs]")
@click.option(
    "--basis",
    type=click.Choice(["newton", "spectral"]),
    default="newton",
    show_default=True,
    help="Features: Newton basis, or uncorrelated and ordered by variance.",
)
@click.option(
    "--sample-size",
    type=count,
    default=SAMPLE_SIZE,
    show_default=True,
    help="Rows from which pivots are chosen.",
)
@compute_options
@overwrite_option
@json_option
def features(
    store: str,
    out: Path,
    x: tuple[str, ...] | None,
    length_scale: tuple[float, ...] | None,
    tol: float,
    max_rank: int | None,
    basis: str,
    sample_size: int,
    scheduler: str | None,
    workers: int | None,
    memory_limit: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Fit features of x in STORE (path or URL) by pivoted Cholesky in one pass, and save them.

    Inner products of features are kernel values up to the trace error: ridge regression, PCA or
    k-means on them are those of the kernel.
    """
    from cme_dask.estimators.cholesky import PivotedCholesky
    from cme_dask.jobs.features import fit_features
    from cme_dask.jobs.fitting import Compute
    from cme_dask.kernels import Gaussian
    from cme_dask.report import tables

    scales = length_scale if length_scale is None or len(length_scale) > 1 else length_scale[0]
    estimator = PivotedCholesky(
        None if scales is None else Gaussian(scales),
        tol=tol,
        max_rank=max_rank,
        basis=basis,
        sample_size=sample_size,
    )
    compute = Compute(scheduler, workers, memory_limit)
    result = fit_features(estimator, store, x, compute, out, overwrite)
    tables.show(result, tables.feature_fit_tables(result), as_json)


@cli.command(
    short_help="Write the features of a store's rows to a new store.",
    epilog=_examples(
        "cme-dask transform s.zarr --model features.model --out features.zarr --dtype float32",
    ),
)
@click.argument("store")
@click.option("--model", required=True, metavar="PATH", help="Model of `cme-dask features`.")
@click.option("--out", required=True, type=output, metavar="PATH", help="Store to make (a folder).")
@chunk_option
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help="Type of the features; float32 takes half the disk space.",
)
@compute_options
@overwrite_option
@json_option
def transform(
    store: str,
    model: str,
    out: Path,
    chunk_rows: int | None,
    dtype: str,
    scheduler: str | None,
    workers: int | None,
    memory_limit: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the features of all rows in STORE (path or URL) to a new sample store.

    Its x are the features; y, weights and the row sample are the source's, so that anything that
    reads a sample store can be fitted on it. Rows stream through in one pass.
    """
    from cme_dask.jobs.features import transform_store
    from cme_dask.jobs.fitting import Compute
    from cme_dask.report import tables

    result = transform_store(
        store,
        model,
        out,
        chunk_rows=chunk_rows,
        dtype=dtype,
        compute=Compute(scheduler, workers, memory_limit),
        overwrite=overwrite,
    )
    tables.show(result, tables.transform_tables(result), as_json)


@cli.command(
    short_help="Conditional means and probabilities of a model.",
    epilog=_examples(
        'cme-dask expect m.zarr --given TEMP=20,DEWP=5 --of "PM2.5 > 75"',
        "cme-dask expect m.zarr --points weather.csv --json",
    ),
)
@click.argument("model")
@click.option(
    "--given", multiple=True, metavar="COLUMN=NUMBER,...", help="A point, such as TEMP=20,DEWP=5."
)
@click.option(
    "--points",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CSV file of points with the column names in its header.",
)
@click.option(
    "--of", "functions", multiple=True, help="Column or event; repeatable.  [default: all]"
)
@click.option("--reverse", is_flag=True, help="E[f(x) | y] instead of E[f(y) | x].")
@click.option("--std/--no-std", default=True, help="Standard errors.  [default: with]")
@json_option
def expect(
    model: str,
    given: tuple[str, ...],
    points: Path | None,
    functions: tuple[str, ...],
    reverse: bool,
    std: bool,
    as_json: bool,
) -> None:
    """Conditional means and probabilities E[f | x] of a saved MODEL, with standard errors."""
    from cme_dask.jobs.query import answer
    from cme_dask.report import tables

    result = answer(model, given, points, functions, reverse=reverse, std=std)
    tables.show(result, tables.expectation_tables(result), as_json)


@cli.command(
    short_help="Tell what is in a sample store or a model.",
    epilog=_examples(
        "cme-dask info m.zarr",
    ),
)
@click.argument("path")
@json_option
def info(path: str, as_json: bool) -> None:
    """Tell what is in PATH, a sample store or a model."""
    from cme_dask.jobs.describe import describe
    from cme_dask.report import tables

    result = describe(path)
    kind = tables.store_tables if result["kind"] == "sample" else tables.model_tables
    tables.show(result, kind(result), as_json)


@cli.command(
    short_help="Run a job file: get a sample, fit, report.",
    epilog=_examples(
        "cme-dask run pipelines/air_quality.toml --data ~/air --set fit.tol=1e-4",
    ),
)
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the input files.  [default: the job file's]",
)
@click.option(
    "--out",
    type=output,
    metavar="PATH",
    help="Folder of the outputs.  [default: ./ and the job's name]",
)
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key: fit.tol=1e-4."
)
@compute_options
@overwrite_option
@json_option
def run(
    job: Path,
    data: Path | None,
    out: Path | None,
    changes: tuple[str, ...],
    scheduler: str | None,
    workers: int | None,
    memory_limit: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run a JOB file (TOML): get a sample, fit, and report beside the nearest rows.

    Two jobs come with cme_dask and run by name: air_quality and normal3.
    """
    from cme_dask.jobs.fitting import Compute
    from cme_dask.jobs.runner import job_tables, run_job
    from cme_dask.jobs.schema import read_job
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines

    with ProgressLines() as progress:
        result = run_job(
            read_job(job, changes),
            data or job.parent,
            out or Path(job.stem),
            compute=Compute(scheduler, workers, memory_limit),
            overwrite=overwrite,
            progress=progress,
        )
    tables.show(result, job_tables(result), as_json)


@cli.command(
    epilog=_examples(
        "cme-dask demo --rows 1e6",
    ),
)
@click.option("--rows", type=count, default=10**7, show_default="1e7", help="Rows of the sample.")
@click.option(
    "--out",
    type=output,
    metavar="PATH",
    default=Path("demo"),
    show_default="./demo",
    help="Folder of the outputs.",
)
@click.option(
    "--picture",
    type=output,
    metavar="PATH",
    help="PNG file to draw.  [default: demo.png in the folder, if matplotlib is installed]",
)
@compute_options
@json_option
def demo(
    rows: int,
    out: Path,
    picture: Path | None,
    scheduler: str | None,
    workers: int | None,
    memory_limit: str | None,
    as_json: bool,
) -> None:
    """Fit ten million rows of a known law and compare with the truth."""
    from cme_dask.jobs.demo import demo_tables, run_demo
    from cme_dask.jobs.fitting import Compute
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines

    with ProgressLines() as progress:
        result = run_demo(
            rows, out, picture, compute=Compute(scheduler, workers, memory_limit), progress=progress
        )
    tables.show(result, demo_tables(result), as_json)


@cli.command(
    short_help="Measure fits beside the machine's limits and beside peers.",
    epilog=_examples(
        "cme-dask bench --out bench",
        "cme-dask bench --case fmca --rows 1e6 --tols 1e-4,1e-6 --repeats 5",
    ),
)
@click.option(
    "--case",
    "cases",
    type=click.Choice(CASE_NAMES),
    multiple=True,
    help="What to measure; repeatable.  [default: all]",
)
@click.option(
    "--full", is_flag=True, help="Sizes of the published figures (hours), not of a few minutes."
)
@click.option("--rows", type=count, help="Rows, such as 1000000, 1e6 or 1M.  [default: by case]")
@click.option("--ranks", type=counts, help="Ranks, such as 100,400.  [default: by case]")
@click.option("--tols", type=numbers, help="Tolerances of the case fmca.  [default: by case]")
@click.option(
    "--repeats",
    type=click.IntRange(1),
    help="Runs of each measurement.  [default: 3, with --full 5]",
)
@click.option("--workers", type=click.IntRange(1), help="Threads.  [default: one per core]")
@click.option(
    "--out",
    type=output,
    metavar="PATH",
    help="Folder for bench.json and bench.png; stores lie there meanwhile.  [default: none]",
)
@overwrite_option
@json_option
def bench(
    cases: tuple[str, ...],
    full: bool,
    rows: int | None,
    ranks: tuple[int, ...] | None,
    tols: tuple[float, ...] | None,
    repeats: int | None,
    workers: int | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Measure fits beside what the machine can do and beside other packages.

    The cases: machine (rates), fmca (FMCA's pivoted Cholesky), pass (joint fits from a store beside
    the bare pass, threads beside processes), random (randomly pivoted Cholesky), ridge (Nystroem
    features and ridge regression), sweep (one thing changed at a time). Each measurement runs in a
    fresh process, rivals in turns.
    """
    from cme_dask.bench.run import Options, run_bench
    from cme_dask.bench.tables import bench_tables
    from cme_dask.report import tables
    from cme_dask.report.progress import ProgressLines

    options = Options(cases, full, rows, ranks, tols, repeats, workers)
    with ProgressLines() as progress:
        result = run_bench(options, out, overwrite=overwrite, progress=progress)
    tables.show(result, bench_tables(result), as_json)
