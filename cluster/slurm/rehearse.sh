#!/bin/bash
# Submit a fit four ways, two of them interrupted at their time limits, and compare the models.
#
#     ./one_node.sh ./rehearse.sh FOLDER 1e8 --kernel-x laplace:0.1 --kernel-y laplace:0.1 \
#         --max-rank 100
#
# The first argument is a folder for all files, the second the number of rows, others are options of
# the fit, which should take three minutes at least: time limits are of one minute. TASKS (default:
# 1) is the number of workers, SHARES (3) that of the jobs of the array. WAYS names some of the four;
# models of others that are in the folder are compared all the same.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: rehearse.sh FOLDER ROWS [OPTIONS OF THE FIT]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 rows=$2
shift 2
fit=("$@")
tasks=${TASKS:-1} shares=${SHARES:-3}
ways=${WAYS:-undisturbed array warned killed}
mkdir -p "$folder"
cd "$folder"
export OMP_NUM_THREADS=1
started=$SECONDS

say() { printf '%4d s  %s\n' $((SECONDS - started)) "$*"; }
field() { scontrol show job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p" | head -n 1; }
ended() { [[ " COMPLETED FAILED TIMEOUT CANCELLED NODE_FAIL " == *" $(field "$1" JobState) "* ]]; }
wait_for() { until ended "$1"; do sleep 1; done; }
asked_for() { [[ " $ways " == *" $1 "* ]]; }
submit() {  # WAY SCRIPT MINUTES [OPTION OF SBATCH...]
    local way=$1 script=$2 minutes=$3
    shift 3
    sbatch --parsable --job-name="$way" --time="$minutes" --cpus-per-task=1 "$@" "$here/$script" \
        fit rows.zarr --out "$way.model" --checkpoint "$way.run" "${fit[@]}"
}

[ -e rows.zarr ] || cme-dask sample rows.zarr --rows "$rows" >/dev/null
say "$rows rows"
if asked_for undisturbed; then
    undisturbed=$(submit undisturbed fit.sbatch 120 --ntasks="$tasks")
fi
if asked_for array; then
    array=$(submit array array.sbatch 120 --array=1-"$shares")
    merge=$(submit array array.sbatch 120 --dependency=afterok:"$array")
fi

if asked_for warned; then  # before the limit, it stops and requeues itself
    job=$(submit warned fit.sbatch 1 --ntasks="$tasks" --signal=B:USR1@10)
    restarts=0
    until ended "$job"; do
        count=$(field "$job" Restarts)
        if [ "$count" -gt "$restarts" ]; then
            restarts=$count
            say "warned: stopped before its time limit, requeued (restart $restarts)"
            [ "$restarts" -lt 2 ] || scontrol update JobId="$job" TimeLimit=120
        fi
        sleep 1
    done
    say "warned: $(field "$job" JobState) after $restarts restarts"
    [ "$restarts" -ge 2 ] || { echo "the fit is too short for two interruptions" >&2; exit 1; }
fi

if asked_for killed; then  # without a signal that it heeds, SLURM kills it at the limit
    job=$(submit killed fit.sbatch 1 --ntasks="$tasks" --signal=B:URG@1)
    for restart in 1 2; do
        wait_for "$job"
        state=$(field "$job" JobState)
        [ "$state" = TIMEOUT ] || { echo "the fit ended too early: $state" >&2; exit 1; }
        say "killed: $state after $(field "$job" RunTime), requeued (restart $restart)"
        scontrol requeue "$job"
        while ended "$job"; do sleep 1; done
        [ "$restart" -lt 2 ] || scontrol update JobId="$job" TimeLimit=120
    done
    wait_for "$job"
    say "killed: $(field "$job" JobState) after 2 kills"
fi

if asked_for array; then
    wait_for "$merge"
    say "array: $(field "$merge" JobState), $shares shares and their sum"
fi
if asked_for undisturbed; then
    wait_for "$undisturbed"
    say "undisturbed: $(field "$undisturbed" JobState) after $(field "$undisturbed" RunTime)"
fi

python3 - undisturbed array warned killed <<'END'
import sys
from pathlib import Path

import zarr


def arrays(path):
    members = zarr.open_group(path, mode="r").members(max_depth=None)
    return {name: array[...].tobytes() for name, array in members if isinstance(array, zarr.Array)}


first, *others = (way for way in sys.argv[1:] if Path(f"{way}.model").exists())
expected = arrays(f"{first}.model")
for way in others:
    found = arrays(f"{way}.model")
    differing = [key for key in {*expected, *found} if expected.get(key) != found.get(key)]
    if differing or not expected:
        sys.exit(f"{way} and {first} differ in {', '.join(sorted(differing))}")
    print(f"        {way}: all {len(expected)} arrays have the bits of {first}")
END
