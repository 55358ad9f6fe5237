# Qwen3-0.6B. To be read by a launch script:
#
#   source examples/post_training/modelopt/conf/Qwen/Qwen3-0.6B.sh
#   torchrun --nproc_per_node=8 pretrain_gpt.py ${MODEL_ARGS} --data-path ... --train-iters ...
#
# `pentatron train --preset qwen3-0.6b` has the same shape.
MODEL_ARGS="\
    --num-layers 28 \
    --hidden-size 1024 \
    --ffn-hidden-size 3072 \
    --num-attention-heads 16 \
    --kv-channels 128 \
    --group-query-attention \
    --num-query-groups 8 \
    --max-position-embeddings 40960 \
    --position-embedding-type rope \
    --rotary-percent 1.0 \
    --rotary-base 1000000 \
    --normalization RMSNorm \
    --norm-epsilon 1e-06 \
    --swiglu \
    --disable-bias-linear \
    --qk-layernorm \
    --vocab-size 151936 \
    --make-vocab-size-divisible-by 1 \
"
