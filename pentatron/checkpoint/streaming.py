"""A step written by one process, tensor by tensor, that never has the whole of it in memory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pentatron.checkpoint.manifest import Manifest, StoredPiece, TensorRecord
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import Outline, Read, write_blocks


def save_streamed(
    store: CheckpointStore,
    step: int,
    outlines: Mapping[str, Outline],
    read: Read,
    run_state: Mapping[str, Any],
    config: Mapping[str, Any],
    file_bytes: int,
) -> Path:
    """Saves whole tensors, in files of at most `file_bytes` unless one tensor alone is larger.

    The caller removes what an error leaves: it has made the folder.
    """
    temporary = store.temporary(step)
    temporary.mkdir(parents=True)
    groups = list(in_files(outlines, file_bytes))
    names = [f"weights-{number:05d}.safetensors" for number in range(1, len(groups) + 1)]
    files = [write_blocks(temporary / name, group, read) for name, group in zip(names, groups, strict=True)]
    tensors = {
        tensor: TensorRecord(
            str(outline.dtype).removeprefix("torch."),
            outline.shape,
            (StoredPiece(name, tensor, (0,) * len(outline.shape), outline.shape),),
        )
        for name, group in zip(names, groups, strict=True)
        for tensor, outline in group.items()
    }
    manifest = Manifest(
        step, {f.name: f for f in files}, dict(sorted(tensors.items())), dict(run_state), dict(config)
    )
    return store.commit(temporary, manifest)


def in_files(outlines: Mapping[str, Outline], file_bytes: int) -> Iterator[dict[str, Outline]]:
    """Tensors in their order, as many to a file as it may hold, and at least one."""
    group: dict[str, Outline] = {}
    held = 0
    for name, outline in outlines.items():
        if group and held + outline.bytes > file_bytes:
            yield group
            group, held = {}, 0
        group[name] = outline
        held += outline.bytes
    if group:
        yield group
