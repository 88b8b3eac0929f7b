#!/bin/bash
# A Dask worker for each GPU of this machine: ./workers.sh tcp://SCHEDULER:8786
#
#     pip install "cme-dask[gpu]" dask-cuda
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: workers.sh tcp://SCHEDULER:8786" >&2; exit 2; }
command -v nvidia-smi >/dev/null || { echo "no NVIDIA driver is here" >&2; exit 3; }
export OMP_NUM_THREADS=1 CUPY_CACHE_DIR=${TMPDIR:-/tmp}/cupy-$UID
exec dask cuda worker "$1" --nthreads 1 --memory-limit auto --death-timeout 120 \
    --local-directory "${TMPDIR:-/tmp}"
