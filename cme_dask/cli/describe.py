"""The contents of a stored sample or model, without Dask and scikit-learn."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr

from cme_dask.data import model_file
from cme_dask.data import sample as sample_file
from cme_dask.data.atomic import ATTRIBUTE
from cme_dask.data.sample import open_store
from cme_dask.data.store import open_zarr, read_attribute
from cme_dask.errors import StoreError
from cme_dask.models import load

if TYPE_CHECKING:
    from cme_dask.data.ingest import IngestReport


Result = dict[str, Any]


def describe(path: str) -> Result:
    """JSON form of a sample store or a model.

    Raises
    ------
    StoreError
        If there is neither, or it is damaged.
    """
    group = open_zarr(path)
    if not isinstance(group, zarr.Group):
        raise StoreError(f"{path} is a single array, a sample store or a model was expected")
    head = group.attrs.get(ATTRIBUTE)
    is_model = isinstance(head, dict) and head.get("kind") == model_file.KIND
    result = _model(path, group) if is_model else _sample(path, group)
    return {
        "path": path,
        **result,
        "zarr_format": group.metadata.zarr_format,
        "bytes": None if "://" in path else size_on_disk(Path(path)),
    }


def describe_ingest(report: "IngestReport", units: dict[str, str]) -> Result:
    """JSON form of an ``IngestReport``."""
    return {
        "store": report.location,
        "files": len(report.files),
        "rows_read": report.rows_read,
        "rows_kept": report.rows_kept,
        "rows_dropped": report.rows_dropped,
        "rows_resumed": report.rows_resumed,
        "missing": report.missing,
        "ranges": {name: list(pair) for name, pair in report.ranges.items()},
        "units": units,
        "columns": [
            {
                "name": name,
                "variable": variable,
                "from": report.origins[name],
                **metadata,
                **({"labels": list(report.categories[name])} if "counts" in metadata else {}),
            }
            for variable, columns in report.statistics.items()
            for name, metadata in columns.items()
        ],
    }


def size_on_disk(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _sample(path: str, group: zarr.Group) -> Result:
    metadata = read_attribute(group, sample_file.KIND, sample_file.SCHEMA_VERSION, path)
    sample = open_store(group, path)
    chunk = max(source.chunk_rows or 1 for source in sample.sources)
    return {
        "kind": sample_file.KIND,
        "columns": {v: c.to_dict() for v, c in zip("xy", sample.columns, strict=False)},
        "weights": sample.weights is not None,
        "rows": sample.n_rows,
        "chunk_rows": chunk,
        "chunks": -(-sample.n_rows // chunk),
        "row_sample": len(sample.row_sample.index) if sample.row_sample else 0,
        "seed": metadata.get("seed"),
        "roles": metadata.get("roles", {}),
        "statistics": metadata.get("statistics"),
        "features": _origin(metadata.get("features"), path),
        "schema_version": metadata["schema_version"],
    }


def _origin(features: Any, path: str) -> Result | None:
    """The origin of the x of a store of features; None for other stores."""
    if features is None:
        return None
    try:
        return {
            **{key: str(features[key]) for key in ("basis", "kernel", "source")},
            "columns": [str(name) for name in features["columns"]],
            "trace_error": float(features["trace_error"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"the origin of {path} is damaged: {error!r}") from error


def _model(path: str, group: zarr.Group) -> Result:
    head = read_attribute(group, model_file.KIND, model_file.SCHEMA_VERSION, path)
    model = load(path)
    return {
        "kind": model_file.KIND,
        "type": head["type"],
        "summary": [list(line) for line in model.summary()],
        **model.contents(),
        "rows": model.about["rows"],
        "fitted_on": str(model.about.get("location", "unknown")),
        "schema_version": head["schema_version"],
    }
