"""What a run can start from: its own checkpoints, those of another run, or a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint.described import saved_settings
from pentatron.checkpoint.find import is_step, megatron_step, read_step, refuse_other_formats, steps_at
from pentatron.checkpoint.manifest import verify_files
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.checkpoint.verifying import Check
from pentatron.errors import UserError
from pentatron.hf.architecture import settings_in
from pentatron.hf.folder import CONFIG, open_folder
from pentatron.hf.small_files import FOLDER_NAME
from pentatron.interchange.found import read_megatron
from pentatron.parallel.values import sendable


@sendable
@dataclass(frozen=True)
class Source:
    """A folder with steps of ours, of which one may be named, or with a model as Hugging Face or Megatron-LM stores it."""

    folder: Path
    is_huggingface: bool
    step: Path | None = None
    # A checkpoint of Megatron-LM's.
    megatron: Path | None = None

    @property
    def is_foreign(self) -> bool:
        return self.is_huggingface or self.megatron is not None

    @property
    def small_files(self) -> Path:
        """Where configuration and tokenizer files of Hugging Face lie, if there are any."""
        return self.folder if self.is_huggingface else self.folder / FOLDER_NAME

    def architecture(self, is_own: bool = False) -> Mapping[str, Any]:
        """Our settings of its model, by name. `is_own`: these are the steps of the run that asks, which it may leave behind."""
        if self.is_huggingface:
            with open_folder(self.folder) as folder:
                return settings_in(folder)
        found, _ = self.newest_step(verify=False, set_aside=False, is_own=is_own)
        assert found is not None, "a source has steps"
        return saved_settings(found)

    def newest_step(
        self, verify: bool, set_aside: bool, check: Check = verify_files, is_own: bool = False
    ) -> tuple[Found | None, list[str]]:
        """The newest valid step, or the one that is named, and a sentence about each one that is not valid. `check` compares sums.

        None only if there was never any.
        """
        if self.megatron is not None:
            return read_megatron(self.megatron)
        if self.step is not None:
            return read_step(self.step, verify, check), []
        store = CheckpointStore(self.folder, keep=None)
        found, complaints = store.newest_valid(verify, set_aside, check)
        if found is None and (complaints or store.damaged()):
            reason = complaints[0] if complaints else f"{store.damaged()[0]} and others were set aside"
            # A run's own steps are the ones that may be set aside; what it was told to load, it cannot begin anew.
            instead = (
                "train anew with --fresh"
                if set_aside or is_own
                else "name another folder, or one step of a run"
            )
            raise UserError(
                f"no checkpoint in {self.folder} is usable ({reason}); put a good one back, or {instead}"
            )
        return found, complaints


def find_source(path: Path, megatron: bool = False) -> Source | None:
    """What lies in a folder: a step, several, a run that has them, or a model of others; None: nothing of that kind.

    `megatron`: checkpoints of Megatron-LM count too, as they may be read.
    """
    if is_step(path):
        return Source(path.resolve().parent, is_huggingface=False, step=path)
    if (steps := steps_at(path)) is not None:
        return Source(steps, is_huggingface=False)
    if (path / CONFIG).is_file():
        return Source(path, is_huggingface=True)
    found = megatron_step(path) if megatron else None
    return None if found is None else Source(path, is_huggingface=False, megatron=found[0])


def named_source(name: str, megatron: bool = False) -> Source:
    """What `--load` names, or why it cannot be started from."""
    found = find_source(Path(name), megatron)
    if found is not None:
        return found
    if not Path(name).exists():
        raise UserError(
            f"--load {name} does not exist; check the path, or leave it out to start from scratch"
        )
    refuse_other_formats(Path(name))
    raise UserError(
        f"--load {name} holds no checkpoint and no Hugging Face model; check the path, or leave it out to start from scratch"
    )
