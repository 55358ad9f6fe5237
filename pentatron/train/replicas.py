"""Whether ranks that must hold the same weights do."""

import hashlib

import torch
from torch import Tensor

from pentatron.errors import AgreedError
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.pieces import Shape
from pentatron.parallel.world import World

# A rectangle of a logical tensor.
_Held = tuple[str, Shape, Shape]


def require_equal_weights(optimizer: AnyOptimizer, world: World, step: int) -> int:
    """Compares the weights that ranks compute with, wherever two hold the same ones. Every rank must ask.

    Returns how many comparisons there were. Whoever holds the same rectangle of a tensor is compared: copies for other data, and norms
    that tensor ranks share.
    """
    own = {
        (f.tensor, tuple(f.start), tuple(f.values.shape)): digest(f.values) for f in optimizer.model_weights()
    }
    first: dict[_Held, tuple[int, str]] = {}
    compared, different = 0, []
    for rank, held in enumerate(gather_objects(own, world.everyone)):
        for key, value in held.items():
            holder, expected = first.setdefault(key, (rank, value))
            compared += holder != rank
            if value != expected:
                different.append((key[0], holder, rank))
    if different:
        name, holder, rank = different[0]
        more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
        raise AgreedError(
            f"after step {step} the weights of ranks {holder} and {rank} are not the same: {name} differs{more}; one of them computes or "
            f"communicates wrongly. Check the machine of rank {rank}, and go on from a checkpoint before the last step at which this was checked"
        )
    return compared


def digest(values: Tensor) -> str:
    flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
