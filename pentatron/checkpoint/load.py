"""Reading a checkpoint into tensors that already exist."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pentatron.checkpoint.manifest import Manifest
from pentatron.config.errors import UserError


def load_into(folder: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """Overwrites every target with the stored tensor of its name; nothing missing, nothing of another shape."""
    missing = [name for name in targets if name not in manifest.tensors]
    if missing:
        raise UserError(
            f"checkpoint {folder} lacks {len(missing)} tensors of this model, the first being {missing[0]}; "
            f"was it made with another architecture?"
        )
    by_file: dict[str, list[str]] = {}
    for name, target in targets.items():
        record = manifest.tensors[name]
        if tuple(target.shape) != record.shape:
            raise UserError(
                f"checkpoint {folder} holds {name} as {list(record.shape)}, this model wants {list(target.shape)}; "
                f"use the architecture it was made with"
            )
        stored = str(target.dtype).removeprefix("torch.")
        if stored != record.dtype:
            raise UserError(
                f"checkpoint {folder} holds {name} as {record.dtype}, this run keeps it as {stored}"
            )
        by_file.setdefault(record.pieces[0].file, []).append(name)
    for file, names in by_file.items():
        _load_file(folder / file, {name: targets[name] for name in names})


def _load_file(path: Path, targets: Mapping[str, Tensor]) -> None:
    try:
        from safetensors import safe_open
    except ImportError:
        raise UserError(
            "loading a checkpoint needs the safetensors library: pip install safetensors"
        ) from None
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, target in targets.items():
            target.copy_(file.get_tensor(name))
