"""`tools/checkpoint/convert.py`: an import under the flags Megatron-LM's converter has.

What those flags ask for beside the conversion does not exist here: a checkpoint has no layout, no padding and one format.
Each of them is either acted on or answered with a line.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pentatron.cli.convert import run_import, until_stopped
from pentatron.cli.options import read_options
from pentatron.cli.terminal import say
from pentatron.config.flags import did_you_mean
from pentatron.errors import UserError

USAGE = """usage: tools/checkpoint/convert.py --load-dir HF_DIR --save-dir OUT [--flag value ...]

Makes a checkpoint of a Hugging Face folder, as `pentatron import HF_DIR OUT` does, under the flags of Megatron-LM's converter.

  --load-dir HF_DIR        folder with config.json and safetensors files, or a model of the hub such as Qwen/Qwen2.5-7B
  --save-dir OUT           the checkpoint to make; give it to --load
  --bf16, --fp16           type of the weights (that of the source)
  --allow-narrowing        also if it cannot hold every value of the source
  --tokenizer-model PATH   tokenizer to carry along (that of the folder)
  --model-size NAME        checked against the folder's model_type: {sizes}
  --verify                 compare logits on random tokens with the transformers library
  --model-type GPT, --loader llama_mistral or mixtral_hf, --saver core, --checkpoint-type hf
                           what this is; anything else is refused
  --target-tensor-parallel-size N, --target-pipeline-parallel-size N, --target-expert-parallel-size N,
  --loader-transformer-impl NAME, --make-vocab-size-divisible-by N
                           accepted; a line says why they change nothing

The way back is `pentatron export CHECKPOINT HF_DIR`.
"""
# By the beginning of what --model-size may be; the rest, such as -7B, is the size, which config.json knows better.
MODEL_SIZES = {
    "qwen2.5": "qwen2",
    "qwen2-moe": "qwen2_moe",
    "qwen2": "qwen2",
    "qwen3-moe": "qwen3_moe",
    "qwen3": "qwen3",
    "llama2": "llama",
    "llama3": "llama",
    "yi": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "gpt2": "gpt2",
}
_FLAGS: dict[str, Any] = {
    "load-dir": "",
    "save-dir": "",
    "bf16": False,
    "fp16": False,
    "allow-narrowing": False,
    "tokenizer-model": "",
    "model-size": "",
    "verify": False,
    "progress-bar": "auto",
    "model-type": "GPT",
    "loader": "llama_mistral",
    "saver": "core",
    "checkpoint-type": "hf",
    "target-tensor-parallel-size": 0,
    "target-pipeline-parallel-size": 0,
    "target-expert-parallel-size": 0,
    "loader-transformer-impl": "",
    "make-vocab-size-divisible-by": 0,
}
# What a flag may be, and why it may be nothing else.
_ONLY = {
    "model-type": (("GPT",), "models that predict the next token are what is trained here"),
    "loader": (
        ("llama_mistral", "mixtral_hf"),
        "Hugging Face folders are what is read here; the way back is pentatron export CHECKPOINT HF_DIR",
    ),
    "saver": (("core", "mcore"), "there is one format of checkpoints here, which --load reads"),
    "checkpoint-type": (
        ("hf",),
        "give the folder as Hugging Face has it, with config.json and safetensors files",
    ),
    "loader-transformer-impl": (
        ("", "local", "transformer_engine"),
        "those are the names Megatron has for it",
    ),
}


def convert_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words or not words:
        say(USAGE.format(sizes=", ".join(MODEL_SIZES)))
        return 0
    options, plain = read_options(words, _FLAGS, "convert.py")
    _check(options, plain)
    for note in _notes(options):
        say(f"note: {note}")
    source, out = options["load-dir"], Path(options["save-dir"])

    def convert() -> int:
        if options["model-size"]:
            _check_family(source, options["model-size"])
        return run_import(source, out, _as_import(options))

    return until_stopped(out, convert)


def _check(options: Mapping[str, Any], plain: Sequence[str]) -> None:
    if plain:
        raise UserError(f"convert.py takes flags alone, not '{plain[0]}'; convert.py --help lists them")
    for name in ("load-dir", "save-dir"):
        if not options[name]:
            raise UserError(f"say --{name}: convert.py --load-dir HF_DIR --save-dir OUT")
    for name, (allowed, why) in _ONLY.items():
        if options[name] not in allowed:
            listed = " or ".join(value for value in allowed if value)
            raise UserError(f"--{name} {options[name]}: only {listed} is possible; {why}")
    if options["bf16"] and options["fp16"]:
        raise UserError(
            "--bf16 and --fp16 contradict each other; choose one, or none to keep the type of the source"
        )
    if options["model-size"] and _family(options["model-size"]) is None:
        guess = did_you_mean(options["model-size"], MODEL_SIZES)
        raise UserError(
            f"--model-size {options['model-size']} is not known{guess}; leave it out, config.json says what the model is, or say "
            f"one of {', '.join(MODEL_SIZES)}"
        )


def _notes(options: Mapping[str, Any]) -> list[str]:
    """Why a flag that was given changes nothing."""
    notes = []
    sizes = [f"target-{axis}-parallel-size" for axis in ("tensor", "pipeline", "expert")]
    if given := [f"--{name} {options[name]}" for name in sizes if options[name]]:
        notes.append(f"{' '.join(given)}: a checkpoint here loads in any layout, so it is not cut for one")
    if options["make-vocab-size-divisible-by"]:
        notes.append(
            f"--make-vocab-size-divisible-by {options['make-vocab-size-divisible-by']}: a checkpoint here holds no padding; a run "
            f"pads the vocabulary as its own flag of that name says"
        )
    if options["loader-transformer-impl"]:
        notes.append(
            f"--loader-transformer-impl {options['loader-transformer-impl']}: there is one implementation here, in PyTorch"
        )
    return notes


def _family(size: str) -> str | None:
    """The model_type that a --model-size means."""
    name = size.lower()
    return next((family for start, family in MODEL_SIZES.items() if name.startswith(start)), None)


def _check_family(source: str, size: str) -> None:
    from pentatron.hf.architecture import model_type_of
    from pentatron.hf.folder import open_folder
    from pentatron.hf.hub import resolve_folder

    with open_folder(resolve_folder(source)) as folder:
        found = model_type_of(folder.config)
    if found != _family(size):
        raise UserError(
            f"--model-size {size} means models of type {_family(size)}, but {source} holds one of type {found}; leave the flag "
            f"out, or name the right folder"
        )


def _as_import(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dtype": "bf16" if options["bf16"] else "fp16" if options["fp16"] else "",
        "allow-narrowing": options["allow-narrowing"],
        "tokenizer": options["tokenizer-model"],
        "verify": options["verify"],
        "progress-bar": options["progress-bar"],
    }
