"""What was decided of a run: the result of `pentatron.settings.decisions.decide`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of the device that computes.

    `kind` is torch's device type, or empty while it is not known, as with `--device auto` before a process has looked.
    `capability`: compute capability of an NVIDIA GPU. `peak`: dense TFLOP/s in the precision of the run (in fp8: of 16
    bits), None if unknown.
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
    """`on`: it is done. `idle`: why the setting changes nothing here, on or off; empty if it does."""

    on: bool
    idle: str = ""


@dataclass(frozen=True)
class CompileDecision:
    """`required`: layers that cannot be compiled end the run. `held_back`: why a GPU's layers are not compiled by default.

    `together`: how many layers are one compiled function, at most; `together_idle`: why it is 1 though more were asked for.
    """

    on: bool
    required: bool
    held_back: str
    together: int
    together_idle: str
    documents: bool
    deterministic: bool


@dataclass(frozen=True)
class GateDecision:
    """The gate of an MLP as a part of a matmul: of its second, which keeps nothing in between (a kernel for GPUs), or in
    fp8 of its first."""

    in_second: bool
    in_fp8: bool
    idle: str

    @property
    def on(self) -> bool:
        return self.in_second or self.in_fp8


@dataclass(frozen=True)
class LossDecision:
    """`on`: the cross entropy is fused, `chunk` tokens at a time. `kernel`: by Triton, where it works."""

    on: bool
    implementation: str
    chunk: int
    kernel: bool
    idle: str


@dataclass(frozen=True)
class ExpertsDecision:
    """`on`: the experts of a rank are one matmul. `on_device`: all experts are mixed on one GPU, without the host."""

    on: bool
    on_device: bool
    idle: str


@dataclass(frozen=True)
class Fp8Decision:
    """`layers` and, if `head`, the output layer multiply in fp8; `experts_left`: but for the experts of these layers.
    `lacking`: why the device has no fp8 matmuls."""

    format: str | None
    by_rows: bool
    layers: range
    head: bool
    experts_left: bool
    lacking: str
    idle: str
    ends_idle: str


@dataclass(frozen=True)
class GraphsDecision:
    """Micro-batches are recorded as CUDA graphs: for certain (`required`), or `if_room` is left for that.

    `problem`: why they cannot be, where they are required. `left_out`: why they are not, though the host's launches
    hold up the GPU.
    """

    required: bool = False
    if_room: bool = False
    problem: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class OptimizerOptions:
    """What an optimizer is built with. `one_pass`: clipping, update and rounding are one kernel, where Triton works."""

    zero_stage: int
    bucket_size: int
    overlap_reduce: bool = False
    overlap_gather: bool = False
    in_host_memory: bool = False
    one_pass: bool = False


@dataclass(frozen=True)
class Decisions:
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
        """For each setting of these decisions why it changes nothing in this run; empty where it does."""
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
        """Lines about the device that belong to no idle setting."""
        if not self.slow_fp16:
            return []
        return [
            "--fp16: most CPUs have no instructions for fp16 and take hundreds of times as long for large matrices; without it, "
            "or with --bf16, a run on a CPU is faster"
        ]
