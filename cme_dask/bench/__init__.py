"""``cme-dask bench``: what the machine can do, what a fit does, and what others take."""

CASE_NAMES = (
    "machine",
    "fmca",
    "pass",
    "random",
    "ridge",
    "sweep",
    "programs",
    "ingest",
    "tuning",
    "coverage",
    "queries",
    "cluster",
    "large",
)
"""In the order in which they run."""
