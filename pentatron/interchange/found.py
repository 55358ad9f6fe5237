"""A checkpoint of Megatron-LM, opened as if it were one of ours."""

from pathlib import Path

from pentatron.checkpoint.find import megatron_step
from pentatron.checkpoint.store import Found
from pentatron.config.errors import UserError
from pentatron.config.run import build, table
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
    contents = open_torch_dist(folder) if kind == "torch_dist" else open_legacy(folder)
    remarks = [
        f"{folder} is a checkpoint of Megatron-LM: what is pickled in it was read by a process apart, and nothing of it ran",
        *contents.remarks,
    ]
    return as_found(contents), remarks


def as_found(contents: Contents) -> Found:
    settings = our_settings(contents.arguments, str(contents.folder))
    defaults = {name: item.default for name, item in table().items()}
    config = build({**defaults, **settings})
    state = run_state_of(contents.common, contents.arguments, contents.iteration)
    return Found(contents.folder, manifest_of(contents, config.model, config.moe, state, config.nested()))
