"""Fit on workers that dask-jobqueue starts as jobs of SLURM: ``python jobqueue.py --help``."""

import argparse
import os
import shutil
import sys

import dask
from dask_jobqueue import SLURMCluster
from distributed import Client

from cme_dask import JointDistribution, kernels


def seconds(walltime: str) -> int:
    """Seconds of a time limit such as 02:00:00."""
    try:
        h, m, s = map(int, walltime.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not HH:MM:SS: {walltime}") from None
    return 3600 * h + 60 * m + s


def options() -> argparse.Namespace:
    """Where the rows are, where the model goes, and how many jobs work on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="sample store on a file system that all nodes share")
    parser.add_argument("--out", required=True, help="model to make, on the same file system")
    parser.add_argument("--checkpoint", required=True, help="folder for partial sums, as well")
    parser.add_argument("--jobs", type=int, default=10, help="jobs of workers (10)")
    parser.add_argument("--cores", type=int, default=4, help="threads of each job (4)")
    parser.add_argument("--memory", default="8GB", help="memory of each job (8GB)")
    parser.add_argument(
        "--walltime", type=seconds, default="02:00:00", help="time limit of a job (02:00:00)"
    )
    parser.add_argument("--partition", help="partition of the jobs")
    parser.add_argument("--length-scale", type=float, help="of Gaussian kernels (learned)")
    return parser.parse_args()


def main() -> None:
    """Fit, save, and remove the checkpoint; after an interruption the same call continues."""
    given = options()
    if shutil.which("sbatch") is None:
        sys.exit("jobqueue.py: there is no sbatch here: run it on a login node of SLURM")
    if os.path.exists(given.out):
        sys.exit(f"jobqueue.py: {given.out} is there already: remove it, or name another one")
    # Workers close before their job ends, so that their tasks move and nothing is computed twice.
    lifetime = max(60, given.walltime - 300)
    minutes, second = divmod(given.walltime, 60)
    kernel = None if given.length_scale is None else kernels.Gaussian(given.length_scale)
    cluster = SLURMCluster(
        queue=given.partition,
        cores=given.cores,
        processes=1,
        memory=given.memory,
        walltime=f"{minutes // 60:02}:{minutes % 60:02}:{second:02}",
        worker_extra_args=["--lifetime", f"{lifetime}s", "--lifetime-stagger", "60s"],
        log_directory="workers",
    )
    with cluster, Client(cluster) as client:
        print(f"dashboard: {client.dashboard_link}", flush=True)
        # A job that ends is submitted again as long as the fit runs.
        cluster.adapt(minimum_jobs=given.jobs, maximum_jobs=given.jobs)
        law = JointDistribution(kernel_x=kernel, kernel_y=kernel)
        law.fit(given.store, scheduler=client, checkpoint=given.checkpoint)
        law.save(given.out)
    shutil.rmtree(given.checkpoint)


if __name__ == "__main__":
    with dask.config.set({"distributed.scheduler.allowed-failures": 10}):
        main()
