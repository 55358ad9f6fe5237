"""The KV cache: keys and values of previous tokens, so that generating a token computes one token.

The slot of a token is its position, independent of the lengths of the other sequences of the batch. A query
attends to the slots up to its own position. Shorter sequences are padded at the end; padding in later slots
is never attended to, because the sequence's own token overwrites it first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ForwardPass:
    """The tokens of one forward: `length` tokens of each sequence i, starting at position `starts[i]`."""

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
        """Positions of the tokens, [B, S]."""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.length, device=device)


class KVCache:
    """Keys and values of the layers of a model, with `capacity` positions per sequence, and the current
    forward pass.

    Slots and masks of a pass are computed by the first layer and shared by all.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: dict[object, tuple[Tensor, Tensor]] = {}
        self.begin(ForwardPass((), 0))

    def begin(self, now: ForwardPass) -> None:
        """Starts a forward pass."""
        assert not now.starts or now.end <= self.capacity, f"position {now.end - 1} of {self.capacity}"
        self.now = now
        self._slots: Tensor | None = None
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def keep(self, attention: object, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the current keys and values of an attention module; returns all stored ones: of this rank's
        heads, ordered by position, [B, K, slots, H] each.
        """
        now = self.now
        if attention not in self._kept:
            batch, heads, _, width = k_BKSH.shape
            size = (batch, heads, self.capacity, width)
            self._kept[attention] = k_BKSH.new_zeros(size), v_BKSH.new_zeros(size)
        for kept, fresh in zip(self._kept[attention], (k_BKSH, v_BKSH)):
            if now.is_even:
                kept.narrow(2, now.starts[0], now.length).copy_(fresh)
            else:
                if self._slots is None:
                    self._slots = now.positions(fresh.device)[:, None, :, None]
                kept.scatter_(2, self._slots.expand_as(fresh), fresh)
        return self._kept[attention]

    def mask(self, first: int, window: int | None, shared: int, like: Tensor) -> Tensor | None:
        """Additive mask over the slots from `first` on, for `shared` queries per token; None if all are
        visible.
        """
        if self.now.is_even and self.now.length == 1:
            return None
        if (window, shared) not in self._masks:
            visible = _visible(self.now, first, window, like.device).repeat(1, 1, shared, 1)
            # Additive, because attention converts a boolean mask in every layer.
            hidden = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
            self._masks[window, shared] = hidden.masked_fill_(~visible, -torch.inf)
        return self._masks[window, shared]


class ActiveCache:
    """The cache of the current forward, or None. The attention modules of a model share one."""

    def __init__(self) -> None:
        self.cache: KVCache | None = None

    @contextmanager
    def using(self, cache: KVCache | None) -> Iterator[None]:
        """Uses the cache inside the block."""
        self.cache = cache
        try:
            yield
        finally:
            self.cache = None


def attend_to_cache(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, cache: KVCache, window: int | None = None
) -> Tensor:
    """Attention of the current tokens to all stored ones up to their own position, or within a window."""
    now, (batch, heads, length, width) = cache.now, q_BNSH.shape
    first = 0 if window is None else max(0, min(now.starts) - window)
    k_BKTH, v_BKTH = (t[:, :, first : now.end] for t in (k_BKTH, v_BKTH))
    groups = k_BKTH.shape[1]
    shared = heads // groups
    # Queries that share a key head are stacked as its queries, so no kernel has to expand the keys.
    q_BKRH = q_BNSH.reshape(batch, groups, shared * length, width)
    mask = cache.mask(first, window, shared, q_BNSH)
    attended = F.scaled_dot_product_attention(q_BKRH, k_BKTH, v_BKTH, attn_mask=mask)
    return attended.reshape(batch, heads, length, width)


def _visible(now: ForwardPass, first: int, window: int | None, device: torch.device) -> Tensor:
    """Which slots from `first` on are visible: [B, 1, S, T], or [1, 1, S, T] if equal for all sequences."""
    slots = torch.arange(first, now.end, device=device)
    rows = now.positions(device)[:1] if now.is_even else now.positions(device)
    positions = rows[:, None, :, None]
    visible = slots <= positions
    return visible if window is None else visible & (slots >= positions - window)
