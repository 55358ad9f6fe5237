"""Rotary positions for long sequences: what Megatron's words for them stand for, and the values left open."""

from typing import Any

from pentatron.config.draft import Draft

# Those of Llama 3.1, and of Megatron.
_LLAMA3_FACTOR = 8.0
_LLAMA3_LENGTH = 8192


def derive_positions(draft: Draft) -> list[str]:
    """Fills in the open values; returns what contradicts itself."""
    problems = [*_yarn(draft), *_interpolation(draft)]
    if draft.rope_scaling_type == "llama3":
        _open(draft, "rope_scaling_factor", _LLAMA3_FACTOR, "llama3, as in Megatron")
        _open(draft, "rope_scaling_original_max_position_embeddings", _LLAMA3_LENGTH, "llama3")
    return problems


def _yarn(draft: Draft) -> list[str]:
    if draft.position_embedding_type != "yarn":
        return []
    draft.derive("yarn is rope with --rope-scaling-type yarn", position_embedding_type="rope")
    return _settle(draft, "rope_scaling_type", "yarn", "--position-embedding-type yarn")


def _interpolation(draft: Draft) -> list[str]:
    factor = draft.rotary_seq_len_interpolation_factor
    if factor is None or draft.position_embedding_type != "rope":
        return []
    words = f"--rotary-seq-len-interpolation-factor {factor}"
    problems = [
        *_settle(draft, "rope_scaling_type", "linear", words),
        *_settle(draft, "rope_scaling_factor", factor, words),
    ]
    # The same model has the same settings, whichever words were used.
    draft.derive(f"{words} is --rope-scaling-type linear", rotary_seq_len_interpolation_factor=None)
    return problems


def _settle(draft: Draft, name: str, value: Any, words: str) -> list[str]:
    """Gives the setting the value that these words mean, unless the user wrote another one."""
    written = getattr(draft, name)
    if written == value:
        return []
    if draft.given(name) and written is not None:
        flag = name.replace("_", "-")
        return [f"{words} means --{flag} {value}, but --{flag} {written} is given; leave one of them out"]
    draft.derive(words, **{name: value})
    return []


def _open(draft: Draft, name: str, value: Any, reason: str) -> None:
    if getattr(draft, name) is None:
        draft.derive(reason, **{name: value})
