"""Hashes of seeded fits, to show that a change moved code and no figure.

``python -m tests.golden write FILE`` fits and writes the hashes as JSON, with the values beside
them in an ``.npz``; ``python -m tests.golden compare FILE`` fits again, names each difference with
the largest relative difference of its values, and ends with code 1 where there is one. The last
bits differ between machines, and between versions of BLAS: write and compare on the same one.

Everything is read through the public interface. ``moments_`` alone has a form of its own, of which
:func:`moment_arrays` knows.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from threadpoolctl import threadpool_limits

from cme_dask import (
    ConditionalMeanEmbedding,
    EmbeddingClassifier,
    JointClassifier,
    JointDistribution,
    KernelLogisticRegression,
    PivotedCholesky,
    Tuning,
    constraints,
    ingest,
    kernels,
    load,
    merge,
    open_sample,
)
from cme_dask.errors import RankWarning, ShardDone, ToleranceWarning

Values = dict[str, np.ndarray]

N = 12_000
POINTS_X = np.random.default_rng(1).normal(size=(40, 2))
POINTS_Y = np.random.default_rng(2).normal(size=(30, 2))
LEVELS = [0.05, 0.25, 0.5, 0.75, 0.95]
SEARCH = Tuning(rows=600, max_rank=40, evaluations=6, finalists=2, averaged=2)
FUNCTIONS = {"positive": lambda y: y[:, 0] > 0, "square": lambda y: y[:, 0] ** 2}
GAUSSIAN = {"kernel_x": kernels.Gaussian(1.0), "kernel_y": kernels.Gaussian(0.8)}


@dataclass(frozen=True)
class Place:
    """Where fits run: nothing in it may change a bit of them."""

    scheduler: str
    workers: int
    chunk_rows: int
    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``fit``."""
        return {"scheduler": self.scheduler, "workers": self.workers}

    def stored(self, *arrays: np.ndarray) -> list[zarr.Array]:
        """Rows as Zarr arrays in chunks of this place."""
        made = []
        for rows in arrays:
            path = Path(tempfile.mkdtemp(dir=self.folder)) / "rows.zarr"
            chunks = (self.chunk_rows, *rows.shape[1:])
            made.append(zarr.create_array(str(path), data=rows, chunks=chunks))
        return made


def rows(n: int = N, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X of two columns, y of two columns that depends on it, and weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    noise = rng.normal(size=(n, 2))
    y = np.column_stack([np.sin(2 * x[:, 0]), x[:, 0] * x[:, 1]]) + 0.3 * noise
    return x, y, rng.uniform(0.0, 2.0, n)


def given(**changed: Any) -> JointDistribution:
    """A joint distribution with given kernels."""
    return JointDistribution(**({**GAUSSIAN, "reg": 1e-4, "max_rank": 40} | changed))


def moment_arrays(moments: Any) -> Values:
    """The sums of a fit, fold by fold. The one place that knows the form of ``moments_``."""
    return {name: np.asarray(getattr(moments, name)) for name in ("gram", "traces", "rows")}


# What is asked of each kind of fit


def moments_of(fit: Any) -> Values:
    return {f"moments_.{name}": value for name, value in moment_arrays(fit.moments_).items()}


def basis_values(name: str, basis: Any) -> Values:
    error = np.nan if basis.trace_error is None else basis.trace_error
    return {f"{name}.ranks": np.asarray(basis.ranks), f"{name}.trace_error": np.asarray(error)}


def scales(fit: Any) -> Values:
    found = [(row.length_scale, row.deviations, row.relevance) for row in fit.length_scales_]
    return {"length_scales_": np.asarray(found)}


def expectations(model: Any, x: np.ndarray, names: tuple[str, ...] = ()) -> Values:
    mean, std = model.expect(None, x, return_std=True)
    found = {"expect": mean, "expect.std": std, "predict": model.predict(x)}
    return found | {f"expect.{name}": model.expect(name, x) for name in names}


def laws(model: Any, x: np.ndarray, y: np.ndarray, first: str = "conditional") -> Values:
    """Every query of a conditional law."""
    law = model.conditional(x)
    column = law.columns.names[0]
    found = {
        "mean": law.mean(),
        "std": law.std(),
        "cov": law.cov(),
        "quantile": law.quantile(LEVELS, column),
        "interval": np.stack(law.interval(0.9, column)),
        "cdf": law.cdf(np.linspace(-2, 2, 9), column),
        "crps": law.crps(y[:1].repeat(len(x), axis=0)),
        "probability": law.probability(f"{column} > 0.2"),
        "expect": law.expect(lambda rows: np.tanh(rows[:, 0])),
        "density_ratio": law.density_ratio(y),
        "sample": law.sample(7, random_state=3),
        "weights": law.weights(),
        "effective_support": law.effective_support(),
    }
    return {f"{first}.{name}": value for name, value in found.items()}


def joint_values(fit: Any, x: np.ndarray = POINTS_X, y: np.ndarray = POINTS_Y) -> Values:
    """All of a joint distribution."""
    names = tuple(name for name in FUNCTIONS if name in fit.model_.function_names[1])
    return {
        **moments_of(fit),
        "coef_": fit.coef_,
        "n_passes_": np.asarray(fit.n_passes_),
        **basis_values("basis_x_", fit.basis_x_),
        **basis_values("basis_y_", fit.basis_y_),
        **scales(fit),
        **{f"held_out.{i}": each.error for i, each in enumerate(fit.replicates_)},
        "solution_.kkt_residual": np.asarray(fit.solution_.kkt_residual),
        **expectations(fit, x, names),
        **{f"given_y.{key}": value for key, value in expectations_of_x(fit, y).items()},
        "weights": fit.weights(x),
        "density_ratio": fit.density_ratio(x, y),
        **laws(fit, x, y),
    }


def expectations_of_x(fit: Any, y: np.ndarray) -> Values:
    mean, std = fit.expect(Y=y, return_std=True)
    law = fit.conditional(Y=y)
    return {"expect": mean, "expect.std": std, "mean": law.mean(), "weights": law.weights()}


def embedding_values(fit: Any, x: np.ndarray = POINTS_X) -> Values:
    names = tuple(name for name in FUNCTIONS if name in fit.model_.function_names)
    return {
        **moments_of(fit),
        "reg_": np.asarray(fit.reg_),
        "losses_": np.asarray(fit.losses_),
        "n_passes_": np.asarray(fit.n_passes_),
        **basis_values("basis_x_", fit.basis_x_),
        **basis_values("basis_y_", fit.basis_y_),
        **scales(fit),
        "held_out": fit.replicates_.error,
        **expectations(fit, x, names),
        "mass": fit.model_.mass(x),
        "embedding": fit.model_.embedding(x, POINTS_Y),
        "interval": np.stack(fit.expect_interval(None, x)),
    }


def loaded_values(
    fit: Any, place: Place, x: np.ndarray = POINTS_X, y: np.ndarray = POINTS_Y
) -> Values:
    """A model that was saved and loaded."""
    folder = place.folder / "model"
    fit.save(folder, overwrite=True)
    model = load(folder)
    return {f"loaded.{key}": value for key, value in laws(model, x, y).items()}


# The fits


def constrained(constraint: Any, **changed: Any) -> Callable[[Place], Values]:
    def values(place: Place) -> Values:
        x, y, _ = rows()
        fit = given(constraint=constraint, **changed)
        stored = place.stored(x, y)
        return joint_values(fit.fit(*stored, functions=FUNCTIONS_BY_TEXT, **place.options))

    return values


FUNCTIONS_BY_TEXT = ["y0 > 0"]  # callables don't reach the processes of a script


def normalized(place: Place) -> Values:
    x, y, _ = rows()
    fit = given().fit(*place.stored(x, y), functions=FUNCTIONS, **in_threads(place))
    return joint_values(fit) | loaded_values(fit, place)


def in_threads(place: Place) -> dict[str, Any]:
    """For functions that no other process can import."""
    return {"scheduler": "threads", "workers": place.workers}


def certified(place: Place) -> Values:
    found = constrained("certified")(place)
    for name, options in {
        "observed": {"bounds": "observed"},
        "paper": {"formulation": "paper"},
    }.items():
        x, y, _ = rows(4000, seed=7)
        fit = given(constraint=constraints.Certified(**options), max_rank=12)
        fit.fit(x, y, **place.options)
        found |= {f"{name}.coef_": fit.coef_, f"{name}.expect": fit.expect(None, POINTS_X)}
    return found


def weighted(place: Place) -> Values:
    x, y, w = rows(seed=3)
    x, y, w = place.stored(x, y, w)
    fit = given(pivots="greedy", span=0.5, reg_form="single")
    return joint_values(fit.fit(x, y, weights=w, **place.options))


def by_time(place: Place) -> Values:
    x, y, _ = rows(seed=4)
    times = np.cumsum(np.random.default_rng(4).exponential(600.0, N))
    sample = open_sample(*place.stored(x, y), time=times).fold_by("1d")
    train, test = sample.split(0.25)
    fit = given(n_folds=5, pivots="random").fit(train, **place.options)
    return joint_values(fit) | {"rows": np.asarray([train.n_rows, test.n_rows])}


def learned(place: Place) -> Values:
    x, y, _ = rows(500, seed=5)
    fit = JointDistribution().fit(x, y, functions=["y0 > 0"], **place.options)
    return joint_values(fit) | loaded_values(fit, place)


def located(place: Place) -> Values:
    rng = np.random.default_rng(6)
    x = rng.normal(size=(700, 1))
    y = 3 * np.sin(x) + 0.3 * rng.normal(size=x.shape) * (1 + x**2)
    fit = JointDistribution().fit(x, y, **place.options)
    assert fit.model_.about["residual"], "no location was kept"
    at, values = POINTS_X[:, :1], POINTS_Y[:, :1]
    return joint_values(fit, at, values) | loaded_values(fit, place, at, values)


def embedding_tuned(place: Place) -> Values:
    x, y, w = rows(1500, seed=8)
    fit = ConditionalMeanEmbedding(max_rank=40)
    return embedding_values(fit.fit(x, y, weights=w, functions=["y0 > 0"], **place.options))


def embedding_given(place: Place) -> Values:
    x, y, _ = rows(seed=9)
    fit = ConditionalMeanEmbedding(**GAUSSIAN, reg=1e-4, max_rank=40)
    return embedding_values(fit.fit(*place.stored(x, y), functions=FUNCTIONS, **in_threads(place)))


def features(place: Place) -> Values:
    x, _, w = rows(seed=10)
    found: Values = {}
    for basis, pivots in {"newton": "sampled", "spectral": "random"}.items():
        fit = PivotedCholesky(kernels.Matern(1.5, nu=2.5), max_rank=40, basis=basis, pivots=pivots)
        fit.fit(*place.stored(x), weights=w, **place.options)
        found |= {
            f"{basis}.pivots_": fit.pivots_,
            f"{basis}.eigenvalues_": fit.eigenvalues_,
            f"{basis}.trace_error_": np.asarray(fit.trace_error_),
            f"{basis}.transform": fit.transform(POINTS_X),
        }
    return found


def classifiers(place: Place) -> Values:
    rng = np.random.default_rng(11)
    x = rng.normal(size=(900, 2))
    signal = np.column_stack([x[:, 0], x[:, 1], -x.sum(axis=1)])
    label = np.array(["a", "b", "c"])[np.argmax(signal + rng.normal(size=signal.shape), axis=1)]
    found: Values = {}
    for fit in (
        KernelLogisticRegression(max_rank=60, reg=1e-2),
        KernelLogisticRegression(kernels.Gaussian(1.0), max_rank=60),
        JointClassifier(tuning=SEARCH),
        JointClassifier(kernel_x="median", constraint="coupling"),
        EmbeddingClassifier(max_rank=40),
    ):
        fit.fit(x, label, **place.options)
        name = f"{type(fit).__name__}.{len(found)}"
        found |= {
            f"{name}.predict_proba": fit.predict_proba(POINTS_X),
            f"{name}.predict": fit.predict(POINTS_X).astype("U"),
        }
    return found


def grown(place: Place) -> Values:
    x, y, w = rows(3000, seed=12)
    fit = given(max_rank=25)
    for start, stop in ((0, 1200), (1200, 2000), (2000, 3000)):
        part = slice(start, stop)
        fit.partial_fit(x[part], y[part], weights=w[part], **place.options)
    return joint_values(fit)


def merged(place: Place) -> Values:
    x, y, _ = rows(3000, seed=13)
    first = given(max_rank=25).fit(x[:1000], y[:1000], **place.options)
    parts = [first.model_]
    for start, stop in ((1000, 2200), (2200, 3000)):
        part = given(max_rank=25)
        here = {"like": first.model_, "first_row": start, **place.options}
        parts.append(part.partial_fit(x[start:stop], y[start:stop], **here).model_)
    model = merge(parts)
    return {
        "coef": model.coef,
        **expectations(model, POINTS_X),
        "weights": model.weights(POINTS_X),
        "density_ratio": model.density_ratio(POINTS_X, POINTS_Y),
        **laws(model, POINTS_X, POINTS_Y),
    }


def resumed(place: Place) -> Values:
    x, y, w = rows(60_000, seed=14)
    table = place.folder / "rows.parquet"
    names = {"x0": x[:, 0], "x1": x[:, 1], "y0": y[:, 0], "y1": y[:, 1], "w": w}
    pq.write_table(pa.table(names), table)
    store = place.folder / "rows.store"
    chunks = {"chunk_rows": place.chunk_rows}
    ingest([table], store, x=["x0", "x1"], y=["y0", "y1"], weights="w", overwrite=True, **chunks)
    folder = Path(tempfile.mkdtemp(dir=place.folder)) / "checkpoint"
    fit = given(max_rank=30, sample_size=2000)
    for shard in ((1, 3), (0, 3)):  # the third is left to the fit
        try:
            fit.fit(store, checkpoint=folder, shard=shard, **place.options)
        except ShardDone:
            continue
        raise AssertionError(f"shard {shard} was the whole fit")
    fit.fit(store, checkpoint=folder, **place.options)
    assert fit.report_.resumed_strips > 0, "nothing was resumed"
    return joint_values(fit)


FITS: dict[str, Callable[[Place], Values]] = {
    "none": constrained("none"),
    "normalized": normalized,
    "certified": certified,
    "pointwise": constrained(constraints.Pointwise(landmarks=60), max_rank=20),
    "coupling": constrained(constraints.Coupling(landmarks=(25, 20)), reg=1e-3),
    "weights": weighted,
    "folds by time": by_time,
    "learned": learned,
    "location": located,
    "embedding, tuned": embedding_tuned,
    "embedding, given": embedding_given,
    "features": features,
    "classifiers": classifiers,
    "partial_fit": grown,
    "merge": merged,
    "resumed": resumed,
}


# Hashes


def digest(values: np.ndarray) -> str:
    """sha256 of an array: its kind, shape and bytes."""
    values = np.ascontiguousarray(values)
    head = f"{values.dtype.str} {values.shape} ".encode()
    return hashlib.sha256(head + values.tobytes()).hexdigest()


def all_values(place: Place, only: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values of everything, fit after fit."""
    for name, values in FITS.items():
        if only and name not in only:
            continue
        began = time.process_time()
        for key, value in values(place).items():
            yield f"{name}/{key}", np.asarray(value)
        print(f"{name}: {time.process_time() - began:.1f} s of CPU", file=sys.stderr, flush=True)


def relative_difference(values: np.ndarray, before: np.ndarray) -> float:
    """Largest difference of two arrays over the largest value before; inf where there is none."""
    if values.shape != before.shape or values.dtype.kind not in "fiub":
        return np.inf
    a, b = values.astype(float), before.astype(float)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    finite = np.isfinite(b)
    scale = np.abs(b[finite]).max(initial=0.0)
    difference = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(difference / scale) if scale > 0 else float(difference)


def differences(
    values: Mapping[str, np.ndarray], hashes: Mapping[str, str], before: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """One line for each difference."""
    for key, value in values.items():
        if key not in hashes:
            yield f"{key}: was not there"
        elif digest(value) != hashes[key]:
            old = before[key]
            if value.shape != old.shape or value.dtype != old.dtype:
                yield f"{key}: {old.dtype} {old.shape} became {value.dtype} {value.shape}"
            else:
                yield f"{key}: largest relative difference {relative_difference(value, old):.3g}"
    for key in hashes:
        if key not in values:
            yield f"{key}: is gone"


def main() -> int:
    """Write hashes, or compare with those that were written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path, help="JSON; the values are beside it, as .npz")
    parser.add_argument("--scheduler", default="threads")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chunk-rows", type=int, default=2048, help="of the stored arrays")
    parser.add_argument("--only", action="append", default=[], choices=list(FITS))
    chosen = parser.parse_args()
    beside = chosen.file.with_suffix(".npz")
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ToleranceWarning)  # bits are compared, at any rank
        warnings.simplefilter("ignore", RankWarning)
        place = Place(chosen.scheduler, chosen.workers, chosen.chunk_rows, Path(folder))
        values = dict(all_values(place, chosen.only))
    if chosen.action == "write":
        hashes = {key: digest(value) for key, value in values.items()}
        chosen.file.write_text(json.dumps(hashes, indent=1) + "\n")
        np.savez_compressed(beside, **values)
        print(f"{len(hashes)} hashes in {chosen.file}")
        return 0
    hashes = json.loads(chosen.file.read_text())
    if chosen.only:
        hashes = {k: v for k, v in hashes.items() if k.partition("/")[0] in chosen.only}
    with np.load(beside) as before:
        found = list(differences(values, hashes, before))
    print("\n".join(found) if found else f"all {len(hashes)} hashes are equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
