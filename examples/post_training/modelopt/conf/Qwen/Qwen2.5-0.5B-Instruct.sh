# Qwen2.5-0.5B-Instruct. To be read by a launch script:
#
#   source examples/post_training/modelopt/conf/Qwen/Qwen2.5-0.5B-Instruct.sh
#   torchrun --nproc_per_node=8 pretrain_gpt.py ${MODEL_ARGS} --data-path ... --train-iters ...
#
# `pentatron train --preset qwen2.5-0.5b` has the same shape.
MODEL_ARGS="\
    --num-layers 24 \
    --hidden-size 896 \
    --ffn-hidden-size 4864 \
    --num-attention-heads 14 \
    --kv-channels 64 \
    --group-query-attention \
    --num-query-groups 2 \
    --max-position-embeddings 32768 \
    --position-embedding-type rope \
    --rotary-percent 1.0 \
    --rotary-base 1000000 \
    --normalization RMSNorm \
    --norm-epsilon 1e-06 \
    --swiglu \
    --disable-bias-linear \
    --add-qkv-bias \
    --vocab-size 151936 \
    --make-vocab-size-divisible-by 1 \
"
