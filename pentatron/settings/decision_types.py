"""The result types of `decisions.decide`: what a run compiles, fuses, offloads and overlaps."""

from collections.abc import Mapping
from dataclasses import dataclass


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
class CompileDecision:
    """What `torch.compile` is applied to.

    `required`: stop the run if a layer cannot be compiled. `disabled_reason`: why layers on a GPU are not
    compiled by default. `layers_per_graph`: maximum number of layers in one compiled function. `documents`:
    attention masks depend on the documents in a batch.
    """

    on: bool
    required: bool
    disabled_reason: str
    layers_per_graph: int

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


@dataclass(frozen=True)
class ExpertsDecision:
    """`on`: use one grouped matmul per rank.

    `on_device`: route on the GPU without a host sync, as it has all experts.
    """

    on: bool
    on_device: bool


@dataclass(frozen=True)
class Fp8Decision:
    """Which matmuls run in fp8.

    `layers`: layers with fp8 matmuls. `head`: the output layer too. `experts_in_bf16`: experts of these
    layers stay in bf16. `by_rows`: one scale per row instead of per tensor. `unsupported_reason`: why the
    device has no fp8 matmuls.
    """

    format: str | None
    by_rows: bool
    layers: range
    head: bool
    experts_in_bf16: bool
    unsupported_reason: str


@dataclass(frozen=True)
class GraphsDecision:
    """Whether micro-batches are captured as CUDA graphs.

    `required`: stop the run if they cannot be. `if_memory_allows`: capture if there is enough GPU memory.
    `problem`: why a required capture is impossible. `not_captured_reason`: why there is none although kernel
    launches limit the GPU.
    """

    required: bool = False
    if_memory_allows: bool = False
    problem: str = ""
    not_captured_reason: str = ""


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of the optimizer. `fused`: clip, update and round in one Triton kernel, if Triton works."""

    zero_stage: int
    bucket_size: int
    overlap_reduce: bool = False
    overlap_gather: bool = False
    in_host_memory: bool = False
    fused: bool = False


@dataclass(frozen=True)
class Decisions:
    """All decisions of a run.

    `no_effect` maps each setting of these decisions to why it has no effect, or to an empty string if it has
    one.
    """

    device: DeviceFacts
    compilation: CompileDecision
    gate: GateDecision
    loss: LossDecision
    experts: ExpertsDecision
    graphs: GraphsDecision
    fp8: Fp8Decision
    allocations_recorded: bool
    torch_profiler: bool
    optimizer: OptimizerOptions
    slow_fp16: bool
    no_effect: Mapping[str, str]

    @property
    def remarks(self) -> list[str]:
        """Further notices about the device."""
        slow = "most CPUs have no instructions for fp16 and take hundreds of times as long for large matrices"
        fix = "without it, or with --bf16, a run on a CPU is faster"
        return [f"--fp16: {slow}; {fix}"] if self.slow_fp16 else []
