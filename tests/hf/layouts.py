"""The layouts in which every family is compared with `transformers`."""

from dataclasses import dataclass

from tests.hf.families import Case


@dataclass(frozen=True)
class Spread:
    name: str
    ranks: int
    words: str
    experts_only: bool = False

    def suits(self, case: Case) -> bool:
        return case.has_experts or not self.experts_only

    @property
    def command(self) -> str:
        return f"{self.words} --micro-batch-size {2 if self.ranks > 1 else 4}"


TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
SP = "--sequence-parallel"

SPREADS = [
    Spread("one process", 1, ""),
    Spread("tp2 sp", 2, f"{TP2} {SP}"),
    Spread("pp2", 2, PP2),
    Spread("cp2", 2, "--context-parallel-size 2"),
    Spread("dp2 zero2", 2, "--zero-stage 2"),
    Spread("ep2", 2, "--expert-model-parallel-size 2", experts_only=True),
    Spread("tp2 pp2", 4, f"{TP2} {PP2}"),
    Spread("tp2 sp dp2 zero3", 4, f"{TP2} {SP} --zero-stage 3"),
    Spread(
        "tp2 sp cp2 ep4",
        4,
        f"{TP2} {SP} --context-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
        experts_only=True,
    ),
]
