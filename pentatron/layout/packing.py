"""How parameters are packed into flat buckets, in numbers of elements; `pentatron.parallel.buckets` fills them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pentatron.layout.ranks import Axis

# Elements: 32 bytes of fp32, so that vector loads of a parameter start on a boundary.
ALIGNMENT = 8


def aligned(number: int, unit: int = ALIGNMENT) -> int:
    """The number, or the next multiple of the unit above it."""
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Item:
    """A parameter of `elements`, of which the ranks on the axis `copies` hold the same. `alone`: in a bucket of its own."""

    elements: int
    copies: Axis
    alone: bool = False


@dataclass
class Packed:
    """One bucket: the numbers of its items, and the axis of the ranks that have the same."""

    copies: Axis
    items: list[int] = field(default_factory=list)

    def size(self, items: Sequence[Item], ranks: int) -> int:
        """Its elements with all alignment, so that `ranks` can cut it into equal shares."""
        return aligned(sum(aligned(items[i].elements) for i in self.items), ALIGNMENT * ranks)


def packed(items: Sequence[Item], limit: int) -> list[Packed]:
    """Packs items, given in the order of the model, from the last to the first into buckets of at most `limit` elements.

    A larger one gets a bucket of its own. Buckets come in the order in which they are opened.
    """
    found: list[Packed] = []
    open_ones: dict[Axis, tuple[Packed, int]] = {}
    for number in reversed(range(len(items))):
        item = items[number]
        room = aligned(item.elements)
        bucket, filled = open_ones.get(item.copies, (Packed(item.copies), limit))
        if item.alone or filled + room > limit:
            bucket, filled = Packed(item.copies), 0
            found.append(bucket)
        bucket.items.append(number)
        open_ones[item.copies] = (bucket, limit if item.alone else filled + room)
    return found
