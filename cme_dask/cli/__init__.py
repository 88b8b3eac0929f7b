"""The command ``cme-dask``, also ``dask cme``: options here, the work in the modules beside.

Everything heavy is imported inside the commands: ``--help`` is fast, and ``info`` and ``expect``
need neither Dask nor scikit-learn.
"""

from cme_dask.cli import data_commands as data
from cme_dask.cli import data_commands as rechunk
from cme_dask.cli import fit_commands as fits
from cme_dask.cli import fit_commands as merge
from cme_dask.cli import fit_commands as tune
from cme_dask.cli import law_commands as laws
from cme_dask.cli import law_commands as scores
from cme_dask.cli import run_commands as runs
from cme_dask.cli.app import cli, main

__all__ = ["cli", "data", "fits", "laws", "main", "merge", "rechunk", "runs", "scores", "tune"]
