"""From the words of a command line to a checked configuration, before anything starts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pentatron.cli.environment import Worker, find_worker
from pentatron.config.derive import derive_vocabulary
from pentatron.config.draft import Draft, Facts
from pentatron.config.entry import EntryPoint
from pentatron.config.resolve import Resolved, gather, resolve


@dataclass(frozen=True)
class Prepared:
    resolved: Resolved
    facts: Facts
    worker: Worker | None


def prepare(words: Sequence[str], entry: EntryPoint) -> Prepared:
    """Reads, completes and checks the configuration; raises every problem at once."""
    worker = find_worker(os.environ)
    draft = gather(words, entry)
    _learn_vocabulary(draft)
    facts = _facts(draft, worker)
    return Prepared(resolve(draft, facts), facts, worker)


def _facts(draft: Draft, worker: Worker | None) -> Facts:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if worker is not None:
        return Facts(worker.world_size, worker.local_size, cores)
    processes = draft["nproc_per_node"] or _processes_by_device(draft["device"])
    return Facts(processes, processes, cores)


def _processes_by_device(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _learn_vocabulary(draft: Draft) -> None:
    """A named tokenizer knows its vocabulary; nobody should have to type it."""
    if draft["vocab_size"] is not None or draft["padded_vocab_size"] is not None:
        return
    if draft["tokenizer_type"] is None and draft["tokenizer_model"] is None:
        return
    from pentatron.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(
        draft["tokenizer_type"] or "HuggingFaceTokenizer", draft["tokenizer_model"], None
    )
    derive_vocabulary(
        draft, tokenizer.vocab_size, f"tokenizer {draft['tokenizer_model'] or draft['tokenizer_type']}"
    )
