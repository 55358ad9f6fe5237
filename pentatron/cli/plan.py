"""`pentatron plan`: memory, time and traffic of a model's layouts on some GPUs, and the command to train the
best one."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pentatron.cli.checkpoint_settings import adopt_named_checkpoint
from pentatron.cli.configure import download_tokenizer, set_vocabulary_size
from pentatron.cli.options import Options, option, options_help, parse_options_and_settings, usage
from pentatron.cli.output import show_report, with_help
from pentatron.cli.plan_report import PlanReport, as_text, memory_parts, speed_of, training_command_lines
from pentatron.devices import DEVICES, GIB, Device, find_device
from pentatron.errors import UserError, explained
from pentatron.plan.search import LAYOUT_SETTINGS, Layout, Search, usable_memory
from pentatron.plan.static_memory import total_parameters
from pentatron.plan.timing import EFFICIENCY
from pentatron.settings.command_line import is_flag
from pentatron.settings.decisions import requires_graphs
from pentatron.settings.declaration import FRACTION, ONE_OR_MORE, Limit
from pentatron.settings.entry_points import TRAIN, EntryPoint
from pentatron.settings.loaded_architecture import adopt_architecture
from pentatron.settings.presets import presets
from pentatron.settings.resolve import derived_settings, gather
from pentatron.settings.settings import Draft, ProcessFacts, is_unset
from pentatron.text import divisors, parse_json

_OTHERS = [name for name in DEVICES if name != "h100"]


def _gigabytes(written: str, flag: str) -> float:
    """Parses `80`, `80GB` or `79.1GiB`; all are in powers of two, as vendors and drivers mean them."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:gi?b?)?\s*", written.lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"{flag} must be a number above 0, not '{written}'")
    return float(match[1])


_SHARE = Limit(FRACTION.holds, "above 0 and at most 1, for example 0.5")
_memory = partial(option, None, value="GB", parse=_gigabytes)


@dataclass(frozen=True)
class PlanOptions(Options):
    gpus: int | None = option(None, "number of GPUs (those of this machine, else 8)", limit=ONE_OR_MORE)
    gpu: str | None = option(None, f"GPU to plan for: h100 (the default), {', '.join(_OTHERS)}", value="NAME")
    gpu_memory: float | None = _memory("memory of one GPU, if not that of --gpu: 24, 80, 141 ...")
    host_memory: float | None = _memory("host memory of one machine, to check optimizer offload")
    gpus_per_machine: int = option(8, "GPUs per machine", limit=ONE_OR_MORE)
    efficiency: float = option(EFFICIENCY, "fraction of the peak FLOP/s that matmuls reach", limit=_SHARE)
    top: int = option(8, "number of layouts to list", limit=ONE_OR_MORE)
    json: bool = option(False, "print JSON")


USAGE = f"""{usage("pentatron plan [FOLDER]", PlanOptions, "[--setting value ...]")}

Estimates the needs of a model and starts nothing: parameters, FLOPs, the memory of every GPU in parts, the pipeline bubble,
communication and step time. Lists the layouts that fit, the fastest first, and prints the training command.

FOLDER is a Hugging Face folder, of which only config.json is read.

{options_help(PlanOptions)}

  pentatron plan --preset llama3-8b --gpus 8
  pentatron plan --preset qwen3-30b-a3b --gpus 32 --gpu a100 --seq-length 8192 --global-batch-size 256
  pentatron plan models/Qwen2.5-7B --gpus 16 --gpu-memory 40 --tp 2 --pp 2

All settings of `pentatron train` are accepted. The given layout is shown in detail, or the best one if none is given.
The list varies the sizes of all axes and keeps other given settings (--zero-stage, --pipeline-schedule ...).
`pentatron layout` shows the role of every rank; docs/how-it-works/memory.md explains the formulas.
"""
# Nothing is trained, so that data and run length are placeholders.
PLAN = EntryPoint(
    name="pentatron plan",
    summary="Estimate memory and time of a model with the settings of `pentatron train`. Nothing is started.",
    refused=TRAIN.refused,
    defaults={"dataset_size": 1000, "train_iters": 1},
)
_MODEL = ("num_layers", "hidden_size", "load", "config", "preset")
_BATCH = ("global_batch_size", "gradient_accumulation_steps", "num_microbatches", "rank_batch_size")
_DEFAULT_LENGTH, _TOKENS_A_STEP = 4096, 2**20


@with_help(USAGE)
def plan_command(words: Sequence[str]) -> int:
    report, options = plan_layouts(words)
    show_report(report, options.json, as_text, as_data)
    return 0


def plan_layouts(words: Sequence[str]) -> tuple[PlanReport, PlanOptions]:
    folder = words[0] if words and not is_flag(words[0]) else None
    options, settings = parse_options_and_settings(PlanOptions, words[folder is not None :], PLAN)
    draft = gather(settings, PLAN)
    device = _device(options)
    world = options.gpus or draft.world_size or _visible_gpus() or 8
    size = options.gpus_per_machine
    if world > size and world % size:
        fewer, each = world - world % size, max(d for d in divisors(world) if d <= size)
        ways = f"add --gpus-per-machine {each}, or use --gpus {fewer} or {fewer + size}"
        raise UserError(f"{world} GPUs are not a multiple of {size} (--gpus-per-machine); {ways}")
    facts = ProcessFacts(max(1, world), max(1, min(world, size)))
    assumed = [f"{world} GPUs (--gpus)"] if options.gpus is None and draft.world_size is None else []
    _adopt_model(draft, facts, folder)
    free_batch = all(getattr(draft, name) is None for name in _BATCH)
    assumed += _assign_defaults(draft, device, world)
    host_memory = None if options.host_memory is None else options.host_memory * GIB
    search = Search(draft, device, world, size, options.efficiency, free_batch, host_memory)
    is_given = any(draft.given(name) for name in LAYOUT_SETTINGS if name != "micro_batch_size")
    layouts = search.layouts()
    notices = list(draft.notices)
    if draft.bf16 and not device.chip.bf16:
        notices.append(f"{device.name} has no bf16 matmuls, so --bf16 is slow; use --fp16")
    model = folder or draft.preset or draft.load or "the model"
    given = search.given_layout() if is_given else None
    report = PlanReport(search, given, layouts, model, assumed, options.top, notices)
    if not layouts and report.given is None:
        # Raises the rules' reasons why no layout is possible.
        search.given_layout()
        ways = "use another number of GPUs or --global-batch-size"
        raise UserError(f"no layout of {world} GPUs fits this model and batch; {ways}")
    return report, options


def _device(options: PlanOptions) -> Device:
    device = find_device(options.gpu or "h100")
    if options.gpu_memory is None:
        return device
    name = device.name if options.gpu else f"{options.gpu_memory:g} GB GPU (else as {device.name})"
    return dataclasses.replace(device, name=name, memory=int(options.gpu_memory * GIB))


def _visible_gpus() -> int:
    """Returns the number of GPUs of this machine without importing torch, which takes a second."""
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count and visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return count


def _adopt_model(draft: Draft, facts: ProcessFacts, folder: str | None) -> None:
    if folder is not None:
        _adopt_folder(draft, facts, folder)
    elif not adopt_named_checkpoint(draft, facts) and not any(draft.given(name) for name in _MODEL):
        ways = "a Hugging Face folder, --config FILE, or --num-layers, --hidden-size ..."
        raise UserError(f"no model is given; add --preset NAME (pentatron presets lists them), {ways}")
    download_tokenizer(draft)
    set_vocabulary_size(draft)


def _adopt_folder(draft: Draft, facts: ProcessFacts, folder: str) -> None:
    """Reads the model's settings from config.json; the weights need not exist."""
    from pentatron.hf.model_config import settings_from_config

    path = Path(folder) / "config.json" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        _require_model(folder)
        draft.assign("flag --load", load=folder)
        adopt_named_checkpoint(draft, facts)
        return
    with explained((OSError, ValueError), f"{path} cannot be read as JSON", "name a Hugging Face folder"):
        config = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise UserError(f"{path} has no model settings; name a Hugging Face folder")
    adopt_architecture(draft, facts, settings_from_config(config), str(path.parent), "or plan another model")
    draft.assign("flag --load", load=str(path.parent))


def _require_model(folder: str) -> None:
    """Raises an error about the folder argument, in place of one about `--load`, if it holds no model."""
    from pentatron.checkpoint.find import refuse_other_formats
    from pentatron.generate.source import find_source
    from pentatron.hf.hub import is_hub_id

    if is_hub_id(folder) or find_source(Path(folder)) is not None:
        return
    if folder in presets():
        raise UserError(f"there is no folder {folder}; the preset of that name is --preset {folder}")
    refuse_other_formats(Path(folder))
    problem = "holds no checkpoint and no Hugging Face model" if Path(folder).exists() else "does not exist"
    ways = "name a Hugging Face folder or a run, or a model with --preset NAME (pentatron presets lists them)"
    raise UserError(f"{folder} {problem}; {ways}")


def _assign_defaults(draft: Draft, device: Device, world: int) -> list[str]:
    """Assigns required settings that are not given; returns descriptions of them."""
    if draft.fp8_format is not None and not device.chip.fp8:
        needed = "a GPU with fp8 matmuls (NVIDIA's Ada, Hopper, Blackwell)"
        raise UserError(f"--fp8 {draft.fp8_format} needs {needed}, and {device.name} has none; leave it out")
    if requires_graphs(draft.cuda_graphs) and not device.is_gpu:
        raise UserError(f"--cuda-graphs on needs a GPU, and {device.name} is not a GPU; leave it out")
    assumed = []
    if not draft.given("seq_length"):
        derived = derived_settings(draft, ProcessFacts(world)) if draft.max_position_embeddings else draft
        length = min(_DEFAULT_LENGTH, derived.max_position_embeddings or _DEFAULT_LENGTH)
        draft.assign("flag --seq-length", seq_length=length)
        assumed.append(f"sequences of {length} tokens (--seq-length)")
    if all(getattr(draft, name) is None for name in _BATCH):
        batch = max(1, _TOKENS_A_STEP // draft.seq_length // world) * world
        draft.assign("flag --global-batch-size", global_batch_size=batch)
        assumed.append(f"{batch} sequences per step, about a million tokens (--global-batch-size)")
    if device.name != "CPU process" and not any(draft.given(n) for n in ("bf16", "fp16")):
        half, why = ("bf16", "") if device.chip.bf16 else ("fp16", f", as {device.name} has no bf16")
        draft.assign(f"flag --{half}", **{half: True})
        assumed.append(f"{half} (--{half}){why}")
    if is_unset(draft.vocab_size) and is_unset(draft.padded_vocab_size):
        draft.assign("flag --vocab-size", vocab_size=32768)
        assumed.append("vocabulary of 32768 (--vocab-size)")
    return assumed


def as_data(report: PlanReport) -> dict[str, Any]:
    parameters, active = total_parameters(report.shown.sizes)
    chosen, device = report.chosen, report.search.device
    rates = {"half": device.peak(2), "single": device.peak(4), "link": device.link, "network": device.network}
    features = {"has_bf16": device.chip.bf16, "is_gpu": device.is_gpu, "has_fp8": device.chip.fp8}
    return {
        "model": report.model,
        "parameters": parameters,
        "active_parameters": active,
        "flops_per_step": report.shown.estimate.flops,
        "gpus": report.search.world,
        "gpu": {"name": device.name, "memory": device.memory, **rates, **features},
        "usable_bytes": int(usable_memory(device)),
        "advice": dataclasses.asdict(report.advice),
        "given": None if report.given is None else _layout_data(report.given),
        "layouts": [_layout_data(layout) for layout in report.layouts],
        "varied": report.varied,
        "kept": report.search.kept,
        "command": None if chosen is None else training_command_lines(chosen[0]),
        "command_of": None if chosen is None else chosen[1],
        "assumed": report.assumed,
        "notes": report.notices,
    }


def _layout_data(layout: Layout) -> Mapping[str, Any]:
    estimate = layout.estimate
    speed, utilisation = speed_of(layout)
    seconds = {"step": estimate.seconds, "computing": estimate.computing, "waiting": estimate.waiting}
    return {
        "sizes": dataclasses.asdict(layout.sizes.grid),
        "settings": dict(layout.settings),
        "fits": layout.fits,
        "bytes": [
            {
                **memory_parts(rank),
                "spared": rank.not_simultaneous,
                "host": rank.static.in_host,
                "total": rank.total,
            }
            for rank in layout.memory.ranks
        ],
        "largest_bytes": layout.largest.total,
        "largest_bytes_if_recorded": None if layout.with_graphs is None else layout.with_graphs.total,
        "bubble": estimate.bubble,
        "sent_bytes": dataclasses.asdict(estimate.traffic),
        "seconds": {**seconds, "sending": dataclasses.asdict(estimate.sending)},
        "tokens_per_second_per_gpu": speed,
        "mfu": utilisation,
    }
