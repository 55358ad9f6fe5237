"""A run that goes on reads the data it began with, or is told that it has changed."""

from pathlib import Path

from pentatron.config.output import CheckpointConfig
from pentatron.errors import UserError
from pentatron.train.data_identity import DataIdentity
from pentatron.train.datasets import OpenedData
from pentatron.train.state import TrainState


def take_data(state: TrainState, data: OpenedData, origin: Path, chosen: CheckpointConfig) -> list[str]:
    """From now on the data of the run is what is there; what was drawn before is not forgotten.

    `origin`: the checkpoint that the state is of. Returns what to tell; data that changed without leave is an error.
    """
    before = DataIdentity.from_json(state.data_fingerprint, state.data_files)
    changed = data.identity.changes_since(before)
    if changed and not chosen.allow_changed_data:
        raise UserError(
            f"the data is not what {origin} was trained on; bring it back, go on all the same with --allow-changed-data, take the "
            f"weights alone with --load {origin.parent} --finetune and another --run-dir, or start anew with --fresh ({changed})"
        )
    now = data.identity.knowing(before)
    state.data_fingerprint, state.data_files = now.fingerprint, now.files_as_json()
    if not changed:
        same = "--allow-changed-data: the data is what it was, so this changes nothing"
        return [same] * chosen.allow_changed_data
    state.drawn = {**dict.fromkeys(data.names, 0), **state.drawn}
    return [
        f"the data has changed ({changed}); --allow-changed-data: from sample {state.consumed_samples} on, the samples are those of "
        "the new data's order"
    ]


def first_data(state: TrainState, data: OpenedData) -> None:
    """Of a run that begins."""
    identity = data.identity
    state.data_fingerprint, state.data_files = identity.fingerprint, identity.files_as_json()
