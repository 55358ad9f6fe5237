"""`pentatron import` and `pentatron export`: convert between Hugging Face folders and checkpoints."""

import contextlib
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pentatron.cli.options import Options, option, options_help, parse_options
from pentatron.cli.output import print_error, say, with_help
from pentatron.errors import UserError
from pentatron.monitor.terminal import ignore_output_errors

if TYPE_CHECKING:
    import torch

    from pentatron.checkpoint.store import Checkpoint
    from pentatron.checkpoint.streaming import Summary
    from pentatron.compare.logits import Comparison
    from pentatron.monitor.display import Display

_DECIMAL = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _size(written: str, flag: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", written)
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise UserError(f"{flag} {written}: write a size such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class ImportCommandOptions(Options):
    dtype: str | None = option(
        None, "dtype to convert the weights to (that of the source)", choices=("fp32", "bf16", "fp16")
    )
    allow_narrowing: bool = option(False, "allow a dtype that cannot hold every value: weights are rounded")
    tokenizer: str | None = option(None, "copy the tokenizer of this folder, not that of HF_DIR", value="DIR")
    verify: bool = option(
        False, "compare logits on random tokens with the transformers library; needs memory for a whole model"
    )
    progress_bar: str = option("auto", "live progress bar", choices=("auto", "on", "off"))

    def problems(self) -> Iterable[str]:
        if self.allow_narrowing and self.dtype is None:
            yield "--allow-narrowing needs --dtype; give the dtype, or leave --allow-narrowing out to keep every value"


@dataclass(frozen=True)
class ExportCommandOptions(ImportCommandOptions):
    ckpt_format: str | None = option(
        None,
        "allow reading a Megatron-LM checkpoint, which contains pickle: it is unpickled in a sandboxed process",
        choices=("torch_dist", "torch"),
    )
    dtype: str | None = option(
        None,
        "dtype of the weights (the precision of the run; for an imported model, its own)",
        choices=("fp32", "bf16", "fp16"),
    )
    tokenizer: str | None = option(None, "copy the tokenizer of this folder, not the model's", value="DIR")
    max_shard_size: int = option(5 * 10**9, "maximum file size, like 500MB (5GB)", value="SIZE", parse=_size)
    no_check: bool = option(False, "do not compare the checksums of the checkpoint")


IMPORT_USAGE = f"""usage: pentatron import HF_DIR OUT [--option value ...]

Converts a Hugging Face folder (config.json and safetensors files) or a model of the hub to a checkpoint. It holds weights only,
in the dtype of the source, and loads in any layout: pentatron train --load OUT. Nothing is overwritten.

{options_help(ImportCommandOptions)}

  pentatron import Qwen/Qwen2.5-7B checkpoints/qwen
"""
EXPORT_USAGE = f"""usage: pentatron export CHECKPOINT HF_DIR [--option value ...]

Writes the weights of a checkpoint as a Hugging Face folder. CHECKPOINT is a run, its checkpoints (the newest is used) or one step of
them, saved in any layout, or a checkpoint of Megatron-LM. Nothing is overwritten.

{options_help(ExportCommandOptions)}

  pentatron export runs/mine exported/mine
"""
T = TypeVar("T", bound=ImportCommandOptions)


@with_help(IMPORT_USAGE)
def import_command(words: Sequence[str]) -> int:
    return _convert(words, ImportCommandOptions, "import HF_DIR OUT", "the Hugging Face folder", run_import)


@with_help(EXPORT_USAGE)
def export_command(words: Sequence[str]) -> int:
    return _convert(words, ExportCommandOptions, "export CHECKPOINT HF_DIR", "the checkpoint", _export)


def _convert(
    words: Sequence[str], cls: type[T], call: str, what: str, run: Callable[[str, Path, T], int]
) -> int:
    name = f"pentatron {call.split()[0]}"
    options, plain = parse_options(cls, words, name)
    if len(plain) != 2:
        raise UserError(f"expected two arguments, {what} and the output: pentatron {call} ({name} --help)")
    out = Path(plain[1])
    return run_interruptible(out, lambda: run(plain[0], out, options))


def run_import(source: str, out: Path, options: ImportCommandOptions) -> int:
    from pentatron.checkpoint.find import find_step
    from pentatron.compare.logits import compare_logits, require_transformers
    from pentatron.hf import convert as hf
    from pentatron.hf.hub import resolve_folder

    if options.verify:
        require_transformers()
    dtype = _dtype(options.dtype)
    folder = resolve_folder(source)
    conversion = hf.ImportOptions(dtype, options.allow_narrowing, _tokenizer_files(options))
    convert = partial(hf.import_folder, folder, out, conversion)
    return _write(out, options, [], convert, lambda made: compare_logits(find_step(made)[0], folder, dtype))


def _export(checkpoint: str, out: Path, options: ExportCommandOptions) -> int:
    from pentatron.checkpoint import find
    from pentatron.checkpoint.format import DamagedCheckpoint, Manifest
    from pentatron.compare.logits import require_transformers
    from pentatron.hf.convert import DamagedStep
    from pentatron.interchange.reading import read_megatron

    if options.verify:
        require_transformers()
    tokenizer = _tokenizer_files(options)
    path = find.resolve_latest(Path(checkpoint))
    if options.ckpt_format and find.find_megatron_checkpoint(path) and not find.find_steps_folder(path):
        step, remarks = read_megatron(path)
        return _export_step(step, [f"note: {remark}" for remark in remarks], out, tokenizer, options)
    damaged: dict[Path, str] = {}

    def refuse_damaged(folder: Path, manifest: Manifest) -> None:
        if folder in damaged:
            raise DamagedCheckpoint(damaged[folder])

    while True:
        step, complaints = find.find_step(path, refuse_damaged)
        notes = [f"note: {complaint}; {step.folder.name} is exported" for complaint in complaints]
        try:
            return _export_step(step, notes, out, tokenizer, options)
        except DamagedStep as error:
            if find.is_step(path):
                raise
            # Checksums are compared while writing. As in training, the previous step is taken instead.
            damaged[step.folder] = str(error.__cause__)


def _export_step(
    step: "Checkpoint", lines: list[str], out: Path, tokenizer: Sequence[Path], options: ExportCommandOptions
) -> int:
    from pentatron.checkpoint.links import dtype_name
    from pentatron.compare.logits import compare_logits
    from pentatron.generate.source import tokenizer_path
    from pentatron.hf import convert as hf
    from pentatron.hf.small_files import FOLDER_NAME, has_tokenizer, small_files

    dtype = _dtype(options.dtype)
    trained, stored = hf.trained_dtype(step.manifest), hf.stored_dtypes(step.manifest)
    if dtype is None and trained is not None and stored != {trained}:
        names = ", ".join(sorted(map(dtype_name, stored)))
        written = f"the weights are written in {dtype_name(trained)}, the precision of the run"
        lines.append(f"note: {written} (--dtype {names} writes its master weights)")
    if not has_tokenizer(small_files(step.folder.parent / FOLDER_NAME, tokenizer)):
        origin = tokenizer_path(step.folder, step.manifest.config)
        flag = f"{origin} adds the one of the training run" if origin else "DIR adds one"
        lines.append(f"note: no tokenizer came with this model, so the folder has none; --tokenizer {flag}")
    narrowing, size = options.allow_narrowing, options.max_shard_size
    conversion = hf.ExportOptions(dtype, narrowing, tokenizer, size, not options.no_check)
    convert = partial(hf.export_step, step, out, conversion)
    return _write(out, options, lines, convert, lambda made: compare_logits(step, made, dtype or trained))


def _write(
    out: Path,
    options: ImportCommandOptions,
    lines: list[str],
    convert: "Callable[[Display, Callable[[Path], None] | None], Summary]",
    compare: "Callable[[Path], Comparison]",
) -> int:
    """Converts, compares with transformers for `--verify`, and prints `lines` and what was written."""
    from pentatron.monitor.display import open_display

    def check(made: Path) -> None:
        display.work("comparing with transformers", 0, 1)
        lines.append(compare(made).sentence())

    with contextlib.closing(open_display(options.progress_bar)) as display:
        summary = convert(display, check if options.verify else None)
    say("\n".join([*lines, f"{out}: {summary.sentence()}"]))
    return 0


def _tokenizer_files(options: ImportCommandOptions) -> Sequence[Path]:
    from pentatron.hf.small_files import tokenizer_files

    return tokenizer_files(Path(options.tokenizer)) if options.tokenizer else ()


def _dtype(name: str | None) -> "torch.dtype | None":
    from pentatron.checkpoint.links import DTYPES_BY_NAME

    return DTYPES_BY_NAME[name] if name else None


def run_interruptible(out: Path, convert: Callable[[], int]) -> int:
    """Runs a conversion. Ctrl-C and SIGTERM stop it and remove partial files; a closed output does not."""
    ignore_output_errors()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, stop)
    try:
        return convert()
    except KeyboardInterrupt:
        print_error(f"stopped; {out} was not created, and partial files were removed")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
