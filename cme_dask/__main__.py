"""``python -m cme_dask`` runs the command."""

from cme_dask.cli.app import main

main()
