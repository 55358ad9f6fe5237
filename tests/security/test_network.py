"""Tests the network: messages are data from ranks of the same job, and sockets stay on the machine."""

import contextlib
import datetime
import hashlib
import hmac
import json
import os
import pickle
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pentatron.checkpoint.format import Manifest, StoredPiece, TensorRecord
from pentatron.cli.environment import RankInfo, rendezvous_address
from pentatron.errors import UserError
from pentatron.layout.ranks import Grid
from pentatron.parallel import collectives
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects
from pentatron.parallel.process_group import exchange_gpus
from pentatron.parallel.rendezvous import (
    LISTENER,
    SECRET,
    Rendezvous,
    RendezvousError,
    is_loopback,
    is_single_machine,
    job_secret,
)
from pentatron.parallel.serialization import ForgedMessage, decode, encode, sign
from pentatron.parallel.world import open_world
from pentatron.supervise.launcher import listener_for_workers
from pentatron.text import REDACTED, redact
from tests.harness import distributed
from tests.harness.forked import Forked
from tests.parallel.test_rendezvous import free_port
from tests.security.canary import Payload, pickled

CPU = torch.device("cpu")
KEY = b"k" * 32
MANIFEST = Manifest(
    3,
    {},
    {"weights/a": TensorRecord("float32", (4, 2), (StoredPiece("f", "a", (0, 0), (4, 2), None),))},
    {},
    {},
)


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**70), 0.1, float("inf"), "x\ud800\x1b", b"\x00\xff", [], (), {}, [(1,), [2]], {"a": (1, {2, 3})},
        {("w", (0, 1)): "digest", 3: frozenset({"x"})}, {"~": 1}, {"~": ["tuple", [1]]}, Path("/a/b"), MANIFEST,
    ],
    ids=repr,
)  # fmt: skip
def test_values_come_back_as_they_were(value: Any) -> None:
    found = decode(encode(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "value", [object(), torch.zeros(1), torch.Size([1]), print, {"a": [Payload(Path("x"))]}]
)
def test_unsendable_value_is_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to other ranks; .*sendable"):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80\x04", b"[" * 100_000, b'{"~":["os.system",["id"]]}', b'{"~":["checkpoint.manifest.Manifest",[1]]}',
        b'{"~":["tuple",[1]],"more":2}', b'{"~":["set",[[1]]]}', b'{"~":3}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ForgedMessage, match="cannot be decoded"):
        decode(data)


@distributed(world=2)
def test_long_and_short_values_travel_with_a_key() -> None:
    rank = dist.get_rank()
    group = Group(rank, 2, dist.group.WORLD, key=KEY)
    for length in (0, 983, 984, 985, 5000):
        # Rank 0 has a short value, rank 1 a long one.
        own = "x" * length if rank else rank
        assert gather_objects(own, group) == [0, "x" * length]
        assert broadcast_object(["y" * length, rank], group) == ["y" * length, 0]


@distributed(world=2)
def test_received_bytes_are_never_unpickled(tmp_path: Path) -> None:
    """Rank 1 does not belong to the job: it joins the collectives and sends a pickle."""
    rank, canary = dist.get_rank(), tmp_path / "canary"
    for key, said in (
        (None, "it cannot be decoded"),
        (KEY, "its HMAC does not match the secret of this job"),
    ):
        group = Group(rank, 2, dist.group.WORLD, key=key, name="all ranks")
        if rank:
            block, _ = sign(pickled(canary), None, 1, collectives._BLOCK)
            collectives._gathered(block, group)
        else:
            with pytest.raises(
                UserError, match=f"that is not from this job: {said}.*choose another --master-port"
            ):
                gather_objects("mine", group)
    assert not canary.exists()


def test_no_module_unpickles_what_ranks_send() -> None:
    package = Path(collectives.__file__).parents[1]
    for module in package.rglob("*.py"):
        text = module.read_text(encoding="utf-8")
        assert "object_list(" not in text and "gather_object(" not in text, module


# --- rendezvous ---


def met(secrets: list[bytes | None], store: Any) -> list[Any]:
    """Runs `exchange_gpus` for each rank in a thread; returns the results or errors."""
    found: list[Any] = [None] * len(secrets)

    def meet(rank: int) -> None:
        try:
            point = Rendezvous("127.0.0.1", 6001, secret=secrets[rank])
            found[rank] = exchange_gpus(store, point, f"gpu{rank}", rank, len(secrets))
        except RendezvousError as error:
            found[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def store_of_one_second() -> Any:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=1))
    return store


def test_ranks_of_one_job_agree_on_a_fresh_key() -> None:
    first, second = (met([b"s" * 32] * 3, store_of_one_second()) for _ in range(2))
    assert [gpus for gpus, _ in first] == [["gpu0", "gpu1", "gpu2"]] * 3
    keys = {key for _, key in first}
    assert len(keys) == 1 and None not in keys
    assert keys != {key for _, key in second}, "messages of one start must not be good for the next"
    assert met([None, None], store_of_one_second()) == [(["gpu0", "gpu1"], None)] * 2


@pytest.mark.parametrize("other", [b"t" * 32, None])
def test_a_rank_of_another_job_leaves_without_a_trace(other: bytes | None) -> None:
    """With two jobs on one port, a rank that meets the other job's store fails and writes nothing to it."""
    store = store_of_one_second()
    store.set("job", hmac.digest(b"s" * 32, b"name of the job", "sha256").hex())
    with pytest.raises(
        RendezvousError, match=r"another job at 127\.0\.0\.1:6001; choose another --master-port"
    ):
        exchange_gpus(store, Rendezvous("127.0.0.1", 6001, secret=other), "gpu", 1, 2)
    assert store.num_keys() == 1


def test_a_process_without_the_secret_is_refused() -> None:
    store = store_of_one_second()
    store.set("rank/1", "random gpu")
    store.set("proof/1", hashlib.sha256(b"a guess").hexdigest())
    with pytest.raises(
        RendezvousError, match=r"does not know the secret of this job .* 127\.0\.0\.1:6001, as rank 1"
    ):
        exchange_gpus(store, Rendezvous("127.0.0.1", 6001, secret=b"s" * 32), "gpu", 0, 2)


def impostor(port: int, canary: Path, joins: bool) -> int:
    """Takes the place of rank 1 and sends a pickle where rank 0 expects a value.

    `joins`: rank 0 requires no secret.
    """
    store = dist.TCPStore("127.0.0.1", port, 2, False, datetime.timedelta(seconds=20))  # type: ignore[attr-defined]
    store.get("job")
    store.set("rank/1", "random none")
    store.set("proof/1", "a guess")
    if joins:
        inner = dist.distributed_c10d.PrefixStore("default_pg", store)
        dist.init_process_group("gloo", store=inner, rank=1, world_size=2)
        with contextlib.suppress(RuntimeError):
            block, _ = sign(pickle.dumps(Payload(canary)), None, 1, collectives._BLOCK)
            collectives._gathered(block, Group(1, 2, dist.group.WORLD))
    return 0


def listening_addresses() -> set[str]:
    """Returns the addresses on which this process listens."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(entry.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state != "0A" or f"socket:[{rest[5]}]" not in own:
                continue
            if table == "tcp6":
                found.add(local)
            else:
                found.add(socket.inet_ntoa(struct.pack("=L", int(local.partition(":")[0], 16))))
    return found


@pytest.mark.parametrize("secret", ["s" * 32, ""])
@distributed(world=1, process_group=False)
def test_an_impostor_runs_nothing(tmp_path: Path, secret: str) -> None:
    """The impostor arrives before rank 1; rank 0 refuses it at the rendezvous or at its first value."""
    canary = tmp_path / "canary"
    listener = listener_for_workers(0)
    port = listener.getsockname()[1]
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK="0",
        WORLD_SIZE="2",
        **({SECRET: secret} if secret else {}),
    )
    child = Forked.of(lambda: impostor(port, canary, joins=not secret))
    os.environ[LISTENER] = str(listener.detach())
    said = (
        "does not know the secret of this job"
        if secret
        else "that is not from this job: it cannot be decoded"
    )
    point = rendezvous_address(RankInfo(0, 2, 0, 2, "none"))
    assert LISTENER not in os.environ, "programs that a rank starts must not look for its socket"
    with pytest.raises(UserError, match=said), open_world(Grid(data=2), 0, 0, CPU, 0.5, {}, point):
        raise AssertionError("it was let in")
    child.wait(30)
    assert not canary.exists()


def meet_as(rank: int, port: int, said: Path) -> int:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    point = rendezvous_address(RankInfo(rank, 2, rank, 2, "none"))
    with open_world(Grid(data=2), rank, rank, CPU, 0.5, {"--a": 1}, point) as world:
        gather_objects(None, world.all_ranks)
        said.write_text(json.dumps(sorted(listening_addresses())))
        gather_objects(None, world.all_ranks)
    return 0


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")
@distributed(world=1, process_group=False)
def test_ranks_of_one_machine_listen_on_loopback_alone(tmp_path: Path) -> None:
    port = free_port()
    ranks = [Forked.of(lambda rank=rank: meet_as(rank, port, tmp_path / str(rank))) for rank in range(2)]  # type: ignore[misc]
    assert [rank.wait(30) for rank in ranks] == [0, 0]
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == ["127.0.0.1"]


def test_which_jobs_stay_on_their_machine() -> None:
    assert (
        is_loopback("127.0.0.1")
        and is_loopback("localhost")
        and is_loopback("::1")
        and is_loopback("127.0.1.1")
    )
    # On several machines a host's own name may mean a loopback address on that host alone.
    assert not is_loopback("node0") and not is_loopback("10.0.0.1") and not is_loopback("")
    assert is_single_machine({"MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"})
    assert not is_single_machine({"MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"})
    assert not is_single_machine({"MASTER_ADDR": "node0", "WORLD_SIZE": "4"})
    assert not is_single_machine({})


@pytest.mark.skipif(sys.platform != "linux", reason="the interface has another name")
def test_sockets_of_gloo_and_nccl_follow_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = (
        {"MASTER_ADDR": address, "MASTER_PORT": "6001"} for address in ("127.0.0.1", "10.0.0.1")
    )
    chosen = {**here, "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo"}
    for environment, gloo, nccl in ((here, "lo", "lo"), (elsewhere, None, None), (chosen, "eth0", "^lo")):
        monkeypatch.setattr("os.environ", environment)
        assert rendezvous_address(RankInfo(1, 4, 1, 2, "none")) == Rendezvous(
            environment["MASTER_ADDR"], 6001
        )
        assert environment.get("GLOO_SOCKET_IFNAME") == gloo
        assert environment.get("NCCL_SOCKET_IFNAME") == nccl


def test_a_secret_is_long_and_never_shown() -> None:
    assert job_secret({}) is None and job_secret({SECRET: ""}) is None
    assert job_secret({SECRET: "x" * 16}) == b"x" * 16
    with pytest.raises(RendezvousError, match="has 4 characters, which can be guessed") as refused:
        job_secret({SECRET: "abcd"})
    assert "abcd" not in str(refused.value)
    assert redact(f"{SECRET}=0123456789abcdef torchrun") == f"{SECRET}={REDACTED} torchrun"
    assert "kkk" not in repr(Group(0, 2, key=KEY)) + repr(Rendezvous("a", 1, secret=KEY))
