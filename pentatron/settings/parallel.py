"""Declares the settings of parallelism, memory, precision and processes."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.settings.declaration import (
    ABOVE_ONE,
    BETWEEN_ZERO_AND_ONE,
    FREE,
    NON_NEGATIVE,
    PORT,
    POSITIVE,
    SILENT,
    OnResume,
    setting,
)
from pentatron.settings.needs import (
    EXPERTS,
    GROUPED_MICRO_BATCHES,
    MEMORY_HISTORY,
    PIPELINE,
    PROGRESS_FILE,
    RECOMPUTE,
    SEVERAL_PROCESSES,
    SPLIT_SEQUENCES,
    STAGES,
    TENSOR_AXIS,
    a_supervisor,
    buckets,
    hybrid_shards,
    loss_scale_search,
    nonzero_loss_scale,
    open_rendezvous,
    own_port,
    own_processes,
    ranks_to_shard_over,
    recomputed_modules,
)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism"""

    tensor_model_parallel_size: int = setting(
        1, "tensor-parallel ranks, which share each layer", also="--tp_size --tp", limit=POSITIVE
    )
    pipeline_model_parallel_size: int = setting(
        1, "pipeline ranks, which the layers are divided over", also="--pp_size --pp", limit=POSITIVE
    )
    context_parallel_size: int = setting(
        1, "context-parallel ranks, which share each sequence", also="--cp_size --cp", limit=POSITIVE
    )
    expert_model_parallel_size: int = setting(
        1, "expert-parallel ranks, which experts are divided over", also="--ep_size --ep", limit=POSITIVE
    )
    expert_tensor_parallel_size: int = setting(
        None, "tensor-parallel ranks of one expert (tensor parallel size)", limit=POSITIVE, needs=EXPERTS
    )
    data_parallel_size: int = setting(
        None, "replicas (world / (tp × pp × cp), checked if given)", also="--dp_size --dp", limit=POSITIVE
    )
    sequence_parallel: bool = setting(
        False, "split sequences over the tensor ranks in norms and residuals", needs=TENSOR_AXIS
    )
    pipeline_schedule: str = setting(
        "1f1b",
        "pipeline schedule (interleaved with virtual stages)",
        choices=("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"),
        needs=PIPELINE,
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None,
        "virtual stages on each pipeline rank",
        also="--num-virtual-stages-per-pipeline-rank --vpp",
        limit=POSITIVE,
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "layers of one virtual stage, instead of the number of stages", limit=POSITIVE
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None,
        "consecutive micro-batches of one virtual stage before its rank switches to the next (pipeline ranks)",
        limit=POSITIVE,
        needs=GROUPED_MICRO_BATCHES,
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "layers on the first pipeline rank (balanced by cost)", limit=POSITIVE, needs=STAGES
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, "layers on the last pipeline rank (balanced by cost)", limit=POSITIVE, needs=STAGES
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "count the embedding as one layer when layers are divided", needs=STAGES
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "count the output layer and the loss as one layer when layers are divided", needs=STAGES
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "all stages explicitly, as in 'Et|(tt|)*2tL': E embedding, t layer, L output layer and loss, | next stage",
        needs=STAGES,
    )
    cp_comm_type: str = setting(
        "p2p",
        "how context ranks exchange keys and values",
        choices=("p2p", "all_gather", "allgather", "a2a"),
        needs=SPLIT_SEQUENCES,
    )
    zero_stage: int = setting(
        0,
        "shard over data-parallel ranks: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters",
        sets={"--use-distributed-optimizer": 1},
        choices=(0, 1, 2, 3),
        needs=ranks_to_shard_over,
    )
    num_distributed_optimizer_instances: int = setting(
        1,
        "ZeRO 3: groups of data-parallel ranks that each hold the whole model (hybrid sharding)",
        limit=POSITIVE,
        needs=hybrid_shards,
    )
    overlap_grad_reduce: bool = setting(False, "reduce gradients while backward runs")
    overlap_param_gather: bool = setting(False, "gather parameters while forward runs")
    ddp_bucket_size: int = setting(
        40_000_000, "elements per gradient bucket, reduced in one collective", limit=POSITIVE, needs=buckets
    )
    optimizer_cpu_offload: bool = setting(
        False, "keep master weights and optimizer state in host memory, updated on the CPU (ZeRO 0 to 2)"
    )
    deepspeed: bool = setting(
        False,
        "accepted for DeepSpeed command lines",
        notice="DeepSpeed is not used; its features (--deepspeed_config, --zero-stage) are built in",
    )
    deepspeed_config: str | None = setting(None, "DeepSpeed configuration file; flags override it")


@dataclass(frozen=True)
class MemoryConfig:
    """Memory"""

    recompute_granularity: str | None = setting(
        None,
        "recompute activations in backward",
        sets={"--recompute-activations": "selective"},
        choices=("selective", "full"),
    )
    recompute_method: str | None = setting(
        None,
        "full recompute: uniform, all layers in chunks that store their input; block, the first layers of each stage singly (uniform)",
        choices=("uniform", "block"),
        needs=RECOMPUTE,
    )
    recompute_num_layers: int = setting(
        None,
        "layers per chunk (uniform: 1), or number of first layers of a stage (block)",
        limit=POSITIVE,
        needs=RECOMPUTE,
    )
    recompute_modules: tuple[str, ...] = setting(
        (),
        "modules of selective recompute (core_attn)",
        choices=("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts"),
        needs=recomputed_modules,
    )
    record_memory_history: bool = setting(
        False, "record GPU allocations with stack traces, for pytorch.org/memory_viz"
    )
    memory_snapshot_path: str = setting(
        "snapshot.pickle", "file of it in the run folder; the rank is added to its name", needs=MEMORY_HISTORY
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision"""

    bf16: bool = setting(False, "bf16 weights and activations, fp32 master weights and gradients")
    fp16: bool = setting(
        False, "fp16 weights and activations, fp32 master weights and gradients, scaled loss"
    )
    loss_scale: float | None = setting(
        None, "static loss scale, any precision (fp16: dynamic)", limit=NON_NEGATIVE, needs=nonzero_loss_scale
    )
    initial_loss_scale: float = setting(
        2.0**32,
        "initial dynamic loss scale in fp16",
        also="--init-scale",
        limit=POSITIVE,
        needs=loss_scale_search("initial_loss_scale"),
    )
    min_loss_scale: float = setting(
        1.0, "minimum loss scale (0: none)", limit=NON_NEGATIVE, needs=loss_scale_search("min_loss_scale")
    )
    loss_scale_window: int = setting(
        1000,
        "consecutive steps without overflow before the loss scale grows",
        also="--growth-interval",
        limit=POSITIVE,
        needs=loss_scale_search("loss_scale_window"),
    )
    loss_scale_growth_factor: float = setting(
        2.0,
        "factor by which the loss scale grows",
        also="--growth-factor",
        limit=ABOVE_ONE,
        needs=loss_scale_search("loss_scale_growth_factor"),
    )
    loss_scale_backoff_factor: float = setting(
        0.5,
        "factor of the loss scale after gradients overflow",
        also="--backoff-factor",
        limit=BETWEEN_ZERO_AND_ONE,
        needs=loss_scale_search("loss_scale_backoff_factor"),
    )
    hysteresis: int = setting(
        2,
        "overflows after a growth before the loss scale is reduced",
        limit=POSITIVE,
        needs=loss_scale_search("hysteresis"),
    )
    fp8_format: str | None = setting(
        None,
        "fp8 matmuls in the layers: e4m3, or hybrid with gradients in e5m2 (GPUs from compute capability 8.9 on)",
        also="--fp8",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = setting(
        "tensorwise",
        "fp8 scaling by the current absolute maximum: one scale per tensor, or per row of an operand, which is slower but keeps the "
        "precision of rows that are thousands of times smaller than others",
        choices=("tensorwise", "rowwise", "delayed", "blockwise"),
        not_yet="an fp8 scaling other than by tensor or by row",
        available=("rowwise",),
    )
    fp8_output_layer: bool = setting(False, "fp8 matmuls in the output layer too")
    first_last_layers_bf16: bool = setting(
        False, "keep the first and last layers in bf16 when the others have fp8 matmuls"
    )
    num_layers_at_start_in_bf16: int = setting(
        1, "number of first layers in bf16 with --first-last-layers-bf16", limit=NON_NEGATIVE
    )
    num_layers_at_end_in_bf16: int = setting(
        1, "number of last layers in bf16 with --first-last-layers-bf16", limit=NON_NEGATIVE
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

    on_resume: ClassVar[OnResume] = FREE

    nproc_per_node: int = setting(
        None, "processes to start (one per GPU; 1 without GPU)", also="--num-processes", limit=POSITIVE
    )
    device: str = setting("auto", "compute device", choices=("auto", "cpu", "cuda"))
    threads_per_process: int = setting(
        None, "CPU threads of one process (OMP_NUM_THREADS, else cores / processes)", limit=POSITIVE
    )
    master_port: int | None = setting(None, "port of the rendezvous (a free one)", limit=PORT, needs=own_port)
    world_size: int | None = setting(
        None, "expected number of processes; a different actual number is an error", limit=POSITIVE
    )
    init_method: str | None = setting(
        None, "rendezvous as tcp://HOST:PORT, if no launcher provides one", needs=open_rendezvous
    )
    distributed_timeout_minutes: float = setting(
        10.0, "timeout of collectives, for the slowest rank", limit=POSITIVE, needs=SEVERAL_PROCESSES
    )
    distributed_timeout_seconds_after_init: float | None = setting(
        None,
        "timeout of collectives after the first step, in seconds (unchanged)",
        limit=POSITIVE,
        needs=SEVERAL_PROCESSES,
    )
    max_restarts: int = setting(
        None,
        "restarts of a crashed job from its last checkpoint; a new checkpoint resets the count (3; 0 for one process, which then runs "
        "without a supervisor)",
        limit=NON_NEGATIVE,
        needs=own_processes,
    )
    heartbeat_timeout: float | None = setting(
        None,
        "seconds without a heartbeat, or at one point of a step, after which a rank is considered hung (60, but at least 10 times the longest "
        "step and twice the first; 0: never)",
        limit=NON_NEGATIVE,
        needs=a_supervisor,
    )
    check_memory: bool = setting(True, "before starting, compare the estimated memory with the device's")
    local_rank: int | None = setting(
        None,
        "local rank, as older launchers pass it",
        notice="LOCAL_RANK, which the launcher sets in the environment, is used instead",
        limit=NON_NEGATIVE,
    )
    job_id: str | None = setting(
        None, "name of the job in progress.txt (the Slurm job ID)", needs=PROGRESS_FILE, resume=SILENT
    )
    enable_ft_package: bool = setting(
        False,
        "NVIDIA's fault-tolerance client",
        notice="this program does not use NVIDIA's rank monitor, so this changes nothing",
    )
