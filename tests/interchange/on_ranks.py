"""Functions for ranks, in a module without heavy imports: megatron-core alone takes two seconds."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.checkpoint.state import TrainState
from pentatron.interchange.store import create_store
from pentatron.optim.build import build_optimizer
from pentatron.parallel.sharding import Fragment
from pentatron.parallel.world import create_groups
from pentatron.train.checkpoints import random_state
from pentatron.train.model import build_parallel_model
from tests.interchange.megatron_core_process import LENGTH, VOCABULARY
from tests.support import LLAMA, resolved

SHAPE = f"--vocab-size {VOCABULARY} --seq-length {LENGTH} --ckpt-format torch_dist --init-method-std 0.2"
MODERN = f"{LLAMA} --group-query-attention --num-query-groups 2 --norm-epsilon 1e-6 --untie-embeddings-and-output-weights"
MIXTURE = (
    f"{MODERN} --ffn-hidden-size 64 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-dtype fp32 "
    "--moe-shared-expert-intermediate-size 40 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
OURS = {
    "gpt": "--ffn-hidden-size 128",
    "qwen": f"{MODERN} --ffn-hidden-size 64 --add-qkv-bias --qk-layernorm",
    "mixture": MIXTURE,
    "pattern": f"{MIXTURE} --moe-layer-freq [0,1]",
}


def save_on_a_rank(families: dict[str, Path], layout: str) -> None:
    """Saves a model at step 5 without training it: made-up moments and router counts."""
    for family, folder in families.items():
        settings = resolved(f"{SHAPE} {OURS[family]} {layout} --save {folder}", dist.get_world_size())
        config, rank = settings.config, dist.get_rank()
        world = create_groups(config.grid, rank, rank, torch.device("cpu"))
        model = build_parallel_model(config, world)
        optimizer = build_optimizer(
            model.stages, world, config.optim, model.decisions.optimizer, torch.float32
        )
        for fragment in optimizer.fragments(owned_only=False):
            if not fragment.tensor.startswith("weights/"):
                fragment.values.copy_(numbers(fragment))
        for fragment in model.routers.fragments(owned_only=False):
            fragment.values.copy_(numbers(fragment))
        optimizer.after_load(5)
        fragments = [*optimizer.fragments(owned_only=True), *model.routers.fragments(owned_only=True)]
        state = TrainState(step=5, consumed_samples=40, updates=5).to_json()
        create_store(config).save(5, fragments, random_state(world), state, config.nested(), world.all_ranks)


def numbers(fragment: Fragment) -> Tensor:
    """Returns values that differ by tensor and element, and are the same in every layout."""
    generator = torch.Generator().manual_seed(sum(map(ord, fragment.tensor)))
    values = torch.rand(fragment.shape, generator=generator)
    at = tuple(slice(i, i + n) for i, n in zip(fragment.start, fragment.values.shape))
    return values[at]
