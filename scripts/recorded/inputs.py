"""Writes small files that recorded commands read: texts, chats, tokenizers, settings.

They are the same on every machine.
"""

import json
import random
from pathlib import Path

WORDS = 96
# Names that the guides give to tokenizers.
TOKENIZERS = ("tokenizer", "qwen2.5-7b-hf", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B")
_CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <|endoftext|> {% endfor %}"
_FILES = {
    "ds_config.json": '{"train_batch_size": 32, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "wall_clock_breakdown": true}',
    "data_blend.yaml": "- [0.7, first_text_document]\n- [0.3, second_text_document]\n",
    "model.yaml": "model:\n  num_layers: 3\n  hidden_size: 48\noptim:\n  lr: 0.002\n",
    "gpt2-merges.txt": "#version: 0.2\n",
}


def write_inputs(place: Path) -> None:
    """Writes all files into `place`, under every name that commands use."""
    for name in TOKENIZERS:
        _write_tokenizer(place / name)
    for name, text in _FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    (place / "gpt2-vocab.json").write_text(json.dumps(_vocabulary()), encoding="utf-8")
    rng = random.Random(1)
    texts = [
        " ".join(f"w{rng.randrange(WORDS - 4)}" for _ in range(rng.randrange(20, 80))) for _ in range(60)
    ]
    _write_lines(place / "text.jsonl", [{"text": text} for text in texts])
    chats = [
        {"messages": [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40:90]}]}
        for text in texts
    ]
    _write_lines(place / "chats.jsonl", chats)


def _write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _vocabulary() -> dict[str, int]:
    names = ["<|endoftext|>", "<unk>", "user", "assistant", *(f"w{n}" for n in range(WORDS - 4))]
    return {name: number for number, name in enumerate(names)}


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer for which every word is a token."""
    end = {"id": 0, "content": "<|endoftext|>", "special": True}
    end |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": _vocabulary(), "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": _CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
