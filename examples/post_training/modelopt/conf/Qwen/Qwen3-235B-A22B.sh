# Qwen3-235B-A22B. To be read by a launch script:
#
#   source examples/post_training/modelopt/conf/Qwen/Qwen3-235B-A22B.sh
#   torchrun --nproc_per_node=8 pretrain_gpt.py ${MODEL_ARGS} --data-path ... --train-iters ...
#
# `pentatron train --preset qwen3-235b-a22b` has the same shape.
MODEL_ARGS="\
    --num-layers 94 \
    --hidden-size 4096 \
    --ffn-hidden-size 12288 \
    --num-attention-heads 64 \
    --kv-channels 128 \
    --group-query-attention \
    --num-query-groups 4 \
    --max-position-embeddings 40960 \
    --position-embedding-type rope \
    --rotary-percent 1.0 \
    --rotary-base 1000000 \
    --normalization RMSNorm \
    --norm-epsilon 1e-06 \
    --swiglu \
    --disable-bias-linear \
    --qk-layernorm \
    --untie-embeddings-and-output-weights \
    --vocab-size 151936 \
    --make-vocab-size-divisible-by 1 \
    --num-experts 128 \
    --moe-router-topk 8 \
    --moe-ffn-hidden-size 1536 \
    --moe-router-load-balancing-type aux_loss \
    --moe-aux-loss-coeff 0.001 \
    --moe-router-dtype fp32 \
    --moe-grouped-gemm \
"
