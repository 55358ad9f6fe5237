"""`pentatron verify`: compares a layout with one process, on a small model of the same structure."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentatron.compare.trial import STEPS, Gap, Trajectory, gap_size, gaps, run_trial
from pentatron.errors import ConfigError
from pentatron.nn.router import loss_weights
from pentatron.parallel.world import World, single_process
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.rules import problems_of
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import ProcessFacts, Settings

_CHANNELS, _HIDDEN, _INNER, _VOCABULARY, _SEQUENCE = 8, 32, 48, 61, 16
_INNER_OF_EXPERT, _INNER_OF_SHARED_EXPERT = 24, 16
# Initial values and optimizer settings that reveal mistakes; the defaults hide wrong gradients.
_REVEALING: dict[str, Any] = {
    "init_method_std": 0.1,
    "lr": 3e-3,
    "min_lr": 0.0,
    "lr_warmup_iters": 0,
    "lr_decay_iters": STEPS,
    "lr_wsd_decay_iters": 2,
    "train_iters": STEPS,
    "adam_eps": 1e-6,
    "clip_grad": 0.5,
    "weight_decay": 0.1,
    "ddp_bucket_size": 3000,
}
# Settings that differ between layouts by design: bf16, fp16 and fp8 round differently, attention dropout
# draws per rank, and kernels and compilation depend on the device.
_LEFT_OUT: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "fp8_format": None,
    "attention_dropout": 0.0,
    "attention_backend": "auto",
    "cross_entropy_fusion_impl": "auto",
    "compile": "off",
    "cuda_graphs": "off",
}
_STAGE_DIVISION = (
    *("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
)
_BATCH_SIZE_ALIASES = ("gradient_accumulation_steps", "num_microbatches", "rank_batch_size")
# Every step of a comparison has the full batch size, and schedules count steps.
_IN_SAMPLES = "train_samples lr_decay_samples lr_wsd_decay_samples lr_warmup_samples lr_warmup_fraction"
_DEFAULT_IF_ALONE = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size data_parallel_size "
    "sequence_parallel pipeline_schedule virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
    "microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
    "pipeline_model_parallel_layout zero_stage num_distributed_optimizer_instances overlap_grad_reduce overlap_param_gather "
    "recompute_granularity recompute_method recompute_num_layers recompute_modules expert_model_parallel_size "
    "expert_tensor_parallel_size moe_token_dispatcher_type"
).split()


def small_twin(config: RunConfig, replicas: int | None = None) -> RunConfig:
    """Returns the layout and structure of a run in small sizes; `replicas` are its data-parallel ranks."""
    unset = dict.fromkeys((*_BATCH_SIZE_ALIASES, *_IN_SAMPLES.split()))
    values = config.flat() | _REVEALING | _LEFT_OUT | unset
    values |= {"rampup_batch_size": (), "step_batch_size_schedule": ()}
    tensor, context = config.grid.tensor, config.grid.context
    copies, micro = replicas or config.grid.data, min(config.train.micro_batch_size, 2)
    length = _rounded_up(_SEQUENCE, math.lcm(2 * context, context * tensor))
    vocabulary = max(_VOCABULARY, 8 * tensor - 3)
    values |= {
        "num_layers": _layers(config),
        "hidden_size": _HIDDEN,
        "kv_channels": _CHANNELS,
        "ffn_hidden_size": _rounded_up(_INNER, tensor),
        "seq_length": length,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
        "make_vocab_size_divisible_by": 16,
        "padded_vocab_size": _rounded_up(vocabulary, 16 * tensor),
        "data_parallel_size": copies,
        **_experts(config),
    }
    # Attention windows and RoPE scaling fit the short sequences.
    if config.model.window_size and config.model.window_size[0] >= 0:
        values["window_size"] = (length // 3, 0)
    if config.model.rope_scaling_original_max_position_embeddings:
        values["rope_scaling_original_max_position_embeddings"] = length // 2
    twin = Settings(values).changed(
        # The number of replicas may not be divisible by the configured number of instances.
        num_distributed_optimizer_instances=math.gcd(config.grid.instances, copies * context),
        micro_batch_size=micro,
    )
    world = tensor * config.grid.pipeline * context * copies
    for count in (min(config.accumulation, max(4, 2 * config.grid.pipeline)), config.accumulation):
        twin = twin.changed(global_batch_size=micro * copies * count)
        started = twin.changed(world_size=None, nproc_per_node=world)
        started.facts = ProcessFacts(world, world)
        if not (problems := problems_of(started)):
            return RunConfig.of(twin)
    raise ConfigError(problems)


def fewest_replicas(config: RunConfig) -> int:
    """Two data-parallel ranks, or as many as the expert axes need."""
    grid = config.grid
    needed = (grid.expert * grid.expert_tensor, grid.context * grid.tensor)
    fitting = (n for n in range(2, grid.data) if n * needed[1] % needed[0] == 0)
    return next(fitting, grid.data)


def _experts(config: RunConfig) -> dict[str, Any]:
    """Sizes of the experts: two per rank, or as many as top-k and groups need."""
    moe, grid = config.moe, config.grid
    if moe.num_experts is None:
        return {}
    groups, used = moe.moe_router_num_groups or 1, moe.moe_router_group_topk or 1
    least = max(2 * grid.expert, moe.moe_router_topk + 1, groups * math.ceil(moe.moe_router_topk / used))
    shared = moe.moe_shared_expert_intermediate_size
    return {
        "num_experts": min(moe.num_experts, _rounded_up(least, math.lcm(grid.expert, groups))),
        "moe_ffn_hidden_size": _rounded_up(_INNER_OF_EXPERT, grid.expert_tensor),
        "moe_shared_expert_intermediate_size": shared and _rounded_up(_INNER_OF_SHARED_EXPERT, grid.tensor),
    }


def _layers(config: RunConfig) -> int:
    """Two layers per stage, or one more than a recompute chunk; an uneven division stays uneven.

    All layers if a division, or a list of layers with experts or windows, is written for their number.
    """
    layers, stages = config.model.num_layers, config.placement.stages
    lists: list[str | None] = [config.moe.moe_layer_freq] if config.moe.num_experts is not None else []
    lists += [config.model.window_attn_skip_freq] if config.model.window_size else []
    listed = any(written is not None and not written.strip().isdigit() for written in lists)
    if listed or any(getattr(config.settings, name) is not None for name in _STAGE_DIVISION):
        return layers
    each = max(2, (config.memory.recompute_num_layers or 0) + 1)
    return min(layers, each * stages + (layers % stages > 0))


def _rounded_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def single_process_config(config: RunConfig) -> RunConfig:
    """Returns the configuration of the same model on one process, without recompute and sharding.

    The whole batch is one micro-batch, unless balancing or capacity depends on micro-batches.
    """
    defaults = {name: all_settings()[name].default for name in _DEFAULT_IF_ALONE} | {"data_parallel_size": 1}
    balances = "aux_loss" in loss_weights(config.moe) or config.moe.moe_expert_capacity_factor is not None
    by_micro_batch = config.moe.num_experts is not None and balances
    taken = config.train.micro_batch_size if by_micro_batch else config.train.global_batch_size
    return RunConfig.of(config.settings.changed(**defaults, micro_batch_size=taken))


def describe_config(config: RunConfig) -> str:
    """Describes the configuration of a comparison."""
    m, t, moe, grid = config.model, config.train, config.moe, config.grid
    experts = ranks = ""
    if moe.num_experts is not None:
        shared = moe.moe_shared_expert_intermediate_size
        used = f"{moe.moe_router_topk} for a token{f', and a shared one of {shared}' if shared else ''}"
        count, layers = f"{moe.num_experts} experts of {moe.moe_ffn_hidden_size}", config.layers_with_experts
        experts = f"; {count} in {len(layers)} of the layers, {used}"
        sizes = f"{grid.expert_tensor} expert tensor × {grid.expert} expert × {grid.expert_data} expert data"
        ranks = f" ({sizes})"
    return (
        f"{m.num_layers} layers × {m.hidden_size}, {m.num_attention_heads} heads of {m.kv_channels} in "
        f"{m.num_query_groups} groups, MLP {m.ffn_hidden_size}, vocabulary {m.vocab_size} padded to "
        f"{m.padded_vocab_size}, {m.seq_length} tokens{experts}\n"
        f"{grid.tensor} tensor × {grid.pipeline} pipeline × {grid.context} context × {grid.data} data{ranks}, "
        f"ZeRO {config.parallel.zero_stage}; a step of {t.global_batch_size} samples in {config.accumulation} "
        f"micro-batches of {t.micro_batch_size}; {STEPS} steps in fp32"
    )


def uncompared_settings(config: RunConfig) -> list[str]:
    """Lists the settings that are not compared, with the reason."""
    decisions, half = decide(config, DeviceFacts()), "bf16" if config.precision.bf16 else "fp16"
    rounds, drops = getattr(config.precision, half), config.model.attention_dropout > 0
    notes = {
        f"{half} is not compared: its rounding depends on the layout": rounds,
        "fp8 is not compared: its rounding depends on the layout": decisions.fp8.format is not None,
        "attention dropout is not compared: its mask depends on the layout": drops,
        "the compiler is not compared: its rounding depends on the layout": decisions.compilation.required,
        "--device cuda has no effect: the comparison runs on a CPU": config.launch.device == "cuda",
        "CUDA graphs are not compared: the comparison runs on a CPU": decisions.graphs.required,
    }
    return [note for note, applies in notes.items() if applies]


# --- between processes ---


def write_settings(config: RunConfig, folder: Path) -> None:
    (folder / "settings.json").write_text(json.dumps(config.flat()), encoding="utf-8")


def read_settings(folder: Path) -> RunConfig:
    settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return RunConfig.of(Settings({n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}))


def run_reference(config: RunConfig) -> Trajectory:
    return run_trial(single_process_config(config), single_process(torch.device("cpu")))


def run_rank(config: RunConfig, world: World, folder: Path) -> None:
    """Runs one rank of the layout and writes its trajectory into the folder."""
    trajectory = dataclasses.asdict(run_trial(config, world))
    torch.save(trajectory, folder / f"rank-{world.all_ranks.rank}.pt")


def read_ranks(folder: Path, count: int) -> list[Trajectory]:
    return [Trajectory(**torch.load(folder / f"rank-{n}.pt", weights_only=True)) for n in range(count)]


# --- the verdict ---


@dataclass(frozen=True)
class LayoutVerdict:
    """The result of a comparison."""

    judged: Sequence[Gap]

    @property
    def passes(self) -> bool:
        return not any(gap.fails for gap in self.judged)

    @property
    def first(self) -> Gap | None:
        """The first difference in the order of a run: the loss of the first step, its gradients, the rest.

        Gradients are in bucket order, which is approximately that of backward.
        """
        failing = [gap for gap in self.judged if gap.fails]
        forward = [gap for gap in failing if gap.what.startswith("loss") and gap.what.endswith("step 1")]
        backward = [gap for gap in failing if gap.kind == "gradients 1"]
        return next(iter([*forward, *backward, *failing]), None)

    def numbers(self) -> list[tuple[str, float]]:
        """The largest gap of loss, gradient norm and validation loss over ranks and steps."""
        largest: dict[str, float] = {}
        for gap in (gap for gap in self.judged if not gap.tensor):
            name = gap.what.partition(" on rank")[0]
            largest[name] = max(largest.get(name, 0.0), gap_size(gap))
        return list(largest.items())

    def tensors(self) -> list[tuple[str, dict[str, float]]]:
        """The gaps of every parameter's gradients and weights, largest first."""
        by_tensor: dict[str, dict[str, float]] = {}
        for gap in self.judged:
            if gap.tensor:
                by_tensor.setdefault(gap.tensor, {})[gap.kind] = gap_size(gap)
        return sorted(by_tensor.items(), key=lambda item: -max(item[1].values()))


def compare_trajectories(ranks: Sequence[Trajectory], reference: Trajectory) -> LayoutVerdict:
    return LayoutVerdict(gaps(ranks, reference))
