"""A run from its first line to its last: folder, data, model, loop, results."""

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from pentatron.checkpoint.lock import folder_lock
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.models.generate import generate
from pentatron.monitor.curve import loss_curve
from pentatron.monitor.display import Display, Silent, open_display
from pentatron.monitor.metrics import MetricsFile, read_metrics
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.collectives import on_some_ranks
from pentatron.parallel.world import World
from pentatron.train.datasets import Datasets, build_datasets
from pentatron.train.interrupt import StopRequest, stop_on_signals
from pentatron.train.resume import find_checkpoint, resume
from pentatron.train.run_folder import RunFolder
from pentatron.train.state import TrainState
from pentatron.train.trainer import Output, Trainer


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `stopped_by` is the signal that ended it early."""

    folder: RunFolder
    stopped_by: signal.Signals | None


def run_training(resolved: Resolved, world: World, resumes: bool) -> Outcome:
    """Trains as configured on this rank of the world."""
    config = resolved.config
    assert config.run.run_dir is not None
    folder = RunFolder(Path(config.run.run_dir))
    display = open_display(config.log.progress_bar) if world.is_first else Silent()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(display.close)
        stop = cleanup.enter_context(stop_on_signals())
        start_afresh = config.run.fresh or not resumes
        on_some_ranks(
            world.is_first, lambda: _open_folder(folder, start_afresh, display, cleanup), world.everyone
        )
        output = _run(resolved, world, folder, display, stop, cleanup)
        if stop.signal is not None and world.is_first:
            name = "Ctrl-C" if stop.signal == signal.SIGINT else stop.signal.name
            output.say(f"stopped by {name}; the checkpoint is saved, the same command goes on from there")
        return Outcome(folder, stop.signal)


def _open_folder(
    folder: RunFolder, start_afresh: bool, display: Display, cleanup: contextlib.ExitStack
) -> None:
    """Makes the folder ours until the end of the run."""
    folder.create()
    if start_afresh:
        with folder_lock(folder.path):
            moved = folder.move_aside()
        if moved is not None:
            display.say(f"the earlier run was moved to {moved}")
        folder.create()
    cleanup.enter_context(folder_lock(folder.path))


def _run(
    resolved: Resolved,
    world: World,
    folder: RunFolder,
    display: Display,
    stop: StopRequest,
    cleanup: contextlib.ExitStack,
) -> Output:
    config = resolved.config
    for notice in resolved.notices:
        display.say(f"note: {notice}")
    datasets = build_datasets(config, world, folder.data, display)
    model = build_model(config.model, config.run.seed, world.device, config.kernels.attention_backend)
    optimizer = Optimizer(model, config.optim, _dtype(config), config.parallel.ddp_bucket_size)
    store = CheckpointStore(Path(config.checkpoint.save or ""), config.checkpoint.keep_checkpoints)
    state, changes = _starting_point(config, world, optimizer, store, resumes=not config.run.fresh)
    output = _open_output(resolved, world, folder, display, state, cleanup)
    output.say(describe(config, world, model))
    for change in changes:
        output.say(f"note: {change}")
    assert config.train.train_iters is not None
    if state.step >= config.train.train_iters:
        output.say(
            f"this run has finished its {state.step} steps: nothing is left to train. Raise --train-iters to go on, "
            f"give --fresh to start anew, or --run-dir for another run"
        )
    elif state.step:
        output.say(f"resuming at step {state.step} of {config.train.train_iters}")
    trainer = Trainer(config, world, model, optimizer, datasets, store, state, output, stop)
    finished = trainer.run()
    if world.is_first:
        _draw_curve(folder, config)
        if finished:
            _finish(config, folder, model, datasets, output)
    return output


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision.bf16 else torch.float32


def _starting_point(
    config: RunConfig, world: World, optimizer: Optimizer, store: CheckpointStore, resumes: bool
) -> tuple[TrainState, list[str]]:
    """The newest valid checkpoint of the run itself, else of --load, else the beginning."""
    if not resumes:
        return TrainState(), []
    notes: list[str] = []
    for folder in dict.fromkeys((store.folder, Path(config.checkpoint.load or store.folder))):
        source = CheckpointStore(folder, keep=None)
        found, complaints = find_checkpoint(source, config.checkpoint.verify_checkpoint, world)
        notes += complaints
        if found is not None:
            state, changes = resume(found, config, optimizer, world.everyone.rank)
            return state, [*notes, *changes]
    return TrainState(), notes


def _open_output(
    resolved: Resolved,
    world: World,
    folder: RunFolder,
    display: Display,
    state: TrainState,
    cleanup: contextlib.ExitStack,
) -> Output:
    if not world.is_first:
        return Output(display, None, None)
    folder.write_config(resolved)
    metrics = MetricsFile(folder.metrics, state.step)
    cleanup.callback(metrics.close)
    log = cleanup.enter_context(folder.log.open("a", encoding="utf-8"))
    return Output(display, log, metrics)


def describe(config: RunConfig, world: World, model: CausalLM) -> str:
    """One line on what is about to run, and where."""
    parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    size = world.everyone.size
    precision = "bf16" if config.precision.bf16 else "fp32"
    return (
        f"model: {_count(parameters)} parameters, {config.model.num_layers} layers; "
        f"{size} process{'es' if size > 1 else ''} ({world.grid.data} data-parallel) on {device}, {precision}; "
        f"{config.train.global_batch_size} × {config.model.seq_length} tokens a step"
    )


def _count(number: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _draw_curve(folder: RunFolder, config: RunConfig) -> None:
    rows = list(read_metrics(folder.metrics))
    if rows:
        training = [(float(r["step"]), float(r["loss"])) for r in rows]
        validation = [(float(r["step"]), float(r["validation_loss"])) for r in rows if "validation_loss" in r]
        title = f"{folder.path.name}: loss by step"
        folder.curve.write_text(loss_curve(title, training, validation), encoding="utf-8")


def _finish(
    config: RunConfig, folder: RunFolder, model: CausalLM, datasets: Datasets, output: Output
) -> None:
    """What the user came for: how far the loss fell, a taste of the model, and what to do next."""
    rows = list(read_metrics(folder.metrics))
    if rows:
        first, last = rows[0]["loss"], sum(r["loss"] for r in rows[-10:]) / len(rows[-10:])
        output.say(f"finished: loss {first:.3f} → {last:.3f} (down {100 * (1 - last / first):.0f} %)")
    if datasets.tokenizer is not None and config.run.sample_prompt is not None:
        tokenizer, prompt = datasets.tokenizer, config.run.sample_prompt
        model.eval()
        ids = tokenizer.encode(prompt)
        tokens = list(
            generate(
                model,
                ids,
                config.run.sample_tokens,
                config.model.seq_length,
                seed=config.run.seed,
                stop=tokenizer.eod,
            )
        )
        sample = tokenizer.decode([*ids, *tokens])
        folder.sample.write_text(sample + "\n", encoding="utf-8")
        output.say(
            "a sample of what it writes now:\n" + "\n".join(f"    {line}" for line in sample.splitlines())
        )
    output.say(f"run folder: {folder.path} (config.yaml, train.log, metrics.jsonl, loss.svg, checkpoints/)")
