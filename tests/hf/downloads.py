"""A rank that wants a model of the hub, and a hub to download from: a folder on this disk."""

from pathlib import Path

import huggingface_hub
import torch
import torch.distributed as dist
from huggingface_hub.errors import LocalEntryNotFoundError

from pentatron.config.errors import AgreedError
from pentatron.hf.hub import folder_on_every_node
from pentatron.layout.ranks import Grid
from pentatron.parallel.world import connect


def folder_of_a_rank(name: str, cache: Path) -> tuple[Path | str, list[str]]:
    """What the rank got, and how often it asked for it."""
    calls: list[str] = []

    def download(_: str, local_files_only: bool, **__: object) -> str:
        calls.append("cache" if local_files_only else "network")
        made = cache / "downloaded"
        if local_files_only and not made.is_dir():
            raise LocalEntryNotFoundError("not there")
        if not local_files_only:
            if (cache / "broken").exists():
                raise ConnectionError("no route")
            made.mkdir()
        return str(made)

    huggingface_hub.snapshot_download = download
    world = connect(Grid(data=2), dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    try:
        return folder_on_every_node(name, world), calls
    except AgreedError as error:
        return str(error), calls
