"""`pentatron generate`: continues prompts with a trained model, on one or several ranks."""

import json
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.cli import environment
from pentatron.cli.options import Options, option, options_help, parse_options
from pentatron.cli.output import print_error, print_note, with_help
from pentatron.errors import AgreedError, UserError
from pentatron.launch.machine import usable_cores
from pentatron.settings.declaration import FRACTION, NON_NEGATIVE, ONE_OR_MORE, SEED, flag_of

if TYPE_CHECKING:
    from pentatron.generate.source import ModelSource
    from pentatron.parallel.world import World
    from pentatron.settings.run_config import RunConfig


def _parse_token_ids(written: str, flag: str) -> tuple[tuple[int, ...], ...]:
    """Parses `1,2,3;4,5`, which is two prompts."""
    try:
        return tuple(tuple(int(part) for part in prompt.split(",")) for prompt in written.split(";"))
    except ValueError:
        raise UserError(
            f"{flag} must be token ids such as 1,2,3 (with ; between prompts), not '{written}'"
        ) from None


@dataclass(frozen=True)
class PromptOptions(Options):
    prompt_file: str | None = option(
        None, "file with one prompt per line, in addition to prompts on the command line", value="FILE"
    )
    tokens: tuple[tuple[int, ...], ...] | None = option(
        None,
        "prompts as token ids, which need no tokenizer; 1,2,3;4,5 are two prompts",
        value="1,2,3",
        parse=_parse_token_ids,
    )
    spec: tuple[str, ...] = option(
        (), "custom layer spec of the checkpoint; as code it must be named here", value="MODULE FUNCTION"
    )
    tokenizer_model: str | None = option(
        None, "tokenizer.json or its folder, for a model without tokenizer", value="DIR"
    )


@dataclass(frozen=True)
class SamplingOptions(Options):
    max_new_tokens: int = option(
        120,
        "maximum new tokens; generation also stops at the end-of-document token or the maximum position",
        unlisted="--max-tokens",
        limit=ONE_OR_MORE,
    )
    temperature: float = option(0.8, "sampling temperature; 0: greedy decoding", limit=NON_NEGATIVE)
    greedy: bool = option(False, "take the most likely token (greedy decoding)")
    top_k: int = option(40, "top-k sampling: keep the N most likely tokens; 0: all", limit=NON_NEGATIVE)
    top_p: float = option(
        1.0, "nucleus sampling: keep the fewest tokens whose probability sums to X; 1: all", limit=FRACTION
    )
    seed: int = option(
        0, "random seed; the same seed gives the same text on any device and number of ranks", limit=SEED
    )
    json: bool = option(
        False,
        "print a JSON list of objects with prompt, text, tokens, logprobs (before temperature, top-k and top-p) and the reason why it ended",
    )

    def problems(self) -> Iterable[str]:
        if self.greedy and self.temperature not in (0, SamplingOptions.temperature):
            yield f"--greedy means --temperature 0, but --temperature {self.temperature} is given; leave one of them out"


_DTYPES = ("auto", "float32", "fp32", "bfloat16", "bf16")


def _size(short: str, help: str) -> Any:
    return option(1, help, also=short, unlisted=f"{short}_size", limit=ONE_OR_MORE)


@dataclass(frozen=True)
class DeviceOptions(Options):
    tensor_model_parallel_size: int = _size(
        "--tp",
        "tensor-parallel ranks that each layer is sharded over; this command starts the ranks unless torchrun does",
    )
    pipeline_model_parallel_size: int = _size("--pp", "pipeline ranks that the layers are divided among")
    expert_model_parallel_size: int = _size("--ep", "expert-parallel ranks; must divide --tp")
    device: str = option("auto", "device to compute on", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "dtype of the weights; auto: bfloat16 on a GPU, float32 on a CPU",
        choices=_DTYPES,
        value="auto|float32|bfloat16",
    )
    threads: int | None = option(None, "CPU threads per process (cores / processes)", limit=NON_NEGATIVE)
    batch_size: int = option(16, "prompts per batch", limit=ONE_OR_MORE)
    master_port: int | None = option(None, "port of the rendezvous (a free one)", limit=NON_NEGATIVE)


@dataclass(frozen=True)
class GenerateOptions(DeviceOptions, SamplingOptions, PromptOptions):
    def problems(self) -> Iterable[str]:
        yield from super().problems()
        if len(self.spec) not in (0, 2):
            yield "--spec needs two values, MODULE FUNCTION; write --spec after the prompts"


USAGE = f"""usage: pentatron generate PATH [PROMPT ...] [--option value ...]

Continues texts with a trained model. PATH is a run folder, its checkpoints (the newest is taken), one step of them, a Hugging
Face folder, or a model of the hub such as Qwen/Qwen2.5-0.5B. Several prompts are batched; each gets the same text as alone.
The prompt - is read from standard input.

prompts
{options_help(PromptOptions)}

sampling
{options_help(SamplingOptions)}

device and layout
{options_help(DeviceOptions)}

  pentatron generate runs/demo "import "
  pentatron generate Qwen/Qwen2.5-7B "The capital of France is" --greedy --tp 4
"""
# Options of random sampling, which greedy decoding ignores.
_RANDOM_SAMPLING = ("top_k", "top_p", "seed")
_WORKER = "--worker"
_RESTART = ("-m", "pentatron", "generate")
_TIMEOUT_MINUTES = 10.0


@dataclass(frozen=True)
class Request:
    """The input that all ranks receive.

    `folder` holds the weights; `prompts` are texts or, with `--tokens`, token ids.
    """

    folder: str
    prompts: list[Any]
    options: GenerateOptions


@with_help(USAGE)
def generate_command(words: Sequence[str], restart: Sequence[str] = _RESTART) -> int:
    """Runs the command. `restart`: the words after `python` that run it again, for the workers."""
    worker = environment.find_worker(os.environ)
    if words[:1] == [_WORKER]:
        written = json.loads(Path(words[1]).read_text(encoding="utf-8"))
        given: dict[str, Any] = written.pop("options")
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return _work(Request(**written, options=GenerateOptions(**given)), worker)
    options, plain = parse_options(GenerateOptions, words, "pentatron generate")
    if options.greedy:
        options = replace(options, temperature=0.0)
    if not plain:
        example = 'pentatron generate runs/demo "import "'
        raise UserError(f"expected a model and a prompt in quotes, for example: {example}")
    from pentatron.generate.source import find_weights

    # Only one process verifies the checkpoint and reads the prompts, which may come from stdin.
    is_first = worker is None or worker.rank == 0
    folder, complaints = find_weights(plain[0], verify=is_first)
    for complaint in complaints:
        print_note(complaint)
    request = Request(str(folder), _prompts(plain[1:], options) if is_first else [], options)
    if worker is not None or _ranks(request).world_size == 1:
        return _work(request, worker)
    return _launch(request, restart)


def _prompts(words: Sequence[str], options: GenerateOptions) -> list[Any]:
    if options.tokens is not None:
        if words or options.prompt_file:
            raise UserError("--tokens gives the prompts already; leave out the text prompts, or --tokens")
        return [list(prompt) for prompt in options.tokens]
    prompts = [sys.stdin.read() if word == "-" else word for word in words]
    if options.prompt_file:
        named = f"--prompt-file {Path(options.prompt_file)}"
        try:
            prompts += filter(None, Path(options.prompt_file).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{named} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not prompts:
            raise UserError(f"{named} has no prompt; write one per line")
    return prompts or ["\n"]


def _launch(request: Request, restart: Sequence[str]) -> int:
    """Starts the ranks. Raises their errors here, which is seconds earlier and only once."""
    from pentatron.files import scratch_folder
    from pentatron.parallel.world import require_gpu
    from pentatron.supervise.launcher import BROKEN_PIPE, run_workers

    if request.options.device == "cuda":
        require_gpu()
    _open_model(request)
    world = _ranks(request).world_size
    environment.set_worker_environment(_threads(request, world))
    port = request.options.master_port or None
    with scratch_folder("generate") as folder:
        file = folder / "request.json"
        file.write_text(json.dumps(asdict(request)), encoding="utf-8")
        ended = run_workers([*restart, _WORKER, str(file)], world, port, os.environ, os.getpid())
    if ended.stopped_by is not None:
        raise KeyboardInterrupt
    # For these exit codes a rank has printed the error, or there is none.
    if ended.exit_code in (0, UserError.exit_code, BROKEN_PIPE):
        return ended.exit_code
    print_error(ended.failure_message(world))
    return 1


def _work(request: Request, worker: environment.RankInfo | None) -> int:
    import torch

    from pentatron.parallel.world import choose_device, open_world

    source, config = _open_model(request)
    size = config.grid.world_size
    if worker is not None and worker.world_size != size:
        started = f"{worker.launcher} started {worker.world_size} processes"
        spread = f"the layout of the model has {size} ({_layout_text(config)})"
        raise UserError(f"{started}, but {spread}; start {size} processes, or change --tp and --pp")
    worker = worker or environment.RankInfo(0, 1, 0, 1, "none")
    torch.set_num_threads(_threads(request, worker.local_size))
    if worker.world_size > 1:
        environment.export_rank_variables(worker, None)
    device = choose_device(request.options.device, worker.local_rank)
    place = (config.grid, worker.rank, worker.local_rank, device)
    shared, address = {**config.shared(), "folder": request.folder}, environment.rendezvous_address(worker)
    try:
        with open_world(*place, _TIMEOUT_MINUTES, shared, address) as world, torch.no_grad():
            _generate(request, source, config, world)
    except AgreedError:
        raise
    except UserError as error:
        print_error(str(error) if worker.world_size == 1 else f"rank {worker.rank}: {error}")
        return UserError.exit_code
    return 0


def _threads(request: Request, processes: int) -> int:
    return request.options.threads or max(1, usable_cores() // processes)


def _ranks(request: Request) -> Any:
    from pentatron.generate.continue_text import Ranks

    axes = ("tensor", "pipeline", "expert")
    return Ranks(*(getattr(request.options, f"{axis}_model_parallel_size") for axis in axes))


def _layout_text(config: "RunConfig") -> str:
    return f"{config.grid.tensor} tensor × {config.grid.pipeline} pipeline"


def _open_model(request: Request) -> tuple["ModelSource", "RunConfig"]:
    from pentatron.generate.continue_text import generation_config
    from pentatron.generate.source import open_source

    source = open_source(Path(request.folder), request.options.spec)
    return source, generation_config(source, _ranks(request))


def _generate(request: Request, source: "ModelSource", config: "RunConfig", world: "World") -> None:
    import torch

    from pentatron.cli.generate_output import PromptTexts
    from pentatron.generate.continue_text import generate_texts, load_stages
    from pentatron.generate.generate import Sampling, build_generation_model
    from pentatron.parallel.collectives import broadcast_object, run_on_all_ranks, run_on_some_ranks

    options = request.options
    half = options.dtype in ("bfloat16", "bf16") or (options.dtype == "auto" and world.device.type == "cuda")
    dtype = torch.bfloat16 if half else torch.float32

    words = run_on_some_ranks(
        world.is_first, lambda: PromptTexts(request.prompts, options, source), world.all_ranks
    )
    prompts, stop = broadcast_object((words.ids, words.stop) if words else None, world.all_ranks)
    stages = run_on_all_ranks(lambda: load_stages(source, config, world, dtype), world.all_ranks)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    model = build_generation_model(stages, config.model, world)
    texts = generate_texts(model, prompts, options.max_new_tokens, sampling, stop, options.batch_size)
    if words is None:
        # Other ranks take part in the generation, which the generator drives.
        deque(texts, maxlen=0)
        return
    changed = [n for n in _RANDOM_SAMPLING if getattr(options, n) != getattr(GenerateOptions, n)]
    if changed and options.temperature == 0:
        flags = " ".join(f"{flag_of(name)} {getattr(options, name)}" for name in changed)
        print_note(f"{flags}: greedy decoding takes the most likely token, so this has no effect")
    if options.master_port and config.grid.world_size == 1:
        print_note(f"--master-port {options.master_port}: there is one process, so this has no effect")
    type_name = str(dtype).removeprefix("torch.")
    print_note(f"{request.folder}: {type_name} on {world.device.type}, {_layout_text(config)}")
    words.show(texts, options.json)
