"""A run step by step, for programs with a `pretrain` of their own: what `initialize_megatron` begins."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from pentatron.data.loader import Batch
from pentatron.errors import UserError
from pentatron.megatron.program import UserProgram, as_dictionary
from pentatron.megatron.state import current
from pentatron.train.batches import micro_batches
from pentatron.train.session import Session

SETS = ("train", "validation", "test")


class Flow:
    """Which parts of the session have been done."""

    def __init__(self, session: Session, program: UserProgram) -> None:
        self.session = session
        self.program = program
        self.has_model = False
        self.has_data = False

    def require(self, model: bool = False, data: bool = False) -> None:
        if model and not self.has_model:
            raise UserError("there is no model yet; call setup_model_and_optimizer() first")
        if data and not self.has_data:
            raise UserError("there is no data yet; call build_train_valid_test_data_iterators() first")


class DataIterator(Iterator[dict[str, Tensor]]):
    """One of a run's sets: read by the functions it is given to, or micro-batch by micro-batch."""

    def __init__(self, flow: Flow, name: str) -> None:
        self.flow = flow
        self.name = name
        self._batches: Iterator[Batch] | None = None

    def next_batch(self) -> Batch:
        """This rank's next micro-batch, of whole sequences."""
        session = self.flow.session
        if self._batches is None:
            datasets = session.trainer.datasets
            samples: Any = {"train": datasets.train, "validation": datasets.valid, "test": datasets.test}[
                self.name
            ]
            consumed = session.state.consumed_samples if self.name == "train" else 0
            self._batches = micro_batches(session.config, session.world, samples, consumed)
        return next(self._batches)

    def __next__(self) -> dict[str, Tensor]:
        return as_dictionary(self.next_batch())


class RateSchedule:
    """`opt_param_scheduler`: the learning rate of the step that comes next. The loop moves it on."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def get_lr(self, param_group: Any = None) -> float:
        self.flow.require(data=True)
        trainer = self.flow.session.trainer
        return trainer.schedule.learning_rate(trainer.state.scheduled_samples)


def current_flow() -> Flow:
    flow = current().flow
    if flow is None:
        raise UserError(
            "pretrain() runs all steps itself; to call them one by one begin with initialize_megatron()"
        )
    return flow


def own_iterator(iterator: Any, flow: Flow) -> DataIterator:
    """With virtual stages there is one for each of them; they read the same."""
    first = iterator[0] if isinstance(iterator, Sequence) and iterator else iterator
    if not isinstance(first, DataIterator) or first.flow is not flow:
        raise UserError(
            "the data iterator is none of build_train_valid_test_data_iterators(); give what that returned"
        )
    return first
