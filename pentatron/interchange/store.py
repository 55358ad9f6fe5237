"""Saves steps in Megatron-LM's torch_dist format with our manifest beside it.

The manifest gives the position of every rectangle in the `.distcp` files, so a run resumes from such a step
as from any other: verified by digests, in any layout, without unpickling. State that Megatron-LM has no place
for is in our own files.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pentatron.checkpoint import format
from pentatron.checkpoint.links import Link
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.retention import rename_base, replaced_name
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import DTYPES, write_tensors
from pentatron.checkpoint.torch_file import rectangle_key, torch_save_position
from pentatron.files import rename
from pentatron.interchange import index
from pentatron.interchange.arguments import arguments_from_settings, common_state
from pentatron.interchange.index import MASTER_PREFIX, STATE_PREFIX, VOCABULARY
from pentatron.interchange.torch_dist import HashedFile, WrittenRectangle, write_common, write_index
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import Fragment, Shape
from pentatron.settings.run_config import RunConfig


@sendable
@dataclass(frozen=True)
class _TorchDistWritten(format.RankWriteResult):
    """What one rank wrote to the temporary folder, or why it could not."""

    places: tuple[WrittenRectangle, ...] = ()


class _RankFile(HashedFile):
    """The `.distcp` file of a rank being written, and the names of its tensors."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.places: list[WrittenRectangle] = []

    def add(
        self, links: Sequence[Link], kinds: Sequence[str], at: Shape, values: Tensor, dtype: torch.dtype
    ) -> WrittenRectangle:
        """Writes a rectangle of ours once, under all its names. Returns its first place."""
        start, size = links[0].their_rectangle(at, tuple(values.shape))
        # A contiguous copy on the host: torch.save writes the whole storage of a view.
        copy = values.detach().to("cpu", dtype, copy=True).contiguous()
        position = (self.path.name, *self.save(links[0].to_theirs(copy)))
        name = str(dtype).removeprefix("torch.")
        names = [f"{kind}{link.theirs}" for link in links for kind in kinds]
        places = [WrittenRectangle(theirs, start, size, name, *position) for theirs in names]
        self.places += places
        return places[0]


class TorchDistStore(CheckpointStore):
    """A `CheckpointStore` that saves in the torch_dist format."""

    def __init__(
        self, folder: Path, keep: int | None, retain: int | None, verify: bool, config: RunConfig
    ) -> None:
        super().__init__(folder, keep, retain, verify)
        self.config = config
        self.links = index.written_links(config.model, config.moe)
        self.vocabulary = config.model.padded_vocab_size or config.model.vocab_size
        self.shapes = index.written_shapes(self.links, config.model.num_layers, self.vocabulary)
        precision = config.precision
        self.dtype = torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32

    def write_own(self, temporary: Path, rank: int, parts: Sequence[Fragment]) -> _TorchDistWritten:
        """Writes tensors Megatron-LM has names for to a `.distcp` file, others to a file of our own.

        Errors are returned as text, to be gathered on all ranks.
        """
        other_path = temporary / f"rank-{rank:05d}.safetensors"
        other_values: dict[str, Tensor] = {}
        records: list[tuple[str, format.TensorRecord]] = []
        try:
            with _RankFile(temporary / f"__{rank}_0.distcp") as file:
                for fragment in (part for part in parts if part.values.numel()):
                    kind, _, ours = fragment.tensor.partition("/")
                    if kind in ("weights", *index.OPTIMIZER_STATES):
                        record = self._add(file, kind, ours, fragment)
                    else:
                        if fragment.tensor.startswith(ROUTERS) and ours in self.links:
                            file.add(self.links[ours], [""], fragment.start, fragment.values, torch.float32)
                        record = format.describe_fragment(fragment, other_path.name)
                        other_values[record.pieces[0].key] = fragment.values
                    records.append((fragment.tensor, record))
                files = [file.finish()]
            if other_values:
                files.append(write_tensors(other_path, other_values))
            tensors = format.collect_tensor_records(records)
            return _TorchDistWritten(tuple(files), tensors, places=tuple(file.places))
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

    def _add(self, rank_file: _RankFile, kind: str, ours: str, fragment: Fragment) -> format.TensorRecord:
        """Writes weights in the compute dtype and as master weights; once if both have the same dtype."""
        links, at, values = self.links[ours], fragment.start, fragment.values
        if kind != "weights":
            place = rank_file.add(links, [f"{STATE_PREFIX}{kind}."], at, values, values.dtype)
        elif self.dtype == values.dtype:
            place = rank_file.add(links, ["", MASTER_PREFIX], at, values, values.dtype)
        else:
            rank_file.add(links, [""], at, values, self.dtype)
            place = rank_file.add(links, [MASTER_PREFIX], at, values, values.dtype)
        size, position = tuple(values.shape), torch_save_position(place.offset, place.length)
        key = rectangle_key(position, (0,) * len(place.size), place.size, size)
        piece = format.StoredPiece(place.file, key, tuple(at), size)
        return format.TensorRecord(str(values.dtype).removeprefix("torch."), tuple(fragment.shape), (piece,))

    def complete(
        self, temporary: Path, draft: format.Manifest, rank_results: Sequence[_TorchDistWritten]
    ) -> format.Manifest:
        """Rank 0 writes what belongs to no rank, after checking that the fragments are complete."""
        manifest = super().complete(temporary, draft, rank_results)
        places = [place for wrote in rank_results for place in wrote.places]
        with _RankFile(temporary / f"__{len(rank_results)}_0.distcp") as file:
            self._add_padding(file, {place.theirs: place.dtype for place in places})
            empty_object = WrittenRectangle("", None, (), "", file.path.name, *file.save([None]))
            places += file.places
            places += [dataclasses.replace(empty_object, theirs=name) for name in self._extra_states()]
            last_file = file.finish()
        parts: dict[str, list[tuple[Shape, Shape]]] = {}
        for place in places:
            if place.start is not None:
                parts.setdefault(place.theirs, []).append((place.start, place.size))
        shapes = {theirs: self.shapes[_parameter_name(theirs)] for theirs in parts}
        for name, of_tensor in parts.items():
            if (problem := format.cover_problem(shapes[name], of_tensor)) is not None:
                raise ValueError(f"{name}: {problem}")
        files = [last_file, *write_index(temporary, shapes, places)]
        arguments = arguments_from_settings(self.config, draft.run_state, draft.step)
        stacked = index.is_stacked(self.config.model, self.config.moe)
        common = common_state(draft.step, draft.run_state, self.config, stacked)
        files.append(write_common(temporary, common, arguments))
        return dataclasses.replace(manifest, files=manifest.files | {file.name: file for file in files})

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
        stacked = index.is_stacked(self.config.model, self.config.moe)
        for layer in range(layers):
            prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
            shard = f"{layer}_{layers}" if stacked else "0_1"
            for name in index.EXTRA_IN_LAYERS:
                yield f"{prefix}{name}.{index.EXTRA_STATE}/shard_{shard}"
            for name in index.EXTRA_OF_EXPERTS:
                for expert in range(experts):
                    shard = f"{layer}.{expert}_{layers}.{experts}" if stacked else f"{expert}_{experts}"
                    yield f"{prefix}{name}.{index.EXTRA_STATE}/shard_{shard}"
        for name in index.EXTRA_OUTSIDE:
            yield f"{name}.{index.EXTRA_STATE}/shard_0_1"

    def _free_step(self, step: int) -> Path:
        """Returns the name that Megatron-LM expects.

        A step of this run of that name, saved before a rollback, is replaced once the new one is committed;
        others are renamed.
        """
        self._keep_bases(step)
        final = self.folder / f"iter_{step:07d}"
        if not final.exists():
            return final
        if (final / format.MANIFEST_FILE).is_file():
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
    _, is_state, state = theirs.partition(STATE_PREFIX)
    return state.partition(".")[2] if is_state else theirs
