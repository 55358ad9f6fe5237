"""Keys and passwords that found their way into a setting: they are used as they were given, and never written down."""

import re
from typing import Any

HIDDEN = "***"
_NAMED = r"API_?KEY|ACCESS_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH_?TOKEN|ACCESS_?TOKEN"
_RULES = (
    # user:password@ or token@ in an address.
    (re.compile(r"(?<=://)[^/\s@'\"]+(?=@)"), HIDDEN),
    # WANDB_API_KEY=..., ?access_token=...; and HF_TOKEN=..., where eos_token is no secret.
    (re.compile(rf"(?i)\b([A-Z0-9_]*(?:{_NAMED})[A-Z0-9_]*\s*[=:]\s*)(?!\*\*\*)[^\s'\"&,;]+"), rf"\1{HIDDEN}"),
    (re.compile(r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*_TOKEN\s*=\s*)(?!\*\*\*)[^\s'\"&,;]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([?&](?:token|key|sig|signature)=)[^\s'\"&]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(Bearer\s+)[A-Za-z0-9._~+/-]{16,}"), rf"\1{HIDDEN}"),
    # Keys that are known by their form.
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})\b"), HIDDEN),
)  # fmt: skip


def redacted(text: str) -> str:
    """The same text with what looks like a secret taken out."""
    for rule, instead in _RULES:
        text = rule.sub(instead, text)
    return text


def redacted_value(value: Any) -> Any:
    """The same of a setting."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, tuple | list):
        return type(value)(redacted_value(item) for item in value)
    return value
