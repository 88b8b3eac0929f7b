"""The study of classes with learned kernels: table 1 of Hsu, Nock and Ramos, and its peers."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.multiclass_methods import (
    BINS,
    DATA_SETS,
    FOLDS,
    METHODS,
    PROCESS_ROWS,
    Judge,
    cell,
    file_of,
    table,
    verdicts,
)
from benchmarks.multiclass_page import LEARNED, learned, multiclass_page, multiclass_picture
from benchmarks.run import write_result
from benchmarks.study import SCHEMA_VERSION, StudyOptions, judge_all
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import one_blas_thread

Result = dict[str, Any]

OUTPUTS = ("multiclass.json", "multiclass.png", "multiclass.md")


@dataclass(frozen=True)
class MulticlassOptions(StudyOptions):
    """What to study; ``data`` is the folder of the tables.

    Attributes
    ----------
    data
        Folder of the files as the UCI repository publishes them.
    """

    scenarios: tuple[str, ...] = DATA_SETS
    seeds: int = FOLDS
    data: Path | None = None
    known = DATA_SETS


def run_multiclass(
    options: MulticlassOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Judge all methods on all folds; write JSON, picture and page into the folder ``out``, if any.

    Data sets of an earlier run in that folder that are not studied again are kept, so that a study
    may be made piece by piece.
    """
    if options.data is None:
        raise DataError("give the folder of the tables by --data")
    files = [file_of(options.data, name) for name in dict.fromkeys((*options.scenarios, *LEARNED))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise DataError(
            f"{options.data} lacks {', '.join(missing)}: --data is the folder of the tables, "
            f"which the picture needs {' and '.join(LEARNED)} of"
        )
    begin, earlier = time.time(), Path() if out is None else out / OUTPUTS[0]
    cells: dict[str, Result] = {}
    seconds = 0.0
    if out is not None:
        if earlier.exists() and overwrite:
            before = json.loads(earlier.read_text(encoding="utf-8"))
            seconds = before["seconds"]
            cells = {each["scenario"]: each for each in before["cells"]}
        prepare_folder(out, OUTPUTS, overwrite)
    data, judge = options.data, Judge(options.data)
    sizes = {name: len(table(data, name)[1]) for name in options.scenarios}
    tasks = [
        (f"{name}/{method}", size, fold)
        for name, size in sizes.items()
        for method in METHODS
        for fold in range(options.seeds)
    ]
    aside = None if out is None else out / "multiclass-folds.jsonl"
    values = judge_all(judge, tasks, options.workers, progress, aside)
    for name, size in sizes.items():
        folds = {
            method: [values[f"{name}/{method}", size, k]["figures"] for k in range(options.seeds)]
            for method in METHODS
        }
        cells[name] = cell(name, size, folds)
    with one_blas_thread():
        lessons = learned(data)
    judged = [cells[name] for name in DATA_SETS if name in cells]
    result: Result = {
        "kind": "multiclass",
        "schema_version": SCHEMA_VERSION,
        "seconds": seconds + time.time() - begin,
        "machine": describe_machine(),
        "settings": {"seeds": options.seeds, "bins": BINS, "process_rows": PROCESS_ROWS},
        "cells": judged,
        "verdicts": verdicts(judged),
        "learned": lessons,
        "files": [],
    }
    if out is not None:
        pages = {OUTPUTS[2]: multiclass_page}
        write_result(result, out, OUTPUTS[:2], multiclass_picture, progress, pages)
        if aside is not None:
            aside.unlink(missing_ok=True)
    return result
