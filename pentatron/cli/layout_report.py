"""Report of `pentatron layout` as text and as JSON, and the table of batch sizes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pentatron.layout.check import ScheduleProperties, TimeSlot, check
from pentatron.layout.ranks import Axis, Grid
from pentatron.settings.model_sizes import costs_of, is_tied
from pentatron.settings.run_config import RunConfig, size_problem
from pentatron.text import plural

# Rows of a long table of batch sizes that are printed at its start and end.
_FIRST, _LAST = 5, 3


def batch_sizes(config: RunConfig, steps: int | None = None) -> list[dict[str, Any]]:
    """Returns every batch size within `steps` (default: the whole plan) and the iteration at which it
    begins."""
    rows = []
    for phase in config.batch_plan.sizes(steps):
        problem = size_problem(config, phase.size)
        count = None if problem is not None else config.accumulation_of(phase.size)
        row = {"iteration": phase.first_step, "samples": phase.first_sample, "batch_size": phase.size}
        rows.append({**row, "micro_batches": count, "problem": problem})
    return rows


def batch_table(config: RunConfig, steps: int | None = None) -> str:
    """Formats the batch sizes as a table; empty if the batch size is constant."""
    rows = batch_sizes(config, steps)
    if config.batch_plan.is_constant:
        return ""
    lines = list(map(_line, rows))
    if len(rows) > _FIRST + _LAST + 1:
        lines[_FIRST:-_LAST] = [f"        ...  {len(rows) - _FIRST - _LAST} more sizes"]
    title = "Batch sizes, and after which iteration they begin"
    return "\n".join([title, "", "  iteration       samples  batch size  micro-batches", *lines])


def _line(row: dict[str, Any]) -> str:
    runs = f"does not fit: {row['problem']}" if row["problem"] else f"{row['micro_batches']:>13}"
    return f"  {row['iteration']:>9}  {row['samples']:>12}  {row['batch_size']:>10}  {runs}"


_MEANINGS: dict[Axis, str] = {
    "tensor": "shard every layer: partial outputs are all-reduced",
    "context": "shard every sequence: each holds a part of it",
    "data": "hold the same weights for different samples: gradients are summed",
    "pipeline": "hold consecutive layers: activations are sent forward, gradients back",
    "expert_tensor": "shard every expert",
    "expert": "hold different experts: tokens are exchanged (all-to-all)",
    "expert_data": "hold the same experts: their gradients are summed",
    "kv": "hold the same key/value head: its gradient is summed",
    "embedding": "first and last stage, which both hold the tied embedding",
    "shards": "shard the weights (ZeRO 3): each keeps a shard and all-gathers the others before use",
    "instances": "hold the same shard of the weights: gradients are summed",
    "expert_shards": "shard the experts of a rank, as `shards` do the other weights",
    "expert_instances": "hold the same shard of the experts: gradients are summed",
}
_DENSE: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")
_SPARSE: tuple[Axis, ...] = ("expert_tensor", "expert", "expert_data")
# What each ZeRO stage shards.
_DIVIDED = ("", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")
_MOST_ROWS, _MOST_GROUPS = 24, 6
_BAR = 24


@dataclass(frozen=True)
class LayoutReport:
    """A layout with the properties derived from it.

    `is_assumed_model`: no model was named, so its shape is assumed.
    """

    config: RunConfig
    per_machine: int | None
    notices: tuple[str, ...]
    is_assumed_model: bool

    @property
    def grid(self) -> Grid:
        return self.config.grid

    @cached_property
    def checked(self) -> ScheduleProperties:
        return check(self.config.schedule(self.config.accumulation))

    @property
    def has_experts(self) -> bool:
        return self.grid.expert * self.grid.expert_tensor > 1

    @property
    def axes(self) -> list[Axis]:
        """The axes that have groups of more than one rank."""
        grid = self.grid
        ends = self.config.placement.rank_of[0], self.config.placement.rank_of[-1]
        axes: list[Axis] = [*_DENSE, *(_SPARSE if self.has_experts else ())]
        axes += ["kv"] if grid.kv_copies > 1 else []
        axes += ["embedding"] if ends[0] != ends[1] and is_tied(self.config.model) else []
        if grid.instances > 1:
            axes += ["shards", "instances"]
            axes += ["expert_shards", "expert_instances"] if self.has_experts else []
        return [axis for axis in axes if any(len(members) > 1 for members in grid.groups(axis))]

    @property
    def shares(self) -> list[float]:
        """The share of the computation of each stage."""
        costs = costs_of(self.config.settings)
        stage_costs = [costs.of(part) for part in self.config.stages]
        return [cost / sum(stage_costs) for cost in stage_costs]

    @property
    def kind(self) -> str:
        return self.config.parallel.pipeline_schedule if self.grid.pipeline > 1 else "no pipeline"

    @property
    def schedule_in_words(self) -> str:
        count, ranks = self.config.accumulation, self.grid.pipeline
        virtual = self.config.placement.stages > ranks
        each = f" with {self.config.virtual_stages} stages each" if virtual else ""
        batches = f"{count} {plural(count, 'micro-batch')}"
        return f"{self.kind}: {batches} on {ranks} {plural(ranks, 'pipeline rank')}{each}"

    def place(self, rank: int) -> dict[str, Any]:
        """Returns the machine of a rank, if known, and its coordinates."""
        machine = None if self.per_machine is None else rank // self.per_machine
        return {"machine": machine, **dataclasses.asdict(self.grid.coordinates(rank))}


def as_text(report: LayoutReport, everything: bool) -> str:
    blocks = [_equation(report), _ranks(report, everything), _groups(report, everything)]
    blocks += [_stages(report), _schedule(report), batch_table(report.config)]
    blocks.append("\n".join(f"note: {notice}" for notice in report.notices))
    return "\n\n".join(filter(None, blocks))


def _equation(report: LayoutReport) -> str:
    grid = report.grid
    world, copies = grid.world_size, f"{grid.context} context × {grid.data} data"
    all_ranks = f"{world} {plural(world, 'process')}"
    lines = [f"{all_ranks} = {grid.tensor} tensor × {grid.pipeline} pipeline × {copies}"]
    if report.has_experts:
        experts = f"{grid.expert_tensor} expert tensor × {grid.expert} expert"
        experts += f" × {grid.expert_data} expert data"
        lines.append(f"{grid.stage_size} ranks of a stage = {grid.tensor} tensor × {copies} = {experts}")
    stage, replicas = report.config.parallel.zero_stage, grid.data * grid.context
    if stage and replicas > 1:
        groups = f" in {grid.instances} groups of {replicas // grid.instances}" if grid.instances > 1 else ""
        lines.append(f"ZeRO {stage}: {replicas} ranks with the same weights{groups} divide {_DIVIDED[stage]}")
    return "\n".join(lines)


def _ranks(report: LayoutReport, everything: bool) -> str:
    grid = report.grid
    columns = [axis.replace("_", " ") for axis in (*_DENSE, *(_SPARSE if report.has_experts else ()))]
    if report.per_machine is not None:
        columns.insert(0, "machine")
    ends = _MOST_ROWS // 2 if grid.world_size > _MOST_ROWS and not everything else grid.world_size
    rows = []
    for rank in range(grid.world_size):
        place = report.place(rank)
        cells = ((place[column.replace(" ", "_")], max(8, len(column))) for column in columns)
        rows.append(f"{rank:>6}" + "".join(f"  {value:>{width}}" for value, width in cells))
    if ends < grid.world_size:
        rows[ends:-ends] = [f"   ...  {grid.world_size - 2 * ends} more ranks (--all shows them)"]
    title = "Ranks: tensor neighbours are numbered first, then context, data and pipeline"
    return "\n".join([title, "", "  rank" + "".join(f"  {column:>8}" for column in columns), *rows])


def _groups(report: LayoutReport, everything: bool) -> str:
    if not report.axes:
        return ""
    lines = ["Process groups: ranks that communicate with each other", ""]
    width = max(14, *(len(axis) + 2 for axis in report.axes))
    for axis in report.axes:
        groups = [members for members in report.grid.groups(axis) if len(members) > 1]
        shown = groups if everything else groups[:_MOST_GROUPS]
        more = f"  ... {len(groups)} in all" if len(shown) < len(groups) else ""
        lines.append(f"  {axis.replace('_', ' '):<{width}}{_MEANINGS[axis]}")
        lines.append(f"  {'':<{width}}{'  '.join(_members(m, everything) for m in shown)}{more}")
    return "\n".join(lines)


def _members(ranks: Sequence[int], everything: bool) -> str:
    """Formats a group: `0-3` if contiguous, otherwise `0,4,8` or `0,4,...,60`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4 and not everything:
        return f"{ranks[0]},{ranks[1]},...,{ranks[-1]}"
    return ",".join(map(str, ranks))


def _stages(report: LayoutReport) -> str:
    model, shares = report.config.model, report.shares
    is_assumed_model = " (no model is named: this shape is assumed)" if report.is_assumed_model else ""
    lines = [f"Stages: {model.num_layers} layers, {model.hidden_size} wide{is_assumed_model}", ""]
    lines.append(f"  stage  pipeline rank  {'layers':<9}  {'also holds':<14}  share of the computation")
    for stage, part in enumerate(report.config.stages):
        layers = _layers(part.layers)
        holds = " ".join(["embedding"] * part.embedding + ["head"] * part.head)
        bar = "█" * max(1, round(_BAR * shares[stage] / max(shares)))
        held = f"{report.config.placement.rank_of[stage]:>13}  {layers or 'none':<9}  {holds:<14}"
        lines.append(f"  {stage:>5}  {held}  {shares[stage]:>6.1%}  {bar}".rstrip())
    return "\n".join(lines + _recompute(report))


def _layers(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))


def _recompute(report: LayoutReport) -> list[str]:
    """Describes what is recomputed in backward, and what a micro-batch keeps for it."""
    memory = report.config.memory
    if memory.recompute_granularity is None:
        return []
    modules = ", ".join(memory.recompute_modules)
    lines = ["", f"  {modules}: recomputed in every layer that has them; only the input is kept"]
    if memory.recompute_granularity == "full":
        kept = "these layers are recomputed; each micro-batch keeps one input for each chunk of consecutive layers"
        lines = ["", f"  recompute: {kept}"]
        for stage, part in enumerate(report.config.stages):
            runs = report.config.recomputed(part)
            whole = len(part.layers) - sum(map(len, runs))
            inputs = f"keeps {len(runs)} {plural(len(runs), 'input')}"
            layers = f" and all of {whole} {plural(whole, 'layer')}" if whole else ""
            lines.append(f"    stage {stage:>2}  {'  '.join(map(_layers, runs)) or 'none'}: {inputs}{layers}")
    if any(report.checked.deferred):
        second = "inputs of weight gradients until those are computed"
        lines.append(f"  kept until its input gradients are computed; {second}")
    return lines


def _schedule(report: LayoutReport) -> str:
    checked, ranks = report.checked, report.grid.pipeline
    tokens = f"{report.config.train.micro_batch_size} × {report.config.model.seq_length} tokens"
    lines = [f"Schedule: {report.schedule_in_words}, {tokens} each", ""]
    unit = "micro-batches" if report.config.virtual_stages == 1 else "micro-batches of single stages"
    if ranks == 1:
        return "\n".join([*lines, f"  {unit} kept for backward at most: {checked.in_flight[0]}"])
    lines.append(f"  {unit} kept for backward at most")
    for rank, count in enumerate(checked.in_flight):
        lines.append(f"    pipeline rank {rank:>2}  {count:>3}  {'▪' * min(count, 60)}")
    if any(checked.deferred):
        deferred = ", ".join(map(str, checked.deferred))
        lines.append(f"  of them between the halves of a split backward, at most, by rank: {deferred}")
    lines.append("")
    backward = "each half of a backward as 1" if any(checked.deferred) else "a backward as 2"
    steps = f"{checked.time} steps, a forward taken as 1, {backward}"
    lines.append(f"  waiting: {checked.bubble:.1%} of the ranks' time ({steps})")
    if checked.bubble > 0.2:
        ways = "a smaller --micro-batch-size or a larger --global-batch-size"
        lines.append(f"  more micro-batches ({ways}) or virtual stages help")
    stages_of, shares = report.config.placement.stages_of, report.shares
    rank_shares = [sum(shares[stage] for stage in stages_of(rank)) for rank in range(ranks)]
    # The rank with the largest share sets the pace; the others wait for it.
    idle = 1 - (1 - checked.bubble) / (ranks * max(rank_shares))
    if idle > checked.bubble + 0.01:
        lines.append(f"  with the unequal stages of this layout: about {idle:.0%}")
    return "\n".join(lines)


def as_data(report: LayoutReport) -> dict[str, Any]:
    grid, memory = report.grid, report.config.memory
    return {
        "world_size": grid.world_size,
        "sizes": {**dataclasses.asdict(grid), "expert_data": grid.expert_data},
        "ranks": [{"rank": rank, **report.place(rank)} for rank in range(grid.world_size)],
        "groups": {axis: [list(members) for members in grid.groups(axis)] for axis in report.axes},
        "stages": [_stage_data(report, stage) for stage in range(len(report.shares))],
        "recompute": {"granularity": memory.recompute_granularity, "modules": list(memory.recompute_modules)},
        "schedule": _schedule_data(report),
        "notes": list(report.notices),
        "model_is_made_up": report.is_assumed_model,
    }


def _stage_data(report: LayoutReport, stage: int) -> dict[str, Any]:
    part, rank = report.config.stages[stage], report.config.placement.rank_of[stage]
    held = {"layers": list(part.layers), "embedding": part.embedding, "head": part.head}
    recomputed = [list(run) for run in report.config.recomputed(part)]
    place = {"stage": stage, "pipeline_rank": rank}
    return {**place, **held, "share": report.shares[stage], "recomputed": recomputed}


def _schedule_data(report: LayoutReport) -> dict[str, Any]:
    checked, config = report.checked, report.config
    batches = {"micro_batches": config.accumulation, "batch_sizes": batch_sizes(config)}
    kept = {"alive": list(checked.in_flight), "deferred": list(checked.deferred)}
    timeline = [list(map(_slot_data, slots)) for slots in checked.timeline]
    waiting = {"bubble": checked.bubble, "time": checked.time, "timeline": timeline}
    return {"kind": report.kind, **batches, **kept, **waiting}


def _slot_data(slot: TimeSlot) -> dict[str, Any]:
    action = slot.action
    times = {"start": slot.start, "end": slot.end, "kind": action.kind.value}
    return {**times, "stage": action.stage, "micro_batch": action.micro_batch}
