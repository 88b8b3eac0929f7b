"""``python -m cme_dask``."""

from cme_dask.cli.app import main

main()
