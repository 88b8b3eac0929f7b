"""Commands that run whole jobs, and the demo."""

from pathlib import Path
from typing import Any

import click

from cme_dask.bench import CASE_NAMES
from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    compute_options,
    count,
    counts,
    examples,
    json_option,
    numbers,
    output,
    overwrite_option,
)


@cli.command(
    short_help="Run a job file: get a sample, fit, report.",
    epilog=examples(
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
    compute: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Run a JOB file (TOML): get a sample, fit, score held-out rows, report; or a study.

    Two jobs come with cme_dask and run by name: air_quality and normal3.
    """
    from cme_dask.cli import tables
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.cli.runner import job_tables, run_job
    from cme_dask.cli.schema import read_job

    asked, folder = read_job(job, changes), out or Path(job.stem)
    with ProgressLines() as progress:
        if asked.study is not None:
            from cme_dask.bench.study import StudyOptions, run_study, study_tables

            study = asked.study
            options = StudyOptions(
                tuple(study.scenarios), tuple(study.rows), study.seeds, compute.workers
            )
            result = run_study(options, folder, overwrite=overwrite, progress=progress)
            tables.show(result, study_tables(result), as_json)
            return
        if asked.classification is not None:
            from cme_dask.bench.classification import (
                ClassificationOptions,
                classification_tables,
                run_classification,
            )

            wanted = asked.classification
            choices = ClassificationOptions(
                tuple(wanted.scenarios), tuple(wanted.rows), wanted.seeds, compute.workers
            )
            result = run_classification(choices, folder, overwrite=overwrite, progress=progress)
            tables.show(result, classification_tables(result), as_json)
            return
        result = run_job(
            asked,
            data or job.parent,
            folder,
            compute=compute,
            overwrite=overwrite,
            progress=progress,
        )
    tables.show(result, job_tables(result), as_json)


@cli.command(
    epilog=examples(
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
    compute: Any,
    as_json: bool,
) -> None:
    """Fit ten million rows of a known law and compare with the truth."""
    from cme_dask.cli import tables
    from cme_dask.cli.demo import demo_tables, run_demo
    from cme_dask.cli.progress import ProgressLines

    with ProgressLines() as progress:
        result = run_demo(rows, out, picture, compute=compute, progress=progress)
    tables.show(result, demo_tables(result), as_json)


@cli.command(
    short_help="Measure fits beside the machine's limits and beside peers.",
    epilog=examples(
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
@click.option(
    "--dir",
    "stores",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder for the store of the case large, which is kept and used again.",
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
    stores: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Measure fits beside what the machine can do and beside other packages.

    The cases: machine (rates), fmca (FMCA's pivoted Cholesky), pass (joint fits from a store beside
    the bare pass, threads beside processes), random (randomly pivoted Cholesky), ridge (Nystroem
    features and ridge regression), sweep (one thing changed at a time), programs (certified
    programs: closed form, Clarabel, OSQP), ingest (a CSV file into a store, and pyarrow's read
    of it), tuning (a fit that learns its kernels), coverage (how often intervals of conditional
    expectations hold the truth), queries (a saved model's expectations and quantiles), cluster
    (workers beside threads, beside independent processes, and on a slow network), large (rows 20
    times larger than the workers' memory). Each measurement runs in a fresh process, rivals in
    turns.
    """
    from cme_dask.bench.report import bench_tables
    from cme_dask.bench.run import Options, run_bench
    from cme_dask.cli import tables
    from cme_dask.cli.progress import ProgressLines

    options = Options(cases, full, rows, ranks, tols, repeats, workers, stores)
    with ProgressLines() as progress:
        result = run_bench(options, out, overwrite=overwrite, progress=progress)
    tables.show(result, bench_tables(result), as_json)


@cli.command(
    short_help="Compare the models of conditional laws where the truth is known.",
    epilog=examples(
        "cme-dask study --out study",
        "cme-dask study --scenario strong --rows 1000 --seeds 5",
    ),
)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    help="low, medium, high, strong, bimodal or skewed; repeatable.  [default: all]",
)
@click.option(
    "--rows", "sizes", type=count, multiple=True, help="Training rows.  [default: 200, 1000, 5000]"
)
@click.option("--seeds", type=click.IntRange(1), default=20, show_default=True, help="Draws each.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option(
    "--out",
    type=output,
    metavar="PATH",
    help="Folder for study.json, study.png, study.md.  [default: none]",
)
@overwrite_option
@json_option
def study(
    scenarios: tuple[str, ...],
    sizes: tuple[int, ...],
    seeds: int,
    workers: int | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Judge every model of a conditional law against the truth: means and standard errors.

    Error (43), CRPS, least probability, |E[1|x] - 1| and held-out loss of the models none and
    normalized (signed, clipped, projected), certified, pointwise, coupling and the traditional
    embedding, with scales and ridge by the held-out joint loss over a grid; and of the default,
    a fit without arguments.
    """
    from cme_dask.bench.study import ROWS, SCENARIO_NAMES, StudyOptions, run_study, study_tables
    from cme_dask.cli import tables
    from cme_dask.cli.progress import ProgressLines

    options = StudyOptions(scenarios or SCENARIO_NAMES, sizes or ROWS, seeds, workers)
    with ProgressLines() as progress:
        result = run_study(options, out, overwrite=overwrite, progress=progress)
    tables.show(result, study_tables(result), as_json)
