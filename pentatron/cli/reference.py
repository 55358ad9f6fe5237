"""The greedy text of `transformers` itself, to hold that of `pentatron generate` against."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from pentatron.cli.options import read_options
from pentatron.cli.terminal import say, show
from pentatron.errors import UserError

USAGE = """usage: huggingface_reference.py --model_path FOLDER --prompt TEXT [--max-new-tokens N]

Continues the prompt greedily with the `transformers` library, in fp32 on the CPU, and prints the tokens and the text. The last line is
the command that does the same here.
"""
DEFAULTS = {"model-path": "", "prompt": "", "max-new-tokens": 20}


def reference_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    options, plain = read_options(words, DEFAULTS, "huggingface_reference.py")
    if plain or not options["model-path"] or not options["prompt"]:
        raise UserError('say which model to ask and what: --model_path FOLDER --prompt "Hello, world!"')
    folder, prompt, count = (options[name] for name in DEFAULTS)
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"--model_path {folder} is no Hugging Face folder: it has no config.json")
    if count < 1:
        raise UserError(f"--max-new-tokens {count} must be 1 or more")
    tokens, text = _greedy(folder, prompt, count)
    say(f"tokens: {','.join(map(str, tokens))}")
    show(f"text: {prompt}{text}\n")
    say(f"the same here: pentatron generate {folder} {shlex.quote(prompt)} --greedy --max-new-tokens {count}")
    return 0


def _greedy(folder: str, prompt: str, count: int) -> tuple[list[int], str]:
    """The tokens that follow, and the text they are."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UserError("the reference is the transformers library: pip install transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"transformers cannot open {folder} ({reason}); name a folder with weights and a tokenizer"
        ) from None
    given = tokenizer(prompt, return_tensors="pt")
    made = (
        model.eval()
        .generate(
            given["input_ids"],
            attention_mask=given["attention_mask"],
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )[0, given["input_ids"].shape[1] :]
        .tolist()
    )
    return made, str(tokenizer.decode(made))
