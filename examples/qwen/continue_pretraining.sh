#!/usr/bin/env bash
# Continued pretraining of Qwen2.5-7B on eight GPUs of one machine: weights alone are taken from the checkpoint, logs and
# TensorBoard go to OUTPUT_PATH. Paths and sizes come from outside; further arguments come last, so they win.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

CHECKPOINT_PATH="${CHECKPOINT_PATH:-./qwen2.5-7b-megatron}"
TOKENIZER_MODEL="${TOKENIZER_MODEL:-./qwen2.5-7b-hf}"
DATA_PATH="${DATA_PATH:-my_dataset_text_document}"
OUTPUT_PATH="${OUTPUT_PATH:-./qwen2.5-7b-continued}"

TP="${TP:-2}"
PP="${PP:-1}"
WORLD_SIZE="${WORLD_SIZE:-8}"

MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-10000}"
# torchrun tells its workers their number under the same name.
PROCESSES="$WORLD_SIZE"
unset WORLD_SIZE

LAYOUT=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --use-mcore-models
    --transformer-impl transformer_engine
)
MODEL=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --kv-channels 128
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings 32768
    --group-query-attention
    --num-query-groups 4
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --position-embedding-type rope
    --rotary-percent 1.0
    --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --padded-vocab-size 152064
    --make-vocab-size-divisible-by 1
)
TRAINING=(
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --lr 1e-5
    --min-lr 1e-6
    --lr-warmup-iters 100
    --lr-decay-style cosine
    --weight-decay 0.01
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
)
SPEED=(
    --use-distributed-optimizer
    --sequence-parallel
    --recompute-granularity selective
    --recompute-modules core_attn
    --attention-backend flash
    --no-masked-softmax-fusion
    --attention-softmax-in-fp32
)
FILES=(
    --data-path "$DATA_PATH"
    --split 99,1,0
    --load "$CHECKPOINT_PATH"
    --save "$OUTPUT_PATH"
    --save-interval 500
    --ckpt-format torch_dist
    --finetune
    --no-load-optim
    --no-load-rng
    --log-interval 10
    --tensorboard-dir "$OUTPUT_PATH/tensorboard"
    --log-throughput
)

torchrun --nproc_per_node="$PROCESSES" "$ROOT/pretrain_gpt.py" \
    "${LAYOUT[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${SPEED[@]}" "${FILES[@]}" "$@"
