"""The only room that knows Dask: strips, the driver, passes, memory, sources."""
