"""Packing of parameters into flat buckets, by size; `pentatron.parallel.buckets` allocates them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pentatron.layout.ranks import Axis

# In elements: 32 bytes of fp32, so that vector loads of a parameter are aligned.
ALIGNMENT = 8


def align_up(number: int, unit: int = ALIGNMENT) -> int:
    """Returns the number rounded up to a multiple of `unit`."""
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Item:
    """A parameter of `elements` with replicas on `replica_axis`. `alone`: it gets its own bucket."""

    elements: int
    replica_axis: Axis
    alone: bool = False


@dataclass
class PackedBucket:
    """One bucket: the indices of its items, and the axis of their replicas."""

    replica_axis: Axis
    items: list[int] = field(default_factory=list)

    def size(self, items: Sequence[Item], ranks: int) -> int:
        """Returns the size of the bucket, padded so that it divides into `ranks` equal aligned shards."""
        return align_up(sum(align_up(items[i].elements) for i in self.items), ALIGNMENT * ranks)


def pack(items: Sequence[Item], limit: int) -> list[PackedBucket]:
    """Packs items, given in model order, from the last to the first into buckets of at most `limit` elements.

    A larger item gets its own bucket. Buckets are in the order in which they were opened.
    """
    buckets: list[PackedBucket] = []
    open_buckets: dict[Axis, tuple[PackedBucket, int]] = {}
    for number in reversed(range(len(items))):
        item = items[number]
        size = align_up(item.elements)
        bucket, filled = open_buckets.get(item.replica_axis, (PackedBucket(item.replica_axis), limit))
        if item.alone or filled + size > limit:
            bucket, filled = PackedBucket(item.replica_axis), 0
            buckets.append(bucket)
        bucket.items.append(number)
        open_buckets[item.replica_axis] = (bucket, limit if item.alone else filled + size)
    return buckets
