#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tries the batch script of this folder on this machine alone: starts a Slurm of one node (Debian's packages slurmctld, slurmd,
# slurm-client, munge) in a folder of its own, submits ci/cluster/sweep.sbatch with few ranks, waits, and looks at what came out.
#
#   ci/cluster/one_node_slurm.sh PROGRAM [OUT]    the program is build/cpu/tandem
#
# Exit status 77, with the reason, where Slurm is not installed or this user is not root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

program=$(realpath "${1:?"which program? (build/cpu/tandem)"}")
out=$(realpath -m "${2:-build/cluster}")
skip() {
  echo "$*"
  exit "$skipped_status"
}
for tool in slurmctld slurmd sbatch munged mpirun; do
  command -v "$tool" >/dev/null || skip "$tool is not installed (ci/setup.sh --all)"
done
((EUID == 0)) || skip "slurmd wants to be root"

state=$(mktemp -d)
chmod 755 "$state"
mkdir -p "$state/ctld" "$state/d" "$state/munge"
chmod 700 "$state/munge"
pids=()
stop() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$state"
}
trap stop EXIT

head -c 1024 /dev/urandom >"$state/munge/key"
chmod 400 "$state/munge/key"
munged --foreground --force --key-file="$state/munge/key" --socket="$state/munge.socket" --pid-file="$state/munge/pid" \
  --log-file="$state/munge/log" --seed-file="$state/munge/seed" >"$state/munged.log" 2>&1 &
pids+=($!)

host=$(hostname -s)
read -r control_port node_port < <(python3 - <<'PYTHON'
import socket
sockets = [socket.socket() for _ in range(2)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))
PYTHON
)
export SLURM_CONF=$state/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control_port
SlurmdPort=$node_port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
CredType=cred/munge
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/d
SlurmctldPidFile=$state/ctld.pid
SlurmdPidFile=$state/d.pid
SlurmctldLogFile=$state/ctld.log
SlurmdLogFile=$state/d.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES State=UP OverSubscribe=YES
CONF
slurmctld -D >"$state/ctld.out" 2>&1 &
pids+=($!)
slurmd -D >"$state/d.out" 2>&1 &
pids+=($!)
for ((second = 0; second < 30; ++second)); do
  if sinfo -h -o %t 2>/dev/null | grep -q '^idle'; then break; fi
  sleep 1
done
sinfo -h -o '%t' 2>/dev/null | grep -q '^idle' || { tail -n 5 "$state"/*.log "$state"/*.out >&2 && fail "Slurm did not come up"; }

rm -rf "$out"
mkdir -p "$out"
# The batch script's own settings are for nodes with eight GPUs; here it is one node with two processes.
status=0
sbatch --wait --nodes=1 --ntasks-per-node=2 --gpus-per-node=0 --output="$out/sweep.log" \
  --export="ALL,TANDEM=$program,OUT=$out,TANDEM_TRANSPORT=mpi,SUITES=collectives/ring,TRAIN=docs/examples/tiny_text.json,PROBE_SECONDS=3,STEPS=4,ROWS_PER_RANK=4,OMPI_ALLOW_RUN_AS_ROOT=1,OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" \
  ci/cluster/sweep.sbatch >"$out/submitted" || status=$?
cat "$out/sweep.log" 2>/dev/null || true
((status == 0)) || fail "the job ended with status $status; see $out/sweep.log"
for file in cluster.json train_2.json report.html; do
  [[ -s $out/$file ]] || fail "$out/$file was not written"
done
ls "$out"/suites_*.json >/dev/null || fail "no result files in $out"
echo "one_node_slurm: the sweep ran as a batch job; results in $out"
