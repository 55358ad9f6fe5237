"""The test harness: features of distributed tests, failure messages and clean-up."""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import RanksFailed, distributed, run_distributed
from tests.harness.client import session_zygote
from tests.harness.processes import child_pids, is_running, open_descriptors


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Checks after every test that the zygote has no child, no scratch file and no new descriptor."""
    before = session_zygote().zygote()
    descriptors = open_descriptors(before.pid)
    yield
    after = session_zygote().zygote()
    assert child_pids(after.pid) == []
    assert list(after.scratch.iterdir()) == []
    if after.pid == before.pid:
        assert open_descriptors(after.pid) == descriptors


def failure_of(function: Callable[..., Any], world: int, **arguments: Any) -> str:
    with pytest.raises(RanksFailed) as caught:
        run_distributed(function, world, **arguments)
    return str(caught.value)


# What works


def sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_can_reduce(world: int) -> None:
    assert run_distributed(sum_of_ranks, world) == [sum(range(world))] * world


@pytest.mark.parametrize(("scale", "label"), [(2, "two"), (3, "three")])
@distributed(world=2)
def test_decorated_test_takes_parameters(scale: int, label: str) -> None:
    value = torch.full((2,), float(scale))
    dist.all_reduce(value)
    assert value.tolist() == [2 * scale] * 2
    assert {"two": 2, "three": 3}[label] == scale


@distributed(world=4)
def test_tmp_path_is_shared(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def rank_and_draw() -> tuple[int, float, int]:
    return dist.get_rank(), torch.rand(()).item(), torch.get_num_threads()


def test_return_values_come_in_rank_order_and_ranks_start_alike() -> None:
    torch.manual_seed(1234)
    draw = torch.rand(()).item()
    assert run_distributed(rank_and_draw, 4) == [(rank, draw, 1) for rank in range(4)]


def long_bytes(size: int) -> bytes:
    return bytes([dist.get_rank()]) * size


def test_large_arguments_and_results_get_through() -> None:
    assert run_distributed(long_bytes, 2, size=5_000_000) == [bytes([rank]) * 5_000_000 for rank in range(2)]
    assert run_distributed(length, 2, text="x" * 5_000_000) == [5_000_000] * 2


def length(text: str) -> int:
    return len(text)


def surroundings(variable: str) -> tuple[str, str | None]:
    return str(Path.cwd()), os.environ.get(variable)


def test_ranks_see_the_callers_directory_and_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENTATRON_HARNESS_TEST", "seen")
    assert run_distributed(surroundings, 1, variable="PENTATRON_HARNESS_TEST") == [(str(tmp_path), "seen")]


def count_tests_of_this_rank(seen: list[int] = []) -> int:  # noqa: B006 - state that would outlive a test
    seen.append(1)
    return len(seen)


def test_no_state_passes_from_one_test_to_the_next() -> None:
    assert run_distributed(count_tests_of_this_rank, 2) == [1, 1]
    assert run_distributed(count_tests_of_this_rank, 2) == [1, 1]


def outlive_rank_0() -> None:
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        time.sleep(0.3)
        assert is_running(pids[0])


def test_a_rank_that_has_returned_stays_reachable_for_the_others() -> None:
    run_distributed(outlive_rank_0, 2)


def test_the_zygote_has_one_thread_only() -> None:
    assert len(list(Path(f"/proc/{session_zygote().zygote().pid}/task").iterdir())) == 1


# What is refused


def test_wrong_calls_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="world must be 1 to 8"):
        run_distributed(sum_of_ranks, 9)
    with pytest.raises(ValueError, match="must be at module level"):
        distributed(world=2)(lambda: None)
    with pytest.raises(ValueError, match="argument 'text' cannot be sent to the ranks"):
        run_distributed(length, 2, text=lambda: None)


# How failures read


def raise_on_rank_2() -> None:
    if dist.get_rank() == 2:
        raise ValueError("boom")
    dist.barrier()


def test_exception_is_reported_before_its_consequences() -> None:
    text = failure_of(raise_on_rank_2, 4)
    assert text.startswith("rank 2 of 4 raised ValueError: boom\n")
    assert 'raise ValueError("boom")' in text
    assert "in raise_on_rank_2" in text
    assert "lost the connection to another rank: rank 0, 1, 3" in text
    assert "tests/harness/" not in text


def raise_while_others_sleep() -> None:
    if dist.get_rank() == 1:
        raise KeyError("lost key")
    time.sleep(60)


def test_ranks_that_do_not_notice_a_failure_are_stopped_soon() -> None:
    started_at = time.monotonic()
    text = failure_of(raise_while_others_sleep, 2)
    assert text.startswith("rank 1 of 2 raised KeyError: 'lost key'")
    assert "rank 0 of 2 was still running" in text
    assert time.monotonic() - started_at < 10


@distributed(world=2)
def wrong_sum(expected: int) -> None:
    value = torch.ones(())
    dist.all_reduce(value)
    if dist.get_rank() == 1:
        assert int(value) == expected


def test_a_failed_assert_of_a_decorated_test_shows_the_values() -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"^rank 1 of 2 raised AssertionError: assert 2 == 5"
    ) as caught:
        wrong_sum(expected=5)
    assert "assert int(value) == expected" in str(caught.value)


def raise_long_message() -> None:
    raise ValueError("x" * 1_000_000 + "end of message")


def test_a_long_traceback_gets_through_once() -> None:
    text = failure_of(raise_long_message, 2)
    assert "end of message" in text
    assert text.count("in raise_long_message") == 1
    assert "(as rank" in text


def leave_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(3)
        os.abort()
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "headline"),
    [
        ("sys.exit", "exited with code 3 (sys.exit)"),
        ("os._exit", "exited with code 3"),
        ("abort", "was killed by SIGABRT"),
    ],
)
def test_a_rank_that_leaves_is_named_with_the_way_it_left(how: str, headline: str) -> None:
    text = failure_of(leave_on_rank_1, 2, how=how)
    assert text.splitlines()[0] == f"rank 1 of 2 {headline}"
    if how != "os._exit":  # `os._exit` writes no stack
        assert "os.abort()" in text or "sys.exit(3)" in text


def mismatch_between_two_while_one_sleeps() -> None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        time.sleep(60)
    dist.all_reduce(torch.ones(1 + 1000 * dist.get_rank()), group=pair)


def test_a_crash_inside_a_collective_comes_before_a_rank_that_only_had_to_be_stopped() -> None:
    text = failure_of(mismatch_between_two_while_one_sleeps, 3)
    assert re.match(r"rank [01] of 3 was killed by SIGABRT\n", text)
    assert "rank 2 of 3 was still running" in text


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def test_a_hang_names_the_ranks_and_shows_where_they_stood() -> None:
    text = failure_of(sleep_on_rank_1, 3, timeout=4.0)
    assert text.startswith("rank 1 of 3 had not finished after 4 s\n")
    assert "    time.sleep(600)" in text
    assert "rank 0 of 3 had not finished after 4 s" in text
    assert "rank 2 of 3 had not finished after 4 s" in text
    assert "    dist.barrier()" in text


def wait_for_a_rank_that_returned() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_a_forgotten_collective_is_a_hang_of_those_that_wait() -> None:
    text = failure_of(wait_for_a_rank_that_returned, 2, timeout=1.0)
    assert text.startswith("rank 0 of 2 had not finished after 1 s")
    assert "returned normally: rank 1" in text


def print_then_crash() -> None:
    rank = dist.get_rank()
    print(f"out of {rank}", end="", flush=False)
    os.write(2, f", err of {rank}\n".encode())
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_output_of_ranks_is_shown_with_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    text = failure_of(print_then_crash, 2)
    assert text.startswith("rank 0 of 2 was killed by SIGKILL")
    assert "[rank 0] out of 0, err of 0" in text
    assert "[rank 1] out of 1, err of 1" in text
    assert capfd.readouterr() == ("", "")


def print_only() -> None:
    print("not to be seen")


def test_output_of_ranks_is_not_mixed_into_that_of_a_passing_test(capfd: pytest.CaptureFixture[str]) -> None:
    run_distributed(print_only, 2)
    assert capfd.readouterr() == ("", "")


def test_a_run_after_failures_works() -> None:
    for function in (raise_on_rank_2, sum_of_ranks, raise_on_rank_2):
        with contextlib.suppress(RanksFailed):
            run_distributed(function, 3)
    assert run_distributed(sum_of_ranks, 3) == [3.0] * 3
