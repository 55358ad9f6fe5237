"""Summary of a run: its description at the start, the loss curve, and the result with a sample at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pentatron.data.open_data import Datasets
from pentatron.errors import UserError, describe_os_error
from pentatron.files import write_file
from pentatron.generate.continue_text import open_continuation
from pentatron.monitor.curve import loss_curve
from pentatron.monitor.metrics import damaged_lines, read_metrics
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig, size_problem
from pentatron.text import format_abbreviated, plural
from pentatron.train.output import Output, device_name
from pentatron.train.run_folder import RunFolder

_LAST_STEPS = 10
# The consequence if a file beside the checkpoints cannot be written.
WITHOUT_IT = "the run itself is complete"


def describe_run(config: RunConfig, world: World, parameters: int) -> str:
    """Describes model, layout, device and batch in one line."""
    device, size = device_name(world.device), world.all_ranks.size
    return (
        f"model: {format_abbreviated(parameters)} parameters, {config.model.num_layers} layers; "
        f"{size} {plural(size, 'process')} ({_axes(config)}) on {device}, {config.precision.described}; "
        f"{_sizes(config, lambda size: size)} × {config.model.seq_length} tokens a step"
    )


def _axes(config: RunConfig) -> str:
    """Formats the axes with more than one rank, as `2 tensor + sequence × 2 pipeline`."""
    grid, parallel = config.grid, config.parallel
    axes = {
        "tensor + sequence" if parallel.sequence_parallel else "tensor": grid.tensor,
        f"context ({parallel.cp_comm_type})": grid.context,
        "pipeline": grid.pipeline,
        "data": grid.data,
    }
    shown = [f"{size} {axis}" for axis, size in axes.items() if size > 1]
    shared = parallel.zero_stage > 0 and grid.data * grid.context > 1
    groups = f" in {grid.instances} groups" if grid.instances > 1 else ""
    zero = f" with ZeRO-{parallel.zero_stage}{groups}" if shared else ""
    return f"{' × '.join(shown)}{zero} parallel" if shown else "not parallel"


def describe_pipeline(config: RunConfig) -> str | None:
    """Describes the pipeline schedule and its layers in one line, if there is a pipeline."""
    ranks = config.grid.pipeline
    if ranks == 1:
        return None
    layers = " + ".join(str(len(part.layers)) for part in config.stages)
    virtual = f", {config.virtual_stages} stages on each" if config.virtual_stages > 1 else ""
    count = _sizes(config, config.accumulation_of)
    return (
        f"pipeline: {config.parallel.pipeline_schedule} on {ranks} ranks{virtual}; layers {layers}; "
        f"{count} micro-batch{'' if count == '1' else 'es'} a step"
    )


def _sizes(config: RunConfig, number_of: Callable[[int], int]) -> str:
    """Formats a number per batch size: `16`, or `16 to 1536` with a ramp-up."""
    planned = (phase.size for phase in config.batch_plan.sizes(config.train.train_iters))
    # A resumed run may have passed sizes that do not fit this layout.
    sizes = [size for size in planned if size_problem(config, size) is None]
    smallest, largest = number_of(min(sizes)), number_of(max(sizes))
    return str(largest) if smallest == largest else f"{smallest} to {largest}"


def write_loss_svg(folder: RunFolder) -> None:
    # Rows of steps with NaN have no loss.
    rows = read_metrics(folder.metrics)
    training, validation = (
        [(float(row["step"]), float(row[name])) for row in rows if name in row]
        for name in ("loss", "validation_loss")
    )
    if training:
        title = f"{folder.path.name}: loss by step"
        write_file(folder.curve, loss_curve(title, training, validation).encode())


def print_summary(config: RunConfig, folder: RunFolder, datasets: Datasets, output: Output) -> None:
    """Prints how far the loss fell, a sample of the model, and where the files are."""
    metrics = read_metrics(folder.metrics)
    if metrics.damaged:
        output.say(f"note: {damaged_lines(metrics.damaged)}")
    tried = [row for row in metrics if not row.get("left_out")]
    if metrics and not tried:
        output.say("finished, but every step was skipped (--iterations-to-skip), so nothing was trained")
    updates = [row for row in tried if not row.get("skipped") and "loss" in row]
    if tried and not updates:
        output.say(
            "finished, but the weights were never updated: every step was skipped, because fp16 overflows at its loss scale. Train longer, "
            "so that the loss scale decreases, or lower --initial-loss-scale"
            if config.precision.fp16 and not config.precision.loss_scale
            else "finished, but the weights were never updated: every step was skipped, because its loss or a gradient was NaN or inf. Lower --lr, or "
            "check the data"
        )
    if updates:
        output.say(f"finished: {_fall([row['loss'] for row in updates])}")
    _show_sample(config, folder, datasets, output)
    log = config.log
    files = (folder.config, folder.log, folder.metrics, folder.curve)
    names = [path.name for path in files if path.exists()]
    # These are written when the output is closed, after this line.
    names += ["performance_summary.json"] * log.save_performance_summary
    names += ["memory/"] * log.monitor_memory_continuously
    output.say(
        f"run folder: {folder.path} ({', '.join(names)}), "
        f"checkpoints: {config.checkpoint.save if config.checkpoint.save_checkpoints else 'none'}"
    )


def _show_sample(config: RunConfig, folder: RunFolder, datasets: Datasets, output: Output) -> None:
    """Prints a continuation of --sample-prompt. An error is a note, as the training itself has succeeded."""
    saves, prompt = config.checkpoint.save_checkpoints, config.run.sample_prompt
    if not saves or datasets.tokenizer is None or prompt is None or config.run.sample_tokens == 0:
        return
    try:
        # The ranks hold parts of the model only; the last checkpoint has all of it.
        run, folder_of_steps = config.run, Path(config.checkpoint.save)
        pieces = open_continuation(folder_of_steps, prompt, run.sample_tokens, run.seed, config.model.spec)
        sample = prompt + "".join(pieces)
    except (UserError, OSError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        output.say(f"note: no sample text was generated (--sample-prompt): {why}")
        return
    content = f"{sample}\n".encode(errors="backslashreplace")
    output.attempt("sample.txt", lambda: write_file(folder.sample, content), WITHOUT_IT)
    # Control characters, which an untrained model emits, would be interpreted by the terminal.
    safe = ("".join(c if c.isprintable() or c == "\t" else "·" for c in line) for line in sample.splitlines())
    shown = "\n".join(f"    {line}" for line in safe)
    output.say(f"a sample of generated text:\n{shown}")


def _fall(losses: Sequence[float]) -> str:
    """Compares the first loss with the mean of the last ones: at most ten, and a quarter of the run."""
    count = max(1, min(_LAST_STEPS, len(losses) // 4))
    first, last = losses[0], sum(losses[-count:]) / count
    if len(losses) == 1 or not first:
        return f"loss {last:.3f}"
    return f"loss {first:.3f} → {last:.3f} ({'down' if last <= first else 'up'} {100 * abs(1 - last / first):.0f} %)"
