"""Layouts in which planned memory is compared with a real step, for each pipeline rank."""

from collections.abc import Iterator
from dataclasses import dataclass

from pentatron.plan.memory import RankMemory, memory_of
from tests.harness import run_distributed
from tests.plan.measured import Measured, measured_on_a_rank
from tests.support import LLAMA, resolved

TP, SP, PP = "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"
CP, EP = "--context-parallel-size 2", "--expert-model-parallel-size 2"
GQA, SELECTIVE = "--group-query-attention --num-query-groups 2", "--recompute-granularity selective"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 192 --moe-aux-loss-coeff 0.01"
SHAPE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64 --vocab-size 1000 --micro-batch-size 2 "
    "--global-batch-size 16 --ddp-bucket-size 400000 --init-method-std 0.02"
)


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    words: str

    @property
    def command(self) -> str:
        return f"{SHAPE} {self.words}"


CASES = (
    Case("one process, GPT, fp32", 1, ""),
    Case("one process, Llama, fp32", 1, f"{LLAMA} {GQA}"),
    Case("one process, Qwen3, bf16", 1, f"{LLAMA} {GQA} --qk-layernorm --bf16"),
    Case("dropout, biases, bf16", 1, "--hidden-dropout 0.1 --bf16"),
    Case("recompute full", 1, f"{LLAMA} --recompute-granularity full --bf16"),
    Case(
        "recompute full, block of 2",
        1,
        f"{LLAMA} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    Case("recompute core_attn", 1, f"{LLAMA} {GQA} {SELECTIVE} --bf16"),
    Case("recompute all modules", 1, f"{LLAMA} {SELECTIVE} --recompute-modules core_attn mlp layernorm"),
    Case("optimizer in host memory", 1, f"{LLAMA} --bf16 --optimizer-cpu-offload"),
    Case("gradient descent with momentum, fp16", 1, f"{LLAMA} --optimizer sgd --fp16 --seq-length 16"),
    Case("DP 2", 2, f"{LLAMA} --bf16"),
    Case("DP 2, ZeRO 1", 2, f"{LLAMA} --bf16 --zero-stage 1"),
    Case("DP 2, ZeRO 2, overlap", 2, f"{LLAMA} --zero-stage 2 --overlap-grad-reduce"),
    Case("DP 2, ZeRO 3", 2, f"{LLAMA} --bf16 --zero-stage 3"),
    Case("TP 2", 2, f"{LLAMA} {GQA} {TP}"),
    Case("TP 2, SP", 2, f"{LLAMA} {TP} {SP} --bf16"),
    Case(
        "TP 2, SP, recompute core_attn and mlp", 2, f"{TP} {SP} {SELECTIVE} --recompute-modules core_attn mlp"
    ),
    Case("CP 2 p2p", 2, f"{LLAMA} {GQA} {CP} --bf16"),
    Case("CP 2 a2a", 2, f"{LLAMA} {CP} --cp-comm-type a2a"),
    Case("PP 2", 2, f"{LLAMA} {PP} --bf16"),
    Case("PP 2, uneven stages", 2, f"{LLAMA} {PP} --decoder-first-pipeline-num-layers 1"),
    Case("PP 2, VPP 2", 2, f"{LLAMA} {PP} --virtual-pipeline-model-parallel-size 2"),
    Case("PP 2, GPipe", 2, f"{PP} --pipeline-schedule gpipe --bf16"),
    Case("PP 2, zero-bubble", 2, f"{LLAMA} {PP} --pipeline-schedule zero-bubble"),
    Case("PP 2, ZB-V, tied ends on one rank", 2, f"{LLAMA} {PP} --pipeline-schedule zbv"),
    Case("EP 2, Mixtral", 2, f"{LLAMA} {EXPERTS} {EP}"),
    Case(
        "EP 2, shared expert, fp32 router",
        2,
        f"{LLAMA} {EXPERTS} {EP} --bf16 --moe-router-dtype fp32 --moe-shared-expert-intermediate-size 128",
    ),
    Case(
        "EP 2, recompute of the activation",
        2,
        f"{LLAMA} {EXPERTS} {EP} {SELECTIVE} --recompute-modules moe_act",
    ),
    Case("TP 2 × PP 2 × DP 2, SP, ZeRO 1", 8, f"{LLAMA} {GQA} {TP} {SP} {PP} --zero-stage 1 --bf16"),
)


@dataclass(frozen=True)
class Row:
    """Planned and measured bytes, summed over the ranks of a stage because experts are not balanced."""

    pipeline_rank: int
    what: str
    planned: int
    measured: float

    @property
    def gap(self) -> float:
        return (self.planned - self.measured) / self.measured if self.measured else float(self.planned > 0)


def compared(case: Case) -> Iterator[Row]:
    config = resolved(case.command, case.ranks).config
    found = run_distributed(measured_on_a_rank, case.ranks, words=case.command)
    for at in range(config.grid.pipeline):
        of_stage = [m for rank, m in enumerate(found) if config.grid.coordinates(rank).pipeline == at]
        yield from _rows(at, memory_of(config).ranks[at], of_stage)


def _rows(at: int, planned: RankMemory, found: list[Measured]) -> Iterator[Row]:
    pairs = {
        "weights": planned.static.weights,
        "gradients": planned.static.gradients,
        "optimizer": planned.static.optimizer,
        "host": planned.static.host,
        "activations": planned.activations + planned.logits,
    }
    for what, number in pairs.items():
        yield Row(at, what, number, sum(getattr(m, what) for m in found) / len(found))
