"""The command ``cme-dask``, also ``dask cme``: options here, the work in ``cme_dask.jobs``.

Everything heavy is imported inside the commands: ``--help`` is fast, and ``info`` and ``expect``
need neither Dask nor scikit-learn.
"""

from cme_dask.cli import data, fits, laws, merge, rechunk, runs, scores, tune
from cme_dask.cli.root import cli, main

__all__ = ["cli", "data", "fits", "laws", "main", "merge", "rechunk", "runs", "scores", "tune"]
