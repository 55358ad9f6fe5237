"""What chunks of queries see of chunks of keys where a token sees its own document alone.

No block needs a mask because of documents, except for short neighbours inside a chunk: of two different chunks, only the one
document that reaches from one into the other is seen, and that is a rectangle.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from pentatron.layout.documents import DocumentStarts, alike, pieces
from pentatron.nn.attention_blocks import Block


def in_documents(
    documents: DocumentStarts, queries: Sequence[int], keys: Sequence[int], size: int, window: int | None
) -> list[Block]:
    """Chunks of `size` tokens are given by their number in the sequence and lie in this order; with or without a window."""
    found: list[Block] = []
    for samples, starts in alike(documents):
        for (place, number), (key_place, key_number) in itertools.product(
            enumerate(queries), enumerate(keys)
        ):
            shift, key_shift = (place - number) * size, (key_place - key_number) * size
            if number == key_number:
                found += _inside(starts, samples, number * size, size, (shift, key_shift), window)
            elif number > key_number:
                found += _across(starts, samples, number, key_number, size, (shift, key_shift), window)
    return found


def _inside(
    starts: Sequence[int],
    samples: slice,
    begin: int,
    size: int,
    shifts: tuple[int, int],
    window: int | None,
) -> Iterator[Block]:
    """The documents of one chunk."""
    for piece in pieces(starts, begin, begin + size):
        left = None if window is None or window >= piece.end - piece.begin - 1 else window
        of_queries, of_keys = (slice(piece.begin + shift, piece.end + shift) for shift in shifts)
        yield Block(of_queries, of_keys, causal=True, left=left, samples=samples, cuts=piece.cuts)


def _across(
    starts: Sequence[int],
    samples: slice,
    number: int,
    key_number: int,
    size: int,
    shifts: tuple[int, int],
    window: int | None,
) -> Iterator[Block]:
    """The document at the end of the chunk of keys, as far as it is in the chunk of queries."""
    of_last_key = bisect_right(starts, (key_number + 1) * size - 1) - 1
    first_key, after_keys = max(key_number * size, starts[of_last_key]), (key_number + 1) * size
    first, after = number * size, (number + 1) * size
    if of_last_key + 1 < len(starts):
        after = min(after, starts[of_last_key + 1])
    if window is not None:
        # Neither keys that no query sees, nor queries that see no key.
        first_key, after = max(first_key, first - window), min(after, after_keys + window)
    if first >= after or first_key >= after_keys:
        return
    nearest = first - first_key
    left = None if window is None or after - 1 - first_key <= window else window - nearest
    shift, key_shift = shifts
    of_queries = slice(first + shift, after + shift)
    of_keys = slice(first_key + key_shift, after_keys + key_shift)
    yield Block(of_queries, of_keys, causal=False, left=left, samples=samples)
