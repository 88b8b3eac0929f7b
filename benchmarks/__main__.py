"""The commands ``python3 run bench`` and ``python3 run study``: their options."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from benchmarks import CASE_NAMES
from cme_dask.cli.app import SentenceGroup
from cme_dask.cli.options import Shown, examples, json_option, overwrite_option
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.values import (
    columns,
    count,
    counts,
    numbers,
    output,
)
from cme_dask.errors import DataError


@click.group(
    cls=SentenceGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def cli() -> None:
    """Measure cme_dask beside other packages, and compare its models where the truth is known."""


@cli.command(
    short_help="Measure fits beside the limits of the machine and beside other packages.",
    epilog=examples(
        "python3 run bench --out bench",
        "python3 run bench --case fmca --rows 1e6 --tols 1e-4,1e-6 --repeats 5",
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
    help="Folder for bench.json and bench.png, and for temporary stores.  [default: none]",
)
@click.option(
    "--dir",
    "stores",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder for the store of the case large, which later runs use again.",
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
) -> Shown:
    """Measure fits beside what the machine can do and beside other packages.

    The cases: machine (rates), fmca (FMCA's pivoted Cholesky), pass (joint fits from a store beside
    the bare pass, threads beside processes), random (randomly pivoted Cholesky), ridge (Nystroem
    features and ridge regression), crossval (embeddings whose ridge is chosen on folds beside a
    given ridge), sweep (one parameter changed at a time), programs (certified programs: closed
    form, Clarabel, OSQP), sparse (sparse embeddings beside Clarabel), ingest (a CSV file into a
    store, and pyarrow's read of it), tuning (a fit that learns its kernels, beside one with these
    kernels), small (fits without arguments of tables of 1,000 and 10,000 rows), coverage (how often
    intervals of conditional expectations hold the truth), queries (a saved model's expectations and
    quantiles), cluster (workers beside threads, beside independent processes, and on a slow
    network), large (rows 20 times larger than the memory of the workers), multiclass (classes with
    a learned kernel beside gradient boosting in memory), sizing (passes on 1 to 8 workers, and on
    1,000 stubs of workers, beside the simulation that sizes clusters), memory (predicted and
    measured peaks of fits of twelve shapes, and limits around them), device (fits on a GPU beside
    the same on the host).
    Each measurement runs in a fresh process, and rivals take turns.
    """
    from benchmarks.report import bench_tables
    from benchmarks.run import Options, run_bench

    options = Options(cases, full, rows, ranks, tols, repeats, workers, stores)
    with ProgressLines() as progress:
        result = run_bench(options, out, overwrite=overwrite, progress=progress)
    return result, bench_tables(result)


@cli.command(
    short_help="Compare models where the truth is known.",
    epilog=examples(
        "python3 run study --out study",
        "python3 run study --scenario strong --rows 1000 --seeds 5",
        "python3 run study classification --out classification",
        "python3 run study rates --out rates",
        "python3 run study power --out power",
        "python3 run study koopman --out koopman",
        "python3 run study koopman --rows 19000 --rows 1e6 --rows 1e7 --workers 1",
        "python3 run study operators --out operators",
        "python3 run study filtering --out filtering",
        "python3 run study shift --out shift",
        "python3 run study drift --out drift",
        "python3 run study mnist --data DIR --out mnist",
        "python3 run study pendulum --out pendulum",
        "python3 run study pendulum --transitions transitions --rows 1e6",
        "python3 run study multiclass --data classification --data-set wine --out multiclass",
        "python3 run study regression --data regression --out regression",
        "python3 run study sizing --rows 1e8 --rows 1e10 --out sizing",
        "python3 run study truth --rows 2000 --seeds 1 --methods joint --out truth",
    ),
)
@click.argument(
    "subject",
    type=click.Choice(
        [
            "laws",
            "classification",
            "rates",
            "power",
            "operators",
            "filtering",
            "koopman",
            "mnist",
            "multiclass",
            "pendulum",
            "regression",
            "shift",
            "drift",
            "truth",
            "sizing",
        ]
    ),
    default="laws",
)
@click.option(
    "--scenario",
    "--data-set",
    "scenarios",
    multiple=True,
    help="low, medium, high or strong, and of laws also bimodal or skewed; repeatable.  [default: "
    "all; of classification: medium, strong; of rates: finite-rank, slow-decay, "
    "linear-gaussian; of power: "
    "independence, two-sample; of drift: no drift, shift of x, far shift of x, change of y given "
    "x; of koopman: "
    "ornstein-uhlenbeck, logistic-map; of filtering: linear, pendulum; of multiclass: banknote, "
    "ecoli, robot, segment, wine, yeast; of regression: concrete, energy, power-plant, "
    "wine-quality-red, yacht; of truth: heteroscedastic, bimodal, skewed, tails, rain, counts, "
    "bounded, jump, friedman, three-of-twenty, five]",
)
@click.option(
    "--rows",
    "sizes",
    type=count,
    multiple=True,
    help="Training rows; repeatable.  [default: 200, 1000, 5000; of classification: 100, 200, 500, "
    "1000; of rates: 500, 2000, 8000, 32000; of power: 200, 1000, 2000; of drift: 400, 2000; "
    "of operators: 2e4; of "
    "koopman: 500, 2000; of "
    "filtering: 1e3, 1e4, 1e5; of pendulum, in stores: 200, 1e3, 1e4, 1e5, 1e6; of truth: 2000, "
    "20000; of sizing: 1e8, 1e10]",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    help="Draws each.  [default: 20; of koopman and truth: 3; of filtering and pendulum: 5]",
)
@click.option(
    "--splits",
    type=click.IntRange(1, 20),
    help="Of regression: the first so many of the standard splits.  [default: 20]",
)
@click.option(
    "--methods",
    type=columns,
    help="Of regression and truth: as of `cme-dask compare`.  [default: all; of truth: joint, "
    "quantile-forest]",
)
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option(
    "--out",
    type=output,
    metavar="PATH",
    help="Folder for study.json, study.png and study.md, or for the files of classification, "
    "rates, power, operators, filtering, koopman, multiclass, pendulum, regression, "
    "shift, drift, truth or sizing.  [default: none]",
)
@click.option(
    "--transitions",
    type=output,
    metavar="DIR",
    help="Of pendulum: write no study, but transitions.parquet for the job `pendulum`, of --rows.  "
    "[default: 1e5 rows]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Of shift: folder of the air-quality table.  [default: synthetic shifts alone]  Of "
    "multiclass: folder of the six tables; iris.csv and wine.csv are always needed, for the "
    "picture.  Of mnist: folder of mnist.npz.  Of regression: folder of the folders of five "
    "tables.",
)
@overwrite_option
@json_option
def study(
    subject: str,
    scenarios: tuple[str, ...],
    sizes: tuple[int, ...],
    seeds: int | None,
    splits: int | None,
    methods: tuple[str, ...] | None,
    workers: int | None,
    out: Path | None,
    transitions: Path | None,
    data: Path | None,
    overwrite: bool,
) -> Shown:
    """Compare every model with the truth: means and standard errors over draws.

    Of laws: error (43), CRPS, least probability, |E[1|x] - 1| and held-out loss of the models none
    and normalized (signed, clipped, projected), certified, pointwise, coupling and the traditional
    embedding, with scales and ridge by the held-out joint loss over a grid; and of the default, a
    fit without arguments. Of classification: probabilities of a label by laws, embeddings and
    kernel logistic regression, figure 5 of the joint paper. Of rates: the excess risk of embeddings
    against the number of rows, and errors of the sum rule and of Bayes' rules against closed forms,
    beside the rates of theory. Of power: how often tests of
    independence and of equal laws reject, a hundred tables per draw. Of operators: what each rule
    learns, beside the truth. Of filtering: kernel Bayes filters beside Kalman's and particle
    filters, and the rates of their rules. Of koopman: eigenvalues of transfer operators beside
    known ones, and beside kooplearn's where that is installed. Of pendulum: sparse embeddings
    beside incomplete Cholesky, and policies that swing a pendulum up. Of multiclass: classifiers
    with learned kernels beside scikit-learn's on six tables, ten folds each. Of mnist: length
    scales of pixels and a convolutional network, learned by the Rademacher bound. Of shift: fits on
    rows reweighted to another law of x, and on rows as they are. Of drift: how often drift reports
    see a change, a hundred tables per draw. Of regression: the methods of `cme-dask compare` on
    five tables and their standard splits. Of truth: how far the laws of these methods are from
    eleven true ones. Of sizing: simulated seconds of a pass on 1 to 2,000 workers.
    """
    from benchmarks import (
        mnist,
        multiclass,
        multiclass_page,
        pendulum,
        pendulum_page,
        pendulum_study,
        rules,
        sizing_study,
    )
    from benchmarks.methods import MethodStudy
    from benchmarks.study import Study

    if transitions is not None:
        others = scenarios, seeds, splits, methods, workers, out, data
        if subject != "pendulum" or any(others) or len(sizes) > 1:
            raise DataError("--transitions is for pendulum, with one --rows and --overwrite alone")
        (rows,) = sizes or (100_000,)
        written = pendulum.write_transitions(transitions, rows, overwrite=overwrite)
        return written, [f"{written['file']}: {rows:,} transitions"]
    chosen = {"scenarios": scenarios, "rows": sizes, "seeds": seeds, "workers": workers}
    chosen |= {"splits": splits, "methods": methods}
    given: dict[str, Any] = {key: values for key, values in chosen.items() if values}
    if data is not None and subject not in ("shift", "mnist", "multiclass", "regression"):
        raise DataError("--data is for the studies of shift, mnist, multiclass and regression")
    if methods and subject not in ("regression", "truth"):
        raise DataError("--methods is for the studies of regression and truth")
    if splits and subject != "regression":
        raise DataError("--splits is for the study of regression")
    if subject == "regression" and (sizes or seeds):
        raise DataError("the study of regression takes its tables as they are, and --splits")
    lines: Iterable[Any]
    with ProgressLines() as progress:
        if subject == "pendulum":
            if scenarios:
                raise DataError("the study of the pendulum has no --scenario")
            result = pendulum_study.run_pendulum(
                pendulum_study.PendulumOptions(**given), out, overwrite=overwrite, progress=progress
            )
            lines = pendulum_page.pendulum_tables(result)
        elif subject == "operators":
            if scenarios or seeds or workers or len(sizes) > 1:
                raise DataError("the study of operators takes one --rows, --out and --overwrite")
            (rows,) = sizes or (rules.ROWS,)
            result = rules.run_rules(rows, out, overwrite=overwrite, progress=progress)
            lines = rules.rules_tables(result)
        elif subject == "sizing":
            if scenarios or seeds or workers:
                raise DataError("the study of sizing takes --rows, --out and --overwrite")
            result = sizing_study.run_sizing(
                sizes or sizing_study.ROWS, out, overwrite=overwrite, progress=progress
            )
            lines = sizing_study.sizing_tables(result)
        elif subject == "mnist":
            if data is None or seeds or workers:
                raise DataError("the study of mnist takes --data, and no --seeds or --workers")
            result = mnist.run_mnist(
                mnist.MnistOptions(data, **given), out, overwrite=overwrite, progress=progress
            )
            lines = mnist.mnist_tables(result)
        elif subject == "multiclass":
            if sizes or seeds:
                raise DataError("the study multiclass takes its tables as they are, in ten folds")
            result = multiclass.run_multiclass(
                multiclass.MulticlassOptions(**given, data=data),
                out,
                overwrite=overwrite,
                progress=progress,
            )
            lines = multiclass_page.multiclass_tables(result)
        else:
            module = import_module(f"benchmarks.{'study' if subject == 'laws' else subject}")
            study_of: Study | MethodStudy = module.STUDY
            if data is not None:
                given["data"] = data
            options: Any = study_of.options(**given)
            result = study_of.run(options, out, overwrite=overwrite, progress=progress)
            lines = study_of.tables(result)
    return result, lines


if __name__ == "__main__":
    cli(prog_name="python3 run")
