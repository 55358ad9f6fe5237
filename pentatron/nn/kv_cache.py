"""Keys and values of tokens a model has seen, kept so that the next token costs one token.

A token lies in the slot of its position, whatever the length of the other sequences of the batch. Which slots a query may look
at follows from positions alone: those up to its own. Sequences that are shorter than others are filled up at the end; what
the filling leaves in later slots is never seen, because the sequence's own token overwrites it before any query is that
far.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pass:
    """The tokens of one forward: `length` of every sequence, those from position `starts[i]` on of the i-th."""

    starts: tuple[int, ...]
    length: int

    @cached_property
    def is_first(self) -> bool:
        return not any(self.starts)

    @cached_property
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
    """Keys and values of the layers of a model, `capacity` positions of each sequence, and which tokens the
    layers are given now.

    What follows from the tokens is made for the first layer that asks, and once for all of them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[object, LayerCache] = {}
        self.begin(Pass((), 0))

    def of(self, attention: object) -> "LayerCache":
        """What is kept for one attention, which gives itself."""
        if attention not in self._layers:
            self._layers[attention] = LayerCache(self)
        return self._layers[attention]

    def begin(self, now: Pass) -> None:
        assert not now.starts or now.end <= self.capacity, (
            f"position {now.end - 1} in a cache of {self.capacity}"
        )
        self.now = now
        self._slots: Tensor | None = None
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def slots(self, device: torch.device) -> Tensor:
        """Where the tokens given now are kept, for `scatter_` along dimension 2: [B, 1, S, 1]."""
        if self._slots is None:
            self._slots = self.now.positions(device)[:, None, :, None]
        return self._slots

    def mask(self, first: int, window: int | None, shared: int, like: Tensor) -> Tensor | None:
        """What is added to the scores of `shared` queries of each token for the slots from `first` on; None: nothing is hidden."""
        if self.now.is_even and self.now.length == 1:
            return None
        if (window, shared) not in self._masks:
            seen = _visible(self.now, first, window, like.device).repeat(1, 1, shared, 1)
            # A mask of truth values is turned into this one by every attention.
            hidden = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
            self._masks[window, shared] = hidden.masked_fill_(~seen, -torch.inf)
        return self._masks[window, shared]


class LayerCache:
    """The keys and values of one layer: of this rank's heads, in the order of positions."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.keys_values: tuple[Tensor, Tensor] | None = None

    def keep(self, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps those of the tokens given now; returns all there are, [B, K, slots, H] each."""
        now = self.cache.now
        if self.keys_values is None:
            batch, heads, _, width = k_BKSH.shape
            size = (batch, heads, self.cache.capacity, width)
            self.keys_values = k_BKSH.new_zeros(size), v_BKSH.new_zeros(size)
        for kept, fresh in zip(self.keys_values, (k_BKSH, v_BKSH)):
            if now.is_even:
                kept.narrow(2, now.starts[0], now.length).copy_(fresh)
            else:
                kept.scatter_(2, self.cache.slots(fresh.device).expand_as(fresh), fresh)
        return self.keys_values


class CacheInUse:
    """The cache of the forward that runs now, if it has one. The attentions of a model share one of these."""

    def __init__(self) -> None:
        self.cache: KVCache | None = None

    @contextmanager
    def using(self, cache: KVCache | None) -> Iterator[None]:
        """Around the layers of one forward."""
        self.cache = cache
        try:
            yield
        finally:
            self.cache = None


def attend_to_kept(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, cache: KVCache, window: int | None = None
) -> Tensor:
    """Attention of the tokens given now to all kept ones up to their own; with a window, to no more than so many before."""
    now, (batch, heads, length, width) = cache.now, q_BNSH.shape
    first = 0 if window is None else max(0, min(now.starts) - window)
    k_BKTH, v_BKTH = (t[:, :, first : now.end] for t in (k_BKTH, v_BKTH))
    groups = k_BKTH.shape[1]
    shared = heads // groups
    # The queries that share a key head are its queries: no kernel has to copy keys, and any of them will do.
    q_BKRH = q_BNSH.reshape(batch, groups, shared * length, width)
    mask = cache.mask(first, window, shared, q_BNSH)
    attended = F.scaled_dot_product_attention(q_BKRH, k_BKTH, v_BKTH, attn_mask=mask)
    return attended.reshape(batch, heads, length, width)


def _visible(now: Pass, first: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the slots from `first` on each token sees: [B, 1, S, T], or [1, 1, S, T] where that is the same for all."""
    slots = torch.arange(first, now.end, device=device)
    rows = now.positions(device)[:1] if now.is_even else now.positions(device)
    positions = rows[:, None, :, None]
    seen = slots <= positions
    return seen if window is None else seen & (slots >= positions - window)
