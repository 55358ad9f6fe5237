"""`pretrain`, and its steps one by one: a user's model, data and forward step through our session."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pentatron.cli.main import train_by
from pentatron.errors import UserError
from pentatron.megatron.core.enums import ModelType
from pentatron.megatron.datasets import DatasetProvider
from pentatron.megatron.flow import SETS, DataIterator, RateSchedule, current_flow, own_iterator
from pentatron.megatron.program import ForwardStep, UserProgram
from pentatron.megatron.state import current, started_as
from pentatron.megatron.training.arguments import ExtraArguments, take_extra_arguments
from pentatron.megatron.training.entry import entry_of, notes_of
from pentatron.megatron.training.utils import append_to_progress_log, print_datetime
from pentatron.optim.build import AnyOptimizer


def pretrain(
    train_valid_test_dataset_provider: DatasetProvider | None,
    model_provider: Callable[..., Any],
    model_type: ModelType,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Any = None,
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
) -> None:
    """Trains as the command line says. Returns when training is done; ends the process where there is nothing to go on with.

    That is so after an error, after `--help`, and in a process that only started the workers.
    """
    notes = notes_of(
        process_non_loss_data_func=process_non_loss_data_func,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        non_loss_data_func=non_loss_data_func,
    )
    entry, extra = entry_of(args_defaults or {})
    script = sys.argv[0]
    programs: list[UserProgram] = []

    def program(words: list[str]) -> tuple[list[str], UserProgram]:
        _require_decoder(model_type)
        left, added = take_extra_arguments(words, extra_args_provider, entry)
        made = UserProgram(
            train_valid_test_dataset_provider, model_provider, forward_step_func, {**extra, **added}, notes
        )
        programs.append(made)
        return left, made

    code = train_by(program, entry, list(started_as()) or [script])
    if code or not any(made.has_run for made in programs):
        sys.exit(code)


def setup_model_and_optimizer(
    model_provider_func: Callable[..., Any],
    model_type: ModelType,
    checkpointing_context: Mapping[str, Any] | None = None,
    **others: Any,
) -> tuple[list[Any], AnyOptimizer, RateSchedule]:
    """This rank's stages of the model, the optimizer and the learning rate, with the state that the run goes on from."""
    _require_decoder(model_type)
    if others:
        raise UserError(f"setup_model_and_optimizer: {next(iter(others))} is not available; leave it out")
    flow = current_flow()
    flow.program.model_provider = model_provider_func
    flow.session.build()
    flow.has_model = True
    return list(flow.session.model.stages.values()), flow.session.optimizer, RateSchedule(flow)


def build_train_valid_test_data_iterators(
    train_valid_test_dataset_provider: DatasetProvider | None,
) -> tuple[DataIterator, DataIterator | None, DataIterator | None]:
    """For each set there is. With virtual stages it may be called for each of them: they read the same."""
    flow = current_flow()
    flow.require(model=True)
    session = flow.session
    if not flow.has_data:
        flow.program.dataset_provider = train_valid_test_dataset_provider
        session.open_data()
        session.prepare()
        flow.has_data = True
    datasets = session.trainer.datasets
    train, valid, test = (
        None if samples is None else DataIterator(flow, name)
        for name, samples in zip(SETS, (datasets.train, datasets.valid, datasets.test), strict=True)
    )
    assert train is not None
    return train, valid, test


def train(
    forward_step_func: ForwardStep,
    model: list[Any],
    optimizer: AnyOptimizer,
    opt_param_scheduler: RateSchedule,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Any = None,
    config: Any = None,
    checkpointing_context: Mapping[str, Any] | None = None,
    non_loss_data_func: Any = None,
) -> tuple[int, float]:
    """The loop to --train-iters: the step it came to, and the operations of all steps so far. A signal ends the process."""
    flow = current_flow()
    flow.require(model=True, data=True)
    own_iterator(train_data_iterator, flow)
    for note in notes_of(
        process_non_loss_data_func=process_non_loss_data_func, non_loss_data_func=non_loss_data_func
    ):
        current().display.say(f"note: {note}")
    flow.program.forward_step = forward_step_func
    ending = flow.session.trainer.train()
    flow.session.conclude(ending)
    if ending is not None:
        sys.exit(ending.exit_code)
    return flow.session.state.step, flow.session.state.flops


def train_step(
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: list[Any],
    optimizer: AnyOptimizer,
    opt_param_scheduler: RateSchedule,
    config: Any = None,
) -> tuple[dict[str, Tensor], int, float, None]:
    """One step: the losses by name, 1 if the update was skipped, and the gradient norm (zeros are not counted)."""
    flow = current_flow()
    flow.require(model=True, data=True)
    iterator = own_iterator(data_iterator, flow)
    flow.program.forward_step = forward_step_func
    trainer = flow.session.trainer
    trainer.settle_batch_size()
    count = trainer.config.accumulation_of(trainer.batch_size)
    result, _ = trainer.advance([iterator.next_batch() for _ in range(count)])
    trainer.checkpoints.settle()
    return {"lm loss": torch.tensor(result.loss)}, int(not result.updated), result.gradient_norm, None


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: list[Any],
    iteration: int,
    process_non_loss_data_func: Any = None,
    config: Any = None,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Any = None,
) -> None:
    """The loss on --eval-iters steps of a set, told as `validation loss at PREFIX`, and recorded unless told otherwise."""
    flow = current_flow()
    flow.require(model=True, data=True)
    iterator = own_iterator(data_iterator, flow)
    flow.program.forward_step = forward_step_func
    evaluation = flow.session.trainer.evaluation
    loss = evaluation.test(prefix) if iterator.name == "test" else evaluation.validate(prefix)
    if loss is not None and write_to_tensorboard:
        flow.session.output.evaluated(iteration, {iterator.name: loss})


def _require_decoder(model_type: ModelType) -> None:
    if model_type is not ModelType.encoder_or_decoder:
        raise UserError(f"models here are decoders (ModelType.encoder_or_decoder), not {model_type}")


def preprocess_common_state_dict(common_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same: what differs between ranks is no part of what a checkpoint here has in common."""
    return dict(common_state_dict)


__all__ = [
    "append_to_progress_log",
    "build_train_valid_test_data_iterators",
    "evaluate_and_print_results",
    "preprocess_common_state_dict",
    "pretrain",
    "print_datetime",
    "setup_model_and_optimizer",
    "train",
    "train_step",
]
