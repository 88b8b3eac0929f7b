"""``compare``: our law of a number beside those of other methods, on the same splits and scores."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from threadpoolctl import threadpool_limits

from cme_dask import __version__
from cme_dask.config import LEVELS
from cme_dask.data.atomic import disk_errors, sync
from cme_dask.data.sample import Sample
from cme_dask.data.sources import ArraySource, RowSource
from cme_dask.errors import CmeDaskError, DataError, ResourceError, option
from cme_dask.estimators.peers import Method, Training, chosen_methods
from cme_dask.passes.checkpoint import about_run
from cme_dask.passes.driver import RunOptions
from cme_dask.passes.fit import sample_rows
from cme_dask.passes.losses import Law
from cme_dask.passes.scores import score_pass
from cme_dask.passes.sources import open_sample

Array = Any
Scores = dict[str, float | None]

LEVEL = 0.9
"""Probability of the intervals whose coverage and width are compared."""

SCORES = {
    "crps": "CRPS",
    "log_score": "log score",
    "coverage": f"coverage of {LEVEL:.0%}",
    "width": f"width of {LEVEL:.0%}",
    "pinball": "pinball loss",
    "rmse": "RMSE",
    "fit_seconds": "seconds of the fit",
    "answer_seconds": "seconds of the answers",
    "cpu_seconds": "CPU seconds",
}
"""What is compared, and what tables call it."""

MAX_SEED = 2**31 - 1
"""Largest seed: other packages take no larger ones."""

ROWS = 100_000
"""Training rows of methods that hold them in memory, at most."""

_SCHEMA_VERSION = 1
_PROBED = 4096  # rows by which a resumed comparison knows its table
_SHARE = 0.5  # of the free memory that rows may take which a list of row numbers selects


# One method on one split


def judge(method: Method, training: Training, held_out: Sample) -> Scores:
    """Fit a method, and score its laws on rows held out, in one pass over them.

    Parameters
    ----------
    method
        Which one.
    training
        Its rows.
    held_out
        Others, with the same columns.

    Returns
    -------
    scores : by the names of ``SCORES``; a log score of None where there is no density

    Raises
    ------
    DataError
        If the method fails; the message names it.
    """
    (target,) = training.sample.columns[1].names
    place = "synchronous" if training.threads == 1 else "threads"
    executor = RunOptions(place, training.threads).executor()
    begin, cpu = time.perf_counter(), time.process_time()
    with threadpool_limits(training.threads):
        try:
            answers = method.fit(training)
        except CmeDaskError:
            raise
        except Exception as error:
            raise DataError(
                f"{method.name} failed: {type(error).__name__}: {error}; leave it out by naming "
                f"the others ({option('methods')})"
            ) from error
        fitted = time.perf_counter()
        law = Law(
            answers,
            level=LEVEL,
            cells=answers.cells,
            targets=(target,),
            levels=LEVELS,
            log_score=method.has_density,
        )
        result = score_pass(held_out, {}, executor, laws={method.name: law})
    end, name = time.perf_counter(), method.name
    return {
        "crps": result.crps[name].value,
        "log_score": result.log_score[name].value if method.has_density else None,
        "coverage": result.coverage[name][target].value,
        "width": result.width[name][target].value,
        "pinball": float(np.mean([loss.value for loss in result.pinball[name][target].values()])),
        "rmse": float(np.sqrt(result.scores[name][target].mse.value)),
        "fit_seconds": fitted - begin,
        "answer_seconds": end - fitted,
        "cpu_seconds": time.process_time() - cpu,
    }


def training_rows(rest: Sample, rows: int, threads: int, seed: int) -> Training:
    """The training part of a split, with at most so many random rows of it in memory."""
    place = "synchronous" if threads == 1 else "threads"
    whole = replace(rest, row_sample=None)  # which may be too small
    drawn, _ = sample_rows(whole, rows, seed, RunOptions(place, threads).executor())
    return Training(rest, drawn, threads, seed)


# The splits


def rows_at(sample: Sample, index: Array) -> Sample:
    """Some rows of a sample, in memory, in the order of their numbers (k,)."""

    def taken(source: RowSource) -> ArraySource:
        return ArraySource(source.read(0, sample.n_rows)[index])

    beside = {"weights": sample.weights, "group": sample.group, "time": sample.time}
    chosen: dict[str, Any] = {
        role: None if source is None else taken(source) for role, source in beside.items()
    }
    return replace(sample, sources=tuple(map(taken, sample.sources)), row_sample=None, **chosen)


def listed_split(sample: Sample, test_rows: Array) -> tuple[Sample, Sample]:
    """The other rows, and those of these numbers (k,); both in memory.

    Raises
    ------
    DataError
        If these are no different numbers of rows, or all of them.
    ResourceError
        If the rows take more than half of the free memory.
    """
    index, n = np.asarray(test_rows), sample.n_rows
    whole = index.ndim == 1 and index.size > 0 and index.dtype.kind in "iu"
    if not whole or index.min() < 0 or index.max() >= n or len(np.unique(index)) != len(index):
        raise DataError(
            f"test rows are different row numbers from 0 to {n - 1:,}, got {_shown(index)}"
        )
    if len(index) > n - 2:
        raise DataError(f"{len(index):,} test rows of {n:,} leave fewer than 2 rows to fit on")
    size = 8 * n * sum(source.shape[1] for source in sample.sources)
    if size > _SHARE * psutil.virtual_memory().available:
        raise ResourceError(
            f"rows selected by number are held in memory, these take {size / 1e9:.3g} GB: use "
            f"random splits ({option('splits')}) or folds ({option('folds')}), which stream"
        )
    held = np.zeros(n, dtype=bool)
    held[index] = True
    return rows_at(sample, np.flatnonzero(~held)), rows_at(sample, np.flatnonzero(held))


def _shown(index: Array) -> str:
    return f"{index.size} values of type {index.dtype}" if index.size > 5 else f"{index.tolist()}"


@dataclass(frozen=True)
class Splits:
    """Which rows are held out in turn.

    Parameters
    ----------
    count
        Number of random splits.
    hold_out
        Share of the units that each of them holds out.
    folds
        Folds instead, each held out once.
    test_rows
        Numbers of the rows to hold out instead, a list for each split.
    fold_by
        What is held out as a whole, see :meth:`Sample.fold_by`; also in the folds of our fits.
    seed
        Of the first split; the next ones add 1.
    """

    count: int = 5
    hold_out: float = 0.1
    folds: int | None = None
    test_rows: Sequence[Any] | None = None
    fold_by: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise DataError(f"splits must be an integer of at least 1, got {self.count!r}")
        if self.folds is not None and self.test_rows is not None:
            both = f"{option('folds')} and {option('test_rows')}"
            raise DataError(f"{both} both say what is held out: give one")
        if self.test_rows is not None and not len(self.test_rows):
            raise DataError("test_rows holds no split: give a list of row numbers for each")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not whole or not 0 <= self.seed <= MAX_SEED:
            raise DataError(f"seed must be an integer from 0 to {MAX_SEED}, got {self.seed!r}")

    def __len__(self) -> int:
        if self.test_rows is not None:
            return len(self.test_rows)
        return self.count if self.folds is None else self.folds

    def pairs(self, sample: Sample) -> Iterator[tuple[Sample, Sample]]:
        """The rows to fit on and those held out, for each split."""
        sample = sample if self.fold_by is None else sample.fold_by(self.fold_by)
        if self.test_rows is not None:
            yield from (listed_split(sample, index) for index in self.test_rows)
        elif self.folds is not None:
            yield from sample.k_fold(self.folds, seed=self.seed)
        else:
            for seed in range(self.seed, self.seed + self.count):
                yield sample.split(self.hold_out, seed=seed)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; of row numbers a digest."""
        own: dict[str, Any] = {"fold_by": self.fold_by or "rows", "seed": self.seed}
        if self.test_rows is not None:
            lists = [np.asarray(index).astype(np.int64).tobytes() for index in self.test_rows]
            return {**own, "listed": hashlib.sha256(b"|".join(lists)).hexdigest()}
        if self.folds is not None:
            return {**own, "folds": self.folds}
        return {**own, "splits": self.count, "hold_out": self.hold_out}


# Runs that have ended, for a comparison that is resumed


class EndedRuns:
    """Scores of methods on splits, a line of JSON each, in a file that outlives an interruption.

    Parameters
    ----------
    path
        The file; None for none.
    settings
        What all runs in the file share.
    versions
        Of packages, by method: runs with others, or without any, count as not ended.

    Raises
    ------
    DataError
        If the file is of other settings, or was written by something else.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        versions: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._path, self._runs = path, dict[tuple[str, int], Scores]()
        self._versions = versions or {}
        if path is None:
            return
        head = json.loads(json.dumps(settings))
        lines = self._lines(path)
        if not lines and path.exists() and path.stat().st_size:
            raise DataError(f"{path} is no interrupted comparison: choose another path")
        if lines and lines[0] != head:
            raise DataError(
                f"an interrupted comparison of other rows, splits or settings lies in {path}: "
                "repeat that one, or remove the file to start again"
            )
        self._runs = {
            (name, split): scores
            for name, split, scores, *written_by in lines[1:]  # by nothing in earlier files
            if written_by == [self._versions.get(name, {})]
        }
        draft = path.with_name(f"{path.name}.draft")
        with disk_errors(path):
            with draft.open("w", encoding="utf-8") as file:  # without a half line
                file.writelines(json.dumps(line) + "\n" for line in (head, *lines[1:]))
            sync(draft)
            draft.replace(path)

    @staticmethod
    def _lines(path: Path) -> list[Any]:
        result: list[Any] = []
        with contextlib.suppress(FileNotFoundError, ValueError):  # the last line may be cut
            for line in path.read_text(encoding="utf-8").splitlines():
                result.append(json.loads(line))
        return result

    def get(self, method: str, split: int) -> Scores | None:
        """The scores of a run; None if it has not ended."""
        return self._runs.get((method, split))

    def add(self, method: str, split: int, scores: Scores) -> None:
        """Those of a run that has ended."""
        self._runs[method, split] = scores
        if self._path is not None:
            with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                line = [method, split, scores, self._versions.get(method, {})]
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())


# The comparison


def summarized(
    runs: Mapping[str, Sequence[Mapping[str, float | None]]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """JSON form of the scores of methods on the same splits, by method and score.

    Each has its ``mean`` and ``std_error`` over the splits, their ``values``, and the ``excess``
    over the mean of the ``best`` method with the ``excess_error`` of the paired differences.
    Standard errors of a single split are None. The best one has the smallest score; of coverages
    the one nearest to the level.
    """
    result: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in runs}
    for score in SCORES:
        values = {
            name: np.array([run[score] for run in each], dtype=np.float64)
            for name, each in runs.items()
            if all(run.get(score) is not None for run in each)
        }
        if not values:
            continue
        aim = LEVEL if score == "coverage" else -np.inf
        far = {
            name: float(abs(v.mean() - aim)) if np.isfinite(aim) else float(v.mean())
            for name, v in values.items()
        }
        best = min(far, key=lambda name: far[name])
        for name, each in values.items():
            gaps = each - values[best]
            result[name][score] = {
                "mean": float(each.mean()),
                "std_error": standard_error(each),
                "values": each.tolist(),
                "best": best,
                "excess": float(gaps.mean()),
                "excess_error": standard_error(gaps),
            }
    return result


def standard_error(values: Array) -> float | None:
    """Of the mean of values (n,), which vary independently; None for a single one."""
    n = len(values)
    return float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None


@dataclass(frozen=True, eq=False)
class Comparison:
    """Scores of several methods on the same splits of a table.

    Parameters
    ----------
    target
        The column of y.
    unit
        Its unit, or None.
    columns
        Those of x.
    rows
        Rows of the table.
    splits
        Number of splits.
    methods : dict
        By method and score: ``mean``, ``std_error`` and ``values`` over the splits, and the
        ``excess`` over the ``best`` method with its paired ``excess_error``. Errors of a single
        split are None, and methods without a density have no ``log_score``.
    missing : dict
        Methods that could not run, and what they need.
    settings : dict
        How rows were split, how many a method held in memory at most, threads, and the versions
        of the packages.
    """

    target: str
    unit: str | None
    columns: tuple[str, ...]
    rows: int
    splits: int
    methods: dict[str, dict[str, dict[str, Any]]]
    missing: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "kind": "comparison",
            "schema_version": _SCHEMA_VERSION,
            "target": self.target,
            "unit": self.unit,
            "columns": list(self.columns),
            "rows": self.rows,
            "splits": self.splits,
            "settings": self.settings,
            "methods": self.methods,
            "missing": self.missing,
        }

    def __repr__(self) -> str:
        width = max(map(len, self.methods))
        shown = ("crps", "log_score", "coverage", "rmse", "fit_seconds")
        head = f"  {'':<{width}}" + "".join(f"  {SCORES[score]:>18}" for score in shown)
        lines = [
            f"  {name:<{width}}"
            + "".join(
                f"  {each[score]['mean']:>18.4g}" if score in each else f"  {'-':>18}"
                for score in shown
            )
            for name, each in self.methods.items()
        ]
        title = f"laws of {self.target!r}, {self.rows:,} rows, {self.splits} splits"
        return "\n".join([title, head, *lines, *self.missing.values()])


def compare(
    X: Any,
    Y: Any = None,
    *,
    methods: Sequence[str] | None = None,
    splits: int = 5,
    hold_out: float = 0.1,
    folds: int | None = None,
    test_rows: Sequence[Any] | None = None,
    fold_by: str | None = None,
    seed: int = 0,
    rows: int = ROWS,
    threads: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare the laws of one number by several methods on the same held-out rows.

    Every method is fitted without the rows that a split holds out, and its laws are scored on them
    in one pass. Methods that hold their rows in memory get at most ``rows`` random ones, which one
    pass gathers for each split; ``joint`` and ``joint-boosting`` stream all of them in the passes
    of their fits.

    Parameters
    ----------
    X, Y
        Rows of x and of one numeric column of y: arrays, tables, Dask arrays; or X alone, a sample
        store by path or URL, or a ``Sample``.
    methods
        Of ``"joint"``, ``"joint-boosting"``, ``"quantile-forest"``, ``"ngboost"``,
        ``"lightgbm"``, ``"hist-boosting"`` and ``"normal"``; default all. Those whose package is
        not installed are left out.
    splits, hold_out
        Number of random splits, and the share of the units that each holds out.
    folds
        So many folds instead, each held out once.
    test_rows
        Instead, a list of row numbers (from 0) for each split: the rows it holds out. All rows are
        then read into memory.
    fold_by
        What is held out as a whole: ``"rows"``, ``"group"`` or blocks of time such as ``"7d"``, see
        :meth:`Sample.fold_by`; default what the sample has.
    seed
        Of the splits and of the methods.
    rows
        Most training rows of a method that holds them in memory.
    threads
        Threads of each method; default one per core.
    checkpoint
        File for the scores of each method and split as they end. The same call with it goes on
        after an interruption, and repeats what other versions of the packages made; remove the file
        when it is needed no more.
    progress
        Called with a line for each method and split.

    Returns
    -------
    Comparison

    Raises
    ------
    DataError
        On unknown methods, a y of several columns or of labels, unusable rows or splits, a
        checkpoint of another comparison, or a method that fails.
    ResourceError
        If the memory does not suffice.

    Notes
    -----
    Scores are those of :mod:`cme_dask.metrics`; the pinball loss is the mean over the levels 0.05,
    0.5 and 0.95, and RMSE is that of the mean of the law. ``lightgbm``, ``hist-boosting`` and
    ``quantile-forest`` predict quantiles: their law is linear between these, and has no log score.
    Training rows of different splits overlap, so standard errors over splits are approximate.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(200, 2))
    >>> sorted(compare(x, x[:, 0], methods=["normal"], splits=2).methods)
    ['normal']
    """
    for name, value in (("rows", rows), ("threads", 1 if threads is None else threads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{name} must be an integer of at least 1, got {value!r}")
    present, missing = chosen_methods(methods)
    plan = Splits(splits, hold_out, folds, test_rows, fold_by, seed)
    sample = open_sample(X, Y)
    _check_target(sample)
    threads = threads or os.cpu_count() or 1
    settings: dict[str, Any] = {**plan.to_dict(), "most_rows": rows, "threads": threads}
    say = progress or (lambda line: None)
    for sentence in missing.values():
        say(sentence)
    path = None if checkpoint is None else Path(checkpoint)
    if fold_by is not None:
        sample = sample.fold_by(fold_by)
    table = None if path is None else _digest(sample)
    by_method = {method.name: versions([method]) for method in present}
    ended = EndedRuns(path, {**settings, "table": table}, by_method)
    scores: dict[str, list[Scores]] = {method.name: [] for method in present}
    for number, (rest, held_out) in enumerate(plan.pairs(sample)):
        training: Training | None = None
        for method in present:
            known = ended.get(method.name, number)
            if known is None:
                training = training or training_rows(rest, rows, threads, seed)
                known = judge(method, training, held_out)
                ended.add(method.name, number, known)
                say(
                    f"{method.name}, split {number + 1} of {len(plan)}: CRPS {known['crps']:.4g}, "
                    f"{known['cpu_seconds']:.3g} s of CPU"
                )
            scores[method.name].append(known)
    x, y = sample.columns
    (target,) = y.names
    return Comparison(
        target,
        y.units.get(target),
        x.names,
        sample.n_rows,
        len(plan),
        summarized(scores),
        missing,
        {**settings, "versions": versions(present)},
    )


def versions(methods: Sequence[Method]) -> dict[str, str]:
    """Versions of the packages of some methods, and of those that all need."""
    own = [method.package[1] for method in methods if method.package is not None]
    return {name: importlib.metadata.version(name) for name in ("numpy", "scikit-learn", *own)} | {
        "cme-dask": __version__
    }


def _check_target(sample: Sample) -> None:
    if len(sample.columns) != 2:
        raise DataError("a comparison needs rows of x and of y: give Y, or a store of both")
    y = sample.columns[1]
    if len(y.names) != 1 or y.categories:
        kind = "labels" if y.categories else f"{len(y.names)} columns ({y.listed()})"
        raise DataError(
            f"laws of one column of numbers are compared, y holds {kind}: choose one "
            f"({option('y')})"
        )


def _digest(sample: Sample) -> str:
    """Of all that a checkpoint knows of the rows, and of the first and last ones.

    Of a Dask array a checkpoint knows the name alone.
    """
    n = sample.n_rows
    parts = [repr(about_run("compare", {}, sample)["data"]).encode()]
    for start, stop in ((0, min(n, _PROBED)), (max(n - _PROBED, 0), n)):
        parts += [source.read(start, stop).tobytes() for source in sample.reads]
    return hashlib.sha256(b"|".join(parts)).hexdigest()
