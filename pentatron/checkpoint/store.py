"""The checkpoints of one run: a folder of steps, each complete or not there at all.

Saving: every rank writes its file into a fresh temporary folder; rank 0 writes the manifest last, renames the
folder into place and then moves the `latest` pointer. Whatever is killed in between leaves older steps untouched.
"""

import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint.bases import read_bases
from pentatron.checkpoint.manifest import (
    FILE_NAME,
    DamagedCheckpoint,
    Manifest,
    StoredPiece,
    TensorRecord,
    piece_key,
    read_manifest,
    verify_files,
)
from pentatron.checkpoint.retention import Retention, remove_steps
from pentatron.checkpoint.tensor_file import DTYPES, FileRecord, write_tensors, write_text
from pentatron.config.errors import AgreedError
from pentatron.data.atomic import sync_folder
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects
from pentatron.parallel.pieces import Fragment

_STEP_NAME = re.compile(r"step-(\d{8,})(?:-again(\d+))?|iter_(\d{7,})")
_DAMAGED = ".damaged"


@dataclass(frozen=True)
class Found:
    """A checkpoint that passed its checks."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class _Written:
    """What one rank put into the temporary folder, or why it could not: for lack of means, or by our mistake."""

    file: FileRecord | None = None
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    failure: str = ""
    mistake: str = ""


@dataclass(frozen=True)
class _Verdict:
    """What became of a save: where the step lies, or what went wrong."""

    final: str = ""
    failure: str = ""
    mistake: str = ""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class CheckpointStore:
    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        own: Mapping[str, Tensor],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
        group: Group,
    ) -> Path:
        """Saves one step. Over the group, the fragments make up every tensor exactly; `own` is this rank's alone."""
        temporary = self._agree_on_temporary(step, group)
        whole = (Fragment(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in own.items())
        written = _write(temporary / f"rank-{group.rank:05d}.safetensors", (*fragments, *whole))
        everyone = gather_objects(written, group)
        verdict = _Verdict()
        if group.rank == 0:
            verdict = self._decide(step, temporary, everyone, run_state, config)
            if not verdict.final:
                shutil.rmtree(temporary, ignore_errors=True)
        verdict = broadcast_object(verdict, group)
        if verdict.mistake:
            raise ValueError(f"the checkpoint of step {step} would be wrong: {verdict.mistake}")
        if verdict.failure:
            raise self._not_saved(step, verdict.failure)
        if group.rank == 0:
            self._remove_old(step)
        return Path(verdict.final)

    def temporary(self, step: int) -> Path:
        """A name for a step that is being written; the folder is not made yet."""
        return self.folder / f".{step_name(step)}.{secrets.token_hex(4)}"

    def _agree_on_temporary(self, step: int, group: Group) -> Path:
        """A fresh folder made by rank 0; if it could not be made, every rank hears why."""
        made, problem = self.temporary(step), ""
        if group.rank == 0:
            try:
                made.mkdir(parents=True)
            except OSError as error:
                problem = f"rank 0: {error.strerror or error}"
        made, problem = broadcast_object((made, problem), group)
        if problem:
            raise self._not_saved(step, problem)
        return Path(made)

    def _not_saved(self, step: int, reason: str) -> AgreedError:
        existing = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free / 2**20
        return AgreedError(
            f"the checkpoint of step {step} could not be saved to {self.folder} ({reason}; {free:.0f} MiB free); "
            f"earlier checkpoints are intact"
        )

    def _decide(
        self,
        step: int,
        temporary: Path,
        everyone: Sequence[_Written],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> _Verdict:
        """Commits the step if every rank wrote its part and the parts fit together."""
        for rank, written in enumerate(everyone):
            if written.mistake:
                return _Verdict(mistake=f"rank {rank}: {written.mistake}")
            if written.failure:
                return _Verdict(failure=f"rank {rank}: {written.failure}")
        try:
            final = self.commit(temporary, _manifest(step, everyone, run_state, config))
        except OSError as error:
            return _Verdict(failure=f"rank 0: {error.strerror or error}")
        except (ValueError, TypeError) as error:
            return _Verdict(mistake=str(error))
        return _Verdict(final=str(final))

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Gives a step whose files are written its manifest and its name; returns where it now lies."""
        final = self._free_step(manifest.step)
        write_text(temporary / FILE_NAME, manifest.to_json())
        sync_folder(temporary)
        temporary.rename(final)
        sync_folder(self.folder)
        pointer = self.folder / f".latest.{secrets.token_hex(4)}"
        write_text(pointer, final.name + "\n")
        pointer.replace(self.folder / "latest")
        sync_folder(self.folder)
        return final

    def _free_step(self, step: int) -> Path:
        """A name newer than any of this step: saved again after a rollback, it stands beside the old one."""
        taken = [_order(p)[1] for p in self.steps() if _order(p)[0] == step]
        return self.folder / (f"{step_name(step)}-again{max(taken) + 1}" if taken else step_name(step))

    def steps(self) -> list[Path]:
        """Finished steps, oldest first; of a step saved again, the last one last."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if _is_finished(p)), key=_order)

    def newest_valid(self, verify: bool, set_aside: bool) -> tuple[Found | None, list[str]]:
        """The newest step that passes its checks, and a sentence about each one that did not.

        With `set_aside` the bad ones are renamed, so that nobody meets them again; only the run that holds the
        folder may ask for that.
        """
        complaints: list[str] = []
        for folder in reversed(self._candidates()):
            try:
                manifest = read_manifest(folder)
                if manifest.step != _order(folder)[0]:
                    raise DamagedCheckpoint(f"{folder} says it is step {manifest.step}")
                if verify:
                    verify_files(folder, manifest)
                return Found(folder, manifest), complaints
            except DamagedCheckpoint as damage:
                complaints.append(str(damage))
                if set_aside:
                    aside = _free_name(folder.with_name(f"{folder.name}{_DAMAGED}"))
                    folder.rename(aside)
                    complaints[-1] += f"; the step is set aside as {aside.name}"
        return None, complaints

    def _candidates(self) -> list[Path]:
        """The steps the run has saved. What it began from counts while there are none, and none was lost."""
        steps, bases = self.steps(), read_bases(self.folder) or ()
        own = [step for step in steps if step.name not in bases]
        return own or ([] if bases and self.damaged() else steps)

    def damaged(self) -> list[Path]:
        """Steps that were set aside earlier."""
        return sorted(self.folder.glob(f"step-*{_DAMAGED}*"))

    def _remove_old(self, saved: int) -> None:
        """Deletes what the step just saved replaces, the oldest steps beyond `keep`, and what killed saves left."""
        bases = read_bases(self.folder) or ()
        steps = [step for step in self.steps() if step.name not in bases]
        just_saved = [p for p in steps if _order(p)[0] == saved][-1:]
        remove_steps(self.folder, Retention(self.keep).outdated(steps, just_saved))


def _is_finished(path: Path) -> bool:
    """Others write steps called iter_0000100 as well: such a one is ours if it has our manifest."""
    match = _STEP_NAME.fullmatch(path.name)
    return match is not None and path.is_dir() and (match[3] is None or (path / FILE_NAME).is_file())


def _order(folder: Path) -> tuple[int, int]:
    """(step, how often it was saved again) of a step's folder."""
    match = _STEP_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1] or match[3]), int(match[2] or 0)


def _write(path: Path, fragments: Sequence[Fragment]) -> _Written:
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
        tensors = _collect(records)
        return _Written(write_tensors(path, values) if values else None, tensors)
    except OSError as error:
        return _Written(failure=error.strerror or str(error))
    except ValueError as error:
        return _Written(mistake=str(error))


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


def _manifest(
    step: int, everyone: Sequence[_Written], run_state: Mapping[str, Any], config: Mapping[str, Any]
) -> Manifest:
    """What all ranks wrote, once it is sure that the pieces make up every tensor exactly."""
    files = {written.file.name: written.file for written in everyone if written.file is not None}
    tensors = _collect(record for written in everyone for record in written.tensors.items())
    for name, record in tensors.items():
        problem = record.problem(name)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
    return Manifest(step, files, tensors, dict(run_state), dict(config))


def _free_name(wanted: Path) -> Path:
    number, candidate = 1, wanted
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate
