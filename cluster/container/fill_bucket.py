"""Write a sample of a known law into a bucket of an S3-compatible server, unless it is there."""

import argparse
import subprocess
import tempfile
from pathlib import Path

import fsspec


def main() -> None:
    """Make the bucket, then the sample store in it; where the server is, the environment says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", required=True, help="such as 1e6")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--key", required=True, help="name of the store in the bucket")
    given = parser.parse_args()
    files = fsspec.filesystem("s3")
    target = f"{given.bucket}/{given.key}"
    if files.exists(f"{target}/zarr.json"):
        print(f"s3://{target} is there already")
        return
    if not files.exists(given.bucket):
        files.mkdir(given.bucket)
    with tempfile.TemporaryDirectory() as folder:
        command = ["cme-dask", "sample", f"{folder}/rows.zarr", "--rows", given.rows]
        subprocess.run(command, check=True)
        # The description comes last: what was cut off is not taken for complete.
        description = Path(folder, "rows.zarr", "zarr.json").rename(Path(folder, "zarr.json"))
        files.put(f"{folder}/rows.zarr/", f"{target}/", recursive=True)
        files.put_file(str(description), f"{target}/zarr.json")
    print(f"s3://{target} is complete")


if __name__ == "__main__":
    main()
