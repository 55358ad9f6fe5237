"""The files of a Hugging Face folder besides its weights, carried along so that an export has them."""

import secrets
import shutil
from pathlib import Path

# Beside the steps of a run.
FOLDER_NAME = "huggingface"
_KINDS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_INDEX = ".index.json"


def small_files(folder: Path) -> list[Path]:
    """Configuration, generation defaults, tokenizer."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in _KINDS and not path.name.endswith(_INDEX)
    )


def carry(source: Path, checkpoints: Path) -> None:
    """Copies them beside the steps of a run that begins with this source."""
    files, wanted = small_files(source), checkpoints / FOLDER_NAME
    if not files or source.resolve() == wanted.resolve():
        return
    # Under another name until it is complete: a copy cut short must not be taken for the whole.
    temporary = checkpoints / f".{FOLDER_NAME}.{secrets.token_hex(4)}"
    temporary.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, temporary / path.name)
    if wanted.exists():
        # Of a start that got no further than this.
        shutil.rmtree(wanted)
    temporary.rename(wanted)
