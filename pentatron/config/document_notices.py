"""Why a setting about the ends of documents may have nothing to act on."""

from collections.abc import Callable

from pentatron.config.draft import Draft, Facts
from pentatron.config.sft_rules import documents_of_conversations


def _no_documents(draft: Draft, facts: Facts) -> str:
    if draft["corpus"] or draft["data_path"] or draft["mock_data"]:
        return documents_of_conversations(draft)
    return "synthetic samples are one document each, so this changes nothing"


IDLE_OF_DOCUMENTS: dict[str, Callable[[Draft, Facts], str]] = dict.fromkeys(
    ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), _no_documents
)
