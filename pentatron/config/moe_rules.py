"""Rules about experts: whether router, experts and ranks fit together."""

import math

from pentatron.config.moe_layers import moe_layers
from pentatron.config.settings import Settings, unset
from pentatron.config.stages import grid_of
from pentatron.layout.divisors import divisors, either
from pentatron.layout.ranks import expert_size_problem


def _experts(s: Settings) -> str | None:
    experts, ep, topk = s.num_experts, s.expert_model_parallel_size, s.moe_router_topk
    if experts is None:
        return f"--expert-model-parallel-size {ep} needs experts; give --num-experts" if ep > 1 else None
    if experts % ep:
        return (
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ep}; "
            f"use {either(divisors(experts))}"
        )
    if topk > experts:
        return f"--moe-router-topk {topk} is more than --num-experts {experts}; use at most {experts}"
    return None


def _expert_ranks(s: Settings) -> str | None:
    if s.num_experts is None:
        return None
    grid = grid_of(s)
    return expert_size_problem(grid.data, grid.context, grid.tensor, grid.expert, grid.expert_tensor)


def _expert_width(s: Settings) -> str | None:
    if s.num_experts is None:
        return None
    width, ranks = s.moe_ffn_hidden_size, grid_of(s).expert_tensor
    if width % ranks:
        return (
            f"--moe-ffn-hidden-size {width} is not divisible by --expert-tensor-parallel-size {ranks}; "
            f"use {math.ceil(width / ranks) * ranks}, or another size"
        )
    return None


def _shared_expert_width(s: Settings) -> str | None:
    width, tp = s.moe_shared_expert_intermediate_size, s.tensor_model_parallel_size
    if s.num_experts is None or width is None or width % tp == 0:
        return None
    return (
        f"--moe-shared-expert-intermediate-size {width} is not divisible by --tensor-model-parallel-size {tp}; "
        f"use {math.ceil(width / tp) * tp}"
    )


def _shared_gate(s: Settings) -> str | None:
    if not s.moe_shared_expert_gate or s.moe_shared_expert_intermediate_size is not None:
        return None
    return "--moe-shared-expert-gate needs a shared expert; give --moe-shared-expert-intermediate-size"


def _layers_with_experts(s: Settings) -> str | None:
    if s.num_experts is None:
        return None
    try:
        moe_layers(s.moe_layer_freq, s.num_layers)
    except ValueError as error:
        return str(error)
    return None


def _tokens_of_a_rank(s: Settings) -> str | None:
    """Every rank must route tokens of its own; without sequence parallelism tensor ranks all have the same ones."""
    tp = s.tensor_model_parallel_size
    if s.num_experts is None or tp == 1 or s.sequence_parallel:
        return None
    return (
        f"experts with --tensor-model-parallel-size {tp} need --sequence-parallel: without it {tp} ranks would route the "
        f"same tokens; leave --no-sequence-parallel out"
    )


def _groups_of_experts(s: Settings) -> str | None:
    experts, groups, used, topk = (
        s.num_experts,
        s.moe_router_num_groups,
        s.moe_router_group_topk,
        s.moe_router_topk,
    )
    if experts is None or (groups is None and unset(used)):
        return None
    if groups is None or unset(used):
        return "--moe-router-num-groups and --moe-router-group-topk go together; give both"
    if experts % groups:
        return f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}; use {either(divisors(experts))}"
    if used > groups:
        return f"--moe-router-group-topk {used} is more than --moe-router-num-groups {groups}; use at most {groups}"
    if topk % used:
        return f"--moe-router-topk {topk} is not divisible by --moe-router-group-topk {used}; use {either(divisors(topk))}"
    if topk > used * (experts // groups):
        most = used * (experts // groups)
        return (
            f"--moe-router-topk {topk} is more than the {used} (--moe-router-group-topk) × {experts // groups} (experts of "
            f"a group) = {most} experts a token may use; use at most {most}"
        )
    return None


def _expert_bias(s: Settings) -> str | None:
    if not s.moe_router_enable_expert_bias or s.moe_router_score_function == "sigmoid":
        return None
    return "--moe-router-enable-expert-bias goes with scores that do not compete; give --moe-router-score-function sigmoid"


def _pre_softmax(s: Settings) -> str | None:
    softmax = s.moe_router_score_function == "softmax"
    if s.num_experts is None or not softmax or s.moe_router_topk > 1 or s.moe_router_pre_softmax:
        return None
    return (
        "--moe-router-topk 1 with a softmax over the one chosen expert gives it the weight 1, whatever the router says, which "
        "teaches the router nothing; give --moe-router-pre-softmax"
    )


def _balancing(s: Settings) -> str | None:
    kinds, weights = s.moe_router_load_balancing_type, s.moe_aux_loss_coeff
    if len(set(kinds)) < len(kinds):
        return f"--moe-router-load-balancing-type {' '.join(kinds)} names one kind twice; name each once"
    if "none" in kinds and len(kinds) > 1:
        return (
            f"--moe-router-load-balancing-type {' '.join(kinds)}: none goes with no other kind; leave it out"
        )
    if len(weights) in (1, len(kinds)):
        return None
    return f"--moe-aux-loss-coeff has {len(weights)} numbers for {len(kinds)} kinds of balancing; give one for all, or one for each"


MOE_RULES = (
    _experts,
    _expert_ranks,
    _expert_width,
    _shared_expert_width,
    _shared_gate,
    _layers_with_experts,
    _tokens_of_a_rank,
    _groups_of_experts,
    _expert_bias,
    _pre_softmax,
    _balancing,
)
