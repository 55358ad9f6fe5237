"""Copies config.json, tokenizer and other small files of Hugging Face folders to checkpoints and exports."""

import fnmatch
import importlib.util
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pentatron import files
from pentatron.data.tokenizer import FileTokenizer
from pentatron.errors import UserError, explained
from pentatron.hf.folder import CONFIG
from pentatron.text import decimal_size, in_mib

# The folder for these files beside the steps of a checkpoint.
FOLDER_NAME = "huggingface"
_GENERATION = "generation_config.json"
_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*"),
    *("*.model", "*.tiktoken"),
)


@contextmanager
def new_folder(path: Path, needs_bytes: int) -> Iterator[Path]:
    """Yields a temporary folder, renamed to `path` after the block or removed after an error."""
    final = path.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"{path} exists already and nothing is overwritten; name a new folder, or remove it")
    parents = [folder for folder in final.parents if not folder.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # Before the check for space: leftovers of killed processes may fill the disk.
        files.remove_leftover_folders(final)
        if (free := files.free_bytes(final)) < needs_bytes:
            raise UserError(
                f"{final} would take {decimal_size(needs_bytes)} and {decimal_size(free)} are free there; make room, or choose "
                f"another disk"
            )
        with files.atomic_folder(final) as folder:
            yield folder
    except BaseException as error:
        for folder in parents:
            # Fails if another process has created files in it.
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            reason = f"{error.filename or path}: {error.strerror or error}"
            raise UserError(
                f"{path} could not be written ({reason}; {in_mib(files.free_bytes(final))} MiB free); nothing was left behind"
            ) from None
        raise


def small_files(folder: Path, tokenizer: Sequence[Path] = ()) -> list[Path]:
    """Returns config.json, generation_config.json and the tokenizer files, or the given ones instead."""
    configs = [path for path in _files(folder) if path.name in (CONFIG, _GENERATION)]
    return [*configs, *(tokenizer or filter(_is_tokenizer_file, _files(folder)))]


def tokenizer_files(place: Path) -> list[Path]:
    """Returns the tokenizer files in a folder, or the given file itself."""
    paths = [place] if place.is_file() else list(filter(_is_tokenizer_file, _files(place)))
    if not paths:
        raise UserError(f"{place} has no tokenizer files such as tokenizer.json; name a tokenizer's folder")
    return paths


def unusable_file_warnings(paths: Iterable[Path]) -> list[str]:
    """Returns warnings about files that are copied but cannot be used here.

    Raises UserError for a file that is not JSON. A tokenizer that the installed library cannot read is
    only a warning.
    """
    warnings = []
    for path in paths:
        if path.suffix != ".json":
            continue
        advice = "copy or download it again, or copy another tokenizer with --tokenizer DIR"
        with explained((ValueError, RecursionError), f"{path} is damaged: it is not JSON", advice):
            json.loads(path.read_bytes())
        if path.name == "tokenizer.json" and importlib.util.find_spec("tokenizers") is not None:
            try:
                FileTokenizer(path)
            except UserError:
                warnings.append(
                    f"{path} is copied, but the package tokenizers here cannot read it: text can be neither prepared nor "
                    "generated with it; --tokenizer DIR copies another one"
                )
    return warnings


def has_tokenizer(paths: Iterable[Path]) -> bool:
    return any(map(_is_tokenizer_file, paths))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _is_tokenizer_file(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in _TOKENIZER)


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        # Only the content: files in the hub's cache are symbolic links and often read-only.
        files.write_file(folder / path.name, path.read_bytes())


def copy_model_files(source: Path, checkpoints: Path) -> None:
    """Copies the small files of a folder to the checkpoints of a run that starts from its weights."""
    paths, target = small_files(source), checkpoints / FOLDER_NAME
    if not paths or source.resolve() == target.resolve():
        return
    # An existing folder is only replaced if it contains nothing else.
    if target.exists() and not (target.is_dir() and set(target.iterdir()) <= set(small_files(target))):
        raise UserError(
            f"{target} is where a run keeps the tokenizer and config.json of its model, but it has other content; choose another "
            f"--save"
        )
    # Copied under a temporary name first, so that an incomplete copy is never used.
    for leftover in files.hidden_names(target):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = files.hidden_name(target)
    copy_files(paths, temporary)
    if target.exists():
        # Left by an earlier start of the run.
        shutil.rmtree(target)
    files.rename(temporary, target)
    files.fsync_folder(checkpoints)
