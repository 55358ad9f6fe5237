"""What the end of a document means inside a sample: three wishes, each by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pentatron.config.training import DataConfig

Sample = dict[str, npt.NDArray[Any]]

# In a sample, beside what becomes tensors: where its documents begin, 0 first. A token then sees its own document alone.
DOCUMENT_STARTS = "document_starts"


@dataclass(frozen=True)
class Boundaries:
    """The token `eod` ends a document and belongs to it."""

    eod: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def mark(self, sample: Sample) -> Sample:
        """The sample with what was wished: only where the input is the end of a document, never the label."""
        ends = sample["tokens"] == self.eod
        begins = np.concatenate(([0], np.flatnonzero(ends[:-1]) + 1))
        marked = dict(sample)
        if self.mask_loss:
            marked["loss_mask"] = np.where(ends, np.float32(0), sample["loss_mask"])
        if self.reset_positions:
            marked["position_ids"] = positions_in_documents(begins, len(ends))
        if self.reset_attention:
            marked[DOCUMENT_STARTS] = begins
        return marked


def boundaries_of(data: DataConfig, eod: Callable[[], int]) -> Boundaries | None:
    """What the settings wish for; the end of a document is asked for only if they do."""
    wishes = (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    return Boundaries(eod(), *wishes) if any(wishes) else None


def positions_in_documents(begins: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Positions that count from 0 in every document."""
    lengths = np.diff(begins, append=length)
    return np.arange(length, dtype=np.int64) - np.repeat(begins, lengths)
