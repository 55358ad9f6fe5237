"""Greedy generation with the `transformers` library, as a reference for `pentatron generate`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.options import Options, option, parse_options, usage
from pentatron.cli.output import say, show_generated, with_help
from pentatron.errors import UserError
from pentatron.settings.declaration import ONE_OR_MORE


@dataclass(frozen=True)
class ReferenceOptions(Options):
    model_path: str | None = option(None, "Hugging Face folder of the model", value="FOLDER")
    prompt: str | None = option(None, "text to continue")
    max_new_tokens: int = option(20, "maximum new tokens", limit=ONE_OR_MORE)


USAGE = f"""{usage("huggingface_reference.py", ReferenceOptions)}

Continues the prompt greedily with the `transformers` library, in fp32 on the CPU, and prints the tokens and the text. The last line is
the command that does the same here.
"""


@with_help(USAGE)
def reference_command(words: Sequence[str]) -> int:
    options, plain = parse_options(ReferenceOptions, words, "huggingface_reference.py")
    if plain or not options.model_path or not options.prompt:
        raise UserError('expected a model and a prompt: --model_path FOLDER --prompt "Hello, world!"')
    folder, prompt, count = options.model_path, options.prompt, options.max_new_tokens
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"--model_path {folder} is not a Hugging Face folder: it has no config.json")
    tokens, text = _greedy(folder, prompt, count)
    say(f"tokens: {','.join(map(str, tokens))}")
    show_generated(f"text: {prompt}{text}\n")
    say(f"the same here: pentatron generate {folder} {shlex.quote(prompt)} --greedy --max-new-tokens {count}")
    return 0


def _greedy(folder: str, prompt: str, count: int) -> tuple[list[int], str]:
    """Returns the generated tokens and their text."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UserError("the reference is the transformers library: pip install transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        problem = f"transformers cannot open {folder} ({(str(error).splitlines() or [''])[0]})"
        raise UserError(f"{problem}; name a folder with weights and a tokenizer") from None
    inputs = tokenizer(prompt, return_tensors="pt")
    tensors = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    output = model.eval().generate(**tensors, do_sample=False, max_new_tokens=count, pad_token_id=0)
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, str(tokenizer.decode(tokens))
