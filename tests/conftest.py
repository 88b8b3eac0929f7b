"""Shared fixtures: stores on disk, a real cluster."""

import numpy as np
import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="session", autouse=True)
def one_blas_thread():
    """Small matrices only get slower on several BLAS threads."""
    with threadpool_limits(1):
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(20261121)


@pytest.fixture(scope="module")
def cluster():
    """A real cluster: scheduler and two worker processes over TCP."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address="127.0.0.1:0",
            protocol="tcp",
        ) as local,
        Client(local) as client,
    ):
        yield client


def write_store(path, x, y, weights=None, *, chunk_rows=1000, x_names=None, y_names=None, seed=0):
    """Rows to a sample store on disk."""
    from cme_dask.storage.columns import Columns
    from cme_dask.storage.writer import writing_sample

    x, y = (a if a.ndim == 2 else a[:, None] for a in (np.asarray(x), np.asarray(y)))
    columns = (
        Columns(tuple(x_names)) if x_names else Columns.default("x", x.shape[1]),
        Columns(tuple(y_names)) if y_names else Columns.default("y", y.shape[1]),
    )
    with writing_sample(
        path, columns, weights=weights is not None, chunk_rows=chunk_rows, seed=seed
    ) as writer:
        for start in range(0, len(x), 700):  # batches that fit no chunk
            rows = slice(start, start + 700)
            writer.append(x[rows], y[rows], None if weights is None else weights[rows])
    return path
