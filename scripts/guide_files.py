"""Creates the files that the guides expect: a small Qwen with tokenizer, a GPT-2 vocabulary, texts.

python scripts/guide_files.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from pentatron.data.tokenizer import train_bpe

WORDS = 512


def texts() -> list[str]:
    """Returns source text of the standard library in pages: it exists on every machine and is learnable."""
    folder = Path(json.__file__).parent.parent
    lines = [
        line
        for path in sorted(folder.glob("[a-c]*.py"))[:20]
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return ["\n".join(lines[i : i + 40]) for i in range(0, len(lines), 40)]


def write_model(folder: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        rope_theta=1000000.0,
    )
    # bf16, as the models of the Hugging Face hub are stored.
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def write_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")


def main() -> int:
    folder = Path(sys.argv[1])
    corpus = texts()
    tokenizer = train_bpe(iter(corpus), WORDS)
    tokenizer.post_processor = TemplateProcessing(single="$A")
    write_model(folder / "qwen2.5-7b-hf", tokenizer)
    write_vocabulary(folder, tokenizer)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in corpus)
    (folder / "data.jsonl").write_text(lines, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
