"""What one rank puts into a step, and how the parts of all ranks become a manifest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint.manifest import Manifest, StoredPiece, TensorRecord, piece_key
from pentatron.checkpoint.tensor_file import DTYPES, FileRecord, write_tensors
from pentatron.parallel.pieces import Fragment
from pentatron.parallel.values import sendable


@sendable
@dataclass(frozen=True)
class Written:
    """What one rank put into the temporary folder, or why it could not: for lack of means, or by our mistake."""

    file: FileRecord | None = None
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    failure: str = ""
    mistake: str = ""


@sendable
@dataclass(frozen=True)
class Verdict:
    """What became of a save: where the step lies, or what went wrong.

    `to_check`: all ranks are to read the step once more before anything older goes. `note`: what else should be told. `lost`: why the
    folder is not the run's any more. `keeps_older`: nothing older may go, as the step may not survive a power cut.
    """

    final: str = ""
    failure: str = ""
    mistake: str = ""
    to_check: bool = False
    note: str = ""
    lost: str = ""
    keeps_older: bool = False


def own_fragments(own: Mapping[str, Tensor]) -> list[Fragment]:
    """Tensors that one rank alone has."""
    return [Fragment(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in own.items()]


def write_part(path: Path, fragments: Sequence[Fragment]) -> Written:
    """Writes one rank's file, if it has anything; errors come back as text, so that the other ranks hear of them."""
    values: dict[str, Tensor] = {}
    records: list[tuple[str, TensorRecord]] = []
    try:
        for fragment in fragments:
            record = _describe(fragment, path.name)
            for piece in record.pieces:
                if piece.key in values:
                    raise ValueError(f"{piece.key} is given twice")
                values[piece.key] = fragment.values
            records.append((fragment.tensor, record))
        if not values:
            return Written(None, _collect(records))
        file = write_tensors(path, values)
        return Written(file, with_sums(_collect(records), file.crc32))
    except OSError as error:
        return Written(failure=error.strerror or str(error))
    except ValueError as error:
        return Written(mistake=str(error))


def _describe(fragment: Fragment, file: str) -> TensorRecord:
    """The record of a fragment's tensor with this one piece; nothing is stored of an empty part."""
    dtype = str(fragment.values.dtype).removeprefix("torch.")
    whole, start, size = tuple(fragment.shape), tuple(fragment.start), tuple(fragment.values.shape)
    if not len(whole) == len(start) == len(size):
        raise ValueError(f"{fragment.tensor} of {list(whole)} has a part {list(size)} at {list(start)}")
    if dtype not in DTYPES:
        raise ValueError(f"{fragment.tensor} is {dtype}, which a checkpoint cannot hold")
    if fragment.values.numel() == 0 and size != whole:
        return TensorRecord(dtype, whole, ())
    key = piece_key(fragment.tensor, whole, start, size)
    return TensorRecord(dtype, whole, (StoredPiece(file, key, start, size),))


def _collect(records: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """One record for each tensor, with the pieces of all its records in the order in which they lie."""
    pieces: dict[str, list[StoredPiece]] = {}
    first: dict[str, TensorRecord] = {}
    for name, record in records:
        known = first.setdefault(name, record)
        if (known.dtype, known.shape) != (record.dtype, record.shape):
            raise ValueError(
                f"{name} is {known.dtype} {list(known.shape)} in one part and "
                f"{record.dtype} {list(record.shape)} in another"
            )
        pieces.setdefault(name, []).extend(record.pieces)
    return {
        name: TensorRecord(r.dtype, r.shape, tuple(sorted(pieces[name], key=lambda piece: piece.start)))
        for name, r in sorted(first.items())
    }


def with_sums(tensors: Mapping[str, TensorRecord], crc32: Mapping[str, str]) -> dict[str, TensorRecord]:
    """Records of what lies in one file, with the sums that were made of it as it was written."""
    return {
        name: replace(r, pieces=tuple(replace(piece, crc32=crc32.get(piece.key)) for piece in r.pieces))
        for name, r in tensors.items()
    }


def whole_tensors(records: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Every tensor with all its pieces; ValueError unless they make it up exactly."""
    tensors = _collect(records)
    for name, record in tensors.items():
        problem = record.problem(name)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
    return tensors


def manifest_of(
    step: int, everyone: Sequence[Written], run_state: Mapping[str, Any], config: Mapping[str, Any]
) -> Manifest:
    """What all ranks wrote, once it is sure that the pieces make up every tensor exactly."""
    files = {written.file.name: written.file for written in everyone if written.file is not None}
    tensors = whole_tensors(record for written in everyone for record in written.tensors.items())
    return Manifest(step, files, tensors, dict(run_state), dict(config))
