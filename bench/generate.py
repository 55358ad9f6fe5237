"""Measures greedy generation against `transformers`: same tokens, tokens per second.

A model of a preset's shape with random weights is saved by `transformers`, loaded by both libraries, and
continues the same prompts of different lengths. In fp32 the tokens must be equal. In bf16 ties may resolve
differently, so tokens count as equal up to the first difference of each prompt.

The libraries run in turns; every other round begins with the other one. Ratios are those of the median round:
of wall time, and of CPU seconds over all threads, which other load disturbs less. Rates are those of the
median runs.

    python bench/generate.py [--preset qwen2.5-0.5b] [--layers 24] [--flags "--vocab-size 8192"]
        [--dtype bfloat16] [--batch 8] [--tokens 128] [--device cuda] [--threads 1] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from bench.cpu import in_turns, timed  # noqa: E402
from pentatron.cli.configure import prepare  # noqa: E402
from pentatron.generate.continue_text import Ranks, generation_config, load_stages  # noqa: E402
from pentatron.generate.generate import Sampling, build_generation_model, generate  # noqa: E402
from pentatron.generate.source import open_source  # noqa: E402
from pentatron.hf.model_config import config_from_settings  # noqa: E402
from pentatron.parallel.world import single_process  # noqa: E402
from pentatron.settings.entry_points import TRAIN  # noqa: E402


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    """Returns random prompts: the first has 16 tokens, each next one three more."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (16 + 3 * n,), generator=draw).tolist() for n in range(count)]


def save_model(folder: Path, preset: str, more: Sequence[str], dtype: torch.dtype, device: str) -> None:
    words = [
        "--preset",
        preset,
        "--mock-data",
        "--train-iters",
        "1",
        "--nproc-per-node",
        "1",
        "--device",
        "cpu",
    ]
    config = prepare([*words, *more], TRAIN).resolved.config
    written = config_from_settings(config.model, config.moe)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written)).to(dtype)
    model.save_pretrained(folder)


Texts = list[list[int]]


@dataclass
class Generation:
    work: Callable[[], Texts]

    def steps(self, count: int) -> tuple[float, float]:
        return timed(self.work, count)


def theirs(
    folder: Path, prompts: Sequence[Sequence[int]], count: int, dtype: torch.dtype, device: str
) -> Callable[[], Texts]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()  # type: ignore[arg-type]
    longest = max(map(len, prompts))
    # Left padding, which transformers requires for generation.
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)

    def work() -> Texts:
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        found: Texts = made[:, longest:].tolist()
        return found

    return work


def ours(
    folder: Path, prompts: Sequence[Sequence[int]], count: int, dtype: torch.dtype, device: str
) -> Callable[[], Texts]:
    source = open_source(folder)
    world = single_process(torch.device(device))
    config = generation_config(source, Ranks())
    model = build_generation_model(load_stages(source, config, world, dtype), config.model, world)

    def work() -> Texts:
        found: Texts = [[] for _ in prompts]
        for made in generate(model, prompts, count, Sampling(temperature=0.0)):
            if made.choice is not None:
                found[made.number].append(made.choice.token)
        return found

    return work


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, help="number of layers (default: those of the preset)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--flags", default="", help="further flags of pentatron train for the model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    more = [*(["--num-layers", str(options.layers)] if options.layers else []), *shlex.split(options.flags)]
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_model(folder, options.preset, more, dtype, options.device)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        prompts = prompts_of(options.batch, vocabulary)
        arguments = (folder, prompts, options.tokens, dtype, options.device)
        works = [ours(*arguments), theirs(*arguments)]
    found, expected = (work() for work in works)
    # A run ends with its tokens in host memory, so the clock needs no GPU synchronisation.
    times = in_turns([Generation(work) for work in works], options.rounds, 1, warm=1)
    by_clock, by_cpu = (
        sorted(their / our for our, their in zip(*both))
        for both in ([t.wall for t in times], [t.cpu for t in times])
    )
    our_time, their_time = (statistics.median(t.wall) for t in times)
    agreed = [
        next((i for i, (a, b) in enumerate(zip(f, e)) if a != b), len(e)) for f, e in zip(found, expected)
    ]
    total = options.batch * options.tokens
    print(
        json.dumps(
            {
                **{
                    name: getattr(options, name)
                    for name in ("preset", "layers", "flags", "dtype", "batch", "tokens", "device", "threads")
                },
                "ours_tokens_per_s": round(total / our_time, 1),
                "transformers_tokens_per_s": round(total / their_time, 1),
                "ratio": round(statistics.median(by_clock), 3),
                "rounds": [round(by_clock[0], 3), round(by_clock[-1], 3)],
                "cpu_ratio": round(statistics.median(by_cpu), 3),
                "cpu_rounds": [round(by_cpu[0], 3), round(by_cpu[-1], 3)],
                "equal_tokens": sum(agreed),
                "of": total,
            }
        )
    )
    same = agreed == [options.tokens] * options.batch
    return 0 if same or options.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
