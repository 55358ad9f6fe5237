"""`pentatron plan`: what a model needs and costs on some GPUs, which layouts fit, and the command for the best."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.cli.loaded import learn_from_named
from pentatron.cli.plan_data import as_data
from pentatron.cli.plan_report import Report, as_text
from pentatron.cli.prepare import find_tokenizer, learn_vocabulary
from pentatron.cli.terminal import say
from pentatron.config.decisions import requires_graphs
from pentatron.config.draft import Draft, Facts
from pentatron.config.entry import EntryPoint
from pentatron.config.flags import Assigned, is_flag, normal, parse_flags
from pentatron.config.loaded import adopt
from pentatron.config.parsing import parse_json
from pentatron.config.presets import presets
from pentatron.config.resolve import foreseen, gather
from pentatron.errors import UserError
from pentatron.layout.divisors import divisors
from pentatron.plan.devices import GIB, Device, device_named
from pentatron.plan.search import LAYOUT, Search
from pentatron.plan.timing import EFFICIENCY

USAGE = """usage: pentatron plan [FOLDER] [--gpus N] [--gpu NAME | --gpu-memory GB] [--host-memory GB] [--top N] [--json] [--setting value ...]

Says what a model needs and costs, before anything is started: parameters, FLOPs, the memory of every GPU part by part, the
pipeline's bubble, what is sent, and an estimate of the time; then which layouts fit, the fastest first, with the command to copy.

  FOLDER                a Hugging Face folder, of which config.json is enough
  --gpus N              how many GPUs (those of this machine, else 8)
  --gpu NAME            h100 (the default), h200, b200, a100, a100-40, h800, a800, h20, l40s, v100, rtx4090, rtx3090 or cpu
  --gpu-memory GB       memory of one, if it is another: 24, 80, 141 ...
  --host-memory GB      memory of one machine, for an optimizer that is kept there
  --gpus-per-machine N  GPUs that are linked with each other (8)
  --efficiency X        share of the peak that matmuls reach (0.5)
  --top N               how many layouts to list (8)
  --json                everything, for machines

  pentatron plan --preset llama3-8b --gpus 8
  pentatron plan --preset qwen3-30b-a3b --gpus 32 --gpu a100 --seq-length 8192 --global-batch-size 256
  pentatron plan models/Qwen2.5-7B --gpus 16 --gpu-memory 40 --tp 2 --pp 2

All settings of `pentatron train` are understood. With settings of a layout, that layout is looked at first; without any,
the best one is. The list tries all sizes of the axes; what else is given (--zero-stage, --pipeline-schedule ...) holds for all. `pentatron layout` shows which rank does what; docs/how-it-works/memory.md explains the formulas.
"""
# Trains nothing, so data and length are settled here.
PLAN = EntryPoint(
    name="pentatron plan",
    summary="Say what a model needs and costs under the same settings as `pentatron train`. Nothing is started.",
    refused={
        "batch-size": "say --micro-batch-size (samples one rank computes at once) or --global-batch-size instead"
    },
    defaults={"dataset_size": 1000, "train_iters": 1},
    own=("gpus", "gpu", "gpu-memory", "host-memory", "gpus-per-machine", "efficiency", "top", "json"),
)
_MODEL = ("num_layers", "hidden_size", "load", "config", "preset")
_BATCH = ("global_batch_size", "gradient_accumulation_steps", "num_microbatches", "rank_batch_size")
_LONGEST, _TOKENS_A_STEP = 4096, 2**20


@dataclass
class _Options:
    folder: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: float | None = None
    host_memory: float | None = None
    per_machine: int = 8
    efficiency: float = EFFICIENCY
    top: int = 8
    as_json: bool = False


def plan_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    report, options = describe(words)
    say(json.dumps(as_data(report), indent=1) if options.as_json else as_text(report))
    return 0


def describe(words: Sequence[str]) -> tuple[Report, _Options]:
    options, settings = _read(words)
    draft = gather(settings, PLAN)
    device = _device(options)
    world = options.gpus or draft["world_size"] or _visible() or 8
    if world > options.per_machine and world % options.per_machine:
        whole = [d for d in divisors(world) if d <= options.per_machine]
        raise UserError(
            f"{world} GPUs are no whole number of machines with {options.per_machine}; add --gpus-per-machine {max(whole)}, or plan for "
            f"{world // options.per_machine * options.per_machine} or {-(-world // options.per_machine) * options.per_machine} (--gpus)"
        )
    facts = Facts(max(1, world), max(1, min(world, options.per_machine)))
    assumed: list[str] = []
    if options.gpus is None and draft["world_size"] is None:
        assumed.append(f"{world} GPUs (--gpus)")
    _learn_model(draft, facts, options)
    free_batch = all(draft[name] is None for name in _BATCH)
    assumed += _complete(draft, device, world)
    host = None if options.host_memory is None else options.host_memory * GIB
    search = Search(draft, device, world, options.per_machine, options.efficiency, free_batch, host)
    given = [name for name in LAYOUT if draft.given(name) and name != "micro_batch_size"]
    layouts = search.layouts()
    report = Report(
        search=search,
        given=search.as_given() if given else None,
        layouts=layouts,
        model=options.folder or draft["preset"] or draft["load"] or "the model",
        assumed=tuple(assumed),
        top=options.top,
        notices=(*draft.notices, *_about(draft, device)),
    )
    if not layouts and report.given is None:
        # Let the rules say why nothing is possible.
        search.as_given()
        raise UserError(
            f"no division of {world} GPUs suits this model and batch; try another number of GPUs or --global-batch-size"
        )
    return report, options


def _read(words: Sequence[str]) -> tuple[_Options, list[str]]:
    """The options of this command, and the other words."""
    options, rest = _Options(), []
    written: dict[str, str] = {}
    takes: dict[str, Callable[[str], Any]] = {
        "gpus": int,
        "gpu": str,
        "gpu-memory": _gigabytes,
        "host-memory": _gigabytes,
        "gpus-per-machine": int,
        "efficiency": float,
        "top": int,
    }
    names = {"gpus-per-machine": "per_machine", "gpu-memory": "gpu_memory", "host-memory": "host_memory"}
    queue = list(words)
    if queue and not is_flag(queue[0]):
        options.folder = queue.pop(0)
    while queue:
        word = queue.pop(0)
        name = normal(word) if is_flag(word) else ""
        if name == "json":
            options.as_json = True
        elif name in takes:
            written[name] = word.partition("=")[2] or (queue.pop(0) if queue else "")
        else:
            rest.append(word)
    # A misspelt flag comes first: it may be the one that was meant.
    parse_flags(rest, PLAN)
    for name, text in written.items():
        setattr(options, names.get(name, name), _converted(name, text, takes[name]))
    for name in ("gpus", "per_machine", "top"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise UserError(
                f"--{name.replace('per_machine', 'gpus-per-machine')} wants a number above 0, not {number}"
            )
    if not 0 < options.efficiency <= 1:
        raise UserError(
            f"--efficiency {options.efficiency:g} is no share of the peak; use a number such as 0.5"
        )
    return options, rest


def _converted(name: str, written: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(written)
    except ValueError:
        raise UserError(
            f"--{name} wants a {'name' if kind is str else 'number above 0'}, not '{written}'"
        ) from None


def _gigabytes(text: str) -> float:
    """`80`, `80GB` or `79.1GiB`: vendors and drivers both mean powers of two here."""
    found = re.fullmatch(r"\s*([\d.]+)\s*(?:gi?b?)?\s*", text.lower())
    if found is None or float(found[1]) <= 0:
        raise ValueError
    return float(found[1])


def _device(options: _Options) -> Device:
    device = device_named(options.gpu or "h100")
    if options.gpu_memory is None:
        return device
    memory = int(options.gpu_memory * GIB)
    name = device.name if options.gpu else f"{options.gpu_memory:g} GB GPU (else as {device.name})"
    return dataclasses.replace(device, name=name, memory=memory)


def _visible() -> int:
    """GPUs of this machine, without the second that importing torch takes where there are none."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _learn_model(draft: Draft, facts: Facts, options: _Options) -> None:
    if options.folder is not None:
        _learn_folder(draft, facts, options.folder)
    elif draft["load"] is not None:
        learn_from_named(draft, facts)
    elif not any(draft.given(name) for name in _MODEL):
        raise UserError(
            "which model? Give --preset NAME (pentatron presets lists them), a Hugging Face folder, --config FILE, or its "
            "shape: --num-layers, --hidden-size ..."
        )
    find_tokenizer(draft)
    learn_vocabulary(draft)


def _learn_folder(draft: Draft, facts: Facts, folder: str) -> None:
    """From config.json alone; the weights need not be there."""
    from pentatron.hf.architecture import settings_of

    path = Path(folder) / "config.json" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        _require_model(folder)
        draft.values["load"] = Assigned(folder, "flag --load")
        learn_from_named(draft, facts)
        return
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); name a Hugging Face folder") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no settings of a model; name a Hugging Face folder")
    adopt(draft, facts, settings_of(config), str(path.parent), "or plan another model")
    draft.values["load"] = Assigned(str(path.parent), "flag --load")


def _require_model(folder: str) -> None:
    """In the words of whoever typed no `--load`."""
    from pentatron.checkpoint.find import refuse_other_formats
    from pentatron.hf.hub import is_hub_id
    from pentatron.train.sources import find_source

    if is_hub_id(folder) or find_source(Path(folder)) is not None:
        return
    if folder in presets():
        raise UserError(f"there is no folder {folder}; the preset of that name is --preset {folder}")
    refuse_other_formats(Path(folder))
    found = "holds no checkpoint and no Hugging Face model" if Path(folder).exists() else "does not exist"
    raise UserError(
        f"{folder} {found}; name a Hugging Face folder or a run, or a model with --preset NAME (pentatron presets lists them)"
    )


def _complete(draft: Draft, device: Device, world: int) -> list[str]:
    """Settles what a plan needs and nobody said; returns what was settled."""
    if draft["fp8_format"] is not None and not device.has_fp8:
        raise UserError(
            f"--fp8 {draft['fp8_format']} needs a GPU with fp8 matmuls (NVIDIA's Ada, Hopper, Blackwell), and {device.name} has none; "
            "leave it out"
        )
    if requires_graphs(draft["cuda_graphs"]) and not device.is_gpu:
        raise UserError(f"--cuda-graphs on needs a GPU, and {device.name} is none; leave it out")
    assumed = []
    if not draft.given("seq_length"):
        known = (
            foreseen(draft, Facts(world))["max_position_embeddings"]
            if draft["max_position_embeddings"]
            else None
        )
        length = min(_LONGEST, known or _LONGEST)
        draft.values["seq_length"] = Assigned(length, "flag --seq-length")
        assumed.append(f"sequences of {length} tokens (--seq-length)")
    if all(draft[name] is None for name in _BATCH):
        batch = max(1, _TOKENS_A_STEP // draft["seq_length"] // world) * world
        draft.values["global_batch_size"] = Assigned(batch, "flag --global-batch-size")
        assumed.append(f"{batch} sequences a step, about a million tokens (--global-batch-size)")
    if device.name != "CPU process" and not any(draft.given(n) for n in ("bf16", "fp16")):
        half = "bf16" if device.has_bf16 else "fp16"
        draft.values[half] = Assigned(True, f"flag --{half}")
        assumed.append(f"{half} (--{half})" + ("" if device.has_bf16 else f", as {device.name} has no bf16"))
    if draft["vocab_size"] is None and draft["padded_vocab_size"] is None:
        draft.values["vocab_size"] = Assigned(32768, "flag --vocab-size")
        assumed.append("32768 words (--vocab-size)")
    return assumed


def _about(draft: Draft, device: Device) -> list[str]:
    if draft["bf16"] and not device.has_bf16:
        return [f"{device.name} multiplies no matrices in bf16, so that --bf16 is slow there: use --fp16"]
    return []
