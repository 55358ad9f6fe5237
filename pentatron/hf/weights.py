"""Weights of a Hugging Face folder into memory that already exists, whatever the layout."""

import itertools
import math
from collections.abc import Iterable
from operator import attrgetter

import torch

from pentatron.checkpoint.tensor_file import WEIGHT_DTYPES, blocks, holds
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.errors import UserError
from pentatron.hf.architecture import model_type_of
from pentatron.hf.folder import HuggingFaceFolder
from pentatron.hf.links import Link, check_covered, links_of
from pentatron.parallel.pieces import Fragment, overlap, region


def load_weights(
    folder: HuggingFaceFolder,
    model: TransformerConfig,
    moe: MoEConfig,
    targets: Iterable[Fragment],
    allow_narrowing: bool = False,
) -> None:
    """Overwrites every target with the folder's values; of the files no more is read than the targets need.

    A target names a logical tensor of the model. A type that cannot hold the stored values is refused unless
    `allow_narrowing`. The folder is checked as a whole first, so that nothing is overwritten if it does not fit.
    """
    model_type = model_type_of(folder.config)
    links = links_of(model_type, model, moe, folder.tensors)
    check_covered(links, folder, model_type)
    of_tensor = {ours: list(group) for ours, group in itertools.groupby(links, key=attrgetter("ours"))}
    wanted = list(targets)
    for target in wanted:
        if target.tensor not in of_tensor:
            raise UserError(
                f"this model has {target.tensor}, which no {model_type} model has, so {folder.path} cannot fill it; use the family's "
                f"own layers, or start from other weights"
            )
        for link in of_tensor[target.tensor]:
            _require_room(folder, link, target, allow_narrowing)
    with torch.no_grad():
        for target in wanted:
            _fill(folder, of_tensor[target.tensor], target)


def _require_room(folder: HuggingFaceFolder, link: Link, target: Fragment, allow_narrowing: bool) -> None:
    stored, kept = WEIGHT_DTYPES[folder.tensors[link.theirs].dtype], target.values.dtype
    if not allow_narrowing and not holds(kept, stored):
        names = [str(dtype).removeprefix("torch.") for dtype in (stored, kept)]
        raise UserError(
            f"{folder.path} holds {link.theirs} as {names[0]}, and {names[1]} cannot hold all of its values; to have them rounded, "
            f"import the folder first (pentatron import {folder.path} OUT --dtype fp32 --allow-narrowing) and load OUT"
        )


def _fill(folder: HuggingFaceFolder, links: Iterable[Link], target: Fragment) -> None:
    size, found = tuple(target.values.shape), 0
    for link in links:
        common = overlap(target.start, size, link.at, link.size)
        if common is None:
            continue
        at, extent = common
        into = region(target.values.detach(), tuple(i - j for i, j in zip(at, target.start)), extent)
        for offset, block in blocks(extent, into.element_size()):
            start, their_size = link.part(tuple(i + j for i, j in zip(at, offset)), block)
            values = folder.read(link.theirs, start, their_size)
            region(into, offset, block).copy_(link.to_ours(values, block))
        found += math.prod(extent)
    assert found == math.prod(size), f"{target.tensor}: {found} elements of {size} have a source"
