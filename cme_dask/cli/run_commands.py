"""The commands run and demo: their options."""

from pathlib import Path
from typing import Any

import click

from cme_dask.cli.app import cli
from cme_dask.cli.options import (
    Shown,
    checkpoint_options,
    compute_options,
    device_options,
    examples,
    json_option,
    out_option,
    overwrite_option,
)
from cme_dask.cli.values import count, output, output_folder


@cli.command(
    short_help="Run a job file: make a sample, fit it, report.",
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
@out_option("Folder of the outputs.  [default: the name of the job]", required=False, folder=True)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the job, such as fit.tol=1e-4; repeatable.",
)
@checkpoint_options
@compute_options
@device_options
@overwrite_option
@json_option
def run(
    job: Path,
    data: Path | None,
    out: Path | None,
    changes: tuple[str, ...],
    checkpoint: Any,
    compute: Any,
    overwrite: bool,
) -> Shown:
    """Run a JOB file (TOML): make a sample, fit it, score held-out rows, report.

    The jobs air_quality, pendulum and multiclass come with cme_dask and run by name.
    """
    from cme_dask.cli.progress import ProgressLines
    from cme_dask.cli.runner import job_tables, run_job
    from cme_dask.cli.schema import read_job

    described, folder = read_job(job, changes), out or Path(job.stem)
    with ProgressLines() as progress, checkpoint.continued():
        result = run_job(
            described,
            data or job.parent,
            folder,
            compute=compute,
            overwrite=overwrite,
            progress=progress,
            checkpoint=checkpoint,
        )
    return result, job_tables(result)


@cli.command(
    epilog=examples(
        "cme-dask demo --rows 1e6",
    ),
)
@click.option("--rows", type=count, default=10**7, help="Rows of the sample.  [default: 1e7]")
@click.option(
    "--out",
    type=output_folder,
    metavar="PATH",
    default=Path("demo"),
    help="Folder of the outputs.  [default: demo]",
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
) -> Shown:
    """Fit ten million rows of a known law and compare with the truth."""
    from cme_dask.cli.demo import demo_tables, run_demo
    from cme_dask.cli.progress import ProgressLines

    with ProgressLines() as progress:
        result = run_demo(rows, out, picture, compute=compute, progress=progress)
    return result, demo_tables(result)
