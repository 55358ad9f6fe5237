"""The manifest: what a checkpoint consists of. Written last, so that a folder without one is no checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint.tensor_file import FileRecord, hash_file
from pentatron.config.errors import UserError

FORMAT = "pentatron-checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be trusted; the text says which file and why."""


@dataclass(frozen=True)
class Piece:
    """One stored part of a logical tensor: `shape` elements starting at `start`, in `file`."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRecord:
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    run_state: dict[str, Any]
    config: dict[str, Any]

    def to_json(self) -> str:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1)


def _digest(content: Mapping[str, Any]) -> str:
    """Over the content alone, so that reformatting the file is no damage."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder whose files have the recorded sizes; their content is not read."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("sha256")
        if content["format"] == FORMAT and content["version"] > VERSION:
            raise UserError(
                f"{path} has format version {content['version']}, this program knows {VERSION}; use a newer Pentatron"
            )
        if content["format"] != FORMAT or found != _digest(content):
            raise DamagedCheckpoint(f"{path} does not match its own checksum")
        manifest = Manifest(
            step=int(content["step"]),
            files={name: FileRecord(**record) for name, record in content["files"].items()},
            tensors={name: _tensor(record) for name, record in content["tensors"].items()},
            run_state=content["run_state"],
            config=content["config"],
        )
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except OSError as error:
        # Not damage: the disk or the permissions may be better tomorrow.
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is no manifest ({type(error).__name__}: {error})") from None
    _check_pieces(folder, manifest)
    for record in manifest.files.values():
        _check_size(folder, record)
    return manifest


def _check_pieces(folder: Path, manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        if len(tensor.pieces) != 1 or tensor.pieces[0].shape != tensor.shape:
            raise DamagedCheckpoint(f"{folder / FILE_NAME}: {name} is not stored in one piece")
        if tensor.pieces[0].file not in manifest.files:
            raise DamagedCheckpoint(f"{folder / FILE_NAME}: {name} lies in a file that is not listed")


def _tensor(record: dict[str, Any]) -> TensorRecord:
    pieces = tuple(Piece(p["file"], tuple(p["start"]), tuple(p["shape"])) for p in record["pieces"])
    return TensorRecord(record["dtype"], tuple(record["shape"]), pieces)


def _check_size(folder: Path, record: FileRecord) -> None:
    # A name from a file is not to be trusted with a path.
    if Path(record.name).name != record.name:
        raise DamagedCheckpoint(f"{folder / FILE_NAME} names a file outside its folder: {record.name}")
    path = folder / record.name
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing")
    if path.stat().st_size != record.bytes:
        raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, not {record.bytes}")


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Reads every file and compares its checksum."""
    for record in manifest.files.values():
        found = hash_file(folder / record.name)
        if found != record.sha256:
            names = [n for n, t in manifest.tensors.items() if any(p.file == record.name for p in t.pieces)]
            raise DamagedCheckpoint(
                f"{folder / record.name}: sha256 is {found[:12]}…, not {record.sha256[:12]}…; "
                f"it holds {len(names)} tensors, from {names[0] if names else 'none'} on"
            )
