#!/bin/bash
# Start a scheduler (rank 0) and workers (all other ranks) under MPI: mpirun -n 9 is for 8 workers.
#
#     pip install dask-mpi mpi4py
#     RANKS=9 ./job.sh fit rows.zarr --out rows.model --checkpoint run
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: job.sh fit STORE --out MODEL --checkpoint DIR ..." >&2; exit 2; }
command -v "${MPIRUN:=mpirun}" >/dev/null || { echo "$MPIRUN is missing" >&2; exit 3; }
address_file=$PWD/.cme-dask-$$.json
"$MPIRUN" -n "${RANKS:-9}" dask-mpi --scheduler-file "$address_file" --worker-class distributed.Worker \
    --nthreads "${THREADS:-1}" --memory-limit "${MEMORY:-4GiB}" \
    --local-directory "${TMPDIR:-/tmp}" &
cluster=$!
trap 'kill $cluster 2>/dev/null; wait $cluster || true; rm -f "$address_file"' EXIT
until [ -s "$address_file" ]; do
    kill -0 "$cluster" 2>/dev/null || { echo "the cluster did not start" >&2; exit 3; }
    sleep 1
done
address=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["address"])' \
    "$address_file")
cme-dask "$@" --scheduler "$address" &
fit=$!
trap 'kill -TERM $fit 2>/dev/null' TERM
while kill -0 "$fit" 2>/dev/null; do wait "$fit" || true; done
wait "$fit"
