"""``python -m cme_dask``."""

from cme_dask.cli import main

main()
