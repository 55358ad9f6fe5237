"""Saves steps in Megatron-LM's torch_dist format with our manifest beside it.

The manifest gives the position of every rectangle in the `.distcp` files, so a run resumes from such a step
as from any other: verified by digests, in any layout, without unpickling. State that Megatron-LM has no place
for is in our own files.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.format import (
    FILE_NAME,
    Manifest,
    RankWriteResult,
    StoredPiece,
    TensorRecord,
    cover_problem,
    merge_tensor_records,
    piece_key,
)
from pentatron.checkpoint.links import Link
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.retention import rename_base, replaced_name
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import DTYPES, FileRecord, write_tensors
from pentatron.checkpoint.torch_file import rectangle_key, torch_save_position
from pentatron.files import rename
from pentatron.interchange.arguments import arguments_from_settings, common_state
from pentatron.interchange.index import (
    EXTRA_IN_LAYERS,
    EXTRA_OF_EXPERTS,
    EXTRA_OUTSIDE,
    EXTRA_STATE,
    MASTER_PREFIX,
    OPTIMIZER_STATES,
    STATE_PREFIX,
    VOCABULARY,
    is_stacked,
    written_links,
    written_shapes,
)
from pentatron.interchange.torch_dist import (
    HashedFile,
    WrittenRectangle,
    host_copy,
    write_common,
    write_index,
)
from pentatron.parallel.encoding import sendable
from pentatron.parallel.sharding import Fragment, Shape
from pentatron.settings.run_config import RunConfig


def iteration_name(step: int) -> str:
    return f"iter_{step:07d}"


@sendable
@dataclass(frozen=True)
class _TorchDistWritten(RankWriteResult):
    """What one rank wrote to the temporary folder, or why it could not."""

    files: tuple[FileRecord, ...] = ()
    places: tuple[WrittenRectangle, ...] = ()
    records: tuple[tuple[str, TensorRecord], ...] = ()


@dataclass
class _RankFile:
    """The `.distcp` file of a rank being written, and the names of its tensors."""

    file: HashedFile
    places: list[WrittenRectangle] = field(default_factory=list)

    def add(
        self, links: Sequence[Link], kinds: Sequence[str], at: Shape, values: Tensor, dtype: torch.dtype
    ) -> WrittenRectangle:
        """Writes a rectangle of ours once, under all its names. Returns its first place."""
        start, size = links[0].their_rectangle(at, tuple(values.shape))
        offset, length = self.file.save(links[0].to_theirs(host_copy(values, dtype)))
        name = str(dtype).removeprefix("torch.")
        places = [
            WrittenRectangle(f"{kind}{link.theirs}", start, size, name, self.file.path.name, offset, length)
            for link in links
            for kind in kinds
        ]
        self.places += places
        return places[0]


class TorchDistStore(CheckpointStore):
    """A `CheckpointStore` that saves in the torch_dist format."""

    def __init__(
        self, folder: Path, keep: int | None, retain: int | None, verify: bool, config: RunConfig
    ) -> None:
        super().__init__(folder, keep, retain, verify)
        self.config = config
        self.links = written_links(config.model, config.moe)
        vocabulary = config.model.padded_vocab_size or config.model.vocab_size
        assert vocabulary is not None
        self.vocabulary = vocabulary
        self.shapes = written_shapes(self.links, config.model.num_layers, vocabulary)
        precision = config.precision
        self.dtype = torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32

    def write_own(self, temporary: Path, rank: int, parts: Sequence[Fragment]) -> _TorchDistWritten:
        """Writes this rank's files. Errors are returned as text, to be gathered on all ranks."""
        try:
            with HashedFile(temporary / f"__{rank}_0.distcp") as file:
                return self._write(_RankFile(file), temporary / f"rank-{rank:05d}.safetensors", parts)
        except OSError as error:
            return _TorchDistWritten(failure=error.strerror or str(error))
        except (ValueError, KeyError, RuntimeError) as error:
            return _TorchDistWritten(mistake=f"{type(error).__name__}: {error}")

    def bytes_of(self, part: Fragment) -> int:
        """Size of a fragment on disk.

        Weights are written twice if their dtype differs from the compute dtype.
        """
        has_master_copy = part.tensor.startswith(WEIGHTS) and part.values.dtype != self.dtype
        return super().bytes_of(part) + has_master_copy * part.values.numel() * self.dtype.itemsize

    def _write(self, rank_file: _RankFile, other_path: Path, parts: Sequence[Fragment]) -> _TorchDistWritten:
        """Writes tensors Megatron-LM has names for to the `.distcp` file, others to a file of our own."""
        other_values: dict[str, Tensor] = {}
        records: list[tuple[str, TensorRecord]] = []
        for fragment in parts:
            if fragment.values.numel() == 0:
                continue
            kind, _, ours = fragment.tensor.partition("/")
            if kind in ("weights", *OPTIMIZER_STATES):
                records.append((fragment.tensor, self._add(rank_file, kind, ours, fragment)))
                continue
            if fragment.tensor.startswith(ROUTERS) and ours in self.links:
                rank_file.add(self.links[ours], [""], fragment.start, fragment.values, torch.float32)
            key = piece_key(
                fragment.tensor, tuple(fragment.shape), fragment.start, tuple(fragment.values.shape)
            )
            other_values[key] = fragment.values
            piece = StoredPiece(other_path.name, key, tuple(fragment.start), tuple(fragment.values.shape))
            records.append((fragment.tensor, _one_piece(fragment, piece, fragment.values.dtype)))
        files = [rank_file.file.finish()]
        if other_values:
            files.append(write_tensors(other_path, other_values))
        return _TorchDistWritten(files=tuple(files), places=tuple(rank_file.places), records=tuple(records))

    def _add(self, rank_file: _RankFile, kind: str, ours: str, fragment: Fragment) -> TensorRecord:
        """Writes weights in the compute dtype and as master weights; once if both have the same dtype."""
        links, at, values = self.links[ours], fragment.start, fragment.values
        if kind != "weights":
            place = rank_file.add(links, [f"{STATE_PREFIX}{kind}."], at, values, values.dtype)
        elif self.dtype == values.dtype:
            place = rank_file.add(links, ["", MASTER_PREFIX], at, values, values.dtype)
        else:
            rank_file.add(links, [""], at, values, self.dtype)
            place = rank_file.add(links, [MASTER_PREFIX], at, values, values.dtype)
        size = tuple(values.shape)
        key = rectangle_key(
            torch_save_position(place.offset, place.length), (0,) * len(place.size), place.size, size
        )
        return _one_piece(fragment, StoredPiece(place.file, key, tuple(at), size), values.dtype)

    def complete(
        self,
        temporary: Path,
        step: int,
        everyone: Sequence[_TorchDistWritten],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> Manifest:
        """Rank 0 writes what belongs to no rank, after checking that the fragments are complete."""
        tensors = merge_tensor_records(record for wrote in everyone for record in wrote.records)
        places = [place for wrote in everyone for place in wrote.places]
        files = [file for wrote in everyone for file in wrote.files]
        with HashedFile(temporary / f"__{len(everyone)}_0.distcp") as file:
            last_file = _RankFile(file)
            self._add_padding(last_file, {place.theirs: place.dtype for place in places})
            offset, length = last_file.file.save([None])
            empty_object = WrittenRectangle("", None, (), "", last_file.file.path.name, offset, length)
            places += last_file.places
            places += [dataclasses.replace(empty_object, theirs=name) for name in self._extra_states()]
            files.append(last_file.file.finish())
        shapes = {
            place.theirs: self.shapes[_parameter_name(place.theirs)]
            for place in places
            if place.start is not None
        }
        _require_whole(shapes, places)
        files += write_index(temporary, shapes, places)
        is_stacked_model = is_stacked(self.config.model, self.config.moe)
        arguments = arguments_from_settings(self.config, run_state, step)
        common = common_state(step, run_state, self.config, is_stacked_model)
        files.append(write_common(temporary, common, arguments))
        return Manifest(step, {f.name: f for f in files}, tensors, dict(run_state), dict(config))

    def _add_padding(self, last_file: _RankFile, dtypes: Mapping[str, str]) -> None:
        """Writes zeros for padding rows of the vocabulary, which Megatron-LM's loader requires."""
        for ours in VOCABULARY:
            for link in self.links.get(ours, ()):
                rows = self.vocabulary - link.size[0]
                for name, dtype in dtypes.items():
                    if _parameter_name(name) == link.theirs and rows:
                        zeros = torch.zeros(rows, link.size[1], dtype=DTYPES[dtype])
                        start, kind = (link.size[0], 0), name.removesuffix(link.theirs)
                        last_file.add([link], [kind], start, zeros, zeros.dtype)

    def _extra_states(self) -> Iterable[str]:
        """Names of the extra states of all layers and experts."""
        layers, experts = self.config.model.num_layers, self.config.moe.num_experts or 0
        stacked = is_stacked(self.config.model, self.config.moe)
        for layer in range(layers):
            prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
            for name in EXTRA_IN_LAYERS:
                shard = f"{layer}_{layers}" if stacked else "0_1"
                yield f"{prefix}{name}.{EXTRA_STATE}/shard_{shard}"
            for name in EXTRA_OF_EXPERTS:
                for expert in range(experts):
                    shard = f"{layer}.{expert}_{layers}.{experts}" if stacked else f"{expert}_{experts}"
                    yield f"{prefix}{name}.{EXTRA_STATE}/shard_{shard}"
        for name in EXTRA_OUTSIDE:
            yield f"{name}.{EXTRA_STATE}/shard_0_1"

    def _free_step(self, step: int) -> Path:
        """Returns the name that Megatron-LM expects.

        A step of this run of that name, saved before a rollback, is replaced once the new one is committed;
        others are renamed.
        """
        self._keep_bases(step)
        final = self.folder / iteration_name(step)
        if not final.exists():
            return final
        if (final / FILE_NAME).is_file():
            rename(final, replaced_name(final))
        else:
            rename_base(final)
        return final


def create_store(config: RunConfig) -> CheckpointStore:
    """Returns the store of a run in its checkpoint format."""
    chosen = config.checkpoint
    options = (chosen.keep_checkpoints, chosen.save_retain_interval, chosen.verify_checkpoint)
    if chosen.ckpt_format == "torch_dist":
        return TorchDistStore(Path(chosen.save), *options, config)
    return CheckpointStore(Path(chosen.save), *options)


def _parameter_name(theirs: str) -> str:
    """Removes the prefix of an optimizer state from a name."""
    if not theirs.startswith(STATE_PREFIX):
        return theirs
    return theirs.removeprefix(STATE_PREFIX).partition(".")[2]


def _one_piece(fragment: Fragment, piece: StoredPiece, dtype: torch.dtype) -> TensorRecord:
    return TensorRecord(str(dtype).removeprefix("torch."), tuple(fragment.shape), (piece,))


def _require_whole(shapes: Mapping[str, Shape], places: Iterable[WrittenRectangle]) -> None:
    """Raises ValueError unless the places cover every tensor of theirs exactly."""
    parts: dict[str, list[tuple[Shape, Shape]]] = {}
    for place in places:
        if place.start is not None:
            parts.setdefault(place.theirs, []).append((place.start, place.size))
    for name, of_tensor in parts.items():
        problem = cover_problem(shapes[name], of_tensor)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
