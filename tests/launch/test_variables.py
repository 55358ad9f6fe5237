"""Tests environment variables that act on a run or are set by it, and network interfaces of NCCL."""

import pytest

from pentatron.cli.environment import nested_launcher_notices
from pentatron.cli.train import set_cuda_connections
from pentatron.launch.job import cuda_connections, environment_notices, interface_problem, matching_interfaces
from tests.support import resolved

GUIDE = {"NCCL_DEBUG": "WARN", "NCCL_TIMEOUT": "60", "HOME": "/root"}
INTERFACES = ["lo", "eth0", "eth1", "ib0", "docker0"]


def test_environment_notices() -> None:
    """NCCL_TIMEOUT has a notice of its own, as NCCL does not read it."""
    assert environment_notices(GUIDE, GUIDE, on_gpu=True, nccl=True, alone=False) == [
        "NCCL reads from the environment: NCCL_DEBUG=WARN"
    ]
    assert environment_notices(GUIDE, GUIDE, False, False, alone=False)[0].endswith(
        "through gloo here, not through NCCL, so this has no effect"
    )
    assert environment_notices(GUIDE, GUIDE, False, False, alone=True)[0].endswith(
        "one process sends no messages, so this has no effect"
    )
    assert environment_notices({"HOME": "/root"}, {}, True, True, False) == []
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert environment_notices(one, one, True, True, False) == [
        "CUDA reads from the environment: CUDA_DEVICE_MAX_CONNECTIONS=1"
    ]
    assert environment_notices(one, one, False, False, True) == [
        "CUDA_DEVICE_MAX_CONNECTIONS=1: this machine has no GPU"
    ]


@pytest.mark.parametrize(
    ("flags", "world", "is_set"),
    [
        ("", 2, False),
        ("--tensor-model-parallel-size 2", 2, True),
        ("--context-parallel-size 2", 2, True),
        ("--zero-stage 3", 2, False),
        ("--tensor-model-parallel-size 2 --zero-stage 3", 4, False),
        ("--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce", 4, True),
        (
            "--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            4,
            False,
        ),
    ],
)
def test_one_queue_where_it_helps(
    flags: str, world: int, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    config = resolved(flags, world).config
    assert (cuda_connections(config) is not None) == is_set
    set_cuda_connections(config)
    environment.pop("PYTEST_CURRENT_TEST", None)
    assert environment == ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_set else {})
    notes = environment_notices({}, environment, on_gpu=True, nccl=False, alone=True)
    assert [note.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 is set, so that") for note in notes] == [
        True
    ] * is_set
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    set_cuda_connections(config)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=eth0", ["lo", "eth1", "ib0", "docker0"]),
        ("bond0", []),
    ],
)
def test_interfaces_are_chosen_as_nccl_does(pattern: str, chosen: list[str]) -> None:
    assert matching_interfaces(pattern, INTERFACES) == chosen
    problem = interface_problem({"NCCL_SOCKET_IFNAME": pattern}, INTERFACES)
    assert (problem is None) == bool(chosen)
    assert problem is None or "this machine, which has lo, eth0" in problem


def test_torchrun_in_every_task_is_noticed() -> None:
    inside = {"SLURM_STEP_NUM_TASKS": "16", "GROUP_WORLD_SIZE": "2"}
    [note] = nested_launcher_notices(inside)
    assert (
        "Slurm started torchrun 16 times, but this run consists of 2 of them" in note
        and "--ntasks-per-node=1" in note
    )
    assert nested_launcher_notices({**inside, "SLURM_STEP_NUM_TASKS": "2"}) == []
    assert nested_launcher_notices({"SLURM_STEP_NUM_TASKS": "16"}) == [] == nested_launcher_notices({})
