"""Zarr without Dask: sample stores, the priority sample, model files, ingest."""
