"""The folders of a run as it starts: made, locked, and cleared of an earlier run where this one starts anew."""

import contextlib
from pathlib import Path

from pentatron.checkpoint.lock import folder_lock
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.errors import UserError
from pentatron.config.run import RunConfig
from pentatron.config.start import Start
from pentatron.monitor.display import Display
from pentatron.train.run_folder import RunFolder


def open_folders(
    config: RunConfig, folder: RunFolder, start: Start, display: Display, cleanup: contextlib.ExitStack
) -> None:
    """Makes the run's folder, and the one of its checkpoints, ours until the end of the run."""
    assert config.checkpoint.save is not None
    checkpoints = Path(config.checkpoint.save)
    own = checkpoints.resolve() == folder.path.resolve()
    if not own and start is not Start.ANEW and CheckpointStore(folder.path, keep=None).steps():
        # Of a run that was given --save alone: its log is here, and so are its checkpoints.
        raise UserError(
            f"{folder.path} holds checkpoints itself, of a run with --save {folder.path}; name it like that to go on, or choose "
            f"another --run-dir"
        )
    inside = checkpoints.resolve().is_relative_to(folder.path.resolve())
    for place in [folder] if inside else [folder, RunFolder(checkpoints)]:
        place.create()
        if start is Start.ANEW:
            with folder_lock(place.path, display.say):
                moved = place.move_aside(_inputs(config))
            if moved is not None:
                display.say(str(moved))
            place.create()
        cleanup.enter_context(folder_lock(place.path, display.say))


def _inputs(config: RunConfig) -> list[str]:
    """What the run reads, as far as it is named."""
    data = config.data
    named = (*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path)
    return [path for path in (*named, data.tokenizer_model, data.vocab_file, data.merge_file) if path]


def leave_to_earlier_runs(config: RunConfig) -> None:
    """From the first moment on: a restart before the first save must not take an earlier run's steps for this one's."""
    assert config.checkpoint.save is not None
    store = CheckpointStore(Path(config.checkpoint.save), keep=None)
    if store.steps():
        store.begin_again()
