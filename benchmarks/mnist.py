"""The study of MNIST: length scales of 784 pixels, and a convolutional network, by the bound."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.run import write_result
from cme_dask import MulticlassEmbedding, kernels
from cme_dask.cli.compute import prepare_folder
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.tables import grid
from cme_dask.data.store import brief
from cme_dask.errors import DataError
from cme_dask.kernels.evaluator import one_blas_thread
from cme_dask.learning.candidates import TuningProgress
from cme_dask.models.plots import BLUE, PALETTE, STYLE

Array = Any
Result = dict[str, Any]

SCENARIOS = "length scales", "network"
PUBLISHED = {"length scales": 0.9605, "network": 0.9948}
"""Test accuracies of the paper: of 5,000 images, and of all 60,000."""

OUTPUTS = ("mnist.json", "mnist.png")
FILE = "mnist.npz"
IMAGE = (28, 28)
BATCH = 1_000
"""Images of a batch of the network."""
COPIES, SHIFT = 4, 2
"""Moved copies of each image that the network learns from, too, and by how many pixels at most."""


class _Timed(MulticlassEmbedding):
    """Learning with an evaluation at every hundredth step."""

    _every = 100


@dataclass(frozen=True)
class MnistOptions:
    """What to study.

    Attributes
    ----------
    data
        Folder of ``mnist.npz``.
    scenarios
        Of ``SCENARIOS``.
    rows
        Images that the length scales are learned from.
    epochs
        Of the network: how often it sees as many images as the file has.
    """

    data: Path
    scenarios: tuple[str, ...] = SCENARIOS
    rows: tuple[int, ...] = (5_000, 60_000)
    epochs: int = 30

    def __post_init__(self) -> None:
        if not set(self.scenarios) <= set(SCENARIOS):
            raise DataError(f"scenarios must be among {', '.join(SCENARIOS)}")
        if not (self.data / FILE).exists():
            raise DataError(f"{self.data} has no {FILE}: give its folder by --data")


def run_mnist(
    options: MnistOptions, out: Path | None, *, overwrite: bool, progress: ProgressLines
) -> Result:
    """Learn, and measure accuracies on the test images; write JSON and a picture into ``out``.

    With a folder ``out``, an interrupted study goes on with the step it had come to.
    """
    if out is not None:
        prepare_folder(out, OUTPUTS, overwrite)
    begin, cells = time.time(), []
    parts: list[Path] = []  # files of scenarios that have ended, or been interrupted
    x, y, points, truth = images(options.data)
    for name in options.scenarios:
        for rows in options.rows if name == "length scales" else (len(x),):
            aside = None if out is None else out / f"{name.replace(' ', '-')}-{rows}"
            ended = None if aside is None else aside.with_suffix(".json")
            if aside is not None:
                parts += [aside.with_suffix(end) for end in (".json", ".checkpoint", ".clock")]
            if ended is not None and ended.exists():
                cells.append(json.loads(ended.read_text()))
                continue
            checkpoint = None if aside is None else aside.with_suffix(".checkpoint")
            estimator, train = estimator_of(name, rows, options.epochs), (x[:rows], y[:rows])
            if name == "network":
                train = with_copies(*train)
            cell = judged(name, estimator, train, (points, truth), checkpoint, progress)
            progress.say(f"{name}, {rows:,} images: {cell['accuracy']:.2%}")
            cells.append({"scenario": name, "rows": rows, **cell})
            if ended is not None:
                ended.write_text(json.dumps(cells[-1]))
    result = {
        "kind": "mnist",
        "schema_version": 1,
        "seconds": time.time() - begin,
        "machine": describe_machine(),
        "cells": cells,
        "files": [],
    }
    if out is not None:
        write_result(result, out, OUTPUTS, mnist_picture, progress)
        for part in parts:
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
    return result


def images(folder: Path) -> tuple[Array, Array, Array, Array]:
    """Images with pixels from 0 to 1, shape (n, 784), and digits, to learn from and to test on.

    In random order: the file may have the digits one after the other.
    """
    rng, result = np.random.default_rng(0), []
    try:
        with (folder / FILE).open("rb") as file, np.load(file) as stored:
            for part in ("train", "test"):
                x, y = stored[f"x_{part}"], stored[f"y_{part}"].astype(int)
                order = rng.permutation(len(y))
                result += [x[order].reshape(len(y), IMAGE[0] * IMAGE[1]) / 255.0, y[order]]
    except (OSError, ValueError, IndexError, KeyError, EOFError, TypeError, BadZipFile) as error:
        raise DataError(
            f"{folder / FILE} is damaged or no file of images and digits (x_train, y_train, "
            f"x_test, y_test): {brief(error)}"
        ) from error
    return tuple(result)


def with_copies(x: Array, y: Array) -> tuple[Array, Array]:
    """Images and their copies moved by a few pixels, with digits, in random order."""
    rng = np.random.default_rng(1)
    padded = np.pad(x.reshape(-1, *IMAGE), ((0, 0), (SHIFT,) * 2, (SHIFT,) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, IMAGE, axis=(1, 2))
    moves = rng.integers(0, 2 * SHIFT + 1, size=(2, COPIES, len(x)))
    moved = [windows[np.arange(len(x)), *move] for move in moves.swapaxes(0, 1)]
    order = rng.permutation((1 + COPIES) * len(x))
    every = np.concatenate([x, *(each.reshape(x.shape) for each in moved)])
    return every[order], np.tile(y, 1 + COPIES)[order]


def estimator_of(name: str, rows: int, epochs: int) -> MulticlassEmbedding:
    """The estimator of a scenario, for so many images."""
    common: dict[str, Any] = {"reg": np.logspace(-8, -1, 15), "random_state": 0}
    if name == "length scales":
        return _Timed(
            kernel_x=kernels.Gaussian((8.0,) * (IMAGE[0] * IMAGE[1])),
            batch_size=1_200,
            max_iter=300,
            n_iter_no_change=300,
            learning_rate=0.03,
            max_rank=4_000,
            n_folds=5,
            tol=1e-6,
            **common,
        )
    import optax

    steps = epochs * -(-rows // BATCH)
    schedule = optax.warmup_cosine_decay_schedule(2e-4, 2e-3, 50, steps, 1e-6)
    return _Timed(
        kernel_x=kernels.Network((256, 64), image=IMAGE, filters=(32, 64), dropout=0.25),
        batch_size=BATCH,
        max_iter=steps,
        n_iter_no_change=steps,
        optimizer=optax.adam(schedule),
        complexity_weight=1e-3,
        validation_fraction=1 / 30,
        **common,
    )


def judged(
    name: str,
    estimator: MulticlassEmbedding,
    rows: tuple[Array, Array],
    test: tuple[Array, Array],
    checkpoint: Path | None,
    progress: ProgressLines,
) -> Result:
    """Accuracy and log loss on the test images, times, and the history of steps."""
    aside = None if checkpoint is None else checkpoint.with_suffix(".clock")
    clock: list[list[float]] = []
    if aside is not None and aside.exists():
        clock = [json.loads(line) for line in aside.read_text().splitlines()]
    _, *former = clock[-1] if clock else (0, 0.0, 0.0)
    begin, cpu = time.perf_counter() - former[0], time.process_time() - former[1]

    def tell(event: Any) -> None:
        at = event.detail
        if isinstance(at, TuningProgress):
            clock.append([at.done, time.perf_counter() - begin, time.process_time() - cpu])
            if aside is not None:
                with aside.open("a") as lines:
                    lines.write(json.dumps(clock[-1]) + "\n")
            score = "" if at.score is None else f", log loss {at.score:.4f}"
            progress.say(f"{name}: step {at.done} of {at.most}{score}, {clock[-1][2]:.0f} s of CPU")

    with one_blas_thread():
        fit = estimator.fit(*rows, progress=tell, checkpoint=checkpoint)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        begin = time.perf_counter()
        shares = fit.predict_proba(test[0])
    kernel = fit.search_.kernel
    return {
        "accuracy": float((fit.classes_[shares.argmax(axis=1)] == test[1]).mean()),
        "log_loss": float(-np.log(shares[np.arange(len(test[1])), test[1]]).mean()),
        "published": PUBLISHED[name],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "learning_seconds": fit.search_.seconds,
        "test_images_per_second": len(test[0]) / (time.perf_counter() - begin),
        "reg": fit.reg_,
        "rank": fit.basis_x_.rank,
        "history": np.where(np.isfinite(fit.search_.history), fit.search_.history, -1.0).tolist(),
        "clock": clock,
        "length_scales": list(kernel.parameters),
    }


def mnist_tables(result: Result) -> Iterator[Any]:
    """Accuracies and times."""
    yield grid(
        "Test images of MNIST",
        (
            *("learned", "images", "functions", "accuracy", "published", "log loss"),
            *("minutes", "CPU minutes"),
        ),
        [
            (
                cell["scenario"],
                f"{cell['rows']:,}",
                f"{cell['rank']:,}",
                f"{cell['accuracy']:.2%}",
                f"{cell['published']:.2%}",
                f"{cell['log_loss']:.4f}",
                f"{cell['seconds'] / 60:.1f}",
                f"{cell['cpu_seconds'] / 60:.1f}",
            )
            for cell in result["cells"]
        ],
        "Published: length scales learned from 5,000 images, the network from 60,000. Here the "
        f"network learns from {COPIES} copies of each as well, moved by up to {SHIFT} pixels. "
        "Times are of one thread.",
    )


def mnist_picture(result: Result, path: Path) -> None:
    """Draw the learned relevance of the pixels, and objective and held-out loss by step.

    Parameters
    ----------
    result
        JSON form of a study.
    path
        PNG file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    cells = result["cells"]
    scales = [cell for cell in cells if cell["length_scales"]]
    last = list({cell["scenario"]: cell for cell in cells}.values())
    count = len(last) + len(scales[-1:])
    with rc_context(STYLE):
        figure = Figure(figsize=(4.0 * count, 3.4), layout="constrained")
        axes = list(figure.subplots(1, count, squeeze=False)[0])
        for cell in scales[-1:]:
            ax = axes.pop(0)
            each = 1.0 / np.reshape(cell["length_scales"], IMAGE)
            shown = ax.imshow(each, cmap="magma")
            figure.colorbar(shown, ax=ax, shrink=0.8)
            ax.set(title=f"1 / length scale, {cell['rows']:,} images", xticks=[], yticks=[])
        for ax, cell in zip(axes, last, strict=True):
            history = np.array(cell["history"])
            step, objective, held = history[:, 0], history[:, 1], history[:, 4]
            ax.plot(step, objective, ".", color="#bbbbbb", ms=2)
            width = max(len(step) // 50, 1)
            means = np.convolve(objective, np.ones(width) / width, mode="valid")
            ax.plot(step[width - 1 :], means, color=BLUE, label="objective on batches (13)")
            seen = held >= 0.0
            label = "log loss on images held out"
            ax.plot(step[seen], held[seen], "o-", ms=3, color=PALETTE[1], label=label)
            ax.set(
                title=f"{cell['scenario']}: accuracy {cell['accuracy']:.2%}",
                xlabel="step",
                yscale="log",
            )
            ax.legend(fontsize=8.5)
        figure.savefig(path, format="png", dpi=130)
