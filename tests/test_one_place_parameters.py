"""`settings/model_sizes.py` alone defines which parameters a model has.

Layers hold these parameters, and plans count them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pentatron.compare.reshard import _world
from pentatron.layout.stages import StagePart
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.nn.options import axes_of
from pentatron.parallel.sharding import sharded_parameters
from pentatron.plan.sizes import PlanSizes
from pentatron.plan.static_memory import parameters_of, total_parameters
from pentatron.settings import model_sizes
from pentatron.settings.model_sizes import LinearSizes, Parameter
from pentatron.settings.run_config import RunConfig
from tests.support import LLAMA, resolved

PACKAGE = Path(__file__).parent.parent / "pentatron"
META = torch.device("meta")

TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2, EP2, ETP1 = (
    "--pipeline-model-parallel-size 2",
    "--expert-model-parallel-size 2",
    "--expert-tensor-parallel-size 1",
)
SIZES = "--num-layers 4 --num-attention-heads 8 --hidden-size 64 --vocab-size 61 --micro-batch-size 1"
GQA = "--group-query-attention --num-query-groups 2"
UNTIED = "--untie-embeddings-and-output-weights"
MIXTRAL = f"{LLAMA} {GQA} --num-experts 4 --moe-ffn-hidden-size 24"
SHARED = "--moe-shared-expert-intermediate-size 40"

FAMILIES = {
    "gpt": "",
    "gpt, untied, no positions": f"{UNTIED} --position-embedding-type none",
    "gpt, longer positions": "--max-position-embeddings 40",
    "llama": f"{LLAMA} {UNTIED}",
    "qwen2.5": f"{LLAMA} {GQA} --add-qkv-bias",
    "qwen3": f"{LLAMA} {GQA} --qk-layernorm --kv-channels 16",
    "norms of heads with biases": "--qk-layernorm --disable-bias-linear",
    "bias of the projection": f"{LLAMA} --add-proj-bias",
    "biases of the MLP": f"{LLAMA} --add-mlp-bias",
    "plain GELU": "--disable-bias-linear --ffn-hidden-size 96",
    "mixtral": MIXTRAL,
    "qwen2-moe": f"{MIXTRAL} {SHARED} --moe-shared-expert-gate --add-qkv-bias",
    "some layers with experts": f"{MIXTRAL} {SHARED} --moe-layer-freq [0]*1+[1]*3",
    "experts beside biases": f"--num-experts 4 {SHARED}",
    "experts, router with a bias": f"{MIXTRAL} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
}
LAYOUTS = {
    "one process": (1, ""),
    "tp 2": (2, TP2),
    "tp 4, copies of keys": (4, TP4),
    "pp 2": (2, PP2),
    "pp 2, vpp 2": (2, f"{PP2} --virtual-pipeline-model-parallel-size 2"),
    "folded": (2, f"{PP2} --pipeline-schedule zbv"),
    "tp 2, pp 2, dp 2, sp": (8, f"{TP2} {PP2} --sequence-parallel --zero-stage 1"),
}
EXPERT_LAYOUTS = {
    "ep 2": (2, EP2),
    "ep 2, etp 2": (4, f"{TP2} {EP2}"),
    "tp 2, ep 2, etp 1, dp 2": (4, f"{TP2} {EP2} {ETP1}"),
    "tp 2, pp 2, ep 4, etp 1": (8, f"{TP2} {PP2} --expert-model-parallel-size 4 {ETP1} --sequence-parallel"),
}
GRID = [
    pytest.param(words, *layout, id=f"{family}; {name}")
    for family, words in FAMILIES.items()
    for name, layout in {**LAYOUTS, **(EXPERT_LAYOUTS if "--num-experts" in words else {})}.items()
]
# Name without the layer number, local shape, axis of the replicas.
Row = tuple[str, tuple[int, ...], str]


def stages_of(config: RunConfig, rank: int) -> dict[int, CausalLM]:
    """Builds the stages of a rank on the meta device."""
    world = _world(config.grid, rank)
    parts = {number: config.stages[number] for number in config.placement.stages_of(world.at.pipeline)}
    return build_stages(config.model, config.moe, parts, axes_of(world, config.parallel), None, META)


def held_by(stage: CausalLM) -> list[Row]:
    return [
        (within_layer(p.name), tuple(p.parameter.shape), p.declared.replica_axis)
        for p in sharded_parameters(stage)
    ]


def within_layer(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def said(found: list[Parameter]) -> list[Row]:
    return [(each.name, each.shape, each.replica_axis) for each in found]


def difference(config: RunConfig) -> list[str]:
    """Returns the differences between built stages and `settings/model_sizes.py`, on all ranks."""
    sizes, found = PlanSizes(config), []
    for rank in range(config.grid.world_size):
        for number, stage in stages_of(config, rank).items():
            built = held_by(stage)
            planned = said(sizes.parameters.stage(config.stages[number]))
            if built != planned:
                found.append(f"rank {rank}, stage {number}: {sorted(set(built) ^ set(planned))}")
    return found


@pytest.mark.parametrize(("words", "ranks", "layout"), GRID)
def test_layers_have_the_declared_parameters(words: str, ranks: int, layout: str) -> None:
    assert difference(resolved(f"{SIZES} {words} {layout}", ranks).config) == []


@pytest.mark.parametrize(("words", "ranks", "layout"), GRID)
def test_the_plan_counts_what_a_rank_holds(words: str, ranks: int, layout: str) -> None:
    config = resolved(f"{SIZES} {words} {layout}", ranks).config
    sizes = PlanSizes(config)
    for rank in range(ranks):
        stages = stages_of(config, rank)
        held = sum(each.parameter.numel() for each in sharded_parameters(*stages.values()))
        planned = parameters_of(sizes, {number: config.stages[number] for number in stages})
        assert sum(each.elements for found in planned.values() for each in found) == held, rank


@pytest.mark.parametrize("words", FAMILIES.values(), ids=FAMILIES)
def test_the_total_is_that_of_the_whole_model(words: str) -> None:
    config = resolved(f"{SIZES} {words}").config
    stage = stages_of(config, 0)[0]
    whole = sum(shard.elements for each in sharded_parameters(stage) for shard in each.declared.shards)
    assert total_parameters(PlanSizes(config))[0] == whole


def test_the_settings_matter() -> None:
    """Each family but one has its own set of parameters.

    The exception adds only the router's expert bias, which has no gradient and is no parameter.
    """
    found = {
        name: said(
            PlanSizes(resolved(f"{SIZES} {words}").config).parameters.stage(StagePart((0, 1), True, True))
        )
        for name, words in FAMILIES.items()
    }
    assert len({tuple(rows) for rows in found.values()}) >= len(FAMILIES) - 1


@pytest.mark.parametrize("name", ["attention.linear_qkv", "attention.linear_proj", "mlp.linear_fc1"])
def test_a_dropped_bias_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LinearSizes.parameters

    def without_bias(sizes: LinearSizes, given: str) -> list[Parameter]:
        return real(sizes, given)[: 1 if given == name else None]

    monkeypatch.setattr(LinearSizes, "parameters", without_bias)
    (found,) = difference(resolved(f"{SIZES}").config)
    assert f"{name}.bias" in found


@pytest.mark.parametrize("name", ["has_qkv_bias", "has_proj_bias", "has_mlp_bias"])
def test_a_change_there_changes_both(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(SIZES).config
    before = held_by(stages_of(config, 0)[0])
    monkeypatch.setattr(model_sizes, name, lambda config: False)
    assert len(held_by(stages_of(config, 0)[0])) < len(before)
    assert difference(config) == []


# Settings that determine which parameters exist, and their sizes.
SAYS = frozenset(
    "add_bias_linear add_qkv_bias add_proj_bias add_mlp_bias num_query_groups ffn_hidden_size moe_ffn_hidden_size padded_vocab_size "
    "max_position_embeddings moe_shared_expert_intermediate_size moe_shared_expert_gate".split()
)
# Exceptions: Megatron's published formula, and recomputed work, which depends on the widths of layers.
OTHERS = {"plan/fit.py": SAYS, "plan/timing.py": {"ffn_hidden_size", "moe_ffn_hidden_size"}}


def reads(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in SAYS - OTHERS.get(path, set()):
            yield f"{path}:{node.lineno} {node.attr}"


def test_layers_and_plans_read_no_such_setting() -> None:
    found = [
        line
        for package in ("nn", "models", "plan")
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for line in reads(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_read_is_seen() -> None:
    assert list(reads("nn/x.py", "bias = config.add_bias_linear or config.add_mlp_bias"))
