"""``cme-dask demo``: ten million rows of a law whose conditional probabilities are known."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from cme_dask.cli import plots
from cme_dask.cli.compute import Compute, prepare_folder
from cme_dask.cli.fitting import describe_fit, fit_sample
from cme_dask.cli.progress import ProgressLines
from cme_dask.cli.schema import FitSection
from cme_dask.data import model_file, writer
from cme_dask.data.atomic import PICTURE, check_output, disk_errors, withdraw, writing
from cme_dask.data.generate import Normal3, write_normal3
from cme_dask.data.sample import Sample
from cme_dask.data.tables import listed
from cme_dask.display import decimals, with_error
from cme_dask.errors import DataError, ResourceError
from cme_dask.estimators.joint import JointDistribution
from cme_dask.models import plots as drawing
from cme_dask.passes.sources import open_sample

Array = Any
Result = dict[str, Any]

OUTPUTS = ("normal3.zarr", "model.zarr", "demo.png")
_KINDS = dict(zip(OUTPUTS, (writer.OUTPUT, model_file.OUTPUT, PICTURE), strict=True))
SEED = 0
SHIFTS = (0.0, 0.2, 0.5)
POINTS = (-0.4, -0.25, -0.1, 0.0, 0.1, 0.25, 0.4)
SLICE = 0.25  # the x whose density ratio is drawn
SLICES = (-0.25, 0.0, 0.25)  # the x whose distribution functions are drawn
LEVELS = (0.05, 0.5, 0.95)
LEAST_ROWS = 1000

_BYTES_PER_ROW = 30.0
_USED_OF_FREE = 0.8
_CHI2_99 = 9.2103  # 99 % quantile of chi square with 2 degrees of freedom


def run_demo(
    rows: int, out: Path, picture: Path | None, *, compute: Compute, progress: ProgressLines
) -> Result:
    """Generate, fit, compare with the truth, draw.

    The rows are fewer if the disk is short, and outputs of an earlier demo are replaced.

    Raises
    ------
    ResourceError
        If the disk or memory does not suffice, or a picture is requested without matplotlib.
    """
    begin = time.perf_counter()
    if picture is not None:
        drawing.require()
        check_output(picture, PICTURE, overwrite=True)
    _check_folder(out)
    beside = {"--report": compute.report, "--picture": picture}
    prepare_folder(out, OUTPUTS, True, _KINDS, beside)
    law = Normal3("medium")
    sample = _sample(law, rows, out / OUTPUTS[0], progress)
    # Learned kernels would take six times as long, and these are good ones for a normal law.
    options = FitSection(
        events=[_event(shift) for shift in SHIFTS],
        kernel_x="median",
        kernel_y="median",
        residual=False,
    )
    with compute.open() as scheduler:
        estimator, memory = fit_sample(sample, options, scheduler, compute, progress)
    model = out / OUTPUTS[1]
    estimator.save(model, overwrite=True)
    result = {
        "store": str(out / OUTPUTS[0]),
        "fit": describe_fit(estimator, memory, str(model)),
        "points": _compare(estimator, law, np.array(POINTS)),
        "picture": _picture(estimator, law, picture, out, progress),
    }
    return {**result, "seconds": time.perf_counter() - begin}


def _check_folder(out: Path) -> None:
    """DataError if a folder holds what an earlier demo would have written, but none did."""
    others = [name for name in OUTPUTS[1:] if (out / name).exists()]
    if others and not (out / OUTPUTS[0]).exists():
        raise DataError(
            f"{out} holds {listed(others)}, but not {OUTPUTS[0]} of an earlier demo: choose "
            "another folder (--out)"
        )


def demo_tables(result: Result) -> Iterator[Any]:
    """All tables of the demonstration."""
    from cme_dask.cli import tables

    yield from tables.fit_tables(result["fit"])
    names = list(result["points"][0]["functions"])
    for title, shown in (
        ("Conditional means", names[:2]),
        ("Conditional probabilities", names[2:]),
    ):
        yield ""
        yield _comparison(title, shown, result["points"])
    yield ""
    yield _quantiles(result["points"])
    yield ""
    model = result["fit"]["model"]
    command = os.environ.get("CME_DASK_COMMAND", "cme-dask")  # set by the script `run`
    lines = [("took", f"{result['seconds']:.3g} s")]
    lines += [("picture", result["picture"])] if result["picture"] else []
    lines += [
        ("try next", f"{command} info {model}"),
        ("", f'{command} expect {model} --given x=0.3 --of "{names[-1]}"'),
        ("", f'{command} predict {model} --given x=0.3 --event "{names[-1]}"'),
        ("", f"{command} expect {model} --given y1=0.1,y2=-0.1 --reverse"),
    ]
    yield tables.facts("Done", lines)


def _comparison(title: str, names: list[str], points: list[Result]) -> Any:
    """Estimates beside the truth, two columns per function."""
    from cme_dask.cli import tables

    rows = []
    for point in points:
        result = [point["functions"][name] for name in names]
        pairs = [
            (
                with_error(v["value"], v["std"]),
                f"{v['truth'] + 0.0:.{decimals(v['std'])}f}",
            )
            for v in result
        ]
        rows.append((f"{point['x']:g}", *(cell for pair in pairs for cell in pair)))
    head = ["x", *(label for name in names for label in (name, "truth"))]
    return tables.grid(title, head, rows, "± one standard error")


def _quantiles(points: list[Result]) -> Any:
    """Quantiles of the laws beside the truth."""
    from cme_dask.cli import tables

    rows = [
        (
            f"{point['x']:g}",
            *(
                f"{value + 0.0:.3f}"
                for pair in zip(point["quantiles"], point["true_quantiles"], strict=True)
                for value in pair
            ),
        )
        for point in points
    ]
    head = ["x", *(text for level in LEVELS for text in (f"{100 * level:g} %", "truth"))]
    return tables.grid("Quantiles of y1 given x", head, rows)


def _event(shift: float) -> str:
    return f"y1 <= y2 - {shift:g}" if shift else "y1 <= y2"


def _sample(law: Normal3, rows: int, path: Path, progress: ProgressLines) -> Sample:
    """The sample in a store, reused if it is the requested one."""
    earlier = _earlier(law, rows, path)
    if earlier is not None:
        progress.say(f"reusing {path} with {rows:,} rows")
        return earlier
    # An old store is only removed when the new one is whole, so both need room.
    room = int(_USED_OF_FREE * shutil.disk_usage(path.parent).free / _BYTES_PER_ROW)
    if room < min(rows, LEAST_ROWS):
        raise ResourceError(f"the disk of {path.parent} has no room for a sample: free some space")
    if room < rows:
        progress.say(f"the disk has room for {room:,} rows only (30 bytes each and 20 % left free)")
        rows = room
    write_normal3(
        path,
        rows,
        scenario=law.scenario,
        seed=SEED,
        overwrite=True,
        progress=progress.counter("generate", rows),
    )
    progress.say(f"generated {rows:,} rows in {path}")
    return open_sample(path)


def _earlier(law: Normal3, rows: int, path: Path) -> Sample | None:
    """The sample at a path, if its row sample holds these draws; no chunk of rows is read."""
    try:
        sample = open_sample(path)
    except DataError:
        return None
    retained, start = sample.row_sample, 0
    if sample.n_rows != rows or retained is None:
        return None
    for batch in law.batches(rows, SEED):
        here = (start <= retained.index) & (retained.index < start + len(batch[0]))
        start += len(batch[0])
        if here.any():  # a few rows suffice: another law, seed or number has none of them
            at = retained.index[here] - start
            same = (
                np.array_equal(p[here], b[at]) for p, b in zip(retained.parts, batch, strict=True)
            )
            return sample if all(same) else None
    return None


def _truth(law: Normal3, x: Array) -> dict[str, Array]:
    """True conditional expectations by function, each of shape (n,)."""
    mean = law.conditional(x)[0]
    probabilities = {_event(shift): law.probability(x, shift) for shift in SHIFTS}
    return {"y1": mean[:, 0], "y2": mean[:, 1], **probabilities}


def _compare(estimator: JointDistribution, law: Normal3, x: Array) -> list[Result]:
    truth = _truth(law, x)
    values, std = estimator.expect(list(truth), x, return_std=True)
    quantiles = estimator.conditional(x[:, None]).quantile(LEVELS, column="y1")
    return [
        {
            "x": float(point),
            "functions": {
                name: {
                    "value": float(values[i, j]),
                    "std": float(std[i, j]),
                    "truth": float(truth[name][i]),
                }
                for j, name in enumerate(truth)
            },
            "quantiles": quantiles[i].tolist(),
            "true_quantiles": [float(_true_quantile(law, point, q)) for q in LEVELS],
        }
        for i, point in enumerate(x)
    ]


def _picture(
    estimator: JointDistribution,
    law: Normal3,
    picture: Path | None,
    out: Path,
    progress: ProgressLines,
) -> str | None:
    target = picture or out / OUTPUTS[2]
    if not drawing.available():
        progress.say(f"no picture: {drawing.MISSING}")
        withdraw(target, PICTURE)  # that of an earlier demo would be wrong
        return None
    x = np.linspace(-0.5, 0.5, 201)
    names = [_event(shift) for shift in SHIFTS]
    value, (lower, upper) = estimator.expect(names, x), estimator.expect_interval(names, x)
    truth = _truth(law, x)
    curves = [
        plots.Curve(name, value[:, j], lower[:, j], upper[:, j], truth[name])
        for j, name in enumerate(names)
    ]
    grid = _ratio_grid(estimator, law)
    with writing(target, PICTURE, overwrite=True) as aside, disk_errors(target):
        plots.demo_picture(x, curves, SLICE, grid, _laws(estimator, law, x), aside)
    return str(target)


def _laws(estimator: JointDistribution, law: Normal3, x: Array) -> plots.DemoLaws:
    """Laws of y1 along x, and at some x, with the truth."""
    return plots.DemoLaws(
        rows=estimator.report_.rows,
        along=estimator.conditional(x[:, None]),
        at=estimator.conditional(np.array(SLICES)[:, None]),
        true_quantile=lambda x, q: _true_quantile(law, x, q),
        true_cdf=lambda x, t: norm.cdf(t, *_true_moments(law, x)),
    )


def _true_moments(law: Normal3, x: Any) -> tuple[Array, float]:
    """Mean and standard deviation of y1 given x."""
    mean, covariance = law.conditional(np.atleast_1d(x))
    return mean[:, 0], float(np.sqrt(covariance[0, 0]))


def _true_quantile(law: Normal3, x: Any, level: float) -> Any:
    """Quantile of y1 given x, shape (n,), or a number at one x."""
    result = norm.ppf(level, *_true_moments(law, x))
    return result if np.ndim(x) else result[0]


def _ratio_grid(estimator: JointDistribution, law: Normal3) -> plots.RatioGrid:
    axis = np.linspace(-0.65, 0.65, 521)
    y = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    inverse = np.linalg.inv(law.covariance[:2, :2])
    inside = ((y @ inverse) * y).sum(axis=1) < _CHI2_99
    parts = (estimator.density_ratio([[SLICE]], y)[0], _true_ratio(law, SLICE, y), inside)
    return plots.RatioGrid(axis, *(part.reshape(len(axis), len(axis)) for part in parts))


def _true_ratio(law: Normal3, x: float, y: Array) -> Array:
    """g(x, y) = p(y | x) / p(y), shape (n,)."""
    from scipy.stats import multivariate_normal

    mean, covariance = law.conditional(np.array([x]))
    given = multivariate_normal(mean[0], covariance).pdf(y)
    return np.asarray(given / multivariate_normal(None, law.covariance[:2, :2]).pdf(y))
