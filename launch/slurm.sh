#!/usr/bin/env bash
# A training run on Slurm: start Ray on the allocation's nodes, train, and end both.
#
#   sbatch [option of sbatch ...] launch/slurm.sh CONFIG [section.key=value ...]
#
# Submit from grpo_ray's folder, which all nodes share, with launch/ and .venv in it. The run is runs/slurm-JOBID.
# Three minutes before the time limit the run ends with a checkpoint, and the job is requeued and resumes from there,
# as it does after a node failure or a preemption. `scancel --signal=TERM --batch JOBID` ends it with a checkpoint.
#
#SBATCH --job-name=grpo_ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

if [[ $# -lt 1 || -z ${SLURM_JOB_ID:-} ]]; then
  echo "usage: sbatch [option of sbatch ...] launch/slurm.sh CONFIG [section.key=value ...]" >&2
  exit 2
fi
cd "$SLURM_SUBMIT_DIR"
if [[ ! -x launch/start_head.sh ]]; then
  echo "slurm.sh: $PWD has no launch/start_head.sh; call sbatch in the folder of grpo_ray" >&2
  exit 2
fi
if [[ -d .venv/bin ]]; then export PATH=$PWD/.venv/bin:$PATH; fi
grpo-ray check "$@"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}  # this script runs on it
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
# Other jobs may run a Ray on these nodes, so ports, folder and token are this job's own.
port=$((20000 + SLURM_JOB_ID % 10000 * 4))
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not inherit it from sbatch
resources=("--num-cpus=${SLURM_CPUS_PER_TASK:-1}" "--num-gpus=${SLURM_GPUS_ON_NODE:-0}")
# Ray makes world-writable folders in the one that it is given, so that one lies in a folder of the user's alone. Its
# name cannot be known before the job runs; on the other nodes, the step that joins makes the same one.
private=$(mktemp -d /tmp/grpo_ray-XXXXXXXXXX)
folder=--temp-dir=$private/ray
in_private='[[ -d $0 && -O $0 && ! -L $0 ]] || mkdir -m 700 "$0"; exec "$@"'

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  launch/start_head.sh --block --node-ip-address="$address" --port="$port" --dashboard-port=$((port + 1)) \
  --ray-client-server-port=$((port + 2)) "${resources[@]}" "$folder" &
steps=($!)
for _ in {1..60}; do
  if ray health-check --address="$address:$port" >/dev/null 2>&1; then break; fi
  sleep 2
done
if [[ ${#nodes[@]} -gt 1 ]]; then
  others=$((${#nodes[@]} - 1))
  srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
    bash -ec "$in_private" "$private" launch/join.sh "$address:$port" --block "${resources[@]}" "$folder" &
  steps+=($!)
fi

# The name makes a requeued job resume its run; placement.wait_s gives the nodes time to join.
RAY_ADDRESS=$address:$port grpo-ray train "$1" "run.name=slurm-$SLURM_JOB_ID" run.if_exists=resume \
  placement.wait_s=300 run.on_preemption_s=90 "${@:2}" &
run=$!
is_requeued=false
trap 'is_requeued=true; kill -TERM "$run"' USR1
trap 'kill -TERM "$run"' TERM
while true; do
  status=0
  wait "$run" || status=$?
  kill -0 "$run" 2>/dev/null || break  # a signal ends `wait`, not the run
done
kill "${steps[@]}" 2>/dev/null || true
if [[ $status == 0 || $status == 130 ]]; then  # of a run that failed, Ray's own logs may be wanted
  for _ in {1..20}; do kill -0 "${steps[@]}" 2>/dev/null || break; sleep 0.5; done
  timeout 30 srun --overlap --nodes=${#nodes[@]} --ntasks=${#nodes[@]} rm -rf "$private" || true
fi
if [[ $is_requeued == true ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
