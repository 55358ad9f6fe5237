#!/usr/bin/env bash
# One node of a multi-node run: NUM_NODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT, default 29500), NUM_GPUS per node
# (default 8). Run it on every node; further words go to train_3d_parallel.py.
set -euo pipefail
cd "$(dirname "$0")"
: "${NUM_NODES:?set NUM_NODES to the number of machines}" "${NODE_RANK:?set NODE_RANK to 0, 1, ... on each machine}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of machine 0}"
exec "${PYTHON:-python3}" -m torch.distributed.run --nproc_per_node="${NUM_GPUS:-8}" --nnodes="$NUM_NODES" \
    --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}" train_3d_parallel.py \
    --tp_size "${TP_SIZE:-2}" --pp_size "${PP_SIZE:-2}" "$@"
