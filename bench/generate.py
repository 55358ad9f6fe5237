"""Greedy generation against `transformers`: the same tokens, and how many a second.

A model of a preset's shape with random weights is saved by `transformers`, loaded by both, and continues the same prompts of
different lengths. In fp32 the tokens must be the same; in bf16 a tie may fall either way, so the first difference is shown.

    python bench/generate.py [--preset qwen2.5-0.5b] [--layers 24] [--dtype bfloat16] [--batch 8] [--tokens 128] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from pentatron.cli.prepare import prepare  # noqa: E402
from pentatron.config.entry import TRAIN  # noqa: E402
from pentatron.hf.architecture import config_of  # noqa: E402
from pentatron.models.generate import generate  # noqa: E402
from pentatron.models.sampling import Sampling  # noqa: E402
from pentatron.parallel.world import single_process  # noqa: E402
from pentatron.train.continue_text import Ranks, load_stages, settings_of, speaking  # noqa: E402
from pentatron.train.text_source import open_source  # noqa: E402


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    """From 16 tokens on, each three longer than the one before."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (16 + 3 * n,), generator=draw).tolist() for n in range(count)]


def save_model(folder: Path, preset: str, layers: int | None, dtype: torch.dtype, device: str) -> None:
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
    config = prepare([*words, *(["--num-layers", str(layers)] if layers else [])], TRAIN).resolved.config
    written = config_of(config.model, config.moe)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written)).to(dtype)
    model.save_pretrained(folder)


def timed(work: Callable[[], list[list[int]]], device: str) -> tuple[list[list[int]], float]:
    """The second of two runs."""
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    found = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - started


def theirs(
    folder: Path, prompts: Sequence[Sequence[int]], count: int, dtype: torch.dtype, device: str
) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    longest = max(map(len, prompts))
    # Filled up in front, as that library wants it.
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)

    def work() -> list[list[int]]:
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        found: list[list[int]] = made[:, longest:].tolist()
        return found

    return timed(work, device)


def ours(folder: Path, prompts: Sequence[Sequence[int]], count: int, dtype: torch.dtype, device: str) -> Any:
    source = open_source(folder)
    world = single_process(torch.device(device))
    config = settings_of(source, Ranks())
    model = speaking(load_stages(source, config, world, dtype), config, world)

    def work() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for made in generate(model, prompts, count, Sampling(temperature=0.0)):
            if made.choice is not None:
                found[made.number].append(made.choice.token)
        return found

    return timed(work, device)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_model(folder, options.preset, options.layers, dtype, options.device)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        prompts = prompts_of(options.batch, vocabulary)
        arguments = (folder, prompts, options.tokens, dtype, options.device)
        expected, their_time = theirs(*arguments)
        found, our_time = ours(*arguments)
    agreed = [
        next((i for i, (a, b) in enumerate(zip(f, e)) if a != b), len(e)) for f, e in zip(found, expected)
    ]
    total = options.batch * options.tokens
    print(
        json.dumps(
            {
                **{
                    name: getattr(options, name)
                    for name in ("preset", "layers", "dtype", "batch", "tokens", "device")
                },
                "ours_tokens_per_s": round(total / our_time, 1),
                "transformers_tokens_per_s": round(total / their_time, 1),
                "ratio": round(their_time / our_time, 3),
                "equal_tokens": sum(agreed),
                "of": total,
            }
        )
    )
    same = agreed == [options.tokens] * options.batch
    return 0 if same or options.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
