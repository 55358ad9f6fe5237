"""Choice of the backend (NCCL or gloo), and destruction of the process group."""

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pentatron.layout.ranks import Grid
from pentatron.parallel import process_group, world
from pentatron.parallel.process_group import (
    all_gpus_distinct,
    destroy_process_group,
    gpu_of,
    init_process_group,
)
from pentatron.parallel.rendezvous import Rendezvous

CPU = torch.device("cpu")


def test_nccl_serves_processes_with_a_gpu_each() -> None:
    assert all_gpus_distinct(["a", "", "c"])
    assert not all_gpus_distinct(["a", "", "a"]), "two on one GPU"
    assert not all_gpus_distinct(["a", gpu_of(CPU)])


def test_gpu_is_identified_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Slurm every task may see its GPU as device 0."""
    names = iter([("NVIDIA H100", "one"), ("NVIDIA H100", "two"), ("NVIDIA A100 MIG 1g.5g", "three")])

    def properties(device: torch.device) -> SimpleNamespace:
        name, uuid = next(names)
        return SimpleNamespace(name=name, uuid=uuid)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    first = torch.device("cuda", 0)
    assert [gpu_of(first) for _ in range(3)] == ["one", "two", gpu_of(CPU)]


@pytest.mark.parametrize(("other", "backend"), [("theirs", "cpu:gloo,cuda:nccl"), ("mine", "gloo")])
def test_all_choose_by_the_gpus_of_all(other: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = dist.HashStore(), []
    store.set("rank/1", f"0123 {other}")
    monkeypatch.setattr(process_group, "rendezvous", lambda *words, **named: iter([(store, 0, 2)]))
    monkeypatch.setattr(process_group, "gpu_of", lambda device: "mine")
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **named: calls.append((words, named)))
    init_process_group(
        torch.device("cuda", 0), 0, 2, datetime.timedelta(seconds=5), Rendezvous("10.0.0.1", 6000)
    )
    [((chosen,), named)] = calls
    assert chosen == backend
    assert "device_id" not in named, (
        "messages of one group would stand in one queue, and ranks wait in a circle"
    )


def left_by(failed: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("broken off"))
    destroy_process_group(failed)
    return calls


def test_failed_rank_aborts_its_pending_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = "cpu:gloo,cuda:nccl"
    assert left_by(True, mixed, monkeypatch) == ["broken off"]
    assert left_by(False, mixed, monkeypatch) == ["destroyed"]
    assert left_by(True, "cpu:gloo,cuda:gloo", monkeypatch) == ["destroyed"]


def test_abort_error_does_not_hide_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise dist.DistBackendError("ProcessGroup abort timed out")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", fails)
    destroy_process_group(failed=True)


def test_a_world_is_left_as_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def nothing(*words: Any, **named: Any) -> None: ...

    for name in ("init_process_group", "require_same_settings", "create_groups"):
        monkeypatch.setattr(world, name, nothing)
    monkeypatch.setattr(world, "destroy_process_group", lambda failed: calls.append(failed))
    point = Rendezvous("10.0.0.1", 6000)
    with world.open_world(Grid(data=2), 0, 0, CPU, 1.0, {}, point):
        pass
    with pytest.raises(KeyboardInterrupt), world.open_world(Grid(data=2), 0, 0, CPU, 1.0, {}, point):
        raise KeyboardInterrupt
    assert calls == [False, True]
