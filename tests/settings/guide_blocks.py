"""Command lines of the guides: entry point, number of processes and arguments."""

from dataclasses import dataclass

from pentatron.settings.entry_points import EXAMPLE, MEGATRON, PARALLEL_3D, PRETRAIN_GPT, STANDARD, EntryPoint


@dataclass(frozen=True)
class Block:
    """A command line of a guide, or with `complete=False` a part of one."""

    entry: EntryPoint
    processes: int
    text: str
    complete: bool = True

    @property
    def words(self) -> list[str]:
        """Returns the arguments as the shell passes them: lines joined, split at blanks."""
        return self.text.split()


_THREE_EPOCHS = "--batch-size=16 --epochs=3 --train-steps=1000"

_QWEN25_MODEL = """
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 32768 --group-query-attention --num-query-groups 4
    --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias
    --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000
    --untie-embeddings-and-output-weights --tokenizer-type HuggingFaceTokenizer --tokenizer-model ./qwen2.5-7b-hf
    --padded-vocab-size 152064 --make-vocab-size-divisible-by 1
    --no-masked-softmax-fusion --attention-softmax-in-fp32
"""
_QWEN25_TRAINING = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --use-mcore-models
    --transformer-impl transformer_engine --bf16
    --micro-batch-size 1 --global-batch-size 64 --train-iters 10000 --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 100
    --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --use-distributed-optimizer --sequence-parallel --recompute-granularity selective --recompute-modules core_attn
    --split 99,1,0 --save-interval 500 --ckpt-format torch_dist --finetune
"""

BLOCKS: dict[str, Block] = {
    "000-tensor": Block(
        EXAMPLE,
        8,
        f"--tensor-model-parallel-size=2 --pipeline-model-parallel-size=1 {_THREE_EPOCHS} --sequence-parallel --fp16",
    ),
    "000-pipeline": Block(
        EXAMPLE, 8, f"--tensor-model-parallel-size=1 --pipeline-model-parallel-size=2 {_THREE_EPOCHS} --fp16"
    ),
    "000-mixed": Block(
        EXAMPLE,
        8,
        f"--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 {_THREE_EPOCHS} --sequence-parallel --fp16",
    ),
    "000-two-machines": Block(
        EXAMPLE,
        8,
        f"--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 {_THREE_EPOCHS} "
        "--init-method=tcp://10.0.0.1:29500 --world-size=8 --fp16",
    ),
    "000-debug": Block(
        EXAMPLE,
        2,
        "--tensor-model-parallel-size=2 --pipeline-model-parallel-size=1 --num-layers=2 --hidden-size=128 "
        "--num-attention-heads=4 --batch-size=4 --train-steps=10 --dataset-size=100 --monitor-memory-continuously "
        "--memory-monitor-interval=0.5",
    ),
    "000-short": Block(EXAMPLE, 1, "--seq-length=128 --batch-size=4"),
    "000-one-device": Block(EXAMPLE, 1, "--tensor-model-parallel-size=1 --pipeline-model-parallel-size=1"),
    "000-connectivity": Block(
        EXAMPLE,
        4,
        "--tensor-model-parallel-size=2 --pipeline-model-parallel-size=1 --num-layers=2 --hidden-size=128 "
        "--train-steps=10 --batch-size=4",
    ),
    # The two argument lists of guide 001 have comments inside their quotes.
    "001-qwen2.5-7b": Block(
        PRETRAIN_GPT,
        1,
        """
        # precision and basics
        --bf16 --use-mcore-models --transformer-impl transformer_engine
        # the model
        --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --kv-channels 128
        --max-position-embeddings 32768
        # GQA
        --group-query-attention --num-query-groups 4
        # norm and activation
        --normalization RMSNorm --swiglu
        # bias - only in Qwen2.5
        --disable-bias-linear --add-qkv-bias
        # RoPE
        --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000 --no-rope-fusion
        # vocabulary
        --tokenizer-type HuggingFaceTokenizer --padded-vocab-size 152064 --make-vocab-size-divisible-by 1
        # the rest
        --untie-embeddings-and-output-weights --no-masked-softmax-fusion --no-bias-swiglu-fusion
        """,
        complete=False,
    ),
    "001-qwen3-8b": Block(
        PRETRAIN_GPT,
        1,
        """
        # the model
        --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --kv-channels 128
        --max-position-embeddings 40960
        # GQA
        --group-query-attention --num-query-groups 8
        # norm
        --normalization RMSNorm --norm-epsilon 1e-6
        # Qwen3 only: QK norm
        --qk-layernorm
        # activation and bias
        --swiglu --disable-bias-linear
        # RoPE
        --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000 --use-rotary-position-embeddings
        # vocabulary
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-8B --vocab-size 151936
        --make-vocab-size-divisible-by 128
        # the rest
        --untie-embeddings-and-output-weights --no-masked-softmax-fusion --attention-softmax-in-fp32
        """,
        complete=False,
    ),
    "001-train_qwen.sh": Block(
        PRETRAIN_GPT,
        2,
        f"{_QWEN25_MODEL} {_QWEN25_TRAINING} --adam-eps 1e-8 --data-path your_data_prefix "
        "--load ./qwen2.5-7b-megatron --save ./qwen2.5-7b-megatron",
    ),
    "001-appendix": Block(
        PRETRAIN_GPT,
        8,
        f"{_QWEN25_MODEL} {_QWEN25_TRAINING} --attention-backend flash --data-path /path/to/data_text_document "
        "--load /path/to/qwen2.5-7b-megatron --save /path/to/output --no-load-optim --no-load-rng --log-interval 10 "
        "--tensorboard-dir /path/to/output/tensorboard --log-throughput",
    ),
    "001-experts": Block(
        PRETRAIN_GPT,
        8,
        "--num-experts 64 --moe-router-topk 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 8",
        complete=False,
    ),
    "001-options": Block(
        PRETRAIN_GPT,
        2,
        "--overlap-grad-reduce --overlap-param-gather --fp8 e4m3 --fp8-recipe tensorwise --context-parallel-size 2 "
        "--cp-comm-type p2p --data-path-config data_blend.yaml --sft --use-checkpoint-args --seq-length 2048",
        complete=False,
    ),
    "002-one-gpu": Block(
        STANDARD, 1, "--vocab_size 5000 --hidden_size 256 --num_layers 4 --batch_size 4 --max_steps 100"
    ),
    "002-data": Block(STANDARD, 4, "--batch_size 8"),
    "002-data-and-tensor": Block(STANDARD, 4, "--tp_size 2 --batch_size 8"),
    "002-3d": Block(PARALLEL_3D, 8, "--tp_size 2 --pp_size 2 --num_microbatches 4 --pipeline_schedule 1f1b"),
    "002-gpipe": Block(
        PARALLEL_3D, 8, "--tp_size 2 --pp_size 2 --num_microbatches 8 --pipeline_schedule gpipe"
    ),
    "002-two-machines": Block(PARALLEL_3D, 16, "--tp_size 2 --pp_size 2"),
    "002-megatron": Block(MEGATRON, 8, "--hidden_size 1024 --num_layers 24"),
    "002-remedies": Block(
        MEGATRON,
        8,
        "--batch_size 4 --gradient_accumulation_steps 8 --max_seq_len 1024 --bf16 --num_workers 4 "
        "--learning_rate 1e-5 --warmup_steps 100 --max_grad_norm 0.5 --save_steps 1000",
    ),
    "003-pretrain": Block(
        PRETRAIN_GPT,
        16,
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
        "--global-batch-size 64 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --train-iters 100000 --bf16 "
        "--data-path my_dataset_text_document --tokenizer-type HFTokenizer --tokenizer-model Qwen/Qwen2.5-7B "
        "--save checkpoints/megatron_gpt --save-interval 1000 --log-interval 10",
    ),
    "003-deepspeed": Block(
        MEGATRON,
        8,
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --deepspeed --deepspeed_config ds_config.json "
        "--zero-stage 1 --bf16",
    ),
    "004-reduced": Block(
        PRETRAIN_GPT,
        8,
        "--num-layers 24 --hidden-size 3072 --num-attention-heads 24 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 1 --global-batch-size 16 --train-iters 100 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 2 --data-path data_text_document --vocab-size 50257",
    ),
    "004-175b": Block(
        PRETRAIN_GPT,
        128,
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 "
        "--rampup-batch-size 16 16 5859375 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 "
        "--adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine "
        "--min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 "
        "--pipeline-model-parallel-size 16 --data-path data_text_document --vocab-file gpt2-vocab.json "
        "--merge-file gpt2-merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000 "
        "--eval-interval 1000 --save checkpoints --load checkpoints --eval-iters 10 --tensorboard-dir tensorboard",
    ),
}
