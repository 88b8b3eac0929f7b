#!/bin/bash
# Submit a fit four ways, two of them interrupted at their time limits, and compare the models.
#
#     ./one_node.sh ./rehearse.sh FOLDER 1e8 --kernel-x laplace:0.1 --kernel-y laplace:0.1 \
#         --max-rank 100
#
# The first argument is a folder for all files, the second the number of rows, others are options of
# the fit, which should take three minutes at least: time limits are of one minute. TASKS (default:
# 1) is the number of workers, SHARES (3) that of the jobs of the array.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: rehearse.sh FOLDER ROWS [OPTIONS OF THE FIT]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 rows=$2
shift 2
tasks=${TASKS:-1} shares=${SHARES:-3}
mkdir -p "$folder"
cd "$folder"
export OMP_NUM_THREADS=1
started=$SECONDS

say() { printf '%4d s  %s\n' $((SECONDS - started)) "$*"; }
field() { scontrol show job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p" | head -n 1; }
ended() { [[ " COMPLETED FAILED TIMEOUT CANCELLED NODE_FAIL " == *" $(field "$1" JobState) "* ]]; }
wait_for() {
    until ended "$1"; do sleep 1; done
}
submit() {  # NAME SCRIPT LIMIT [OPTION OF SBATCH...], then the options of the fit in "${fit[@]}"
    local name=$1 script=$2 limit=$3
    shift 3
    sbatch --parsable --job-name="$name" --time="$limit" --cpus-per-task=1 "$@" "$here/$script" \
        fit rows.zarr --out "$name.model" --checkpoint "$name.run" "${fit[@]}"
}
fit=("$@")

[ -e rows.zarr ] || cme-dask sample rows.zarr --rows "$rows" >/dev/null
say "$rows rows"

undisturbed=$(submit undisturbed fit.sbatch 120 --ntasks="$tasks")

# Warned 10 to 40 s before the limit of one minute, it stops and requeues itself; after two
# interruptions the limit is lifted.
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
[ "$restarts" -ge 2 ] || { echo "the fit is too short to be interrupted twice" >&2; exit 1; }

# Without the warning (a window that changed its size is of no interest), SLURM kills it.
job=$(submit killed fit.sbatch 1 --ntasks="$tasks" --signal=B:WINCH@1)
for restart in 1 2; do
    wait_for "$job"
    state=$(field "$job" JobState)
    [ "$state" = TIMEOUT ] || { echo "the fit ended too early: $state" >&2; exit 1; }
    say "killed: $state after $(field "$job" RunTime), requeued (restart $restart)"
    [ "$restart" -lt 2 ] || scontrol update JobId="$job" TimeLimit=120 2>/dev/null || true
    scontrol requeue "$job"
    [ "$restart" -lt 2 ] || scontrol update JobId="$job" TimeLimit=120
    until ! ended "$job"; do sleep 1; done
done
wait_for "$job"
say "killed: $(field "$job" JobState) after 2 kills"

wait_for "$undisturbed"
say "undisturbed: $(field "$undisturbed" JobState) after $(field "$undisturbed" RunTime)"

job=$(submit array array.sbatch 120 --array=1-"$shares")
merge=$(submit array array.sbatch 120 --dependency=afterok:"$job")
wait_for "$merge"
say "array: $(field "$merge" JobState), $shares shares and their sum"

python3 - undisturbed warned killed array <<'END'
import sys

import zarr


def arrays(path):
    members = zarr.open_group(path, mode="r").members(max_depth=None)
    return {name: array[...].tobytes() for name, array in members if isinstance(array, zarr.Array)}


first, *others = sys.argv[1:]
expected = arrays(f"{first}.model")
for name in others:
    found = arrays(f"{name}.model")
    differing = [key for key in {*expected, *found} if expected.get(key) != found.get(key)]
    if differing or not expected:
        sys.exit(f"{name} and {first} differ in {', '.join(sorted(differing))}")
    print(f"        {name}: {len(expected)} arrays have the bits of {first}")
END
