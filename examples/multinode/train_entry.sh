#!/usr/bin/env bash
# A training entry of your choice on WORLD_SIZE GPUs (16), GPUS_PER_NODE of them (4) in each machine, as TENSOR_PARALLEL (4) ×
# PIPELINE_PARALLEL (2) × data. Run it on every machine, NODE_RANK counting from 0. DATA_PARALLEL follows from the others, and
# is checked where it is set. TRAIN_ENTRY is pretrain_gpt.py unless set. Words given here take the place of the guide's
# model and data:
#   MASTER_ADDR=192.168.1.100 NODE_RANK=0 bash examples/multinode/train_entry.sh --preset qwen2.5-7b --data-path DATA ...
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${NODE_RANK:?set NODE_RANK to 0, 1, ... on each machine}" "${MASTER_ADDR:?set MASTER_ADDR to the address of machine 0}"
world="${WORLD_SIZE:-16}" here="${GPUS_PER_NODE:-4}"
if [ $((world % here)) -ne 0 ]; then
    echo "WORLD_SIZE=$world is not a multiple of GPUS_PER_NODE=$here; set one of them" >&2
    exit 2
fi
if [ $# -eq 0 ]; then
    set -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \
        --micro-batch-size 1 --global-batch-size 64 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --train-iters 100000 \
        --bf16 --data-path my_dataset_text_document --tokenizer-type HFTokenizer --tokenizer-model Qwen/Qwen2.5-7B \
        --save checkpoints/megatron_gpt --save-interval 1000 --log-interval 10
fi
# A variable of the launcher's shell must not look like the launcher's own word to its workers.
unset WORLD_SIZE
exec "${PYTHON:-python3}" -m torch.distributed.run --nproc_per_node="$here" --nnodes=$((world / here)) \
    --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-6000}" \
    "${TRAIN_ENTRY:-pretrain_gpt.py}" \
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-4}" --pipeline-model-parallel-size "${PIPELINE_PARALLEL:-2}" \
    ${DATA_PARALLEL:+--data-parallel-size "$DATA_PARALLEL"} "$@"
