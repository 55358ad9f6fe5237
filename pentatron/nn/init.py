"""Initial weights from generators seeded by (seed, logical tensor, block).

A logical tensor is drawn in blocks of a fixed number of elements, each with its own generator. To fill a
region of a tensor, a rank draws the blocks it overlaps. The weights therefore do not depend on the layout or
the build order, and no rank allocates more than a bounded part of a tensor it does not own.
"""

import hashlib
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pentatron.parallel.sharding import Shape, ShardedParameter, region

_BLOCK = 2**14
# Number of elements that are drawn together.
_AT_ONCE = 2**22


def named_generator(seed: int, name: str) -> torch.Generator:
    """Returns a CPU generator seeded from the seed and the name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # 63 bits, because manual_seed takes signed 64-bit integers.
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _normal_run(seed: int, name: str, first: int, last: int) -> Tensor:
    """Elements [first, last) of the flattened standard normal tensor of that name, in fp32 on the CPU."""
    begin, end = first // _BLOCK, math.ceil(last / _BLOCK)
    drawn = torch.empty(end - begin, _BLOCK, device="cpu")

    def draw(blocks: range) -> None:
        for block in blocks:
            drawn[block - begin].normal_(generator=named_generator(seed, f"{name}:{block}"))

    # A generator is sequential; different blocks are drawn in parallel.
    threads = min(torch.get_num_threads(), end - begin)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw, (range(begin + offset, end, threads) for offset in range(threads))))
    return drawn.view(-1)[first - begin * _BLOCK : last - begin * _BLOCK]


def normal_region(seed: int, name: str, shape: Shape, start: Shape, size: Shape, out: Tensor) -> None:
    """Fills `out` with a region of the standard normal tensor of that name and shape.

    Draws on the CPU in fp32, so that every device gets the same bits.
    """
    row = math.prod(shape[1:])
    rows_at_once = max(1, _AT_ONCE // row)
    for begin in range(0, size[0], rows_at_once):
        rows = min(rows_at_once, size[0] - begin)
        first = (start[0] + begin) * row
        drawn = _normal_run(seed, name, first, first + rows * row).view(rows, *shape[1:])
        with torch.no_grad():
            out[begin : begin + rows].copy_(region(drawn, (0, *start[1:]), (rows, *size[1:])))


def draw_weights(parameters: Iterable[ShardedParameter], seed: int, std: float) -> None:
    """Initializes every parameter; elements that no shard covers become zero."""
    with torch.no_grad():
        for param in parameters:
            initial = param.declared.initial
            param.parameter.zero_()
            for shard in param.declared.shards:
                target = region(param.parameter.data, shard.local, shard.size)
                if initial.constant is not None:
                    target.fill_(initial.constant)
                    continue
                normal_region(seed, param.tensor, param.declared.shape, shard.start, shard.size, target)
                target.mul_(std * initial.scale)


def residual_scale(num_layers: int) -> float:
    """Scale of weights that write to the residual stream; keeps its variance independent of the depth."""
    return (2 * num_layers) ** -0.5
