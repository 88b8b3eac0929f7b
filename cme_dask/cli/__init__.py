"""The command ``cme-dask``, also ``dask cme``: options here, the work in the modules beside.

Everything heavy is imported inside the commands: ``--help`` is fast, and ``info`` and ``expect``
need neither Dask nor scikit-learn.
"""

from cme_dask.cli import (
    compare,
    data_commands,
    drift,
    fit_commands,
    hypotheses,
    law_commands,
    run_commands,
    sizing_commands,
)
from cme_dask.cli.app import cli, main

__all__ = [
    "cli",
    "compare",
    "data_commands",
    "drift",
    "fit_commands",
    "hypotheses",
    "law_commands",
    "main",
    "run_commands",
    "sizing_commands",
]
