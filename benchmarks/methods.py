"""Studies that judge several methods on the same draws or splits, each in a task of its own."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.machine import describe_machine
from benchmarks.run import write_result
from benchmarks.study import SCHEMA_VERSION, judge_all
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.estimators.peers import chosen_methods

Result = dict[str, Any]
Judge = Callable[[str, int, int], Result]
"""Figures of ``scenario/method``, of so many rows, for one draw or split."""


class MethodOptions(Protocol):
    """What a study of methods asks of its options."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of ``cme_dask.estimators.peers.METHODS``."""

    @property
    def workers(self) -> int | None:
        """Processes; default one per core."""

    def cells(self) -> Sequence[tuple[str, int, int]]:
        """Scenario, rows, and number of draws or splits of each cell of the study."""

    def judge(self) -> Judge:
        """A function that processes can import."""

    def to_dict(self) -> Result:
        """The settings in the JSON form."""


@dataclass(frozen=True)
class MethodStudy:
    """A study whose tasks are methods, on each draw or split of each scenario.

    Attributes
    ----------
    name
        Of its files, ``{name}.json`` and ``{name}.png``.
    options
        What can be chosen: a class of ``MethodOptions``.
    summary
        From the figures of one method or several, by draws, to the JSON form of a cell.
    picture, tables
        Made from the JSON form.
    """

    name: str
    options: Callable[..., Any]
    summary: Callable[[str, int, dict[str, list[Result]]], Result]
    picture: Callable[[Result, Path], None]
    tables: Callable[[Result], Iterable[Any]]

    def run(
        self, options: MethodOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
    ) -> Result:
        """The JSON form; its files are written into the folder ``out``, if any.

        With a folder, an interrupted study goes on after the methods and draws that have ended.
        Methods whose package is missing are left out.
        """
        files = f"{self.name}.json", f"{self.name}.png"
        if out is not None:
            prepare_folder(out, files, overwrite)
        present, missing = chosen_methods(options.methods)
        for sentence in missing.values():
            progress.say(sentence)
        begin, cells = time.time(), options.cells()
        tasks = [
            (f"{name}/{method.name}", rows, draw)
            for name, rows, draws in cells
            for draw in range(draws)
            for method in present
        ]
        aside = None if out is None else out / f"{self.name}-draws.jsonl"
        values = judge_all(options.judge(), tasks, options.workers, progress, aside)
        result: Result = {
            "kind": self.name,
            "schema_version": SCHEMA_VERSION,
            "seconds": time.time() - begin,
            "machine": describe_machine(),
            "settings": {**options.to_dict(), "missing": missing},
            "cells": [
                self.summary(
                    name,
                    rows,
                    {
                        method.name: [
                            values[f"{name}/{method.name}", rows, draw] for draw in range(draws)
                        ]
                        for method in present
                    },
                )
                for name, rows, draws in cells
            ],
            "files": [],
        }
        if out is not None:
            write_result(result, out, files, self.picture, progress)
        if aside is not None:
            aside.unlink(missing_ok=True)
        return result


def counted(count: int, noun: str) -> str:
    """A count with its noun, for captions."""
    return f"{count} {noun}" + ("s" if count > 1 else "")
