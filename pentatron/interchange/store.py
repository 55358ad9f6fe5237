"""Steps that are Megatron-LM's checkpoints and ours at once: its files in the format torch_dist, and our manifest beside them.

The manifest says where every rectangle lies in the `.distcp` files, so that a run goes on from such a step as from any other:
checked by its sums, in any layout, with no pickled file read. What Megatron-LM has no place for lies in files of our own.
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
    StoredPiece,
    TensorRecord,
    Written,
    cover_problem,
    piece_key,
    whole_tensors,
)
from pentatron.checkpoint.links import Link
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.retention import hidden_while_replaced, keep_base
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.tensor_file import DTYPES, FileRecord, write_tensors
from pentatron.checkpoint.torch_file import rectangle_key, saved_place
from pentatron.files import rename
from pentatron.interchange.arguments import common_state, their_arguments
from pentatron.interchange.index import (
    EXTRA_IN_LAYERS,
    EXTRA_OF_EXPERTS,
    EXTRA_OUTSIDE,
    EXTRA_STATE,
    KEPT,
    MASTER,
    STATE,
    VOCABULARY,
    is_stacked,
    written_links,
    written_shapes,
)
from pentatron.interchange.torch_dist import (
    HashedFile,
    Place,
    own_copy,
    write_common,
    write_index,
)
from pentatron.parallel.encoding import sendable
from pentatron.parallel.shards import Fragment, Shape
from pentatron.settings.run import RunConfig


def iteration_name(step: int) -> str:
    return f"iter_{step:07d}"


@sendable
@dataclass(frozen=True)
class _Wrote(Written):
    """What one rank put into the temporary folder, or why it could not."""

    files: tuple[FileRecord, ...] = ()
    places: tuple[Place, ...] = ()
    records: tuple[tuple[str, TensorRecord], ...] = ()


@dataclass
class _RankFile:
    """The `.distcp` file of a rank while it is written, and what it is to be called."""

    file: HashedFile
    places: list[Place] = field(default_factory=list)

    def add(
        self, links: Sequence[Link], kinds: Sequence[str], at: Shape, values: Tensor, dtype: torch.dtype
    ) -> Place:
        """Writes a rectangle of ours once, under all its names."""
        start, size = links[0].their_rectangle(at, tuple(values.shape))
        offset, length = self.file.save(links[0].to_theirs(own_copy(values, dtype)))
        name = str(dtype).removeprefix("torch.")
        made = [
            Place(f"{kind}{link.theirs}", start, size, name, self.file.path.name, offset, length)
            for link in links
            for kind in kinds
        ]
        self.places += made
        return made[0]


class TorchDistStore(CheckpointStore):
    """Saves what `CheckpointStore` saves, as Megatron-LM has it."""

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

    def write_own(self, temporary: Path, rank: int, parts: Sequence[Fragment]) -> _Wrote:
        """This rank's files; errors come back as text, so that the other ranks hear of them."""
        try:
            with HashedFile(temporary / f"__{rank}_0.distcp") as file:
                return self._write(_RankFile(file), temporary / f"rank-{rank:05d}.safetensors", parts)
        except OSError as error:
            return _Wrote(failure=error.strerror or str(error))
        except (ValueError, KeyError, RuntimeError) as error:
            return _Wrote(mistake=f"{type(error).__name__}: {error}")

    def bytes_of(self, part: Fragment) -> int:
        twice = part.tensor.startswith(WEIGHTS) and part.values.dtype != self.dtype
        return super().bytes_of(part) + twice * part.values.numel() * self.dtype.itemsize

    def _write(self, named: _RankFile, path: Path, parts: Sequence[Fragment]) -> _Wrote:
        """What Megatron-LM has names for, and in a file of our own the rest."""
        beside: dict[str, Tensor] = {}
        records: list[tuple[str, TensorRecord]] = []
        for fragment in parts:
            if fragment.values.numel() == 0:
                continue
            kind, _, ours = fragment.tensor.partition("/")
            if kind in ("weights", *KEPT):
                records.append((fragment.tensor, self._add(named, kind, ours, fragment)))
                continue
            if fragment.tensor.startswith(ROUTERS) and ours in self.links:
                named.add(self.links[ours], [""], fragment.start, fragment.values, torch.float32)
            key = piece_key(
                fragment.tensor, tuple(fragment.shape), fragment.start, tuple(fragment.values.shape)
            )
            beside[key] = fragment.values
            piece = StoredPiece(path.name, key, tuple(fragment.start), tuple(fragment.values.shape))
            records.append((fragment.tensor, _one_piece(fragment, piece, fragment.values.dtype)))
        files = [named.file.finish()]
        if beside:
            files.append(write_tensors(path, beside))
        return _Wrote(files=tuple(files), places=tuple(named.places), records=tuple(records))

    def _add(self, named: _RankFile, kind: str, ours: str, fragment: Fragment) -> TensorRecord:
        """Weights twice where the run computes with others than it keeps; once under both names where they are the same."""
        links, at, values = self.links[ours], fragment.start, fragment.values
        if kind != "weights":
            place = named.add(links, [f"{STATE}{kind}."], at, values, values.dtype)
        elif self.dtype == values.dtype:
            place = named.add(links, ["", MASTER], at, values, values.dtype)
        else:
            named.add(links, [""], at, values, self.dtype)
            place = named.add(links, [MASTER], at, values, values.dtype)
        size = tuple(values.shape)
        key = rectangle_key(saved_place(place.offset, place.length), (0,) * len(place.size), place.size, size)
        return _one_piece(fragment, StoredPiece(place.file, key, tuple(at), size), values.dtype)

    def complete(
        self,
        temporary: Path,
        step: int,
        everyone: Sequence[_Wrote],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> Manifest:
        """Rank 0 adds what belongs to no rank, once it is sure that the parts make up every tensor exactly."""
        tensors = whole_tensors(record for wrote in everyone for record in wrote.records)
        places = [place for wrote in everyone for place in wrote.places]
        files = [file for wrote in everyone for file in wrote.files]
        with HashedFile(temporary / f"__{len(everyone)}_0.distcp") as file:
            rest = _RankFile(file)
            self._add_padding(rest, {place.theirs: place.dtype for place in places})
            offset, length = rest.file.save([None])
            nothing = Place("", None, (), "", rest.file.path.name, offset, length)
            places += rest.places
            places += [dataclasses.replace(nothing, theirs=name) for name in self._extra_states()]
            files.append(rest.file.finish())
        shapes = {
            place.theirs: self.shapes[_bare(place.theirs)] for place in places if place.start is not None
        }
        _require_whole(shapes, places)
        files += write_index(temporary, shapes, places)
        stacked = is_stacked(self.config.model, self.config.moe)
        arguments = their_arguments(self.config, run_state, step)
        common = common_state(step, run_state, self.config, stacked)
        files.append(write_common(temporary, common, arguments))
        return Manifest(step, {f.name: f for f in files}, tensors, dict(run_state), dict(config))

    def _add_padding(self, rest: _RankFile, dtypes: Mapping[str, str]) -> None:
        """Rows of the vocabulary that belong to no token: zeros, which Megatron-LM's loader wants to find."""
        for ours in VOCABULARY:
            for link in self.links.get(ours, ()):
                rows = self.vocabulary - link.size[0]
                for name, dtype in dtypes.items():
                    if _bare(name) == link.theirs and rows:
                        zeros = torch.zeros(rows, link.size[1], dtype=DTYPES[dtype])
                        start, kind = (link.size[0], 0), name.removesuffix(link.theirs)
                        rest.add([link], [kind], start, zeros, zeros.dtype)

    def _extra_states(self) -> Iterable[str]:
        """The names of what layers keep besides tensors, for each layer and each expert."""
        layers, experts = self.config.model.num_layers, self.config.moe.num_experts or 0
        stacked = is_stacked(self.config.model, self.config.moe)
        for layer in range(layers):
            prefix, at, of = (
                ("decoder.layers.", str(layer), str(layers))
                if stacked
                else (f"decoder.layers.{layer}.", "0", "1")
            )
            for name in EXTRA_IN_LAYERS:
                yield f"{prefix}{name}.{EXTRA_STATE}/shard_{at}_{of}"
            for name in EXTRA_OF_EXPERTS:
                for expert in range(experts):
                    where = f"{at}.{expert}_{of}.{experts}" if stacked else f"{expert}_{experts}"
                    yield f"{prefix}{name}.{EXTRA_STATE}/shard_{where}"
        for name in EXTRA_OUTSIDE:
            yield f"{name}.{EXTRA_STATE}/shard_0_1"

    def _free_step(self, step: int) -> Path:
        """The name that Megatron-LM looks for. A step of this run of that name, saved before a rollback, makes way; others are kept."""
        self._keep_bases(step)
        final = self.folder / iteration_name(step)
        if not final.exists():
            return final
        if (final / FILE_NAME).is_file():
            rename(final, hidden_while_replaced(final))
        else:
            keep_base(final)
        return final


def store_for(config: RunConfig) -> CheckpointStore:
    """Where a run saves, in the format it asks for."""
    chosen = config.checkpoint
    kept = (chosen.keep_checkpoints, chosen.save_retain_interval, chosen.verify_checkpoint)
    if chosen.ckpt_format == "torch_dist":
        return TorchDistStore(Path(chosen.save), *kept, config)
    return CheckpointStore(Path(chosen.save), *kept)


def _bare(theirs: str) -> str:
    """A name without what says that it is the optimizer's."""
    if not theirs.startswith(STATE):
        return theirs
    return theirs.removeprefix(STATE).partition(".")[2]


def _one_piece(fragment: Fragment, piece: StoredPiece, dtype: torch.dtype) -> TensorRecord:
    return TensorRecord(str(dtype).removeprefix("torch."), tuple(fragment.shape), (piece,))


def _require_whole(shapes: Mapping[str, Shape], places: Iterable[Place]) -> None:
    """Every tensor of theirs, each element once."""
    parts: dict[str, list[tuple[Shape, Shape]]] = {}
    for place in places:
        if place.start is not None:
            parts.setdefault(place.theirs, []).append((place.start, place.size))
    for name, of_tensor in parts.items():
        problem = cover_problem(shapes[name], of_tensor)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
