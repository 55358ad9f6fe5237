"""Validates an untrusted manifest before any of its values is used.

A correct digest shows that a manifest is complete, not that it is benign: anyone can compute it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pentatron.checksums import CRC32, SHA256
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Settings
from pentatron.text import binary_size, one_line, parse_printable_json

# Sizes that must be positive if given.
_COUNTS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels max_position_embeddings vocab_size "
    "padded_vocab_size make_vocab_size_divisible_by num_experts moe_ffn_hidden_size moe_router_topk "
    "moe_shared_expert_intermediate_size rope_scaling_original_max_position_embeddings"
).split()
# Limit of padding rows of the vocabulary, which no checkpoint stores.
_MOST_PADDING = 2**20
# Limit of positions, which no tensor bounds unless they are learned.
_MOST_POSITIONS = 2**40
# One line per piece: enough for millions of pieces.
_LARGEST_MANIFEST = 2**30
# The cover check takes 2^dimensions steps; no layer has a tensor with more dimensions.
_MOST_DIMENSIONS = 8
_LAST_STEP = 10**15
# Smaller blocks would make verification slow.
_SMALLEST_BLOCK = 2**16


def read_json(path: Path) -> Any:
    """Reads JSON from a regular file of bounded size.

    Raises ValueError if it is neither, FileNotFoundError if missing.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise ValueError(f"it is larger than {binary_size(_LARGEST_MANIFEST)}")
    return parse_printable_json(path.read_text(encoding="utf-8"))


def check_types(content: Mapping[str, Any]) -> None:
    """Raises ValueError unless every value that will be used has the right type."""
    _require(type(content["step"]) is int and 0 <= content["step"] <= _LAST_STEP, "step", content["step"])
    for name in ("files", "tensors", "run_state", "config"):
        _require(isinstance(content[name], dict), name, content[name])
    for name, section in content["config"].items():
        _require(isinstance(section, dict), f"the section {name}", section)
    for name, record in content["files"].items():
        _require(isinstance(record, dict), f"the file {name}", record)
        for key, kind in {"name": str, "bytes": int, "sha256": str}.items():
            _require(type(record[key]) is kind, f"{key} of {name}", record[key])
        block, sums = record["block_bytes"], record["block_sums"]
        is_size = type(block) is int and (block == 0 or block >= _SMALLEST_BLOCK)
        _require(is_size, f"block_bytes of {name}", block)
        _require(sums == (CRC32 if block else SHA256), f"block_sums of {name}", sums)
    for name, record in content["tensors"].items():
        _require(one_line(name) == name, "the name of a tensor", name)
        _require(isinstance(record, dict) and type(record["dtype"]) is str, f"the type of {name}", record)
        _require(_is_shape(record["shape"]), f"the shape of {name}", record["shape"])
        _require(isinstance(record["pieces"], list), f"the pieces of {name}", record["pieces"])
        for piece in record["pieces"]:
            _require(isinstance(piece, dict) and type(piece["file"]) is str, f"a piece of {name}", piece)
            _require(type(piece["key"]) is str, f"a key of {name}", piece)
            _require(type(piece.get("crc32") or "") is str, f"a sum of {name}", piece)
            _require(_is_shape(piece["start"]) and _is_shape(piece["shape"]), f"a piece of {name}", piece)


def _is_shape(numbers: Any) -> bool:
    is_short = isinstance(numbers, list) and len(numbers) <= _MOST_DIMENSIONS
    return is_short and all(type(number) is int for number in numbers)


def _require(condition: bool, what: str, value: Any) -> None:
    if not condition:
        text = repr(value)
        raise ValueError(f"{what} is {text if len(text) <= 60 else f'{text[:57]}...'}")


def size_problem(
    settings: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], stacked: bool = False
) -> str | None:
    """Returns why tensors of these shapes cannot belong to the model of the settings, or None.

    A model is built before its tensors are read, so its size must be bounded: each product of sizes that some
    tensor has must not exceed the number of stored elements. `stacked`: one tensor may hold a parameter of
    all layers.
    """
    # Settings that were not saved are None, not their defaults.
    saved = Settings({**dict.fromkeys(all_settings()), **settings})
    for name in _COUNTS:
        if (count := getattr(saved, name)) is not None and count < 1:
            return f"{name} {count}, which must be above 0"
    elements = sum(math.prod(shape) for shape in tensors.values())
    layers = saved.num_layers or 0
    if not stacked and layers > len(tensors):
        return f"num_layers {layers}, but there are only {len(tensors)} tensors"
    for names in (("num_layers", "hidden_size"), *_products(saved)):
        sizes = [getattr(saved, name) or 1 for name in names]
        if math.prod(sizes) > elements:
            product = " × ".join(f"{name} {size}" for name, size in zip(names, sizes))
            return f"{product}, but all tensors have {elements} elements"
    if (saved.padded_vocab_size or 0) - (saved.vocab_size or 0) > _MOST_PADDING:
        return f"padded_vocab_size {saved.padded_vocab_size} for vocab_size {saved.vocab_size}"
    if (saved.max_position_embeddings or 0) > _MOST_POSITIONS:
        return f"max_position_embeddings {saved.max_position_embeddings}"
    return None


def _products(saved: Settings) -> Iterator[tuple[str, ...]]:
    """Yields names of sizes whose product is the size of a tensor, or of a part of one."""
    width = "hidden_size"
    yield "vocab_size", width
    # QKV. The rotary frequencies are no larger than a head.
    for heads in ("num_attention_heads", "num_query_groups"):
        yield heads, "kv_channels", width
    if saved.position_embedding_type in (None, "learned_absolute"):
        yield "max_position_embeddings", width
    if saved.num_experts:
        yield "num_experts", "moe_ffn_hidden_size", width
        yield "moe_shared_expert_intermediate_size", width
    if not saved.num_experts or saved.moe_layer_freq not in (None, "1"):
        yield "ffn_hidden_size", width
