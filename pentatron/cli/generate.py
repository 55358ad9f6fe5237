"""`pentatron generate PATH [PROMPT ...]`"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli.environment import Worker, announce_worker, find_worker, meeting_point, prepare_for_workers
from pentatron.cli.options import read_options
from pentatron.cli.terminal import complain, say
from pentatron.config.limits import SEED
from pentatron.errors import AgreedError, UserError

if TYPE_CHECKING:
    from pentatron.config.run import RunConfig
    from pentatron.parallel.world import World
    from pentatron.train.text_source import ModelSource

USAGE = """usage: pentatron generate PATH [PROMPT ...] [--option value ...]

Continues texts with a trained model. PATH is a run folder, its checkpoints (the newest is taken), one step of them, a Hugging
Face folder, or a model of the hub such as Qwen/Qwen2.5-0.5B. Several prompts are continued together, each as if it were
alone; the prompt - is read from standard input.

what to continue
  --prompt-file FILE     one prompt in every line, beside those on the command line
  --tokens 1,2,3         token ids instead of text; 1,2,3;4,5 are two prompts. Needs no tokenizer
  --spec MODULE FUNCTION the layers of your own that a checkpoint was trained with; they are code, so you have to name them
  --tokenizer-model DIR  a tokenizer.json or its folder, where the model has none of its own

how
  --max-new-tokens N     tokens to add (120); a text also ends at the model's end-of-document token, and where it has no
                         more positions, with a note
  --temperature X        0 always takes the likeliest token (0.8); --greedy says the same
  --top-k N              only the N likeliest tokens; 0: all (40)
  --top-p X              only the fewest tokens that are X of the probability together; 1: all (1.0)
  --seed N               for the same text again, on any device and any number of ranks (0)
  --json                 a list of objects with prompt, text, tokens, logprobs and why the text ended. The logarithms of
                         probability are the model's own, before temperature, top-k and top-p

where
  --tensor-model-parallel-size N, --tp N      ranks that share one layer; they are started here, unless torchrun did
  --pipeline-model-parallel-size N, --pp N    ranks the layers are divided over
  --expert-model-parallel-size N, --ep N      ranks that share the experts, of the tensor ranks
  --device auto|cpu|cuda, --dtype auto|float32|bfloat16   (auto: bfloat16 on a GPU)
  --threads N            CPU threads of one process (cores / processes)
  --batch-size N         prompts continued together (16)
  --master-port N        port of the meeting point (a free one)

  pentatron generate runs/demo "import "
  pentatron generate Qwen/Qwen2.5-7B "The capital of France is" --greedy --tp 4
"""

DEFAULTS: dict[str, int | float | str | tuple[str, ...]] = {
    "prompt-file": "",
    "tokens": "",
    "tokenizer-model": "",
    "max-new-tokens": 120,
    "temperature": 0.8,
    "greedy": False,
    "top-k": 40,
    "top-p": 1.0,
    "seed": 0,
    "json": False,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "device": "auto",
    "dtype": "auto",
    "threads": 0,
    "batch-size": 16,
    "master-port": 0,
    "spec": (),
}
_SPELLINGS = {
    "max-tokens": "max-new-tokens",
    **{
        f"{short}{end}": f"{long}-parallel-size"
        for end in ("", "-size")
        for short, long in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("ep", "expert-model"))
    },
}
_LEAST = {
    "max-new-tokens": 1,
    "temperature": 0,
    "top-k": 0,
    "top-p": 0,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "threads": 0,
    "batch-size": 1,
    "master-port": 0,
}
_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "fp32", "bfloat16", "bf16"),
}
# They act where chance has a part in the choice.
_FOR_CHANCE = ("top-k", "top-p", "seed")
_BY_DEFAULT = "\n"
_WORKER = "--worker"
_RESTART = ("-m", "pentatron", "generate")
_TIMEOUT_MINUTES = 10.0
_USER_ERROR = 2


@dataclass(frozen=True)
class Request:
    """What is asked for. `folder` holds the weights; `prompts` are texts or, with `as_tokens`, token ids."""

    folder: str
    prompts: list[Any]
    as_tokens: bool
    options: dict[str, Any]


def generate_command(words: Sequence[str], restart: Sequence[str] = _RESTART) -> int:
    """`restart` are the words after `python` that run this command again, for the workers."""
    if "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    worker = find_worker(os.environ)
    if words[:1] == [_WORKER]:
        return _work(Request(**json.loads(Path(words[1]).read_text(encoding="utf-8"))), worker)
    options, plain = read_options(words, DEFAULTS, "pentatron generate", _SPELLINGS)
    _check(options)
    if not plain:
        raise UserError(
            'say which model to use and, in quotes, what to continue: pentatron generate runs/demo "import "'
        )
    # One process looks for damage and reads what can be read once.
    first = worker is None or worker.rank == 0
    request = Request(
        _find(plain[0], verify=first),
        _prompts(plain[1:], options) if first else [],
        bool(options["tokens"]),
        options,
    )
    if worker is not None or _ranks(request).world_size == 1:
        return _work(request, worker)
    return _launch(request, restart)


def _check(options: dict[str, Any]) -> None:
    for name, least in _LEAST.items():
        if not least <= options[name] < math.inf:
            raise UserError(f"--{name} {options[name]} must be {least} or more")
    if not SEED.holds(options["seed"]):
        raise UserError(f"--seed {options['seed']} must be {SEED.words}")
    if not 0 < options["top-p"] <= 1:
        raise UserError(f"--top-p {options['top-p']} must be above 0 and at most 1")
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            raise UserError(f"--{name} {options[name]} is not one of {', '.join(choices)}")
    if len(options["spec"]) not in (0, 2):
        raise UserError("--spec wants two words, MODULE FUNCTION; write it after the prompts")
    if options["greedy"] and options["temperature"] not in (0, DEFAULTS["temperature"]):
        raise UserError(
            f"--greedy is --temperature 0, but --temperature {options['temperature']} is given; leave one of them out"
        )
    if options["greedy"]:
        options["temperature"] = 0.0


def _idle(options: Mapping[str, Any], processes: int) -> list[str]:
    """Why options that were given have nothing to act on."""
    found = []
    changed = [f"--{name} {options[name]}" for name in _FOR_CHANCE if options[name] != DEFAULTS[name]]
    if changed and options["temperature"] == 0:
        found.append(f"{' '.join(changed)}: the likeliest token is always taken, so this changes nothing")
    if options["master-port"] and processes == 1:
        found.append(f"--master-port {options['master-port']}: there is one process, so this changes nothing")
    return found


def _find(name: str, verify: bool) -> str:
    from pentatron.cli.generated import note
    from pentatron.train.text_source import find_weights

    folder, complaints = find_weights(name, verify)
    for complaint in complaints:
        note(complaint)
    return str(folder)


def _prompts(words: Sequence[str], options: Mapping[str, Any]) -> list[Any]:
    if options["tokens"]:
        if words or options["prompt-file"]:
            raise UserError("--tokens are the prompts; leave out the text, or --tokens")
        return [_ids(part) for part in options["tokens"].split(";")]
    found = [sys.stdin.read() if word == "-" else word for word in words]
    if options["prompt-file"]:
        path = Path(options["prompt-file"])
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--prompt-file {path} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        found += [line for line in lines if line]
        if not found:
            raise UserError(f"--prompt-file {path} has no line to continue")
    return found or [_BY_DEFAULT]


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--tokens wants ids such as 1,2,3 (and ; between prompts), not '{text}'") from None


# --- processes ---


def _launch(request: Request, restart: Sequence[str]) -> int:
    """Starts the ranks; whatever they would refuse is refused here, seconds earlier and once."""
    from pentatron.launch.local import READER_LEFT, run_workers, scratch_folder
    from pentatron.parallel.world import require_gpu

    if request.options["device"] == "cuda":
        require_gpu()
    _open(request)
    world = _ranks(request).world_size
    prepare_for_workers(_threads(request, world))
    with scratch_folder("generate") as folder:
        file = folder / "request.json"
        file.write_text(json.dumps(asdict(request)), encoding="utf-8")
        port = request.options["master-port"] or None
        ended = run_workers([*restart, _WORKER, str(file)], world, port, os.environ, os.getpid())
    if ended.stopped_by is not None:
        raise KeyboardInterrupt
    if ended.exit_code not in (0, _USER_ERROR, READER_LEFT):
        complain(ended.story(world))
        return 1
    return ended.exit_code


def _work(request: Request, worker: Worker | None) -> int:
    import torch

    from pentatron.parallel.world import choose_device, open_world

    source, config = _open(request)
    size = config.grid.world_size
    if worker is not None and worker.world_size != size:
        raise UserError(
            f"{worker.launcher} started {worker.world_size} processes, and the model is spread over {size} "
            f"({_layout(request)}); start as many, or change --tp and --pp"
        )
    here = worker or Worker(0, 1, 0, 1, "none")
    torch.set_num_threads(_threads(request, here.local_size))
    if here.world_size > 1:
        announce_worker(here, None)
    device = choose_device(request.options["device"], here.local_rank)
    place = (here.rank, here.local_rank)
    shared = {**config.shared(), "folder": request.folder}
    point = meeting_point(here)
    try:
        with (
            open_world(config.grid, *place, device, _TIMEOUT_MINUTES, shared, point) as world,
            torch.no_grad(),
        ):
            _generate(request, source, config, world)
    except AgreedError:
        raise
    except UserError as error:
        complain(str(error) if here.world_size == 1 else f"rank {here.rank}: {error}")
        return _USER_ERROR
    return 0


def _threads(request: Request, processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return request.options["threads"] or max(1, cores // processes)


def _ranks(request: Request) -> Any:
    from pentatron.train.continue_text import Ranks

    sizes = ("tensor", "pipeline", "expert")
    return Ranks(*(request.options[f"{name}-model-parallel-size"] for name in sizes))


def _layout(request: Request) -> str:
    ranks = _ranks(request)
    return f"{ranks.tensor} tensor × {ranks.pipeline} pipeline"


def _open(request: Request) -> tuple["ModelSource", "RunConfig"]:
    from pentatron.train.continue_text import settings_of
    from pentatron.train.text_source import open_source

    source = open_source(Path(request.folder), tuple(request.options["spec"]))
    return source, settings_of(source, _ranks(request))


def _generate(request: Request, source: "ModelSource", config: "RunConfig", world: "World") -> None:
    import torch

    from pentatron.cli.generated import Words, note
    from pentatron.models.sampling import Sampling
    from pentatron.parallel.collectives import broadcast_object, on_some_ranks
    from pentatron.train.continue_text import load_stages, speaking, texts_of

    options = request.options
    half = options["dtype"] in ("bfloat16", "bf16") or (
        options["dtype"] == "auto" and world.device.type == "cuda"
    )
    dtype = torch.bfloat16 if half else torch.float32

    def words_of() -> Words:
        return Words(request.prompts, request.as_tokens, source, options["tokenizer-model"])

    words = on_some_ranks(world.is_first, words_of, world.everyone)
    prompts, stop = broadcast_object((words.ids, words.stop) if words else None, world.everyone)
    stages = on_some_ranks(True, lambda: load_stages(source, config, world, dtype), world.everyone)
    assert stages is not None
    sampling = Sampling(options["temperature"], options["top-k"], options["top-p"], options["seed"])
    model = speaking(stages, config, world)
    made = texts_of(model, prompts, options["max-new-tokens"], sampling, stop, options["batch-size"])
    if words is None:
        for _ in made:
            pass
    else:
        for idle in _idle(options, config.grid.world_size):
            note(idle)
        note(
            f"{request.folder}: {str(dtype).removeprefix('torch.')} on {world.device.type}, {_layout(request)}"
        )
        words.show(made, options["json"])
