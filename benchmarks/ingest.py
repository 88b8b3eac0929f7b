"""The ingest of a CSV file, beside pyarrow's own streaming reads of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from benchmarks.measure import Bench, Ratio, Size, Term
from cme_dask.data.csv import cores
from cme_dask.data.ingest import ingest

Result = dict[str, Any]
Describe = Callable[[], Result]

COLUMNS = tuple(f"c{i}" for i in range(8))
MEMORY_BYTES = 1e9  # that an ingest may take, however large the file

_BATCH = 1 << 18


def write_table(path: Path, rows: int, seed: int = 0) -> None:
    """A CSV file of normal numbers in eight columns, some 157 bytes a row."""
    schema = pa.schema([(name, pa.float64()) for name in COLUMNS])
    with pacsv.CSVWriter(path, schema) as writer:
        for number, start in enumerate(range(0, rows, _BATCH)):
            rng = np.random.default_rng([seed, number])
            values = rng.standard_normal((len(COLUMNS), min(_BATCH, rows - start)))
            writer.write_batch(pa.record_batch(list(values), schema=schema))


@dataclass(frozen=True)
class Ingest:
    """The file into a sample store.

    Parameters
    ----------
    csv, store
        Paths of the file and of the store, which is replaced.
    """

    csv: str
    store: str

    def prepare(self) -> Callable[[], Describe]:
        """Nothing is to prepare."""
        return self._run

    def _run(self) -> Describe:
        begin = time.process_time()
        report = ingest([self.csv], self.store, x=COLUMNS[:6], y=COLUMNS[6:], overwrite=True)
        return partial(_described, self.csv, report.rows_kept, time.process_time() - begin)


@dataclass(frozen=True)
class ArrowRead:
    """All batches of pyarrow's streaming reader, which are dropped.

    Parameters
    ----------
    csv
        Path of the file.
    threads
        Whether the reader may use them.
    """

    csv: str
    threads: bool

    def prepare(self) -> Callable[[], Describe]:
        """Nothing is to prepare."""
        return self._run

    def _run(self) -> Describe:
        begin = time.process_time()
        with pacsv.open_csv(self.csv, pacsv.ReadOptions(use_threads=self.threads)) as batches:
            rows = sum(batch.num_rows for batch in batches)
        return partial(_described, self.csv, rows, time.process_time() - begin)


def _described(csv: str, rows: int, cpu_seconds: float) -> Result:
    return {"rows": rows, "bytes_read": Path(csv).stat().st_size, "cpu_seconds": cpu_seconds}


def ingest_case(bench: Bench, size: Size) -> None:
    """A CSV file into a sample store, beside pyarrow's streaming read of the same file."""
    path = bench.folder / "table.csv"
    write_table(path, size.rows)
    group = f"ingest/{size.rows:,} rows"
    whole, threads, serial = (
        f"{group}/{who}" for who in ("ingest", "pyarrow, threads", "pyarrow, one thread")
    )
    bench.measure(
        {
            whole: Ingest(str(path), str(bench.folder / "table.zarr")),
            threads: ArrowRead(str(path), True),
            serial: ArrowRead(str(path), False),
        }
    )
    for name, rival in (("pyarrow, threads", threads), ("pyarrow, one thread", serial)):
        bench.compare(group, f"ingest / {name}", whole, rival, at_most=1.3)
    megabytes = [Term(whole, "bytes_read", 1e-6 / cores())]
    speed = Ratio(group, "MB/s per core", megabytes, [Term(whole)], at_least=100.0)
    used = Ratio(
        group,
        "MB per second of a core in use",
        [Term(whole, "bytes_read", 1e-6)],
        [Term(whole, "cpu_seconds")],
        at_least=100.0,
    )
    peak = [Term(whole, "peak_bytes", 1e-6)]
    memory = Ratio(group, "peak memory, MB", peak, [Term()], at_most=MEMORY_BYTES / 1e6)
    bench.ratios += [speed, used, memory]
    path.unlink()
