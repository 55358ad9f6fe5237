"""The files of a Hugging Face folder besides its weights: kept beside the steps of a checkpoint, so that an export has them."""

import fnmatch
import importlib.util
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pentatron.data.tokenizer import FileTokenizer
from pentatron.errors import UserError
from pentatron.files import (
    hidden_name,
    hidden_names,
    remove_leftover_folders,
    rename,
    sync_folder,
    whole_folder,
    write_file,
)
from pentatron.hf.folder import CONFIG
from pentatron.text import decimal_size, in_mib

# The folder of an import or export: checked before it is written, and complete or not there at all.


@contextmanager
def new_folder(wanted: Path, needs_bytes: int) -> Iterator[Path]:
    """A folder to write to, which becomes `wanted` if the block ends without an error; after an error, nothing is left."""
    final = wanted.resolve()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(
            f"{wanted} exists already and nothing is overwritten; name a new folder, or remove it"
        )
    parents = [folder for folder in final.parents if not folder.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # First of all: they may be what fills the disk.
        remove_leftover_folders(final)
        _require_space(final, needs_bytes)
        with whole_folder(final) as folder:
            yield folder
    except BaseException as error:
        for folder in parents:
            # It stays if somebody else has begun to use it.
            _remove_if_empty(folder)
        if isinstance(error, OSError):
            reason = f"{error.filename or wanted}: {error.strerror or error}"
            raise UserError(
                f"{wanted} could not be written ({reason}; {in_mib(_free(final))} MiB free); nothing was left behind"
            ) from None
        raise


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _require_space(final: Path, needs_bytes: int) -> None:
    free = _free(final)
    if free < needs_bytes:
        raise UserError(
            f"{final} would take {decimal_size(needs_bytes)} and {decimal_size(free)} are free there; make room, or choose "
            f"another disk"
        )


def _free(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


# Beside the steps.
FOLDER_NAME = "huggingface"
_GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens*",
    "added_tokens*",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


def small_files(folder: Path, tokenizer: Sequence[Path] = ()) -> list[Path]:
    """Configuration, defaults of text generation and tokenizer; another tokenizer, if one is given, instead of its own."""
    found = [path for path in _files(folder) if path.name in (CONFIG, _GENERATION)]
    return [*found, *(tokenizer or filter(_is_of_tokenizer, _files(folder)))]


def tokenizer_files(place: Path) -> list[Path]:
    """The tokenizer in a folder, or the file that is one."""
    found = [path for path in _files(place) if _is_of_tokenizer(path)] or [place] * place.is_file()
    if not found:
        raise UserError(
            f"{place} has no tokenizer files such as tokenizer.json; name the folder of a tokenizer"
        )
    return found


def doubts_of(files: Iterable[Path]) -> list[str]:
    """What to say of files that are carried along: whoever needs them first would notice, perhaps much later.

    One that is not even JSON is an error; of which tokenizers there are, only their library knows.
    """
    found = []
    for path in files:
        if path.suffix != ".json":
            continue
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged: it is not JSON ({error}); copy or download it again, or carry another tokenizer along with "
                "--tokenizer DIR"
            ) from None
        if path.name == "tokenizer.json" and importlib.util.find_spec("tokenizers") is not None:
            try:
                FileTokenizer(path)
            except UserError:
                found.append(
                    f"{path} is carried along, but the package tokenizers here cannot read it: text can be neither prepared nor "
                    "generated with it; --tokenizer DIR carries another one along"
                )
    return found


def has_tokenizer(files: Iterable[Path]) -> bool:
    return any(map(_is_of_tokenizer, files))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _is_of_tokenizer(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in _TOKENIZER)


def copy_files(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in files:
        # The content alone: in the hub's cache files are links, and often read-only.
        write_file(folder / path.name, path.read_bytes())


def carry_files(source: Path, checkpoints: Path) -> None:
    """Copies the small files of a folder beside the steps of a run that begins with its weights."""
    files, wanted = small_files(source), checkpoints / FOLDER_NAME
    if not files or source.resolve() == wanted.resolve():
        return
    if wanted.exists() and not _is_carried(wanted):
        raise UserError(
            f"{wanted} is where a run keeps the tokenizer and config.json of its model, but it holds something else; choose another "
            f"--save"
        )
    # Under another name until it is complete: a copy cut short must not be taken for the whole.
    for leftover in hidden_names(wanted):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = hidden_name(wanted)
    copy_files(files, temporary)
    if wanted.exists():
        # Of a start that got no further than this.
        shutil.rmtree(wanted)
    rename(temporary, wanted)
    sync_folder(checkpoints)


def _is_carried(folder: Path) -> bool:
    """Whether nothing is there but what `small_files` finds: only then may it be replaced."""
    return folder.is_dir() and set(folder.iterdir()) <= set(small_files(folder))
