# Qwen2.5-32B. To be read by a launch script:
#
#   source examples/rl/model_configs/qwen_2p5_32b.sh
#   torchrun --nproc_per_node=8 pretrain_gpt.py ${MODEL_OPTIONS} --data-path ... --train-iters ...
#
# `pentatron train --preset qwen2.5-32b` has the same shape.
MODEL_OPTIONS="\
    --num-layers 64 \
    --hidden-size 5120 \
    --ffn-hidden-size 27648 \
    --num-attention-heads 40 \
    --kv-channels 128 \
    --group-query-attention \
    --num-query-groups 8 \
    --max-position-embeddings 131072 \
    --position-embedding-type rope \
    --rotary-percent 1.0 \
    --rotary-base 1000000 \
    --normalization RMSNorm \
    --norm-epsilon 1e-05 \
    --swiglu \
    --disable-bias-linear \
    --add-qkv-bias \
    --untie-embeddings-and-output-weights \
    --vocab-size 152064 \
    --make-vocab-size-divisible-by 1 \
"
