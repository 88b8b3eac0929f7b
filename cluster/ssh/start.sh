#!/bin/bash
# Start a scheduler on the first host of a file and workers on all hosts, over SSH.
#
#     ./start.sh hosts.txt
#
# Each host is reached without a password and has the same environment at the same path.
set -euo pipefail
[ -s "${1:-}" ] || { echo "usage: start.sh FILE, with a host per line" >&2; exit 2; }
exec dask ssh --hostfile "$1" --nworkers "${PER_HOST:-1}" --nthreads "${THREADS:-4}" \
    --memory-limit "${MEMORY:-8GiB}" --scheduler-port 8786 \
    --remote-python "$(command -v python3)"
