#!/usr/bin/env bash
# Continued pretraining of Qwen2.5-7B from a checkpoint that tools/checkpoint/convert.py made. Every path and size can be set
# from outside: CHECKPOINT_PATH=... DATA_PATH=... TP=4 GPUS=8 bash examples/qwen/train_qwen.sh --train-iters 100
# (further arguments come last, so they win). Runs from anywhere; paths are those of the caller.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

CHECKPOINT_PATH="${CHECKPOINT_PATH:-./qwen2.5-7b-megatron}"
# The guide saves over what it loads; here the trained model has a folder of its own unless you say otherwise.
SAVE_PATH="${SAVE_PATH:-${CHECKPOINT_PATH%/}-trained}"
TOKENIZER_MODEL="${TOKENIZER_MODEL:-./qwen2.5-7b-hf}"
DATA_PATH="${DATA_PATH:-my_dataset_text_document}"
TP="${TP:-2}"
PP="${PP:-1}"
GPUS="${GPUS:-2}"

COMMON_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --use-mcore-models
    --transformer-impl transformer_engine
    --bf16
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --kv-channels 128
    --seq-length 4096
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
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --padded-vocab-size 152064
    --make-vocab-size-divisible-by 1
    --untie-embeddings-and-output-weights
    --no-masked-softmax-fusion
    --attention-softmax-in-fp32
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 64
    --train-iters 10000
    --lr 1e-5
    --min-lr 1e-6
    --lr-warmup-iters 100
    --lr-decay-style cosine
    --weight-decay 0.01
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --adam-eps 1e-8
)
OPTIMIZATION_ARGS=(
    --use-distributed-optimizer
    --sequence-parallel
    --recompute-granularity selective
    --recompute-modules core_attn
)
DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split 99,1,0
)
CHECKPOINT_ARGS=(
    --load "$CHECKPOINT_PATH"
    --save "$SAVE_PATH"
    --save-interval 500
    --ckpt-format torch_dist
    --finetune
)

torchrun --nproc_per_node="$GPUS" "$ROOT/pretrain_gpt.py" \
    "${COMMON_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${OPTIMIZATION_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${CHECKPOINT_ARGS[@]}" \
    "$@"
