"""Generates text from a Hugging Face folder, on one process or on one of several ranks.

A module of its own, so that ranks need not import `transformers`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pentatron.generate.continue_text import (
    Ranks,
    Text,
    generate_texts,
    generation_config,
    load_stages,
)
from pentatron.generate.generate import Sampling, build_generation_model
from pentatron.generate.source import find_weights, open_source
from pentatron.parallel.world import create_groups, single_process

PROMPTS = [[1, 2, 3], [17, 8, 45, 10, 11, 60, 13, 5, 9], [5], [7, 7, 30, 2]]
NEW = 10


def texts(
    folder: Path,
    ranks: Ranks,
    samplings: Sequence[Sampling],
    stop: frozenset[int] = frozenset(),
    device: str = "cpu",
) -> tuple[list[list[Text]], int]:
    """Returns the texts of all prompts for each sampling, and the number of weights on this rank."""
    source = open_source(find_weights(str(folder), verify=True)[0])
    config = generation_config(source, ranks)
    spread = ranks.world_size > 1
    place = torch.device(device)
    world = (
        create_groups(config.grid, dist.get_rank(), dist.get_rank(), place)
        if spread
        else single_process(place)
    )
    stages = load_stages(source, config, world, torch.float32)
    model = build_generation_model(stages, config.model, world)
    # Three at once: the last prompt is read after the others have ended.
    found = [
        list(dict(generate_texts(model, PROMPTS, NEW, sampling, stop, at_once=3)).values())
        for sampling in samplings
    ]
    return found, sum(p.numel() for stage in stages.values() for p in stage.parameters())
