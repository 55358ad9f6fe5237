"""Rendezvous: connection to rank 0, and messages for errors of torch."""

import socket
import threading
import time

import pytest

from pentatron.errors import UserError
from pentatron.parallel import rendezvous
from pentatron.parallel.rendezvous import (
    Rendezvous,
    RendezvousError,
    collective_error,
    rendezvous_error,
    slow_rendezvous_notice,
    slow_rendezvous_text,
    wait_for_rendezvous,
)


def silent(text: str) -> None:
    raise AssertionError(f"said too early: {text}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_rank_0_does_not_wait_for_a_listener() -> None:
    wait_for_rendezvous(Rendezvous("127.0.0.1", free_port()), 0, 1.0, silent)


def test_another_rank_waits_for_one_that_comes_late() -> None:
    port = free_port()

    def come_late() -> None:
        time.sleep(0.5)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()

    late = threading.Thread(target=come_late)
    late.start()
    began = time.monotonic()
    wait_for_rendezvous(Rendezvous("127.0.0.1", port), 1, 20.0, silent)
    assert time.monotonic() - began > 0.4
    late.join()


def test_a_long_wait_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.2)
    said: list[str] = []
    point = Rendezvous("127.0.0.1", free_port(), is_served=True)
    with pytest.raises(RendezvousError, match=f"rank 0 could not be reached at {point} within 1 seconds"):
        wait_for_rendezvous(point, 0, 1.0, said.append)
    assert len(said) == 1 and f"still waiting for rank 0 at {point}" in said[0]


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("Timed out after 601 seconds waiting for clients. 7/8 clients joined.",
         r"^rendezvous timed out: 7 of 8 processes joined within 601 seconds; start all of them .* WORLD_SIZE"),
        ("The server socket has failed to listen on any local network address. port: 1, code: -98, name: EADDRINUSE",
         "port of the rendezvous is taken .* set another MASTER_PORT"),
        ("[enforce fail at gloo] Unable to find address for: eth9", "network interface .* does not exist .* GLOO_SOCKET_IFNAME"),
        ("ncclInternalError: Bootstrap : no socket interface found", "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"),
        ("something else\nmore", r"the 8 processes could not form a process group \(something else\); check that MASTER_ADDR"),
    ],
)  # fmt: skip
def test_torch_errors_become_advice(message: str, advice: str) -> None:
    with pytest.raises(RendezvousError, match=advice):
        raise rendezvous_error(message, 8)


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo] Timed out waiting 2000ms for recv operation to complete",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)",
    ],
)
def test_silence_has_advice(message: str) -> None:
    found = collective_error(message, 0.5)
    assert isinstance(found, RendezvousError)
    for part in ("within 30 seconds", "--distributed-timeout-minutes", "NCCL_TIMEOUT", "NCCL_DEBUG=INFO",
                 "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE=1"):  # fmt: skip
        assert part in str(found)


def test_a_rank_that_is_gone_is_no_matter_of_the_network() -> None:
    found = collective_error("[enforce fail] Connection closed by peer [127.0.0.1]:1", 10)
    assert isinstance(found, UserError) and not isinstance(found, RendezvousError)
    assert collective_error("CUDA out of memory", 10) is None


def test_slow_rendezvous_is_reported_once() -> None:
    """If another program has rank 0's port, the other ranks wait for it until the timeout."""
    said = [slow_rendezvous_text(rank, 4, has_launcher=False) for rank in range(4)]
    assert said[0] is not None and "the 3 other processes" in said[0]
    assert said[1] is not None and "set another MASTER_PORT" in said[1] and said[2:] == [None, None]
    assert slow_rendezvous_text(1, 4, has_launcher=True) is None, "it ends with the first"
    assert slow_rendezvous_text(0, 1, has_launcher=False) is None
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rendezvous, "NOTICE_SECONDS", 0.05)
        with slow_rendezvous_notice("long", told.append):
            time.sleep(0.3)
        with slow_rendezvous_notice("short", told.append) as all_came:
            all_came()
            time.sleep(0.2)
        with slow_rendezvous_notice(None, told.append):
            time.sleep(0.2)
    assert told == ["long"]
