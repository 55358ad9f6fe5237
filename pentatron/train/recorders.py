"""Which recorders a configuration asks for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pentatron.config.run import RunConfig
from pentatron.monitor.lenient import Lenient
from pentatron.monitor.metrics import MetricsFile
from pentatron.monitor.performance import PerformanceSummary
from pentatron.monitor.progress_file import ProgressFile
from pentatron.monitor.recorder import Recorder
from pentatron.monitor.scalars import Choices
from pentatron.monitor.tensorboard import TensorBoard
from pentatron.monitor.weights_and_biases import Place, WeightsAndBiases
from pentatron.parallel.world import World
from pentatron.train.run_folder import RunFolder
from pentatron.train.state import TrainState


def open_recorders(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    state: TrainState,
    parameters: int,
    tell: Callable[[str], None],
) -> Iterator[Recorder]:
    """One after the other, so that the caller can close those that are open when one fails.

    What others keep, a viewer's folder or a service, may fail: that is told, and training goes on.
    """
    log = config.log
    yield MetricsFile(folder.metrics, state.step, tell)
    choices = Choices(
        timers=log.log_timers_to_tensorboard,
        memory=log.log_memory_to_tensorboard,
        world_size=world.everyone.size if log.log_world_size_to_tensorboard else None,
        perplexity=log.log_validation_ppl_to_tensorboard,
    )
    if log.tensorboard_dir is not None:
        events = Path(log.tensorboard_dir)
        yield Lenient(
            f"TensorBoard in {events}",
            lambda: TensorBoard(events, config.flat(), choices, log.tensorboard_log_interval, state.step),
            tell,
        )
    if log.wandb_project is not None:
        place = Place(
            project=log.wandb_project,
            name=log.wandb_exp_name or folder.path.name,
            entity=log.wandb_entity,
            folder=Path(log.wandb_save_dir) if log.wandb_save_dir else folder.path / "wandb",
        )
        yield Lenient(
            "Weights & Biases",
            lambda: WeightsAndBiases(place, config.nested(), choices, log.tensorboard_log_interval),
            tell,
        )
    if log.log_progress:
        path = Path(config.checkpoint.save) / "progress.txt"
        yield ProgressFile(
            path, config.launch.job_id or "", world.everyone.size, state.flops, state.consumed_tokens
        )
    if log.save_performance_summary:
        yield PerformanceSummary(folder.path / "performance_summary.json", _about(config, world, parameters))


def _about(config: RunConfig, world: World, parameters: int) -> dict[str, Any]:
    grid = config.grid
    on_gpu = world.device.type == "cuda"
    return {
        "parameters": parameters,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "CPU",
        "torch": torch.__version__,
        "world_size": grid.world_size,
        "tensor_parallel": grid.tensor,
        "pipeline_parallel": grid.pipeline,
        "context_parallel": grid.context,
        "expert_parallel": config.parallel.expert_model_parallel_size,
        "data_parallel": grid.data,
        "precision": config.precision.name,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        "sequence_length": config.model.seq_length,
    }
