#!/usr/bin/env bash
# pretrain_gpt.py on NNODES machines (2) with GPUS_PER_NODE GPUs each (8). Run it on every machine, NODE_RANK counting from 0;
# its flags follow, or stand in ALL_ARGS:
#   MASTER_ADDR=192.168.1.100 NODE_RANK=0 bash examples/multinode/pretrain_gpt.sh --preset qwen2.5-7b --data-path DATA ...
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${NODE_RANK:?set NODE_RANK to 0, 1, ... on each machine}" "${MASTER_ADDR:?set MASTER_ADDR to the address of machine 0}"
read -r -a all_args <<<"${ALL_ARGS:-}"
exec "${PYTHON:-python3}" -m torch.distributed.run --nproc_per_node="${GPUS_PER_NODE:-8}" --nnodes="${NNODES:-2}" \
    --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}" \
    pretrain_gpt.py "${all_args[@]}" "$@"
