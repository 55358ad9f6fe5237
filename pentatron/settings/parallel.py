"""Declares the settings of parallelism, memory, precision and processes."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.layout.schedules import KINDS
from pentatron.settings import needs
from pentatron.settings.declaration import FREE, NON_NEGATIVE, POSITIVE, SILENT, Limit, setting


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism"""

    tensor_model_parallel_size: int = setting(
        1, "tensor-parallel ranks that each layer is sharded over", POSITIVE, also="--tp_size --tp"
    )
    pipeline_model_parallel_size: int = setting(
        1, "pipeline ranks that the layers are divided among", POSITIVE, also="--pp_size --pp"
    )
    context_parallel_size: int = setting(
        1, "context-parallel ranks that each sequence is sharded over", POSITIVE, also="--cp_size --cp"
    )
    expert_model_parallel_size: int = setting(
        1, "expert-parallel ranks that experts are distributed over", POSITIVE, also="--ep_size --ep"
    )
    expert_tensor_parallel_size: int = setting(
        None, "tensor-parallel ranks of one expert (tensor parallel size)", POSITIVE, needs.EXPERTS
    )
    data_parallel_size: int = setting(
        None,
        "data-parallel ranks, which process different samples (world / (tp × pp × cp); checked if given)",
        POSITIVE,
        also="--dp_size --dp",
    )
    sequence_parallel: bool = setting(
        False, "split sequences over the tensor ranks in norms, dropout and residuals", needs.TENSOR_AXIS
    )
    pipeline_schedule: str = setting(
        "1f1b", "pipeline schedule (1f1b, or interleaved with virtual stages)", needs.PIPELINE, choices=KINDS
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, "virtual stages per rank", POSITIVE, also="--num-virtual-stages-per-pipeline-rank --vpp"
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "layers per virtual stage, instead of the number of virtual stages", POSITIVE
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None,
        "consecutive micro-batches of one virtual stage before a rank switches to its next stage (pipeline ranks)",
        POSITIVE,
        needs.PIPELINE,
        needs.GROUPED_MICRO_BATCHES,
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "layers on the first pipeline rank (balanced by cost)", POSITIVE, needs.STAGES
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, "layers on the last pipeline rank (balanced by cost)", POSITIVE, needs.STAGES
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "count the embedding as one layer when layers are divided into stages", needs.STAGES
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "count output layer and loss as one layer when layers are divided into stages", needs.STAGES
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "layers of every stage, as in 'Et|(tt|)*2tL': E embedding, t layer, L output layer and loss, | next stage",
        needs.STAGES,
    )
    cp_comm_type: str = setting(
        "p2p",
        "exchange of keys and values between context ranks: a ring (p2p), all-gather, or all-to-all over heads (a2a)",
        needs.SPLIT_SEQUENCES,
        choices=("p2p", "all_gather", "allgather", "a2a"),
    )
    zero_stage: int = setting(
        0,
        "ZeRO stage, sharding over data-parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters",
        needs.ranks_to_shard_over,
        sets={"--use-distributed-optimizer": 1},
        choices=(0, 1, 2, 3),
    )
    num_distributed_optimizer_instances: int = setting(
        1,
        "ZeRO 3: groups of data-parallel ranks with a complete copy of the model each (hybrid sharding)",
        POSITIVE,
        needs.hybrid_shards,
    )
    overlap_grad_reduce: bool = setting(False, "reduce gradients while backward runs")
    overlap_param_gather: bool = setting(False, "gather parameters while forward runs")
    ddp_bucket_size: int = setting(
        40_000_000,
        "elements per gradient bucket, which one collective reduces",
        POSITIVE,
        needs.REPLICATED_GRADIENTS,
        needs.BUCKETS,
    )
    optimizer_cpu_offload: bool = setting(
        False, "keep master weights and optimizer state in host memory, updated on the CPU (ZeRO 0 to 2)"
    )
    deepspeed: bool = setting(
        False,
        "accepted for DeepSpeed scripts",
        notice="DeepSpeed is not used; its features (--deepspeed_config, --zero-stage) are built in",
    )
    deepspeed_config: str | None = setting(None, "DeepSpeed configuration file; flags override it")


@dataclass(frozen=True)
class MemoryConfig:
    """Memory"""

    recompute_granularity: str | None = setting(
        None,
        "recompute activations in backward: some modules (selective) or whole layers (full)",
        sets={"--recompute-activations": "selective"},
        choices=("selective", "full"),
    )
    recompute_method: str | None = setting(
        None,
        "layers of full recompute: uniform, all layers in chunks that save their input; block, the first layers of each stage (uniform)",
        needs.RECOMPUTE,
        choices=("uniform", "block"),
    )
    recompute_num_layers: int = setting(
        None, "layers per chunk for uniform (1), first layers of a stage for block", POSITIVE, needs.RECOMPUTE
    )
    recompute_modules: tuple[str, ...] = setting(
        (),
        "modules that selective recompute covers (core_attn)",
        needs.recomputed_modules,
        choices=("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts"),
    )
    record_memory_history: bool = setting(
        False, "record GPU allocations with stack traces, for pytorch.org/memory_viz"
    )
    memory_snapshot_path: str = setting(
        "snapshot.pickle",
        "file name of the memory snapshot in the run folder; the rank is added to the name",
        needs.MEMORY_HISTORY,
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision"""

    bf16: bool = setting(False, "bf16 weights and activations, fp32 master weights and gradients")
    fp16: bool = setting(False, "fp16 weights and activations, fp32 master weights and gradients, loss scale")
    loss_scale: float | None = setting(
        None, "static loss scale in any precision (fp16: dynamic)", NON_NEGATIVE, needs.nonzero_loss_scale
    )
    initial_loss_scale: float = setting(
        2.0**32,
        "initial dynamic loss scale in fp16",
        POSITIVE,
        needs.dynamic_loss_scale("initial_loss_scale"),
        also="--init-scale",
    )
    min_loss_scale: float = setting(
        1.0, "minimum dynamic loss scale (0: none)", NON_NEGATIVE, needs.dynamic_loss_scale("min_loss_scale")
    )
    loss_scale_window: int = setting(
        1000,
        "consecutive steps without overflow before the dynamic loss scale grows",
        POSITIVE,
        needs.dynamic_loss_scale("loss_scale_window"),
        also="--growth-interval",
    )
    loss_scale_growth_factor: float = setting(
        2.0,
        "factor by which the dynamic loss scale grows",
        Limit(lambda factor: factor > 1, "more than 1"),
        needs.dynamic_loss_scale("loss_scale_growth_factor"),
        also="--growth-factor",
    )
    loss_scale_backoff_factor: float = setting(
        0.5,
        "factor of the dynamic loss scale after gradients overflow",
        Limit(lambda factor: 0 < factor < 1, "more than 0 and below 1"),
        needs.dynamic_loss_scale("loss_scale_backoff_factor"),
        also="--backoff-factor",
    )
    hysteresis: int = setting(
        2,
        "overflows since the last growth after which the loss scale is reduced",
        POSITIVE,
        needs.dynamic_loss_scale("hysteresis"),
    )
    fp8_format: str | None = setting(
        None,
        "fp8 matmuls in the layers: e4m3, or hybrid with gradients in e5m2 (GPUs from compute capability 8.9 on)",
        also="--fp8",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = setting(
        "tensorwise",
        "fp8 scaling by the current absolute maximum: one scale per tensor, or per row of an operand, which is slower but more "
        "precise if some rows are thousands of times smaller than others",
        choices=("tensorwise", "rowwise", "delayed", "blockwise"),
        not_yet="an fp8 scaling other than by tensor or by row",
        available=("rowwise",),
    )
    fp8_output_layer: bool = setting(False, "also use fp8 matmuls in the output layer")
    first_last_layers_bf16: bool = setting(
        False, "keep the first and last layers in bf16 while the other layers use fp8 matmuls"
    )
    num_layers_at_start_in_bf16: int = setting(
        1, "number of first layers in bf16 with --first-last-layers-bf16", NON_NEGATIVE
    )
    num_layers_at_end_in_bf16: int = setting(
        1, "number of last layers in bf16 with --first-last-layers-bf16", NON_NEGATIVE
    )
    deterministic_mode: bool = setting(False, "use deterministic kernels only; others are refused")

    @property
    def name(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def described(self) -> str:
        if self.fp8_format is None:
            return self.name
        recipe = "" if self.fp8_recipe == "tensorwise" else f" {self.fp8_recipe}"
        head = ", the head too" if self.fp8_output_layer else ""
        return f"{self.name} with fp8 matmuls ({self.fp8_format}{recipe}{head})"


@dataclass(frozen=True)
class LaunchConfig:
    """Processes"""

    on_resume: ClassVar = FREE

    nproc_per_node: int = setting(
        None, "processes to start on this machine (one per GPU; 1 if none)", POSITIVE, also="--num-processes"
    )
    device: str = setting("auto", "device to train on", choices=("auto", "cpu", "cuda"))
    threads_per_process: int = setting(
        None, "CPU threads per process (OMP_NUM_THREADS, else cores / processes)", POSITIVE
    )
    master_port: int | None = setting(
        None,
        "port of the rendezvous (a free one)",
        Limit(lambda port: 1 <= port <= 65535, "a port from 1 to 65535"),
        needs.own_port,
    )
    world_size: int | None = setting(
        None, "expected number of processes; a different actual number is an error", POSITIVE
    )
    init_method: str | None = setting(
        None, "address of the rendezvous, tcp://HOST:PORT, if no launcher provides one", needs.open_rendezvous
    )
    distributed_timeout_minutes: float = setting(10.0, "collective timeout in minutes", POSITIVE, needs.PEERS)
    distributed_timeout_seconds_after_init: float | None = setting(
        None,
        "timeout of collectives after the first step, in seconds (that of --distributed-timeout-minutes)",
        POSITIVE,
        needs.PEERS,
    )
    max_restarts: int = setting(
        None,
        "maximum restarts of a crashed job from its last checkpoint; a new checkpoint resets the count (3; 0 for one process, which then runs "
        "without a supervisor)",
        NON_NEGATIVE,
        needs.OWN_PROCESSES,
    )
    heartbeat_timeout: float | None = setting(
        None,
        "seconds without a heartbeat or without progress in a step after which a rank is considered hung (60, but at least 10 times the longest "
        "step and twice the first; 0: never)",
        NON_NEGATIVE,
        needs.SUPERVISOR,
    )
    check_memory: bool = setting(True, "before the start, compare estimated memory with that of the device")
    local_rank: int | None = setting(
        None,
        "accepted for torch.distributed.launch: the local rank",
        NON_NEGATIVE,
        notice="LOCAL_RANK, which the launcher sets in the environment, is used instead",
    )
    job_id: str | None = setting(None, "job ID in progress.txt (Slurm job ID)", needs.PROGRESS_LOG, SILENT)
    enable_ft_package: bool = setting(
        False,
        "accepted for Megatron scripts: NVIDIA's fault-tolerance client",
        notice="NVIDIA's rank monitor is not used, so this has no effect",
    )
