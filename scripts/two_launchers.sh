#!/usr/bin/env bash
# Trains one model with two torchrun launchers on this machine, as on two machines.
#   bash scripts/two_launchers.sh PROCESSES_PER_LAUNCHER SCRIPT [ARGUMENTS ...]
# PORT in an argument is replaced by the rendezvous port. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}" processes="$1" script="$2"; shift 2
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
launchers=()
for node in 0 1; do
    "$python" -m torch.distributed.run --nproc_per_node="$processes" --nnodes=2 --node_rank="$node" \
        --master_addr=127.0.0.1 --master_port="$port" "$script" "${@//PORT/$port}" &
    launchers+=($!)
done
for launcher in "${launchers[@]}"; do wait "$launcher"; done
