"""Opens Hugging Face model folders: config.json and safetensors files, read without executing code.

Everything except the values of the weights is checked at open. An index may only name files of its own
folder. Files may be symbolic links to any place, as in the cache of huggingface_hub.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint.manifest_checks import read_json
from pentatron.errors import UserError, explained
from pentatron.parallel.sharding import Shape
from pentatron.text import one_line

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


@dataclass(frozen=True)
class StoredTensor:
    """File, dtype and shape of a tensor; `dtype` is the name in safetensors, such as BF16."""

    file: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, eq=False)
class HuggingFaceFolder:
    """An open model folder. Weights are read on demand."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    _files: Mapping[str, Any]

    def read(self, name: str, start: Shape, size: Shape) -> Tensor:
        """Reads a slice of a tensor, possibly a view that is only valid while the folder is open."""
        file = self._files[self.tensors[name].file]
        index = tuple(slice(i, i + n) for i, n in zip(start, size, strict=True))
        # A 0-dimensional tensor has no slices.
        return file.get_slice(name)[index] if index else file.get_tensor(name)


@contextmanager
def open_folder(path: Path) -> Iterator[HuggingFaceFolder]:
    """Opens a folder and checks that all files it names exist, are complete and define each tensor once."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give one with {CONFIG} and {SINGLE}, from save_pretrained")
    if not (path / CONFIG).exists():
        raise UserError(
            f"{path} has no {CONFIG}, so it is not a Hugging Face model; give a folder written by save_pretrained"
            + (" (checkpoints are loaded without conversion: --load)" if (path / "latest").exists() else "")
        )
    config, expected = _read_json(path / CONFIG), _weight_files(path)
    with ExitStack() as closing:
        files = {name: _open_file(path / name, closing) for name in expected}
        tensors: dict[str, StoredTensor] = {}
        for name, file in files.items():
            for key in _checked_keys(path, name, set(file.keys()), expected[name]):
                stored = file.get_slice(key)
                tensors[key] = StoredTensor(name, stored.get_dtype(), tuple(stored.get_shape()))
        if not tensors:
            raise UserError(f"{path} holds no weights: {SINGLE} is empty; download or save the model again")
        yield HuggingFaceFolder(path, config, tensors, files)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with explained(ValueError, f"{path} is not JSON", "it is damaged: download or save the model again"):
            content = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is a {type(content).__name__}, not a JSON object; download or save it again")
    return content


def _weight_files(path: Path) -> dict[str, set[str] | None]:
    """Returns the weight files, with the keys that the index lists for each, or None without an index."""
    single, index = (path / SINGLE).exists(), (path / INDEX).exists()
    if single and index:
        raise UserError(
            f"{path} has both {SINGLE} and {INDEX}, so it is unclear which weights count; remove the older ones"
        )
    if single:
        return {SINGLE: None}
    if index:
        return _files_of_index(path)
    if pickled := [name for name in _PICKLED if (path / name).exists()]:
        raise UserError(
            f"{path} has its weights in {pickled[0]} alone, which may run code when it is read; convert it where you trust it: "
            f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise UserError(f"{path} has no weights: neither {SINGLE} nor {INDEX}; complete the download")


def _files_of_index(path: Path) -> dict[str, set[str] | None]:
    weights = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise UserError(f"{path / INDEX} has no weight_map; download or save the model again")
    expected: dict[str, set[str]] = {}
    for key, file in weights.items():
        if not isinstance(file, str) or file in ("", ".", "..") or any(mark in file for mark in "/\\\0"):
            raise UserError(
                f"{path / INDEX} says that {key} is in {file!r}, which is not a file of this folder; such an index is refused"
            )
        expected.setdefault(file, set()).add(key)
    if missing := sorted(file for file in expected if not (path / file).is_file()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{path} lacks {missing[0]}{more} of the {len(expected)} files in {INDEX}; complete the download"
        )
    return dict(sorted(expected.items()))


def _open_file(path: Path, closing: ExitStack) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UserError("reading a Hugging Face folder needs safetensors: pip install safetensors") from None
    with explained((SafetensorError, OSError, ValueError), f"{path} is damaged", "download or save it again"):
        return closing.enter_context(safe_open(path, framework="pt"))


def _checked_keys(path: Path, file: str, found: set[str], expected: set[str] | None) -> list[str]:
    """Returns the sorted keys of a file, checked against the index."""
    if expected is not None and found != expected:
        lost, extra = sorted(expected - found), sorted(found - expected)
        what = f"{file} holds {extra[0]}, which it does not list there" if extra else ""
        if lost:
            what = f"{lost[0]} is not in {file}"
        raise UserError(
            f"{path / INDEX} does not fit its files: {what} ({len(lost)} keys missing, {len(extra)} too many); "
            f"download or save the model again"
        )
    if odd := [key for key in found if one_line(key) != key]:
        raise UserError(
            f"{path / file} has a tensor named {one_line(odd[0])}, with unprintable characters; download it again"
        )
    return sorted(found)
