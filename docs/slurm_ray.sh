#!/bin/bash
#SBATCH --job-name=asgd
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120

# A Ray cluster over the nodes of an allocation, and a live run on it:
#
#   sbatch docs/slurm_ray.sh configs/digits.py --config.workers=16 \
#     --config.only=dana_zero --config.seeds=0 --workdir=runs/digits
#
# The driver and the server's shards are on the first node, workers on all. The
# folder of this repository, with .venv and runs, is on a disk that they share.
# Slurm runs the same script again after a preemption or the loss of a node
# (--requeue), as this script asks it to before the time is over (--signal): the
# run in the same --workdir goes on. What is given after the config overrides what
# is given below.

set -euo pipefail
config=${1:?a config, such as configs/digits.py}
shift
cd "${SLURM_SUBMIT_DIR:-$PWD}"
bin=${BIN:-.venv/bin}  # of Python and Ray

mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes=${#names[@]}
head=${names[0]}
# This script runs on the first node. The address is the one that Ray finds.
address=$("$bin/python" -c 'import ray; print(ray.util.get_node_ip_address())')
port=$((20000 + SLURM_JOB_ID % 10000))
cpus=${SLURM_CPUS_PER_TASK:-1}

# Who has not this token is not answered; see docs/howto/security.md.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$("$bin/python" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_worker_niceness=0  # nobody else is in the allocation
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/compiled}

# Ray's files, where nobody else gets at them.
folder=/tmp/ray-$SLURM_JOB_ID
on_all=(srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1)
"${on_all[@]}" mkdir -p -m 700 "$folder"

# Ends what there is, the head last: nodes that leave tell it.
steps=()
finish() {
  trap - EXIT TERM
  for ((i = ${#steps[@]} - 1; i >= 0; i--)); do
    kill "${steps[i]}" 2>/dev/null || true
    wait "${steps[i]}" || true
  done
  "${on_all[@]}" rm -rf "$folder" || true
}
trap finish EXIT

start=("$bin/ray" start --block --disable-usage-stats --num-cpus="$cpus")
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" "${start[@]}" \
  --head --node-ip-address="$address" --port="$port" --temp-dir="$folder" \
  --include-dashboard=False &
steps+=($!)
# Until the head listens.
until (: > "/dev/tcp/$address/$port") 2>/dev/null; do
  kill -0 "${steps[0]}" || exit 1
  sleep 1
done
others=$((nodes - 1))
if ((others)); then
  srun --overlap --nodes="$others" --ntasks="$others" --ntasks-per-node=1 \
    --exclude="$head" "${start[@]}" --address="$address:$port" &
  steps+=($!)
fi

# Each worker asks for a CPU, for which the driver waits: the other nodes come
# while it starts.
RAY_ADDRESS="$address:$port" "$bin/python" -m launch.train \
  --config="$config" --engine=ray --allow_network \
  --config.live.worker_cpus=1 \
  --config.live.placement=spread --config.live.cluster_seconds=600 "$@" &
driver=$!
steps+=("$driver")
# It saves what there is, and ends with status 128 + 15.
trap 'kill -TERM "$driver" 2>/dev/null' TERM
status=0
while kill -0 "$driver" 2>/dev/null; do  # a signal ends the first wait
  status=0
  wait "$driver" || status=$?
done
if ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID" || true  # Slurm may have done it itself
fi
exit "$status"
