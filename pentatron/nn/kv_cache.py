"""Keys and values of tokens a model has seen, kept so that the next token costs one token.

A token lies in the slot of its position, whatever the length of the other sequences of the batch. Which slots a query may look
at follows from positions alone: those up to its own. Sequences that are shorter than others are filled up at the end; what
the filling leaves in later slots is never seen, because the sequence's own token overwrites it before any query is that
far.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentatron.nn.attention import DotProductAttention, SelfAttention
from pentatron.nn.spec import IdentityOp


@dataclass(frozen=True)
class Pass:
    """The tokens of one forward: `length` of every sequence, those from position `starts[i]` on of the i-th."""

    starts: tuple[int, ...]
    length: int

    @property
    def is_first(self) -> bool:
        return not any(self.starts)

    @property
    def is_even(self) -> bool:
        """Whether all sequences are at the same position."""
        return len(set(self.starts)) == 1

    @property
    def end(self) -> int:
        return max(self.starts) + self.length

    def positions(self, device: torch.device) -> Tensor:
        """[B, S]"""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.length, device=device)


class KVCache:
    """Which tokens the layers of a model are given now; `capacity` positions are kept of each sequence."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.now = Pass((), 0)

    def begin(self, now: Pass) -> None:
        assert now.end <= self.capacity, f"position {now.end - 1} in a cache of {self.capacity}"
        self.now = now


class LayerCache:
    """The keys and values of one layer: of this rank's heads, in the order of positions."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.keys_values: Tensor | None = None

    def keep(self, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps those of the tokens given now; returns all there are, [B, K, slots, H] each."""
        now, fresh = self.cache.now, torch.stack((k_BKSH, v_BKSH))
        if self.keys_values is None:
            *outer, _, width = fresh.shape
            self.keys_values = fresh.new_zeros(*outer, self.cache.capacity, width)
        if now.is_even:
            start = now.starts[0]
            self.keys_values[..., start : start + now.length, :] = fresh
        else:
            slots = now.positions(fresh.device)[None, :, None, :, None].expand_as(fresh)
            self.keys_values.scatter_(3, slots, fresh)
        keys, values = self.keys_values
        return keys, values


class KeepingAttention(nn.Module):
    """Attention in the place of `inner` that remembers. What it is given first, `inner` computes itself."""

    def __init__(self, inner: DotProductAttention, cache: KVCache) -> None:
        super().__init__()
        self.inner = inner
        self.cache = cache
        self.kept = LayerCache(cache)

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        keys, values = self.kept.keep(k_BKSH, v_BKSH)
        if self.cache.now.is_first:
            made: Tensor = self.inner(q_BNSH, k_BKSH, v_BKSH)
            return made
        return attend_to_kept(q_BNSH, keys, values, self.cache.now, self.inner.window)


def can_keep(layer: nn.Module) -> bool:
    """Whether a layer attends in the way it is known here how to remember, or not at all."""
    attention = getattr(layer, "attention", None)
    if isinstance(attention, SelfAttention):
        return type(attention.core_attention) is DotProductAttention
    return isinstance(attention, IdentityOp)


@contextmanager
def keeping(layers: Iterable[nn.Module], cache: KVCache) -> Iterator[None]:
    """Within, the attention of the layers, which can keep, remembers the tokens it is given."""
    places = [layer.attention for layer in layers if isinstance(layer.attention, SelfAttention)]
    before = [attention.core_attention for attention in places]
    for attention, inner in zip(places, before):
        attention.core_attention = KeepingAttention(inner, cache)
    try:
        yield
    finally:
        for attention, inner in zip(places, before):
            attention.core_attention = inner


def attend_to_kept(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, now: Pass, window: int | None = None
) -> Tensor:
    """Attention of the tokens given now to all kept ones up to their own; with a window, to no more than so many before."""
    first = 0 if window is None else max(0, min(now.starts) - window)
    k_BKTH, v_BKTH = (t[:, :, first : now.end] for t in (k_BKTH, v_BKTH))
    mask = None if now.is_even and now.length == 1 else _visible(now, first, window, q_BNSH.device)
    groups, shared = k_BKTH.shape[1], q_BNSH.shape[1] // k_BKTH.shape[1]
    # The queries that share a key head are its queries: no kernel has to copy keys, and any of them will do.
    q_BKRH = q_BNSH.unflatten(1, (groups, shared)).flatten(2, 3)
    if mask is not None:
        mask = mask.repeat(1, 1, shared, 1)
    attended = F.scaled_dot_product_attention(q_BKRH, k_BKTH, v_BKTH, attn_mask=mask)
    return attended.unflatten(2, (shared, -1)).flatten(1, 2)


def _visible(now: Pass, first: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the slots from `first` on each token sees: [B, 1, S, T], or [1, 1, S, T] where that is the same for all."""
    slots = torch.arange(first, now.end, device=device)
    rows = now.positions(device)[:1] if now.is_even else now.positions(device)
    positions = rows[:, None, :, None]
    seen = slots <= positions
    return seen if window is None else seen & (slots >= positions - window)
