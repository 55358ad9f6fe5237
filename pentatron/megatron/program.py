"""`UserProgram`: a user's dataset provider, model provider and forward step in a training session."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.state import TrainState
from pentatron.cli.output import say
from pentatron.data.loader import Batch
from pentatron.data.open_data import OpenedData
from pentatron.errors import UserError
from pentatron.layout.stages import StagePart
from pentatron.megatron import state
from pentatron.megatron.arguments import arguments_of
from pentatron.megatron.datasets import DatasetProvider, provided_data
from pentatron.megatron.gpt_model import GPTModel
from pentatron.megatron.losses import call_loss_function, counting_terms_once, objective_share
from pentatron.megatron.state import ProcessGroups
from pentatron.models.causal_lm import CausalLM, shared_embedding_of
from pentatron.monitor.display import Display
from pentatron.nn.options import Axes, ModelOptions
from pentatron.nn.spec import accepts
from pentatron.parallel.timers import Timers
from pentatron.parallel.world import World
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import Program, ReportedNames, StageInputs

# Micro-batches whose numbers of tokens are compared. Few, because each comparison synchronizes host and
# device.
_COMPARED = 8
ForwardStep = Callable[[Iterator[dict[str, Tensor]], Any], tuple[Tensor, Callable[[Tensor], Any]]]


@dataclass(eq=False)
class UserProgram(Program):
    """`extra`: values of the program's own arguments. `notes`: notices about arguments without effect."""

    dataset_provider: DatasetProvider | None
    model_provider: Callable[..., Any]
    forward_step: ForwardStep
    extra: Mapping[str, Any]
    notes: Sequence[str] = ()
    has_run = False
    _first_count: float | None = None
    _counts_left: int = _COMPARED

    def __post_init__(self) -> None:
        # With a provider, --data-path may name something else than a .bin/.idx pair.
        self.reads_named_data = self.dataset_provider is None
        self.reported_names = ReportedNames()

    @contextmanager
    def running(self, resolved: Resolved, world: World, display: Display) -> Iterator[None]:
        self.has_run = True
        args = arguments_of(resolved, world, self.extra)
        with state.running(resolved, world, display, args), warnings.catch_warnings():
            # Raised by an all-reduced loss, whose gradient `losses.py` corrects.
            warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")
            for note in self.notes:
                display.say(f"note: {note}")
            yield

    def begins(self, train_state: TrainState) -> None:
        state.current_run().args.follow(train_state)

    def set_timers(self, timers: Timers) -> None:
        state.current_run().timers.loop = timers

    def open_data(self, config: RunConfig, world: World, folder: Path, display: Display) -> OpenedData:
        if self.dataset_provider is None:
            return super().open_data(config, world, folder, display)
        return provided_data(self.dataset_provider, config, world, folder, display)

    def build_stages(
        self,
        config: RunConfig,
        parts: Mapping[int, StagePart],
        axes: Axes,
        device: torch.device,
        options: ModelOptions,
    ) -> dict[int, CausalLM]:
        stage_parts = tuple(parts.values())
        axes = axes.with_linear(options.linear())
        groups = ProcessGroups(axes, stage_parts, options, shared_embedding_of(stage_parts))
        run = state.current_run()
        # Older providers have no `vp_stage`; GPTModel then takes it from the run.
        takes_stage = accepts(self.model_provider, "vp_stage")
        stages: dict[int, CausalLM] = {}
        with run.building(groups), device:
            for number, part in parts.items():
                run.stage = number
                place = {"vp_stage": run.virtual_rank} if takes_stage else {}
                model = self.model_provider(pre_process=part.embedding, post_process=part.head, **place)
                if not isinstance(model, GPTModel):
                    kind = f"{type(model).__module__}.{type(model).__qualname__}"
                    raise UserError(
                        f"model_provider returned a {kind}; it must return a GPTModel of pentatron.megatron, or of a class derived from it"
                    )
                stages[number] = model
        run.stage = None
        return stages

    def forward(self, module: CausalLM, call: StageInputs) -> Tensor:
        run = state.current_run()
        assert isinstance(module, GPTModel), "build_stages checks the type"
        run.stage = call.stage
        module.pending_call = call
        try:
            result = self.forward_step(_data_iterator(call.batch), module)
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
                raise UserError(
                    "forward_step must return (output_tensor, loss function), the output being what the model returned; "
                    f"it returned {type(result).__name__}"
                )
            output, loss_function = result
            if not call.is_last:
                return output
            if module.axis.sequence_parallel and run.world.tensor.size > 1:
                returned = counting_terms_once(loss_function, output, module, run.world)
            else:
                returned = call_loss_function(loss_function, output, run.world.group("context"))
            if returned.tokens is not None:
                self._compare_counts(returned.tokens)
            return objective_share(returned, call.objective)
        finally:
            module.pending_call = None
            run.stage = None

    def _compare_counts(self, tokens: Tensor) -> None:
        """Prints one notice if micro-batches, which Megatron weighs equally, differ in their number of
        tokens.
        """
        run = state.current_run()
        at = run.world.at
        if self._counts_left == 0 or not at.data == at.context == at.tensor == 0:
            return
        self._counts_left -= 1
        count = float(tokens)
        if self._first_count is None:
            self._first_count = count
        elif count != self._first_count:
            self._counts_left = 0
            if not run.resolved.given("calculate_per_token_loss"):
                say(
                    "note: the loss function counts different numbers of tokens in micro-batches, and every token weighs the same in a step; "
                    "Megatron-LM without --calculate-per-token-loss would weigh every micro-batch the same"
                )


def _data_iterator(batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Yields the single micro-batch of a forward step."""
    yield as_dictionary(batch)
    raise UserError(
        "forward_step took a second micro-batch from data_iterator; take one in each call (--micro-batch-size sets "
        "its number of samples)"
    )


def as_dictionary(batch: Batch) -> dict[str, Tensor]:
    """Returns the micro-batch with Megatron's keys."""
    return {name: getattr(batch, name) for name in ("tokens", "labels", "loss_mask", "position_ids")}
