"""Benchmarks and studies of cme_dask: ``python3 run bench``, ``python3 run study``."""

CASE_NAMES = (
    "machine",
    "fmca",
    "pass",
    "random",
    "ridge",
    "crossval",
    "sweep",
    "programs",
    "sparse",
    "ingest",
    "tuning",
    "small",
    "coverage",
    "queries",
    "cluster",
    "large",
    "multiclass",
    "sizing",
    "memory",
    "device",
)
"""In the order in which they run."""
