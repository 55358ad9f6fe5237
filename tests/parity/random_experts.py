"""Draws the experts of a random model and their parallelism."""

from collections.abc import Iterable

from pentatron.text import divisors
from tests.parity.random_choice import Dice, available


def draw_experts(dice: Dice, stage: int, tensor: int, layers: int) -> Iterable[str]:
    """Draws flags; `stage` ranks hold one pipeline stage, `tensor` of them share a dense layer."""
    cut = tensor if dice.often(0.5) else dice.of(*divisors(stage))
    holders = dice.of(*divisors(stage // cut if stage % cut == 0 else stage))
    experts = holders * dice.of(1, 2, 2, 3, 4)
    yield f"--num-experts {max(2, experts)}"
    if holders > 1:
        yield f"--expert-model-parallel-size {holders}"
    if cut != tensor or dice.often(0.3):
        yield f"--expert-tensor-parallel-size {cut}"
    yield f"--moe-ffn-hidden-size {cut * dice.number(1, 24 // cut)}"
    if dice.often(0.5):
        yield f"--moe-layer-freq {_layers_with_experts(dice, layers)}"
    yield from _routing(dice, max(2, experts))
    yield from _balancing(dice)
    yield f"--moe-token-dispatcher-type {dice.of(*available('moe_token_dispatcher_type'))}"
    if dice.often(0.5):
        yield "--moe-grouped-gemm"
    if dice.often(0.25):
        yield f"--moe-expert-capacity-factor {dice.of(0.5, 1.0, 1.5)}"
        yield f"--moe-token-drop-policy {dice.of(*available('moe_token_drop_policy'))}"
    if dice.often(0.3):
        yield f"--moe-shared-expert-intermediate-size {tensor * dice.number(1, 24 // tensor)}"
        if dice.often(0.5):
            yield "--moe-shared-expert-gate"


def _layers_with_experts(dice: Dice, layers: int) -> str:
    if dice.often(0.4):
        return str(dice.number(1, 3))
    marks = [dice.number(0, 1) for _ in range(layers)]
    marks[dice.number(0, layers - 1)] = 1
    return "+".join(f"[{mark}]" for mark in marks)


def _routing(dice: Dice, experts: int) -> Iterable[str]:
    topk = dice.number(1, min(4, experts))
    if dice.often(0.3):
        groups = dice.of(*divisors(experts))
        used = dice.of(*(n for n in divisors(topk) if n <= groups))
        if topk > used * (experts // groups):
            topk = used
        yield f"--moe-router-num-groups {groups} --moe-router-group-topk {used}"
    yield f"--moe-router-topk {topk}"
    if dice.often(0.4):
        yield "--moe-router-score-function sigmoid"
        if dice.often(0.5):
            # The default rate would hardly change a choice in a few steps.
            yield "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"
    elif dice.often(0.4) or topk == 1:
        yield "--moe-router-pre-softmax"
    if dice.often(0.2):
        yield f"--moe-router-topk-scaling-factor {dice.of(0.5, 2.5)}"
    if dice.often(0.4):
        yield f"--moe-router-dtype {dice.of(*available('moe_router_dtype'))}"


def _balancing(dice: Dice) -> Iterable[str]:
    kinds = available("moe_router_load_balancing_type")
    chosen = ["none"] if dice.often(0.2) else dice.some([k for k in kinds if k != "none"], 3)
    yield f"--moe-router-load-balancing-type {' '.join(chosen)}"
    weights = chosen if dice.often(0.5) else chosen[:1]
    yield f"--moe-aux-loss-coeff {' '.join(str(dice.of(0.01, 0.03, 0.1)) for _ in weights)}"
    if dice.often(0.3):
        yield f"--moe-z-loss-coeff {dice.of(0.001, 0.01)}"
