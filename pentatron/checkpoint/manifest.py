"""The manifest: what a checkpoint consists of. Written last, so that a folder without one is no checkpoint."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint.tensor_file import FileRecord, hash_file

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
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder whose files have the recorded sizes; their content is not read."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise DamagedCheckpoint(
                f"{path}: format {content['format']} version {content['version']} is not known here"
            )
        manifest = Manifest(
            step=int(content["step"]),
            files={name: FileRecord(**record) for name, record in content["files"].items()},
            tensors={name: _tensor(record) for name, record in content["tensors"].items()},
            run_state=content["run_state"],
            config=content["config"],
        )
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    for record in manifest.files.values():
        _check_size(folder, record)
    return manifest


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
