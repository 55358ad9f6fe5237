"""Training flags of the guides as they spell them, with the setting, its values and the programs."""

from dataclasses import dataclass
from typing import Any

from pentatron.settings.entry_points import EXAMPLE, MEGATRON, PARALLEL_3D, PRETRAIN_GPT, STANDARD, EntryPoint

SCRIPT = (EXAMPLE,)
PRETRAIN = (PRETRAIN_GPT,)
BOTH = (EXAMPLE, PRETRAIN_GPT)
PROJECT = (STANDARD, PARALLEL_3D, MEGATRON)
ALL = (*BOTH, *PROJECT)

SWITCH = ""


@dataclass(frozen=True)
class Flag:
    """Expected effect of a flag.

    `values` maps the text after the flag to the value of the setting; SWITCH stands for a flag without a
    value.
    """

    setting: str
    values: dict[str, Any]
    entries: tuple[EntryPoint, ...] = PRETRAIN


# fmt: off
FLAGS: dict[str, Flag] = {
    # the example script
    "--batch-size": Flag("global_batch_size", {"16": 16, "4": 4}, SCRIPT),
    "--epochs": Flag("epochs", {"3": 3}, SCRIPT),
    "--train-steps": Flag("train_iters", {"1000": 1000, "10": 10}, SCRIPT),
    "--warmup-steps": Flag("lr_warmup_iters", {"100": 100}, SCRIPT),
    "--gradient-clip-val": Flag("clip_grad", {"1.0": 1.0}, SCRIPT),
    "--world-size": Flag("world_size", {"8": 8}, SCRIPT),
    "--init-method": Flag("init_method", {"tcp://localhost:12345": "tcp://localhost:12345"}, SCRIPT),
    "--monitor-memory-continuously": Flag("monitor_memory_continuously", {SWITCH: True}, SCRIPT),
    "--memory-monitor-interval": Flag("memory_monitor_interval", {"0.5": 0.5}, SCRIPT),
    "--save-performance-summary": Flag("save_performance_summary", {SWITCH: True}, SCRIPT),
    "--dataset-size": Flag("dataset_size", {"100": 100}, SCRIPT),
    "--num-workers": Flag("num_workers", {"4": 4}, SCRIPT),
    # architecture
    "--num-layers": Flag("num_layers", {"2": 2, "28": 28, "96": 96}, BOTH),
    "--hidden-size": Flag("hidden_size", {"128": 128, "3584": 3584}, BOTH),
    "--num-attention-heads": Flag("num_attention_heads", {"4": 4, "28": 28}, BOTH),
    "--seq-length": Flag("seq_length", {"128": 128, "4096": 4096}, BOTH),
    "--max-position-embeddings": Flag("max_position_embeddings", {"32768": 32768}),
    "--ffn-hidden-size": Flag("ffn_hidden_size", {"18944": 18944}, BOTH),
    "--kv-channels": Flag("kv_channels", {"128": 128}),
    "--group-query-attention": Flag("group_query_attention", {SWITCH: True}),
    "--num-query-groups": Flag("num_query_groups", {"4": 4}),
    "--normalization": Flag("normalization", {"RMSNorm": "RMSNorm", "LayerNorm": "LayerNorm"}),
    "--norm-epsilon": Flag("layernorm_epsilon", {"1e-6": 1e-6}),
    "--swiglu": Flag("gated_linear_unit", {SWITCH: True}),
    "--disable-bias-linear": Flag("add_bias_linear", {SWITCH: False}),
    "--add-qkv-bias": Flag("add_qkv_bias", {SWITCH: True}),
    "--qk-layernorm": Flag("qk_layernorm", {SWITCH: True}),
    "--position-embedding-type": Flag(
        "position_embedding_type", {"rope": "rope", "learned_absolute": "learned_absolute"}),
    "--rotary-percent": Flag("rotary_percent", {"1.0": 1.0}),
    "--rotary-base": Flag("rotary_base", {"1000000": 1e6}),
    "--use-rotary-position-embeddings": Flag("position_embedding_type", {SWITCH: "rope"}),
    "--no-rope-fusion": Flag("rope_fusion", {SWITCH: False}),
    "--no-masked-softmax-fusion": Flag("masked_softmax_fusion", {SWITCH: False}),
    "--no-bias-swiglu-fusion": Flag("bias_swiglu_fusion", {SWITCH: False}),
    "--attention-softmax-in-fp32": Flag("attention_softmax_in_fp32", {SWITCH: True}),
    "--untie-embeddings-and-output-weights": Flag("untie_embeddings_and_output_weights", {SWITCH: True}),
    "--vocab-size": Flag("vocab_size", {"151936": 151936}, BOTH),
    "--padded-vocab-size": Flag("padded_vocab_size", {"152064": 152064}),
    "--make-vocab-size-divisible-by": Flag("make_vocab_size_divisible_by", {"1": 1, "128": 128}),
    "--transformer-impl": Flag(
        "transformer_impl", {"transformer_engine": "transformer_engine", "local": "local"}),
    "--use-mcore-models": Flag("use_mcore_models", {SWITCH: True}),
    "--attention-backend": Flag("attention_backend", {"flash": "flash"}),
    "--init-method-std": Flag("init_method_std", {"0.006": 0.006}),
    "--qk-l2-norm": Flag("qk_l2_norm", {SWITCH: True}),
    "--moe-use-legacy-grouped-gemm": Flag("moe_use_legacy_grouped_gemm", {SWITCH: True}),
    "--multi-latent-attention": Flag("multi_latent_attention", {SWITCH: True}),
    # tokenizer
    "--tokenizer-type": Flag(
        "tokenizer_type",
        {k: k for k in ("HuggingFaceTokenizer", "HFTokenizer", "GPT2BPETokenizer")}),
    "--tokenizer-model": Flag(
        "tokenizer_model", {"./qwen2.5-7b-hf": "./qwen2.5-7b-hf", "Qwen/Qwen3-8B": "Qwen/Qwen3-8B"}),
    "--vocab-file": Flag("vocab_file", {"gpt2-vocab.json": "gpt2-vocab.json"}),
    "--merge-file": Flag("merge_file", {"gpt2-merges.txt": "gpt2-merges.txt"}),
    # batches and schedule
    "--micro-batch-size": Flag("micro_batch_size", {"1": 1}),
    "--global-batch-size": Flag("global_batch_size", {"64": 64, "1536": 1536}),
    "--rampup-batch-size": Flag("rampup_batch_size", {"16 16 5859375": (16, 16, 5859375)}),
    "--train-iters": Flag("train_iters", {"10000": 10000, "500000": 500000}),
    "--lr": Flag("lr", {"1e-5": 1e-5, "6.0e-5": 6e-5, "1.5e-4": 1.5e-4}, BOTH),
    "--min-lr": Flag("min_lr", {"1e-6": 1e-6}),
    "--lr-decay-style": Flag("lr_decay_style", {"cosine": "cosine"}),
    "--lr-warmup-iters": Flag("lr_warmup_iters", {"100": 100}),
    "--lr-warmup-fraction": Flag("lr_warmup_fraction", {".001": 0.001}),
    "--lr-decay-iters": Flag("lr_decay_iters", {"430000": 430000}),
    "--weight-decay": Flag("weight_decay", {"0.01": 0.01, "0.1": 0.1}),
    "--clip-grad": Flag("clip_grad", {"1.0": 1.0}),
    "--adam-beta1": Flag("adam_beta1", {"0.9": 0.9}),
    "--adam-beta2": Flag("adam_beta2", {"0.95": 0.95}),
    "--adam-eps": Flag("adam_eps", {"1e-8": 1e-8}),
    # parallelism and memory
    "--tensor-model-parallel-size": Flag("tensor_model_parallel_size", {"2": 2, "8": 8}, BOTH),
    "--pipeline-model-parallel-size": Flag("pipeline_model_parallel_size", {"1": 1, "16": 16}, BOTH),
    "--sequence-parallel": Flag("sequence_parallel", {SWITCH: True}, BOTH),
    "--context-parallel-size": Flag("context_parallel_size", {"2": 2}),
    "--cp-comm-type": Flag("cp_comm_type", {k: k for k in ("p2p", "all_gather", "a2a")}),
    "--expert-model-parallel-size": Flag("expert_model_parallel_size", {"8": 8}),
    "--use-distributed-optimizer": Flag("zero_stage", {SWITCH: 1}),
    "--overlap-grad-reduce": Flag("overlap_grad_reduce", {SWITCH: True}),
    "--overlap-param-gather": Flag("overlap_param_gather", {SWITCH: True}),
    "--recompute-granularity": Flag("recompute_granularity", {"selective": "selective", "full": "full"}),
    "--recompute-modules": Flag(
        "recompute_modules", {"core_attn": ("core_attn",), "core_attn mlp": ("core_attn", "mlp")}),
    "--deepspeed": Flag("deepspeed", {SWITCH: True}),
    "--deepspeed_config": Flag("deepspeed_config", {"ds_config.json": "ds_config.json"}),
    "--zero-stage": Flag("zero_stage", {"1": 1}),
    # precision
    "--bf16": Flag("bf16", {SWITCH: True}, ALL),
    "--fp16": Flag("fp16", {SWITCH: True}, ALL),
    "--fp8": Flag("fp8_format", {"e4m3": "e4m3"}),
    "--fp8-recipe": Flag("fp8_recipe", {"tensorwise": "tensorwise"}),
    # experts
    "--num-experts": Flag("num_experts", {"64": 64}),
    "--moe-router-topk": Flag("moe_router_topk", {"8": 8}),
    "--moe-grouped-gemm": Flag("moe_grouped_gemm", {SWITCH: True}),
    "--moe-token-dispatcher-type": Flag("moe_token_dispatcher_type", {"alltoall": "alltoall"}),
    "--moe-router-load-balancing-type": Flag("moe_router_load_balancing_type", {"aux_loss": ("aux_loss",)}),
    "--moe-aux-loss-coeff": Flag("moe_aux_loss_coeff", {"0.01": (0.01,)}),
    # data
    "--data-path": Flag("data_path", {
        "my_dataset_text_document": ("my_dataset_text_document",),
        "0.7 dataset1_text_document 0.3 dataset2_text_document":
            ("0.7", "dataset1_text_document", "0.3", "dataset2_text_document"),
    }),
    "--data-path-config": Flag("data_path_config", {"data_blend.yaml": "data_blend.yaml"}),
    "--split": Flag("split", {"99,1,0": "99,1,0", "949,50,1": "949,50,1"}),
    "--sft": Flag("sft", {SWITCH: True}),
    "--mock-data": Flag("mock_data", {SWITCH: True}),
    "--dataloader-type": Flag("dataloader_type", {"single": "single", "cyclic": "cyclic"}),
    # checkpoints
    "--save": Flag("save", {"checkpoints/megatron_gpt": "checkpoints/megatron_gpt"}),
    "--load": Flag("load", {"./qwen2.5-7b-megatron": "./qwen2.5-7b-megatron"}),
    "--save-interval": Flag("save_interval", {"500": 500}),
    "--ckpt-format": Flag("ckpt_format", {"torch_dist": "torch_dist", "torch": "torch"}),
    "--finetune": Flag("finetune", {SWITCH: True}),
    "--no-load-optim": Flag("no_load_optim", {SWITCH: True}),
    "--no-load-rng": Flag("no_load_rng", {SWITCH: True}),
    "--use-checkpoint-args": Flag("use_checkpoint_args", {SWITCH: True}),
    "--non-persistent-ckpt-type": Flag("non_persistent_ckpt_type", {"local": "local"}),
    "--non-persistent-local-ckpt-dir": Flag("non_persistent_local_ckpt_dir", {"/tmp/local": "/tmp/local"}),
    # logging and evaluation
    "--log-interval": Flag("log_interval", {"10": 10, "100": 100}),
    "--tensorboard-dir": Flag("tensorboard_dir", {"output/tensorboard": "output/tensorboard"}),
    "--log-throughput": Flag("log_throughput", {SWITCH: True}),
    "--eval-interval": Flag("eval_interval", {"1000": 1000}),
    "--eval-iters": Flag("eval_iters", {"10": 10}),
    "--skip-train": Flag("skip_train", {SWITCH: True}),
    "--log-progress": Flag("log_progress", {SWITCH: True}),
    "--record-memory-history": Flag("record_memory_history", {SWITCH: True}),
    "--yaml-cfg": Flag("config", {"model.yaml": "model.yaml"}),
    "--enable-ft-package": Flag("enable_ft_package", {SWITCH: True}),
    # the 3D-parallel project
    "--vocab_size": Flag("vocab_size", {"5000": 5000}, PROJECT),
    "--hidden_size": Flag("hidden_size", {"256": 256}, PROJECT),
    "--num_layers": Flag("num_layers", {"4": 4}, PROJECT),
    "--batch_size": Flag("rank_batch_size", {"4": 4, "8": 8}, PROJECT),
    "--gradient_accumulation_steps": Flag("gradient_accumulation_steps", {"8": 8}, PROJECT),
    "--max_seq_len": Flag("seq_length", {"1024": 1024}, PROJECT),
    "--max_steps": Flag("train_iters", {"100": 100}, PROJECT),
    "--save_steps": Flag("save_interval", {"1000": 1000}, PROJECT),
    "--tp_size": Flag("tensor_model_parallel_size", {"2": 2}, PROJECT),
    "--pp_size": Flag("pipeline_model_parallel_size", {"2": 2}, PROJECT),
    "--num_microbatches": Flag("num_microbatches", {"4": 4, "8": 8}, PROJECT),
    "--pipeline_schedule": Flag("pipeline_schedule", {"1f1b": "1f1b", "gpipe": "gpipe"}, PROJECT),
    "--learning_rate": Flag("lr", {"1e-5": 1e-5}, PROJECT),
    "--warmup_steps": Flag("lr_warmup_iters", {"1000": 1000}, PROJECT),
    "--max_grad_norm": Flag("clip_grad", {"0.5": 0.5}, PROJECT),
    "--num_workers": Flag("num_workers", {"4": 4}, PROJECT),
}
# fmt: on
