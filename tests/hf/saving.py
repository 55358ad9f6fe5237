"""Loads a step, trains and saves on one rank; separate, so that ranks do not import transformers."""

from pathlib import Path

import torch.distributed as dist

from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.load import WEIGHTS, load_fragments
from pentatron.checkpoint.store import CheckpointStore
from pentatron.compare.trial import micro_batches
from pentatron.optim.build import build_optimizer
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.parity.trajectory import here
from tests.support import LLAMA, resolved

# A vocabulary that no number of tensor ranks divides, fewer key/value heads than tensor ranks, biases.
QWEN = (
    f"{LLAMA} --add-qkv-bias --group-query-attention --num-query-groups 2 --ffn-hidden-size 48 --norm-epsilon 1e-6 "
    "--untie-embeddings-and-output-weights --max-position-embeddings 64 --seq-length 16 --micro-batch-size 1"
)


def save_on_a_rank(layout: str, source: Path, out: Path, steps: int) -> None:
    """Loads a checkpoint, trains a few steps and saves."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = resolved(f"{QWEN} {layout}", world_size).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    found, _ = find_step(source)
    wanted = optimizer.fragments(owned_only=False)
    load_fragments(
        found.folder, found.manifest, (f for f in wanted if steps == 0 or f.tensor.startswith(WEIGHTS))
    )
    optimizer.after_load(found.manifest.step)
    batches = micro_batches(config, world, 0)
    for step in range(steps):
        train_step(model, optimizer, [next(batches) for _ in range(config.accumulation)], 1e-2, step)
    fragments = optimizer.fragments(owned_only=True)
    CheckpointStore(out, keep=None).save(1, fragments, {}, {}, config.nested(), world.all_ranks)
