"""Classes with a kernel learned by the Rademacher bound, from stores, beside gradient boosting.

The law is known: ten standard normal columns, of which three matter, and twenty classes whose
log-probabilities are smooth functions of these three. So the least possible log loss is known, too.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from benchmarks.measure import Ratio, Term
from cme_dask.data.columns import Columns
from cme_dask.data.writer import writing_sample
from cme_dask.errors import RankWarning
from cme_dask.estimators.multiclass import MulticlassEmbedding
from cme_dask.passes.sources import open_sample

Array = Any
Result = dict[str, Any]

COLUMNS, CLASSES = 10, 20
SCALES = (0.8, 1.2, 2.0)
"""Length scales of the scores of the classes in the columns that matter."""

BOOSTING_ITERATIONS = 100
"""Of gradient boosting, with a tree for each class; scikit-learn's default."""

_HEIGHT = 3.0  # standard deviation of the scores
_WAVES = 100
_BATCH = 1 << 17
_LAW_SEED, _TEST_SEED = 20_180_910, 1
_TEST_ROWS = 100_000
_NAMES = tuple(f"class {i:02}" for i in range(CLASSES))


@dataclass(frozen=True)
class ClassLaw:
    """Rows x, standard normal, and labels of given probabilities.

    Scores are sums of cosines of random frequencies: Gaussian processes, nearly, of these scales.
    """

    @cached_property
    def _waves(self) -> tuple[Array, Array, Array]:
        rng = np.random.default_rng(_LAW_SEED)
        frequencies = rng.normal(size=(len(SCALES), _WAVES)) / np.array(SCALES)[:, None]
        heights = rng.normal(size=(_WAVES, CLASSES)) * _HEIGHT * np.sqrt(2.0 / _WAVES)
        return frequencies, rng.uniform(0.0, 2.0 * np.pi, _WAVES), heights

    def probabilities(self, x: Array) -> Array:
        """P(class | x), shape (n, 20)."""
        frequencies, phases, heights = self._waves
        waves = np.cos(x[:, : len(SCALES)] @ frequencies + phases)
        return np.asarray(softmax(waves @ heights, axis=1))

    def batches(self, n: int, seed: int = 0) -> Iterator[tuple[Array, Array]]:
        """Rows x and codes of labels, shapes (b, 10) and (b,); the first of more rows are these."""
        for number, start in enumerate(range(0, n, _BATCH)):
            rng = np.random.default_rng([seed, number])
            x = rng.normal(size=(_BATCH, COLUMNS))
            below = rng.uniform(size=(_BATCH, 1)) > np.cumsum(self.probabilities(x), axis=1)
            here = slice(min(_BATCH, n - start))
            yield x[here], np.minimum(below.sum(axis=1), CLASSES - 1)[here].astype(np.float64)


def write_classes(path: Path, n: int, seed: int = 0) -> None:
    """Rows of the law in a sample store with one categorical y."""
    columns = (
        Columns.default("x", COLUMNS),
        Columns(("label",), {}, {"label": _NAMES}),
    )
    with writing_sample(path, columns, expected_rows=n, seed=seed) as writer:
        for x, codes in ClassLaw().batches(n, seed):
            writer.append(x, codes[:, None])


def judged(predict_proba: Callable[[Array], Array]) -> Result:
    """Log loss and accuracy on test rows, and the log loss of the true probabilities there."""
    law, sums = ClassLaw(), np.zeros(3)
    for x, codes in law.batches(_TEST_ROWS, _TEST_SEED):
        own = np.arange(len(x)), codes.astype(np.int64)
        shares = predict_proba(x)
        losses = -np.log(np.maximum(shares[own], 1e-15)), -np.log(law.probabilities(x)[own])
        sums += *(loss.sum() for loss in losses), (shares.argmax(axis=1) == codes).sum()
    loss, least, hits = (sums / _TEST_ROWS).tolist()
    return {
        "log_loss": loss,
        "least_log_loss": least,
        "excess": loss - least,
        "accuracy": hits,
    }


@dataclass(frozen=True)
class MulticlassFit:
    """A fit from a store with everything learned.

    Parameters
    ----------
    store
        Path.
    workers
        Threads.
    scheduler
        ``threads`` or ``processes``.
    checkpoint
        Folder of a run that may be interrupted, if any.
    """

    store: str
    workers: int
    scheduler: str = "threads"
    checkpoint: str | None = None

    def prepare(self) -> Callable[[], Callable[[], Result]]:
        """Open the store."""
        sample = open_sample(self.store)

        def run() -> Callable[[], Result]:
            used, steps = time.process_time(), []

            def progress(event: Any) -> None:
                if getattr(event.detail, "stage", None) == "learning":
                    steps.append(time.perf_counter())

            begin = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RankWarning)
                fit = MulticlassEmbedding(random_state=0).fit(
                    sample,
                    scheduler=self.scheduler,
                    workers=self.workers,
                    progress=progress,
                    checkpoint=self.checkpoint,
                )
            cpu = time.process_time() - used

            def describe() -> Result:
                report, learned = fit.report_, fit.search_
                return {
                    "cpu_seconds": cpu,
                    "pass_seconds": report.pass_seconds,
                    "learning_seconds": learned.seconds,
                    "steps": learned.steps,
                    "first_steps_after": steps[0] - begin if steps else None,
                    "rows": report.rows,
                    "resumed_strips": report.resumed_strips,
                    "strips": report.strips,
                    "passes": fit.n_passes_,
                    "ranks": [fit.basis_x_.rank, fit.basis_y_.rank],
                    "trace_error": fit.basis_x_.trace_error,
                    "reg": fit.reg_,
                    "length_scales": [float(v) for v in learned.kernel.parameters],
                    "predicted_bytes": report.memory.predicted,
                    **judged(fit.predict_proba),
                }

            return describe

        return run


@dataclass(frozen=True)
class BoostingFit:
    """scikit-learn's histogram gradient boosting on the rows of a store, in memory.

    Parameters
    ----------
    store
        Path.
    rows
        So many of the first ones.
    iterations
        Of boosting.
    """

    store: str
    rows: int
    iterations: int

    def prepare(self) -> Callable[[], Callable[[], Result]]:
        """Read the rows."""
        from sklearn.ensemble import HistGradientBoostingClassifier

        sample = open_sample(self.store)
        x, codes = (source.read(0, self.rows) for source in sample.sources)
        model = HistGradientBoostingClassifier(
            max_iter=self.iterations, early_stopping=False, random_state=0
        )

        def run() -> Callable[[], Result]:
            used = time.process_time()
            model.fit(x, codes[:, 0])
            cpu = time.process_time() - used
            seen = model.classes_.astype(np.int64)

            def predict_proba(points: Array) -> Array:
                shares = np.zeros((len(points), CLASSES))
                shares[:, seen] = model.predict_proba(points)
                return shares

            return lambda: {"cpu_seconds": cpu, "rows": len(x), **judged(predict_proba)}

        return run


def multiclass_case(bench: Any, size: Any) -> None:
    """A fit of all rows beside one of a tenth of them, and beside gradient boosting in memory."""
    at = f"multiclass/{size.rows:,} rows"
    stores = {n: str(bench.folder / f"classes-{n}.zarr") for n in (size.rows, size.rows // 10)}
    for n, store in stores.items():
        write_classes(Path(store), n)
    (whole, all_rows), (tenth, few) = stores.items()
    fit, boosting = f"{at}/fit", f"{at}/gradient boosting"
    fit_few, boosting_few = f"{fit}, a tenth", f"{boosting}, a tenth"
    jobs = {
        fit: MulticlassFit(all_rows, bench.workers),
        fit_few: MulticlassFit(few, bench.workers),
        boosting: BoostingFit(all_rows, whole, BOOSTING_ITERATIONS),
        boosting_few: BoostingFit(few, tenth, BOOSTING_ITERATIONS),
    }
    bench.measure(jobs, peers=(boosting, boosting_few))
    least = [Term(fit, "least_log_loss")]
    bench.compare(at, "log loss, all rows / a tenth", fit, fit_few, "log_loss", at_most=1.01)
    bench.ratios.append(Ratio(at, "log loss, fit / truth", [Term(fit, "log_loss")], least))
    for ours, theirs, rows in ((fit, boosting, ""), (fit_few, boosting_few, ", a tenth")):
        for name, quantity in (("log loss", "log_loss"), ("CPU time", "cpu_seconds")):
            bench.compare(at, f"{name}, gradient boosting / fit{rows}", theirs, ours, quantity)
    bench.compare(at, "memory, gradient boosting / fit", boosting, fit, "peak_bytes")
    memory = [Term(fit, "peak_bytes")], [Term(number=2e9)]
    bench.ratios.append(Ratio(at, "memory of the fit / 2 GB", *memory, at_most=1.0))
