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
        length = len(sample["tokens"])
        ends = np.flatnonzero(sample["tokens"] == self.eod)
        begins = np.zeros(len(ends) + 1, np.int64)
        begins[1:] = ends + 1
        begins = begins[begins < length]
        marked = dict(sample)
        if self.mask_loss:
            marked["loss_mask"] = sample["loss_mask"].copy()
            marked["loss_mask"][ends] = 0
        if self.reset_positions:
            marked["position_ids"] = positions_in_documents(begins, length)
        if self.reset_attention:
            marked[DOCUMENT_STARTS] = begins
        return marked


def boundaries_of(data: DataConfig, eod: Callable[[], int]) -> Boundaries | None:
    """What the settings wish for; the end of a document is asked for only if they do."""
    wishes = (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    return Boundaries(eod(), *wishes) if any(wishes) else None


def positions_in_documents(begins: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Positions that count from 0 in every document."""
    positions = np.ones(length, np.int64)
    positions[0] = 0
    # Each document begins one position further than the one before had come, back at 0.
    positions[begins[1:]] = 1 - np.diff(begins)
    return np.cumsum(positions)
