"""Resolves model names of the Hugging Face Hub, such as `Qwen/Qwen2.5-7B`, to downloaded folders."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pentatron.errors import UserError

# Weights, configuration and tokenizer; no pickles, code or weights in other formats.
WANTED_FILES = ("*.json", "*.safetensors", "tokenizer*", "vocab*", "merges*", "*.model", "*.jinja")
TOKENIZER_FILES = tuple(name for name in WANTED_FILES if name != "*.safetensors")
# Subfolders, which hold copies of the weights for other programs.
UNWANTED_FILES = ("*/*",)

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether the name is a model of the hub; an existing path has precedence."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def resolve_folder(name: str, network: bool = True, files: Sequence[str] = WANTED_FILES) -> Path:
    """Returns the folder of a path or hub name; without `network` only from the cache."""
    if not is_hub_id(name):
        if not Path(name).is_dir():
            raise UserError(
                f"{name} is not a folder; name a folder with config.json and safetensors files, or a model of the hub such "
                f"as Qwen/Qwen2.5-7B"
            )
        return Path(name)
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        reason = "the huggingface_hub library is missing: pip install huggingface-hub"
        raise _unavailable(name, reason) from None
    patterns: dict[str, Any] = {"allow_patterns": list(files), "ignore_patterns": list(UNWANTED_FILES)}
    try:
        return Path(snapshot_download(name, local_files_only=not network, **patterns))
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"there is no folder {name}, and no accessible model of that name on the hub; check the spelling, "
            f"and for a gated or private model run `hf auth login`"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise _unavailable(name, "it is not in the cache and the hub cannot be reached") from None
    except (OSError, ValueError) as error:
        # Errors of connections, proxies and disks, which the library passes on.
        reason = (str(error).splitlines() or [""])[0]
        raise _unavailable(name, f"{type(error).__name__}: {reason}") from None


def _unavailable(name: str, reason: str) -> UserError:
    if Path(name).parent.is_dir():
        # More likely a misspelt path than a hub name.
        return UserError(
            f"there is no {Path(name).name} in the folder {Path(name).parent}, and no model {name} could be downloaded ({reason}); "
            f"check the path"
        )
    return UserError(
        f"{name} is not a folder and could not be downloaded ({reason}); where there is a network run `hf download "
        f"{name} --local-dir DIR`, copy DIR here and name it instead"
    )
