"""Weights of a Hugging Face folder: checked against a model, and read into memory that already exists, whatever the layout."""

import re
from collections.abc import Collection, Iterable

import torch

from pentatron.checkpoint.convert import fill
from pentatron.checkpoint.links import Link, by_ours, their_shapes
from pentatron.checkpoint.tensor_file import WEIGHT_DTYPES, blocks, holds
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.errors import UserError
from pentatron.hf.architecture import model_type_of
from pentatron.hf.folder import HuggingFaceFolder
from pentatron.hf.name_tables import NAME_TABLES, FamilyNames, links_of
from pentatron.parallel.pieces import Fragment

_FIRST_PROBLEMS = 5


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
    of_tensor = by_ours(links)
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
            fill(target, of_tensor[target.tensor], folder.read)


def _require_room(folder: HuggingFaceFolder, link: Link, target: Fragment, allow_narrowing: bool) -> None:
    stored, kept = WEIGHT_DTYPES[folder.tensors[link.theirs].dtype], target.values.dtype
    if not allow_narrowing and not holds(kept, stored):
        names = [str(dtype).removeprefix("torch.") for dtype in (stored, kept)]
        raise UserError(
            f"{folder.path} holds {link.theirs} as {names[0]}, and {names[1]} cannot hold all of its values; to have them rounded, "
            f"import the folder first (pentatron import {folder.path} OUT --dtype fp32 --allow-narrowing) and load OUT"
        )


def check_covered(links: Collection[Link], folder: HuggingFaceFolder, model_type: str) -> None:
    """Every key of the folder is accounted for: nothing missing, nothing left over, shapes and types right."""
    known, wanted = NAME_TABLES[model_type], their_shapes(links)
    problems = []
    for name, shape in wanted.items():
        stored = folder.tensors.get(name)
        if stored is None:
            hint = (
                " (set tie_word_embeddings to true if it is the embedding)" if name == known.tied_copy else ""
            )
            problems.append(f"{name} is missing{hint}")
        elif stored.shape != shape:
            problems.append(f"{name} is {list(stored.shape)}, not {list(shape)}")
        elif stored.dtype not in WEIGHT_DTYPES:
            problems.append(f"{name} is of type {stored.dtype}, not one of {', '.join(WEIGHT_DTYPES)}")
    for name in folder.tensors:
        if name in wanted or any(re.fullmatch(pattern, name) for pattern in known.ignored):
            continue
        if name == known.tied_copy:
            problems += _tied_copy_problem(folder, known)
        else:
            problems.append(f"{name} has no place in this model")
    if problems:
        more = len(problems) - _FIRST_PROBLEMS
        listed = "; ".join(problems[:_FIRST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        count = "" if len(problems) == 1 else f" ({len(problems)} problems)"
        raise UserError(f"the weights in {folder.path} do not fit its config.json{count}: {listed}")


def _tied_copy_problem(folder: HuggingFaceFolder, known: FamilyNames) -> list[str]:
    """A tied model has one matrix; some files hold it under both names."""
    names = {known.embedding.format(base=base) for base in (known.base, "")}
    embedding = next((name for name in names if name in folder.tensors), None)
    if embedding is None:
        return []
    head, other = folder.tensors[known.tied_copy], folder.tensors[embedding]
    alike = head.shape == other.shape and head.dtype == other.dtype and head.dtype in WEIGHT_DTYPES
    if alike and all(
        torch.equal(folder.read(known.tied_copy, *block), folder.read(embedding, *block))
        for block in blocks(head.shape, WEIGHT_DTYPES[head.dtype].itemsize)
    ):
        return []
    return [
        f"{known.tied_copy} differs from {embedding}, but config.json says tie_word_embeddings, so one of them is wrong (set "
        f"tie_word_embeddings to false if the model has both)"
    ]
