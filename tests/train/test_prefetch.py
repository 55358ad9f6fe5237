"""Tests that prefetched batches keep their order, errors surface at their batch and the thread ends."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pentatron.data.loader import Batch
from pentatron.errors import UserError
from pentatron.parallel.world import single_process
from pentatron.train.batches import CopyToGPU, Prefetcher, micro_batches
from tests.support import LLAMA, resolved


class Journal:
    """Records batches whose copy starts and finishes; copies nothing."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.finished: list[int] = []
        self.threads: list[int] = []

    def enter(self) -> None:
        self.threads.append(threading.get_ident())

    def start(self, batch: Batch) -> tuple[Batch, object]:
        self.started.append(int(batch.tokens))
        return batch, len(self.started)

    def finish(self, batch: Batch, started: object) -> Batch:
        self.finished.append(int(batch.tokens))
        assert started == len(self.finished)
        return batch


def numbered(count: int, closed: list[bool] | None = None) -> Iterator[Batch]:
    try:
        for number in range(count):
            yield Batch(*(torch.tensor(number) for _ in range(4)))
        raise UserError("the data has come to an end")
    finally:
        if closed is not None:
            closed.append(True)


def wait_for(condition: object) -> None:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.005)
    assert condition()  # type: ignore[operator]


def test_order_and_the_place_of_an_error() -> None:
    drawn, journal = [], Journal()
    with pytest.raises(UserError, match="come to an end"):
        for batch in Prefetcher(numbered(20), 3, journal):
            drawn.append(int(batch.tokens))
    assert drawn == journal.started == journal.finished == list(range(20))
    assert len(journal.threads) == 1 and journal.threads[0] != threading.get_ident()


def test_a_step_is_on_its_way_before_it_is_drawn() -> None:
    journal = Journal()
    batches = Prefetcher(numbered(100), 4, journal)
    # Four batches are ready, and the thread holds a fifth.
    wait_for(lambda: len(journal.started) == 5)
    assert journal.finished == []
    next(batches)
    wait_for(lambda: len(journal.started) == 6)
    assert journal.finished == [0]


def test_threads_end_when_the_prefetcher_is_dropped() -> None:
    before = threading.active_count()
    for drawn in (0, 3):
        closed: list[bool] = []
        batches = Prefetcher(numbered(1000, closed), 2, Journal())
        for _ in range(drawn):
            next(batches)
        del batches
        wait_for(lambda found=closed: found == [True])
    wait_for(lambda: threading.active_count() <= before)


def test_on_a_cpu_no_thread_reads_ahead() -> None:
    before = threading.active_count()
    config = resolved(LLAMA).config

    class Ones:
        def __getitem__(self, index: int) -> dict[str, object]:
            row = torch.full((config.model.seq_length,), index).numpy()
            return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), row)

    batches = micro_batches(config, single_process(), Ones(), 4)
    assert next(batches).tokens[:, 0].tolist()[0] == 4
    assert threading.active_count() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU")
def test_batches_reach_the_gpu_unchanged() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    sent = [Batch(*(torch.randint(99, (4, 512)) for _ in range(4))) for _ in range(50)]
    for expected, found in zip(sent, Prefetcher(iter(sent), 2, CopyToGPU(torch.cuda.Stream(device)))):
        assert found.tokens.device == device
        # The batch is used on another stream than the copy's, and freed immediately.
        assert torch.equal((found.tokens * 2 + found.labels).cpu(), expected.tokens * 2 + expected.labels)
