"""How the run is spread over processes, what it keeps in memory and in which precision it computes."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.settings.declaration import (
    ABOVE_ONE,
    ABOVE_ZERO,
    BETWEEN,
    FREE,
    PORT,
    SILENT,
    ZERO_OR_MORE,
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
        1, "ranks that share one layer", also="--tp_size --tp", limit=ABOVE_ZERO
    )
    pipeline_model_parallel_size: int = setting(
        1, "ranks the layers are divided over", also="--pp_size --pp", limit=ABOVE_ZERO
    )
    context_parallel_size: int = setting(
        1, "ranks that share one sequence", also="--cp_size --cp", limit=ABOVE_ZERO
    )
    expert_model_parallel_size: int = setting(
        1, "ranks that share the experts", also="--ep_size --ep", limit=ABOVE_ZERO
    )
    expert_tensor_parallel_size: int = setting(
        None, "ranks that share one expert (tensor parallel size)", limit=ABOVE_ZERO, needs=EXPERTS
    )
    data_parallel_size: int = setting(
        None,
        "copies of the model (world / (tp × pp × cp), checked if given)",
        also="--dp_size --dp",
        limit=ABOVE_ZERO,
    )
    sequence_parallel: bool = setting(
        False, "split norms and residuals over the tensor axis as well", needs=TENSOR_AXIS
    )
    pipeline_schedule: str = setting(
        "1f1b",
        "order of work in the pipeline (interleaved with virtual stages)",
        choices=("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"),
        needs=PIPELINE,
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None,
        "stages on each pipeline rank",
        also="--num-virtual-stages-per-pipeline-rank --vpp",
        limit=ABOVE_ZERO,
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "layers of one stage, instead of the number of stages", limit=ABOVE_ZERO
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None,
        "micro-batches a stage runs before its rank turns to the next (pipeline ranks)",
        limit=ABOVE_ZERO,
        needs=GROUPED_MICRO_BATCHES,
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "layers on the first pipeline rank (divided by cost)", limit=ABOVE_ZERO, needs=STAGES
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, "layers on the last pipeline rank (divided by cost)", limit=ABOVE_ZERO, needs=STAGES
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "count the embedding as one layer when layers are divided", needs=STAGES
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "count the head and the loss as one layer when layers are divided", needs=STAGES
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "all stages written out, as in 'Et|(tt|)*2tL': E embedding, t layer, L head, | next stage",
        needs=STAGES,
    )
    cp_comm_type: str = setting(
        "p2p",
        "how context ranks exchange keys",
        choices=("p2p", "all_gather", "allgather", "a2a"),
        needs=SPLIT_SEQUENCES,
    )
    zero_stage: int = setting(
        0,
        "what data-parallel ranks share: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters",
        sets={"--use-distributed-optimizer": 1},
        choices=(0, 1, 2, 3),
        needs=ranks_to_shard_over,
    )
    num_distributed_optimizer_instances: int = setting(
        1,
        "ZeRO 3: groups of data-parallel ranks that each hold the whole model (hybrid sharding)",
        limit=ABOVE_ZERO,
        needs=hybrid_shards,
    )
    overlap_grad_reduce: bool = setting(False, "reduce gradients while backward runs")
    overlap_param_gather: bool = setting(
        False,
        "gather parameters while forward runs",
    )
    ddp_bucket_size: int = setting(
        40_000_000, "gradients reduced in one collective, in elements", limit=ABOVE_ZERO, needs=buckets
    )
    optimizer_cpu_offload: bool = setting(
        False,
        "keep master weights and Adam's state in host memory, and update them there (ZeRO 0 to 2)",
    )
    deepspeed: bool = setting(
        False,
        "for launch lines of DeepSpeed",
        notice="DeepSpeed takes no part here; what it would do (--deepspeed_config, --zero-stage) is built in",
    )
    deepspeed_config: str | None = setting(None, "a DeepSpeed configuration to take settings from; flags win")


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
        "full recompute: uniform, all layers in chunks that keep their input; block, single layers (uniform)",
        choices=("uniform", "block"),
        needs=RECOMPUTE,
    )
    recompute_num_layers: int = setting(
        None,
        "layers in a chunk (uniform: 1), or how many of a stage's first layers (block)",
        limit=ABOVE_ZERO,
        needs=RECOMPUTE,
    )
    recompute_modules: tuple[str, ...] = setting(
        (),
        "what selective recompute covers (core_attn)",
        choices=("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts"),
        needs=recomputed_modules,
    )
    record_memory_history: bool = setting(
        False,
        "record the allocations of a GPU, with where they came from, for pytorch.org/memory_viz",
    )
    memory_snapshot_path: str = setting(
        "snapshot.pickle",
        "file of that record, in the run folder, with the rank in its name",
        needs=MEMORY_HISTORY,
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision"""

    bf16: bool = setting(False, "bf16 weights and activations, fp32 master weights and gradients")
    fp16: bool = setting(
        False, "fp16 weights and activations, fp32 master weights and gradients, and a scaled loss"
    )
    loss_scale: float | None = setting(
        None,
        "multiply the loss by this before backward, in any precision (fp16: by what fits, found on the way)",
        limit=ZERO_OR_MORE,
        needs=nonzero_loss_scale,
    )
    initial_loss_scale: float = setting(
        2.0**32,
        "first loss scale in fp16",
        also="--init-scale",
        limit=ABOVE_ZERO,
        needs=loss_scale_search("initial_loss_scale"),
    )
    min_loss_scale: float = setting(
        1.0,
        "smallest loss scale (0: as small as it takes)",
        limit=ZERO_OR_MORE,
        needs=loss_scale_search("min_loss_scale"),
    )
    loss_scale_window: int = setting(
        1000,
        "steps in a row without an overflow after which the loss scale grows",
        also="--growth-interval",
        limit=ABOVE_ZERO,
        needs=loss_scale_search("loss_scale_window"),
    )
    loss_scale_growth_factor: float = setting(
        2.0,
        "what it is then multiplied by",
        also="--growth-factor",
        limit=ABOVE_ONE,
        needs=loss_scale_search("loss_scale_growth_factor"),
    )
    loss_scale_backoff_factor: float = setting(
        0.5,
        "what the loss scale is multiplied by when gradients overflow",
        also="--backoff-factor",
        limit=BETWEEN,
        needs=loss_scale_search("loss_scale_backoff_factor"),
    )
    hysteresis: int = setting(
        2,
        "how many overflows it takes, after it has grown, to make the loss scale smaller",
        limit=ABOVE_ZERO,
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
        "scaling of fp8, by the current content: one scale for a tensor, or one for each row of a factor, which keeps digits of rows that "
        "are thousands of times smaller than others, and takes longer",
        choices=("tensorwise", "rowwise", "delayed", "blockwise"),
        not_yet="another scaling of fp8 than by tensor or by row",
        available=("rowwise",),
    )
    fp8_output_layer: bool = setting(False, "the head's matmuls in fp8 too")
    first_last_layers_bf16: bool = setting(
        False,
        "the first and the last layers stay in bf16 where the others have fp8 matmuls",
    )
    num_layers_at_start_in_bf16: int = setting(
        1,
        "how many first layers then stay in bf16",
        limit=ZERO_OR_MORE,
    )
    num_layers_at_end_in_bf16: int = setting(
        1,
        "how many last layers then stay in bf16",
        limit=ZERO_OR_MORE,
    )
    deterministic_mode: bool = setting(False, "refuse kernels whose result is not repeatable")

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
        None,
        "worker processes to start (one per GPU; 1 without GPU)",
        also="--num-processes",
        limit=ABOVE_ZERO,
    )
    device: str = setting("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    threads_per_process: int = setting(
        None, "CPU threads of one worker (OMP_NUM_THREADS, else cores / processes)", limit=ABOVE_ZERO
    )
    master_port: int | None = setting(
        None, "port of the meeting point (a free one)", limit=PORT, needs=own_port
    )
    world_size: int | None = setting(
        None, "number of processes you expect; a different real number is refused", limit=ABOVE_ZERO
    )
    init_method: str | None = setting(
        None, "meeting point as tcp://HOST:PORT, when no launcher gives one", needs=open_rendezvous
    )
    distributed_timeout_minutes: float = setting(
        10.0, "how long a collective may wait for the slowest rank", limit=ABOVE_ZERO, needs=SEVERAL_PROCESSES
    )
    distributed_timeout_seconds_after_init: float | None = setting(
        None,
        "the same after the first step, in seconds (unchanged)",
        limit=ABOVE_ZERO,
        needs=SEVERAL_PROCESSES,
    )
    max_restarts: int = setting(
        None,
        "how often in a row a job that crashed is started again from its last checkpoint before it reaches a new one, which counts anew (3; 0 "
        "for one process, which then runs in place)",
        limit=ZERO_OR_MORE,
        needs=own_processes,
    )
    heartbeat_timeout: float | None = setting(
        None,
        "seconds without a sign of life, or in one place of a step, after which a rank counts as hung (60, 10 times the longest step and twice "
        "the first; 0: never)",
        limit=ZERO_OR_MORE,
        needs=a_supervisor,
    )
    check_memory: bool = setting(
        True, "before starting, compare the memory a run will need with what the device has"
    )
    local_rank: int | None = setting(
        None,
        "given by older launchers",
        notice="the launcher says the same in the environment (LOCAL_RANK), which counts",
        limit=ZERO_OR_MORE,
    )
    job_id: str | None = setting(
        None, "name of the job in progress.txt (Slurm's number of it)", needs=PROGRESS_FILE, resume=SILENT
    )
    enable_ft_package: bool = setting(
        False,
        "NVIDIA's fault-tolerance client",
        notice="this program does not talk to NVIDIA's rank monitor, so this changes nothing",
    )
