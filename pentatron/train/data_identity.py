"""Which data a run reads, in few enough words to be kept in its checkpoints and compared when it goes on."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pentatron.config.data_sources import Blend
from pentatron.data.indexed import pair_paths


def fingerprint_of(blends: Sequence[Blend | None]) -> str:
    """Of the files to train and to validate with: of one corpus that of its files; of several, of all of them and their weights."""
    train, valid = blends
    assert train is not None
    if train.weights is None and len(train.prefixes) == 1 and valid == train:
        return _fingerprint(Path(train.prefixes[0]))
    named = [
        [list(blend.weights or ()), [_fingerprint(Path(prefix)) for prefix in blend.prefixes]]
        for blend in blends
        if blend is not None
    ]
    return f"blend {hashlib.sha256(json.dumps(named).encode()).hexdigest()}"


def _fingerprint(prefix: Path) -> str:
    """The whole index, and the size of the tokens it describes: they may be too many to read before every start."""
    binary, index = pair_paths(prefix)
    if not (binary.exists() and index.exists()):
        return ""
    with index.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest} {binary.stat().st_size}"
