"""A checkpoint in the format torch_dist, as it lies in a folder: what it holds, without a tensor being read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentatron.checkpoint.torch_file import saved_place
from pentatron.errors import UserError
from pentatron.interchange.index import KEPT, STATE, Contents, Piece, Stored, prefix_of
from pentatron.interchange.reading import read_apart

INDEX, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
_ENDING = ".distcp"


def is_torch_dist(folder: Path) -> bool:
    return (folder / INDEX).is_file() and (folder / FORMAT).is_file()


def open_torch_dist(folder: Path) -> Contents:
    """What the folder says of itself; its pickled files are read apart."""
    _check_backend(folder)
    index, common = read_apart(folder / INDEX), read_apart(folder / COMMON)
    if not isinstance(common, Mapping) or not isinstance(index, Mapping) or "places" not in index:
        raise UserError(
            f"{folder} is no checkpoint of Megatron-LM: its {COMMON} or {INDEX} holds something else"
        )
    tensors = _tensors(folder, index)
    arguments = common.get("args") or {}
    contents = Contents(folder, int(common.get("iteration") or 0), tensors, arguments, common)
    return _with_remark_on_optimizer(contents, index["others"])


def _check_backend(folder: Path) -> None:
    try:
        backend = json.loads((folder / FORMAT).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / FORMAT} cannot be read ({type(error).__name__}: {error})") from None
    if backend != "torch_dist":
        raise UserError(
            f"{folder} is in Megatron-LM's format {backend}, which is not read here; let Megatron-LM save it again as torch_dist"
        )


def _tensors(folder: Path, index: Mapping[str, Any]) -> dict[str, Stored]:
    sizes = {
        (name, tuple(start)): tuple(size)
        for name, record in index["tensors"].items()
        for start, size in record["pieces"]
    }
    pieces: dict[str, list[Piece]] = {name: [] for name in index["tensors"]}
    for name, start, file, offset, length, transformed in index["places"]:
        if start is None or name not in pieces:
            continue
        if Path(file).name != file or not file.endswith(_ENDING) or min(offset, length) < 0:
            # A name from a file is not to be trusted with a path.
            raise UserError(
                f"{folder / INDEX} says that {name} lies in {file}, which is no file of this folder's kind"
            )
        if transformed:
            raise UserError(f"{folder} holds {name} compressed or encrypted, which is not read here")
        size = sizes.get((name, tuple(start)))
        if size is None:
            raise UserError(f"{folder / INDEX} contradicts itself about {name} at {start}")
        pieces[name].append(Piece(tuple(start), size, file, saved_place(offset, length)))
    return {
        name: Stored(record["dtype"], tuple(record["shape"]), tuple(pieces[name]))
        for name, record in index["tensors"].items()
    }


def _with_remark_on_optimizer(contents: Contents, others: list[str]) -> Contents:
    """Says so where there is an optimizer's state that is cut in a way only the saving layout understands."""
    prefix = prefix_of(contents.tensors, contents.folder)
    anchor = f"{prefix}embedding.word_embeddings.weight"
    readable = any(
        contents.tensors.get(f"{STATE}{kept}.{anchor}", contents.tensors[anchor]).shape
        == contents.tensors[anchor].shape
        and f"{STATE}{kept}.{anchor}" in contents.tensors
        for kept in KEPT
    )
    held = any(name.startswith(("optimizer.", "chained_")) for name in (*contents.tensors, *others))
    if readable or not held:
        return contents
    tensors = {name: stored for name, stored in contents.tensors.items() if not name.startswith("optimizer.")}
    remark = (
        f"{contents.folder} has its optimizer's state in the order of the layout that saved it, so weights alone are taken (Megatron-LM "
        f"writes it for any layout with --dist-ckpt-optim-fully-reshardable)"
    )
    return Contents(
        contents.folder, contents.iteration, tensors, contents.arguments, contents.common, (remark,)
    )
