"""A checkpoint of Megatron-LM, opened as if it were one of ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentatron.checkpoint.find import megatron_step
from pentatron.checkpoint.store import Found
from pentatron.checkpoint.untrusted import implausible
from pentatron.config.run import RunConfig
from pentatron.config.settings import Settings
from pentatron.errors import UserError
from pentatron.interchange.common import run_state_of
from pentatron.interchange.index import Contents, manifest_of
from pentatron.interchange.legacy import open_legacy
from pentatron.interchange.settings import our_settings
from pentatron.interchange.torch_dist import is_torch_dist, open_torch_dist


def read_megatron(path: Path) -> tuple[Found, list[str]]:
    """The newest checkpoint that the path means, and sentences about what is not taken from it."""
    found = megatron_step(path)
    if found is None:
        raise UserError(f"{path} holds no checkpoint of Megatron-LM")
    folder, kind = found
    if kind == "torch_dist" and not is_torch_dist(folder):
        raise UserError(
            f"{folder} is not complete: there is no .metadata or no metadata.json; name another checkpoint"
        )
    try:
        contents = open_torch_dist(folder) if kind == "torch_dist" else open_legacy(folder)
        opened = as_found(contents)
    except UserError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        # Whoever wrote the files may have written anything into them.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"{folder} makes no sense as a checkpoint of Megatron-LM ({reason}); name another one"
        ) from error
    remarks = [
        f"{folder} is a checkpoint of Megatron-LM: what is pickled in it was read by a process apart, and nothing of it ran",
        *contents.remarks,
    ]
    return opened, remarks


def as_found(contents: Contents) -> Found:
    settings = our_settings(contents.arguments, str(contents.folder))
    _require_plausible(contents, settings)
    config = RunConfig.of(Settings.defaults(**settings))
    state = run_state_of(contents.common, contents.arguments, contents.iteration)
    return Found(contents.folder, manifest_of(contents, config.model, config.moe, state, config.nested()))


def _require_plausible(contents: Contents, settings: Mapping[str, Any]) -> None:
    """Names and sizes of a model are listed before a tensor of it is looked for: there must not be more than its tensors have."""
    shapes = {name: stored.shape for name, stored in contents.tensors.items()}
    if problem := implausible(settings, shapes, stacked=True):
        raise UserError(
            f"{contents.folder} cannot be the model that it describes ({problem}); name another checkpoint"
        )
