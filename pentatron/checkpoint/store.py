"""The checkpoints of one run: a folder of steps, each complete or not there at all.

Saving: every rank writes its files into a fresh temporary folder; rank 0 writes the manifest last, renames the
folder into place and then moves the `latest` pointer. Whatever is killed in between leaves older steps untouched.
"""

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint.manifest import (
    FILE_NAME,
    DamagedCheckpoint,
    Manifest,
    Piece,
    TensorRecord,
    read_manifest,
    verify_files,
)
from pentatron.checkpoint.tensor_file import FileRecord, sync_folder, write_tensors
from pentatron.config.errors import AgreedError
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects

_STEP_NAME = re.compile(r"step-(\d{8,})(?:-again(\d+))?")
_DAMAGED = ".damaged"


@dataclass(frozen=True)
class Found:
    """A checkpoint that passed its checks."""

    folder: Path
    manifest: Manifest


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class CheckpointStore:
    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
        group: Group,
    ) -> Path:
        """Saves one step. `tensors` are the same on every rank and shared out; `own` belong to this rank alone."""
        temporary = self._agree_on_temporary(step, group)
        writers = _writers(tensors, group.size)
        mine = {name: t for name, t in tensors.items() if writers[name] == group.rank}
        outcome = _write(temporary / f"rank-{group.rank:05d}.safetensors", {**mine, **own})
        outcomes = gather_objects(outcome, group)
        failures = [f"rank {rank}: {o}" for rank, o in enumerate(outcomes) if isinstance(o, str)]
        final = ""
        if not failures and group.rank == 0:
            final, failures = self._commit(temporary, _manifest(step, outcomes, run_state, config))
        final, failures = broadcast_object((final, failures), group)
        if failures:
            if group.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise self._not_saved(step, failures[0])
        if group.rank == 0:
            self._remove_old(step)
        return Path(final)

    def _agree_on_temporary(self, step: int, group: Group) -> Path:
        """A fresh folder made by rank 0; if it could not be made, every rank hears why."""
        made, problem = self.folder / f".{step_name(step)}.{secrets.token_hex(4)}", ""
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

    def _commit(self, temporary: Path, manifest: Manifest) -> tuple[str, list[str]]:
        """Gives the step its name; returns where it now lies, or what went wrong."""
        try:
            final = self._free_step(manifest.step)
            _write_text(temporary / FILE_NAME, manifest.to_json())
            sync_folder(temporary)
            temporary.rename(final)
            sync_folder(self.folder)
            pointer = self.folder / f".latest.{secrets.token_hex(4)}"
            _write_text(pointer, final.name + "\n")
            pointer.replace(self.folder / "latest")
            sync_folder(self.folder)
        except OSError as error:
            return "", [f"rank 0: {error.strerror or error}"]
        return str(final), []

    def _free_step(self, step: int) -> Path:
        """A name newer than any of this step: saved again after a rollback, it stands beside the old one."""
        taken = [_order(p)[1] for p in self.steps() if _order(p)[0] == step]
        return self.folder / (f"{step_name(step)}-again{max(taken) + 1}" if taken else step_name(step))

    def steps(self) -> list[Path]:
        """Finished steps, oldest first; of a step saved again, the last one last."""
        if not self.folder.is_dir():
            return []
        return sorted(
            (p for p in self.folder.iterdir() if _STEP_NAME.fullmatch(p.name) and p.is_dir()), key=_order
        )

    def newest_valid(self, verify: bool, set_aside: bool) -> tuple[Found | None, list[str]]:
        """The newest step that passes its checks, and a sentence about each one that did not.

        With `set_aside` the bad ones are renamed, so that nobody meets them again; only the run that holds the
        folder may ask for that.
        """
        complaints: list[str] = []
        for folder in reversed(self.steps()):
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

    def damaged(self) -> list[Path]:
        """Steps that were set aside earlier."""
        return sorted(self.folder.glob(f"step-*{_DAMAGED}*"))

    def _remove_old(self, saved: int) -> None:
        """Deletes what the step just saved replaces, the oldest steps beyond `keep`, and what killed saves left."""
        steps = self.steps()
        replaced = [p for p in steps if _order(p)[0] == saved][:-1]
        outdated = [p for p in steps[: -self.keep] if _order(p)[0] != saved] if self.keep is not None else []
        for folder in dict.fromkeys((*replaced, *outdated)):
            # Hidden first: a deletion cut short must not leave half a step under a step's name.
            folder.rename(self.folder / f".{folder.name}.{secrets.token_hex(4)}")
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for pointer in self.folder.glob(".latest.*"):
            pointer.unlink(missing_ok=True)


def _order(folder: Path) -> tuple[int, int]:
    """(step, how often it was saved again) of a step's folder."""
    match = _STEP_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _writers(tensors: Mapping[str, Tensor], size: int) -> dict[str, int]:
    """Which rank writes which tensor: the largest first, each to the rank with least to write."""
    load = [0] * size
    chosen = {}
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        rank = load.index(min(load))
        chosen[name] = rank
        load[rank] += tensors[name].nbytes
    return chosen


def _write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileRecord, dict[str, TensorRecord]] | str:
    """Writes one rank's file; an error comes back as text, so that the other ranks can hear of it."""
    try:
        record = write_tensors(path, tensors)
    except OSError as error:
        return error.strerror or str(error)
    described = {
        name: TensorRecord(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            pieces=(Piece(path.name, (0,) * tensor.dim(), tuple(tensor.shape)),),
        )
        for name, tensor in tensors.items()
    }
    return record, described


def _manifest(step: int, outcomes: Any, run_state: Mapping[str, Any], config: Mapping[str, Any]) -> Manifest:
    tensors = {name: record for _, described in outcomes for name, record in described.items()}
    files = {record.name: record for record, _ in outcomes}
    return Manifest(step, files, dict(sorted(tensors.items())), dict(run_state), dict(config))


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _free_name(wanted: Path) -> Path:
    number, candidate = 1, wanted
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate
