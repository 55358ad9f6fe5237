"""`tools/checkpoint/convert.py`: `pentatron import` with the flags of Megatron-LM's converter.

Flags for layouts, padding and formats have no effect here, because a checkpoint has no layout, no padding and
one format; each is accepted with a note or refused with a reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.convert import ImportCommandOptions, run_import, run_interruptible
from pentatron.cli.options import Options, option, options_help, parse_options
from pentatron.cli.output import say, with_help
from pentatron.errors import UserError
from pentatron.settings.command_line import did_you_mean
from pentatron.settings.declaration import flag_of

# model_type by the prefix of --model-size; the rest, such as -7B, is not needed.
MODEL_SIZES = {
    "qwen2.5": "qwen2", "qwen2-moe": "qwen2_moe", "qwen2": "qwen2", "qwen3-moe": "qwen3_moe", "qwen3": "qwen3",
    "llama2": "llama", "llama3": "llama", "yi": "llama", "mistral": "mistral", "mixtral": "mixtral", "gpt2": "gpt2",
}  # fmt: skip


@dataclass(frozen=True)
class ConvertOptions(Options):
    load_dir: str = option(
        "", "folder with config.json and safetensors, or a hub model such as Qwen/Qwen2.5-7B", value="HF_DIR"
    )
    save_dir: str = option("", "folder of the new checkpoint, for --load", value="OUT")
    bf16: bool = option(False, "convert the weights to bf16 (dtype of the source)")
    fp16: bool = option(False, "convert the weights to fp16")
    allow_narrowing: bool = option(False, "allow a dtype that cannot hold every value: weights are rounded")
    tokenizer_model: str | None = option(None, "tokenizer to copy (that of --load-dir)", value="PATH")
    model_size: str | None = option(
        None, f"model family, which must match config.json: {', '.join(MODEL_SIZES)}", value="NAME"
    )
    verify: bool = option(
        False, "compare logits on random tokens with the transformers library; needs memory for a whole model"
    )
    progress_bar: str = option("auto", "", choices=("auto", "on", "off"))
    model_type: str = option("GPT", "model type: GPT; any other value is refused")
    loader: str = option("llama_mistral", "input: a Hugging Face folder", value="llama_mistral|mixtral_hf")
    saver: str = option("core", "output: a checkpoint that --load reads", value="core|mcore")
    checkpoint_type: str = option("hf", "format of the source folder: hf")
    target_tensor_parallel_size: int | None = option(None, "accepted without effect; a note gives the reason")
    target_pipeline_parallel_size: int | None = option(None, "accepted without effect")
    target_expert_parallel_size: int | None = option(None, "accepted without effect")
    loader_transformer_impl: str | None = option(None, "accepted without effect", value="NAME")
    make_vocab_size_divisible_by: int | None = option(None, "accepted without effect")

    def problems(self) -> Iterable[str]:
        for name in ("load_dir", "save_dir"):
            if not getattr(self, name):
                yield f"{flag_of(name)} is missing: convert.py --load-dir HF_DIR --save-dir OUT"
        for name, (allowed, why) in _ONLY.items():
            if (value := getattr(self, name)) not in (*allowed.split(), None):
                yield f"{flag_of(name)} {value}: only {' or '.join(allowed.split())} is possible; {why}"
        if self.bf16 and self.fp16:
            yield "--bf16 and --fp16 contradict each other; choose one, or none to keep the dtype of the source"
        if self.model_size and _family(self.model_size) is None:
            guess = did_you_mean(self.model_size, MODEL_SIZES)
            fix = "leave it out, because config.json has the model type"
            sizes = ", ".join(MODEL_SIZES)
            yield f"--model-size {self.model_size} is not known{guess}; {fix}, or use one of {sizes}"


_BACK = "to convert back, use pentatron export CHECKPOINT HF_DIR"
# Allowed values of options, and the reason.
_ONLY = {
    "model_type": ("GPT", "only models that predict the next token are trained"),
    "loader": ("llama_mistral mixtral_hf", f"only Hugging Face folders are read; {_BACK}"),
    "saver": ("core mcore", "Pentatron has only one checkpoint format, which --load reads"),
    "checkpoint_type": ("hf", "give a Hugging Face folder with config.json and safetensors files"),
    "loader_transformer_impl": ("local transformer_engine", "these are Megatron's names"),
}
USAGE = f"""usage: tools/checkpoint/convert.py --load-dir HF_DIR --save-dir OUT [--flag value ...]

Converts a Hugging Face folder to a checkpoint like `pentatron import HF_DIR OUT`, with the flags of Megatron-LM's converter.

{options_help(ConvertOptions)}

To convert back, use `pentatron export CHECKPOINT HF_DIR`.
"""


@with_help(USAGE, without_words=True)
def convert_command(words: Sequence[str]) -> int:
    stray = "convert.py takes only flags, not '{word}'; convert.py --help lists them"
    options, _ = parse_options(ConvertOptions, words, "convert.py", stray=stray)
    for note in _notes(options):
        say(f"note: {note}")
    source, out = options.load_dir, Path(options.save_dir)
    dtype = "bf16" if options.bf16 else "fp16" if options.fp16 else None
    rest = (options.allow_narrowing, options.tokenizer_model, options.verify, options.progress_bar)

    def convert() -> int:
        if options.model_size:
            _check_family(source, options.model_size)
        return run_import(source, out, ImportCommandOptions(dtype, *rest))

    return run_interruptible(out, convert)


def _notes(options: ConvertOptions) -> Iterator[str]:
    """Yields why given options have no effect."""
    axes = ("tensor", "pipeline", "expert")
    sizes = {axis: getattr(options, f"target_{axis}_parallel_size") for axis in axes}
    if given := [f"--target-{axis}-parallel-size {size}" for axis, size in sizes.items() if size]:
        yield f"{' '.join(given)}: a Pentatron checkpoint loads in any layout, so it is not split"
    if divisor := options.make_vocab_size_divisible_by:
        padded = "Pentatron checkpoints have no padding; the flag of that name of the training run pads the vocabulary"
        yield f"--make-vocab-size-divisible-by {divisor}: {padded}"
    if name := options.loader_transformer_impl:
        yield f"--loader-transformer-impl {name}: there is only one implementation, in PyTorch"


def _family(size: str) -> str | None:
    """Returns the model_type of a --model-size."""
    return next((family for start, family in MODEL_SIZES.items() if size.lower().startswith(start)), None)


def _check_family(source: str, size: str) -> None:
    from pentatron.hf.folder import open_folder
    from pentatron.hf.hub import resolve_folder
    from pentatron.hf.model_config import model_type_of

    with open_folder(resolve_folder(source)) as folder:
        model_type = model_type_of(folder.config)
    if model_type != _family(size):
        means = f"--model-size {size} means models of type {_family(size)}"
        holds = f"{source} holds one of type {model_type}"
        raise UserError(f"{means}, but {holds}; leave the flag out, or name the right folder")
