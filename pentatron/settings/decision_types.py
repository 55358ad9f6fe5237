"""The result types of `decisions.decide`: what a run compiles, fuses, offloads and overlaps."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of the compute device.

    `kind` is torch's device type, or empty while it is unknown, as with `--device auto` before a worker
    process has queried it. `capability`: compute capability of an NVIDIA GPU. `peak`: dense TFLOP/s in the
    precision of the run (for fp8: in 16 bits), None if unknown.
    """

    kind: str = ""
    name: str = ""
    capability: tuple[int, int] | None = None
    peak: float | None = None
    is_nvidia: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"


@dataclass(frozen=True)
class Decision:
    """`on`: whether it is done. `idle`: why the setting has no effect in this run; empty if it has one."""

    on: bool
    idle: str = ""


@dataclass(frozen=True)
class CompileDecision:
    """What `torch.compile` is applied to.

    `required`: stop the run if a layer cannot be compiled. `held_back`: why layers on a GPU are not compiled
    by default. `together`: maximum number of layers in one compiled function. `together_idle`: why this is 1
    although more were requested. `documents`: attention masks depend on the documents in a batch.
    """

    on: bool
    required: bool
    disabled_reason: str
    together: int
    together_idle: str
    documents: bool
    deterministic: bool


@dataclass(frozen=True)
class GateDecision:
    """How the gated activation of an MLP is fused.

    `in_second`: into the second matmul by a GPU kernel, which does not save the activation for backward.
    `in_fp8`: into the first matmul, in fp8.
    """

    in_second: bool
    in_fp8: bool
    idle: str

    @property
    def on(self) -> bool:
        return self.in_second or self.in_fp8


@dataclass(frozen=True)
class LossDecision:
    """`on`: the cross entropy is fused, `chunk` tokens at a time.

    `kernel`: use the Triton kernel if Triton works.
    """

    on: bool
    implementation: str
    chunk: int
    kernel: bool
    idle: str


@dataclass(frozen=True)
class ExpertsDecision:
    """`on`: use one grouped matmul per rank.

    `on_device`: route on the GPU without a host sync, as it has all experts.
    """

    on: bool
    on_device: bool
    idle: str


@dataclass(frozen=True)
class Fp8Decision:
    """Which matmuls run in fp8.

    `layers`: layers with fp8 matmuls. `head`: the output layer too. `experts_left`: experts of these layers
    stay in bf16. `by_rows`: one scale per row instead of per tensor. `lacking`: why the device has no fp8
    matmuls. `idle` and `ends_idle`: why the settings of fp8, and of the first and last layers in bf16, have
    no effect.
    """

    format: str | None
    by_rows: bool
    layers: range
    head: bool
    experts_in_bf16: bool
    lacking: str
    idle: str
    ends_idle: str


@dataclass(frozen=True)
class GraphsDecision:
    """Whether micro-batches are captured as CUDA graphs.

    `required`: stop the run if they cannot be. `if_room`: capture if there is enough GPU memory. `problem`:
    why a required capture is impossible. `left_out`: why there is none although kernel launches limit the
    GPU.
    """

    required: bool = False
    if_memory_allows: bool = False
    problem: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of the optimizer. `one_pass`: clip, update and round in one Triton kernel, if Triton works."""

    zero_stage: int
    bucket_size: int
    overlap_reduce: bool = False
    overlap_gather: bool = False
    in_host_memory: bool = False
    one_pass: bool = False


@dataclass(frozen=True)
class Decisions:
    """All decisions of a run, and the options of its optimizer that follow from them."""

    device: DeviceFacts
    compilation: CompileDecision
    gate: GateDecision
    loss: LossDecision
    experts: ExpertsDecision
    graphs: GraphsDecision
    fp8: Fp8Decision
    update: Decision
    offload: Decision
    grad_overlap: Decision
    param_overlap: Decision
    allocations_recorded: Decision
    torch_profiler: Decision
    optimizer: OptimizerOptions
    slow_fp16: bool

    @cached_property
    def idle(self) -> Mapping[str, str]:
        """Maps each setting of these decisions to why it has no effect; to an empty string if it has one."""
        return {
            "bias_swiglu_fusion": self.gate.idle,
            "cross_entropy_fusion_impl": self.loss.idle,
            "cross_entropy_chunk": self.loss.idle,
            "fused_update": self.update.idle,
            "optimizer_cpu_offload": self.offload.idle,
            "overlap_grad_reduce": self.grad_overlap.idle,
            "overlap_param_gather": self.param_overlap.idle,
            "moe_grouped_gemm": self.experts.idle,
            "compile_layers_together": self.compilation.together_idle,
            "fp8_recipe": self.fp8.idle,
            "fp8_output_layer": self.fp8.idle,
            "first_last_layers_bf16": self.fp8.idle,
            "num_layers_at_start_in_bf16": self.fp8.ends_idle,
            "num_layers_at_end_in_bf16": self.fp8.ends_idle,
            "record_memory_history": self.allocations_recorded.idle,
            "use_pytorch_profiler": self.torch_profiler.idle,
        }

    @property
    def remarks(self) -> list[str]:
        """Notices about the device that concern no idle setting."""
        if not self.slow_fp16:
            return []
        return [
            "--fp16: most CPUs have no instructions for fp16 and take hundreds of times as long for large matrices; without it, "
            "or with --bf16, a run on a CPU is faster"
        ]
