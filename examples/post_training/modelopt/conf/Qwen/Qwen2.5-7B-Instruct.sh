# Qwen2.5-7B-Instruct. To be read by a launch script:
#
#   source examples/post_training/modelopt/conf/Qwen/Qwen2.5-7B-Instruct.sh
#   torchrun --nproc_per_node=8 pretrain_gpt.py ${MODEL_ARGS} --data-path ... --train-iters ...
#
# `pentatron train --preset qwen2.5-7b` has the same shape.
MODEL_ARGS="\
    --num-layers 28 \
    --hidden-size 3584 \
    --ffn-hidden-size 18944 \
    --num-attention-heads 28 \
    --kv-channels 128 \
    --group-query-attention \
    --num-query-groups 4 \
    --max-position-embeddings 32768 \
    --position-embedding-type rope \
    --rotary-percent 1.0 \
    --rotary-base 1000000 \
    --normalization RMSNorm \
    --norm-epsilon 1e-06 \
    --swiglu \
    --disable-bias-linear \
    --add-qkv-bias \
    --untie-embeddings-and-output-weights \
    --vocab-size 152064 \
    --make-vocab-size-divisible-by 1 \
"
