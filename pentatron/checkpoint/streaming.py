"""Writes a checkpoint step from one process block by block, without holding the whole step in memory."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint.format import Manifest, StoredPiece, TensorRecord, merge_tensor_records, piece_key
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import DTYPES, FileRecord, ReadRectangle, TensorSpec, write_blocks
from pentatron.monitor.display import Display
from pentatron.parallel.sharding import Shape
from pentatron.text import decimal_rate, decimal_size

# A rectangle of a tensor: name, start, size.
Rectangle = tuple[str, Shape, Shape]


def save_streamed(
    store: CheckpointStore,
    step: int,
    outlines: Mapping[str, TensorSpec],
    read: ReadRectangle,
    run_state: Mapping[str, Any],
    config: Mapping[str, Any],
    file_bytes: int,
) -> Path:
    """Saves whole tensors, in files of at most `file_bytes` (more if a single tensor is larger).

    On an error, the caller removes the folder that it created.
    """
    tensors = {n: TensorRecord(str(o.dtype).removeprefix("torch."), o.shape, ()) for n, o in outlines.items()}
    contents = (
        (f"weights-{number:05d}.safetensors", [(n, (0,) * len(o.shape), o.shape) for n, o in group.items()])
        for number, group in enumerate(split_into_files(outlines, file_bytes), 1)
    )
    source = Manifest(step, {}, tensors, dict(run_state), dict(config))
    return save_rectangles(store, source, read, contents, config)


def split_into_files(outlines: Mapping[str, TensorSpec], file_bytes: int) -> Iterator[dict[str, TensorSpec]]:
    """Groups tensors in order into files of at most `file_bytes`, each with at least one tensor."""
    group: dict[str, TensorSpec] = {}
    size = 0
    for name, outline in outlines.items():
        if group and size + outline.bytes > file_bytes:
            yield group
            group, size = {}, 0
        group[name] = outline
        size += outline.bytes
    if group:
        yield group


def save_rectangles(
    store: CheckpointStore,
    source: Manifest,
    read: ReadRectangle,
    contents: Iterable[tuple[str, Sequence[Rectangle]]],
    config: Mapping[str, Any],
) -> Path:
    """Saves the tensors of a step in other files: `contents` yields the name and rectangles of each.

    On an error, the caller removes the folder that it created.
    """
    temporary = store.temporary(source.step)
    temporary.mkdir(parents=True)
    files: dict[str, FileRecord] = {}
    records = [(name, dataclasses.replace(record, pieces=())) for name, record in source.tensors.items()]
    stored = source.tensors
    for file, rectangles in contents:
        by_key = {
            piece_key(name, stored[name].shape, start, size): (name, start, size)
            for name, start, size in rectangles
        }
        assert len(by_key) == len(rectangles), f"{file} would contain a rectangle twice"
        specs = {key: TensorSpec(DTYPES[stored[name].dtype], size) for key, (name, _, size) in by_key.items()}

        def read_part(
            key: str, start: Shape, size: Shape, by_key: Mapping[str, Rectangle] = by_key
        ) -> Tensor:
            name, origin, _ = by_key[key]
            return read(name, tuple(i + j for i, j in zip(origin, start, strict=True)), size)

        files[file] = write_blocks(temporary / file, specs, read_part)
        for key, (name, start, size) in by_key.items():
            piece = StoredPiece(file, key, start, size, files[file].crc32[key])
            records.append((name, dataclasses.replace(stored[name], pieces=(piece,))))
    tensors = merge_tensor_records(records)
    manifest = dataclasses.replace(source, files=files, tensors=tensors, config=dict(config))
    return store.commit(temporary, manifest)


# --- progress of conversions ---


@dataclass(frozen=True)
class Summary:
    """Result of a conversion."""

    parameters: int
    tensors: int
    bytes: int
    seconds: float

    def sentence(self) -> str:
        return (
            f"{self.parameters:,} parameters in {self.tensors} tensors, {decimal_size(self.bytes)}, in {self.seconds:.1f} s "
            f"({decimal_rate(self.bytes, self.seconds)})"
        )


class Progress:
    """Counts the bytes read through a reader, and displays progress and rate."""

    def __init__(self, display: Display, what: str, total: int) -> None:
        self.display, self.what, self.total = display, what, total
        self.done, self._start = 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def counting(self, read: ReadRectangle) -> ReadRectangle:
        def counted(name: str, start: Shape, size: Shape) -> Tensor:
            values = read(name, start, size)
            self.add(values.nbytes)
            return values

        return counted

    def add(self, count: int) -> None:
        self.done += count
        self.display.work(self.what, self.done, self.total, decimal_rate(self.done, self.seconds))
