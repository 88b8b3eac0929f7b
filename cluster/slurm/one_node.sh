#!/bin/bash
# Run a command under a SLURM of one node, this machine, which ends with the command.
#
#     apt-get install slurmctld slurmd slurm-client munge
#     ./one_node.sh sbatch --wait --wrap hostname
#
# Everything is in a folder of its own: nothing in /etc is read or written, and another SLURM of
# the machine is not disturbed. CPUS (default: twice the cores, at least 4) is what the node claims.
set -euo pipefail
PATH=$PATH:/usr/sbin
[ $# -gt 0 ] || { echo "usage: one_node.sh COMMAND [ARGUMENT...]" >&2; exit 2; }
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || {
        echo "$program is missing: apt-get install slurmctld slurmd slurm-client munge" >&2
        exit 3
    }
done

home=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
host=$(hostname -s)
user=$(id -un)
cpus=${CPUS:-$(( $(nproc) * 2 > 4 ? $(nproc) * 2 : 4 ))}
memory=$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
read -r port node_port < <(python3 -c '
import socket
a, b = socket.create_server(("", 0)), socket.create_server(("", 0))
print(a.getsockname()[1], b.getsockname()[1])')
mkdir "$home/state" "$home/spool"

export SLURM_CONF=$home/slurm.conf
cat >"$SLURM_CONF" <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$node_port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$home/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=86400
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.pid
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=one Nodes=$host Default=YES MaxTime=INFINITE
END
echo "IgnoreSystemd=yes" >"$home/cgroup.conf"
(umask 077 && head -c 1024 /dev/urandom >"$home/munge.key")

started=()
tear_down() {
    status=$?
    trap - EXIT
    scancel --user "$user" 2>/dev/null || true
    for _ in $(seq 20); do
        [ -z "$(squeue --noheader 2>/dev/null)" ] && break
        sleep 0.5
    done
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait
    if [ "$status" -ne 0 ]; then
        grep -h "error:" "$home"/slurm*.log | tail -n 5 >&2 || true
    fi
    rm -rf "$home"
    exit "$status"
}
trap tear_down EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

munged --foreground --force --key-file="$home/munge.key" --socket="$home/munge.socket" \
    --pid-file="$home/munged.pid" --log-file="$home/munged.log" --seed-file="$home/munged.seed" \
    >>"$home/munged.log" 2>&1 &
started+=($!)
for _ in $(seq 50); do [ -S "$home/munge.socket" ] && break; sleep 0.1; done
slurmctld -D -c >/dev/null 2>&1 &
started+=($!)
slurmd -D -N "$host" >/dev/null 2>&1 &
started+=($!)
for _ in $(seq 300); do
    [ "$(sinfo --noheader --format=%t 2>/dev/null)" = idle ] && break
    sleep 0.1
done
if [ "$(sinfo --noheader --format=%t)" != idle ]; then
    echo "the node did not come up within 30 seconds" >&2
    exit 1
fi
"$@"
