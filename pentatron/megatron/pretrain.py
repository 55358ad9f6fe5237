"""`pretrain()`, its steps one by one, and checkpoints, over Pentatron's session."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pentatron.cli.main import train_program
from pentatron.errors import UserError
from pentatron.megatron import arguments
from pentatron.megatron.datasets import DatasetProvider
from pentatron.megatron.initialize import SETS, DataIterator, RateSchedule, Stepwise, current_stepwise
from pentatron.megatron.program import ForwardStep, UserProgram
from pentatron.megatron.state import current_run, script_command
from pentatron.megatron.utils import ModelType
from pentatron.optim.build import AnyOptimizer


def pretrain(
    train_valid_test_dataset_provider: DatasetProvider | None,
    model_provider: Callable[..., Any],
    model_type: ModelType,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Any = None,
    extra_args_provider: arguments.ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
    non_loss_data_func: Any = None,
) -> None:
    """Trains as the command line says, and returns when training is done.

    Exits the process after an error, after `--help`, and in the process that started the workers.
    """
    notes = arguments.notes_without_effect(
        process_non_loss_data_func=process_non_loss_data_func,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        non_loss_data_func=non_loss_data_func,
    )
    entry, extra = arguments.script_entry_point(args_defaults or {})
    user_program = UserProgram(
        train_valid_test_dataset_provider, model_provider, forward_step_func, extra, notes
    )

    def program(words: list[str]) -> tuple[list[str], UserProgram]:
        _require_decoder(model_type)
        rest, added = arguments.take_extra_arguments(words, extra_args_provider, entry)
        user_program.extra = {**extra, **added}
        return rest, user_program

    code = train_program(program, entry, list(script_command() or sys.argv[:1]))
    if code or not user_program.has_run:
        sys.exit(code)


def _require_decoder(model_type: ModelType) -> None:
    if model_type is not ModelType.encoder_or_decoder:
        raise UserError(f"only decoder models are supported (ModelType.encoder_or_decoder), not {model_type}")


def setup_model_and_optimizer(
    model_provider_func: Callable[..., Any],
    model_type: ModelType,
    checkpointing_context: Mapping[str, Any] | None = None,
    **others: Any,
) -> tuple[list[Any], AnyOptimizer, RateSchedule]:
    """Builds this rank's stages, the optimizer and the learning-rate schedule; loads a checkpoint if
    resuming.
    """
    _require_decoder(model_type)
    if others:
        raise UserError(f"setup_model_and_optimizer: {next(iter(others))} is not available; leave it out")
    stepwise = current_stepwise()
    stepwise.program.model_provider = model_provider_func
    stepwise.session.build()
    stepwise.has_model = True
    return list(stepwise.session.model.stages.values()), stepwise.session.optimizer, RateSchedule()


def build_train_valid_test_data_iterators(
    train_valid_test_dataset_provider: DatasetProvider | None,
) -> tuple[DataIterator, DataIterator | None, DataIterator | None]:
    """Returns an iterator for each set, None for an empty one.

    Repeated calls, one per virtual stage, share the data.
    """
    stepwise = current_stepwise(model=True)
    session = stepwise.session
    if not stepwise.has_data:
        stepwise.program.dataset_provider = train_valid_test_dataset_provider
        session.open_data()
        session.prepare()
        stepwise.has_data = True
    train, valid, test = (
        None if getattr(session.trainer.datasets, samples) is None else DataIterator(stepwise, name)
        for name, samples in SETS.items()
    )
    assert train is not None
    return train, valid, test


def _begin_steps(forward_step: ForwardStep, data_iterator: Any) -> tuple[Stepwise, DataIterator]:
    """Returns the run, which uses this forward step from now on, and its data iterator.

    `data_iterator` may be a list with one for each virtual stage.
    """
    stepwise = current_stepwise(model=True, data=True)
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else data_iterator
    if not isinstance(first, DataIterator) or first.stepwise is not stepwise:
        raise UserError(
            "the data iterator is none of build_train_valid_test_data_iterators(); pass what that returned"
        )
    stepwise.program.forward_step = forward_step
    return stepwise, first


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
    """Trains to --train-iters and returns the last step and the FLOPs of all steps.

    Exits the process after a signal.
    """
    stepwise, _ = _begin_steps(forward_step_func, train_data_iterator)
    for note in arguments.notes_without_effect(
        process_non_loss_data_func=process_non_loss_data_func, non_loss_data_func=non_loss_data_func
    ):
        current_run().display.say(f"note: {note}")
    ending = stepwise.session.trainer.train()
    stepwise.session.conclude(ending)
    if ending is not None:
        sys.exit(ending.exit_code)
    return stepwise.session.state.step, stepwise.session.state.flops


def train_step(
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: list[Any],
    optimizer: AnyOptimizer,
    opt_param_scheduler: RateSchedule,
    config: Any = None,
) -> tuple[dict[str, Tensor], int, float, None]:
    """Trains one step; returns losses by name, 1 if the update was skipped, the gradient norm, and None."""
    stepwise, iterator = _begin_steps(forward_step_func, data_iterator)
    trainer = stepwise.session.trainer
    trainer.update_batch_size()
    count = trainer.config.accumulation_of(trainer.batch_size)
    result, _ = trainer.advance(list(itertools.islice(iterator.batches, count)))
    trainer.checkpoints.commit_pending()
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
    """Prints the loss of --eval-iters steps, and records it if `write_to_tensorboard`."""
    stepwise, iterator = _begin_steps(forward_step_func, data_iterator)
    evaluation = stepwise.session.trainer.evaluation
    loss = evaluation.test(prefix) if iterator.name == "test" else evaluation.validate(prefix)
    if loss is not None and write_to_tensorboard:
        stepwise.session.output.evaluated(iteration, {iterator.name: loss})


# --- checkpoints ---


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Mapping[str, Any] | None = None,
    train_data_iterator: Any = None,
    ft_client: Any = None,
    preprocess_common_state_dict_fn: Any = None,
) -> None:
    """Saves a checkpoint of the current step, unless it is saved already. It contains the data position."""
    stepwise = current_stepwise(model=True, data=True)
    step = stepwise.session.state.step
    if iteration != step:
        raise UserError(
            f"save_checkpoint: the run is at iteration {step}, not {iteration}; pass what train() returned"
        )
    trainer = stepwise.session.trainer
    trainer.save()
    # The program may change weights or exit next, so an asynchronous save must have copied the weights.
    trainer.checkpoints.saver.wait_until_copied()
    if trainer.state.step >= trainer.total_steps:
        trainer.checkpoints.commit_pending(wait=True)


def maybe_finalize_async_save(blocking: bool = False) -> None:
    """Commits an asynchronous save if all ranks have written their part; `blocking` waits for them."""
    current_stepwise(model=True, data=True).session.trainer.checkpoints.commit_pending(blocking)


def preprocess_common_state_dict(common_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy: the common state of a checkpoint has no rank-dependent entries here."""
    return dict(common_state_dict)


class BasicLocalCheckpointManager:
    """Checkpoints on the local disks of nodes, which are not available."""

    def __init__(self, root_local_ckpt_dir: str) -> None:
        raise RuntimeError(
            "the local checkpoint manager is not integrated; leave --non-persistent-ckpt-type local out, and save to a shared folder"
        )
