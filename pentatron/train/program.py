"""What a run computes and reads: by default the configured model, its loss and the configured data.

Whoever has a model, a forward step or datasets of their own derives from `Program` and hands it to the session; the loop,
the schedules, the optimizer and the checkpoints are the same for every program.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig
from pentatron.data.loader import Batch
from pentatron.layout.stages import StagePart
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.monitor.display import Display
from pentatron.nn.axes import Axes
from pentatron.nn.dropout import DropoutKeys
from pentatron.nn.options import ModelOptions
from pentatron.parallel.timers import Timers
from pentatron.parallel.world import World
from pentatron.train.datasets import OpenedData, open_data
from pentatron.train.objective import Objective, ReportedNames
from pentatron.train.state import TrainState


@dataclass(frozen=True)
class StageCall:
    """A micro-batch in one stage: the tokens this rank has, what the stage before made of them, and dropout's keys."""

    stage: int
    is_last: bool
    batch: Batch
    received: Tensor | None
    keys: DropoutKeys | None
    objective: Objective


class Program:
    # Whether --data-path and its kin name files that must be there.
    reads_named_data = True
    # Whether loss functions count their own tokens or report values, in `StageCall.objective`; the names of these values.
    reported_names: ReportedNames | None = None

    def running(self, resolved: Resolved, world: World, display: Display) -> AbstractContextManager[None]:
        """Around all of a run on this rank, from before its data is opened."""
        return nullcontext()

    def begins(self, state: TrainState) -> None:
        """The run starts, or goes on, from here; the state is kept up to date."""

    def timed_by(self, timers: Timers) -> None:
        """The timers of the loop, which shows them every --log-interval steps."""

    def open_data(self, config: RunConfig, world: World, folder: Path, display: Display) -> OpenedData:
        return open_data(config, world, folder, display)

    def build_stages(
        self,
        config: RunConfig,
        parts: Mapping[int, StagePart],
        axes: Axes,
        device: torch.device,
        options: ModelOptions,
    ) -> dict[int, CausalLM]:
        """The stages of a rank in fp32, with their initial weights. They compute as the options say."""
        return build_stages(config.model, config.moe, parts, axes, config.run.seed, device, options)

    def forward(self, module: CausalLM, call: StageCall) -> Tensor:
        """The stream for the next stage; of the last one, the micro-batch's share of the step's objective."""
        batch = call.batch
        made: Tensor = module(
            batch.tokens,
            batch.position_ids,
            batch.labels,
            call.received,
            call.keys,
            documents=batch.documents,
        )
        return call.objective.share_of_sum((made * batch.loss_mask).sum()) if call.is_last else made


CONFIGURED = Program()
