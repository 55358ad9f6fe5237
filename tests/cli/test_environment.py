"""Tests which launcher is detected and which environment variables are set for torch."""

import sys

import pytest

from pentatron.cli.configure import threads_from_environment
from pentatron.cli.environment import (
    RankInfo,
    export_rank_variables,
    find_worker,
    nccl_timeout_seconds,
    parse_init_method,
    set_worker_environment,
    tasks_per_node,
)
from pentatron.cli.main import main
from pentatron.errors import UserError
from pentatron.settings.settings import ProcessFacts
from pentatron.text import parse_rendezvous_url

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_NTASKS": "11", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}  # fmt: skip


def test_missing_file_is_reported_once_per_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "train --data-args-path absent --vocab-size 9 --train-iters 1 --nproc-per-node 1".split()
    for rank, local, expected in ((0, 0, 1), (3, 1, 0), (2, 0, 1)):
        places = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "a",
            "MASTER_PORT": 1,
        }
        for name, value in places.items():
            monkeypatch.setenv(name, str(value))
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.count("--data-args-path absent does not exist") == expected
        assert ("rank 2: " in err) == (rank == 2)


def test_find_worker_returns_none_without_a_launcher() -> None:
    assert find_worker({}) is None
    assert find_worker({"HOME": "/root"}) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "16"},
        {"RANK": "0"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_STEP_ID": "0"},
    ],
    ids=[
        "a script's own WORLD_SIZE",
        "RANK alone",
        "inside an allocation",
        "a step of one task",
        "a bare step",
    ],
)
def test_this_is_no_launcher(environment: dict[str, str]) -> None:
    assert find_worker(environment) is None


def test_torchrun() -> None:
    assert find_worker(TORCHRUN) == RankInfo(5, 8, 1, 4, "torchrun")


def test_a_launcher_that_says_only_rank_and_size() -> None:
    assert find_worker({"RANK": "1", "WORLD_SIZE": "2"}) == RankInfo(1, 2, 1, 2, "torchrun")


def test_torchrun_inside_slurm_wins() -> None:
    assert find_worker({**SLURM, **TORCHRUN}) == RankInfo(5, 8, 1, 4, "torchrun")


def test_tasks_of_slurm_may_see_one_gpu_each() -> None:
    worker = find_worker({**SLURM, "SLURM_GPUS_ON_NODE": "3"})
    assert worker == RankInfo(9, 11, 1, 3, "Slurm", 3)
    assert (worker.sharing(visible=1), worker.sharing(visible=3)) == (1, 3)
    shared = RankInfo(0, 8, 0, 8, "Slurm", 4)
    assert (shared.sharing(visible=1), shared.sharing(visible=4)) == (2, 8)
    assert RankInfo(0, 8, 0, 8, "torchrun").sharing(visible=1) == 8, (
        "torchrun shows every GPU to every worker"
    )
    assert find_worker({**SLURM, "SLURM_GPUS_ON_NODE": "(null)"}) == RankInfo(9, 11, 1, 3, "Slurm")


def test_slurm() -> None:
    assert find_worker(SLURM) == RankInfo(9, 11, 1, 3, "Slurm")


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"),
    [("4(x2),3", "0", 4), ("4(x2),3", "2", 3), ("11", "0", 11), ("2,9", "1", 9), ("2,9", "2", 2)],
)
def test_slurm_tasks_of_this_node(tasks: str, node: str, local_size: int) -> None:
    worker = find_worker({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert worker is not None and worker.local_size == local_size


def test_slurm_without_tasks_per_node_is_one_node() -> None:
    environment = {k: v for k, v in SLURM.items() if k not in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")}
    assert find_worker(environment) == RankInfo(9, 11, 1, 11, "Slurm")


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("8", [8]), ("8(x2)", [8, 8]), ("4(x2),3", [4, 4, 3]), ("1,2(x3)", [1, 2, 2, 2]), ("2, 1", [2, 1])],
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "x", "4(x", "4(x)", "4x2", "-1", "4,,3"])
def test_malformed_tasks_per_node(text: str) -> None:
    with pytest.raises(UserError, match="which is not a list like"):
        tasks_per_node(text)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({**TORCHRUN, "RANK": "first"},
         "the environment variable RANK must be a number, it is 'first'; check the launcher"),
        ({**TORCHRUN, "WORLD_SIZE": ""},
         "the environment variable WORLD_SIZE must be a number, it is ''; check the launcher"),
        ({**TORCHRUN, "LOCAL_RANK": "1.5"},
         "the environment variable LOCAL_RANK must be a number, it is '1.5'; check the launcher"),
        ({**TORCHRUN, "RANK": "8"},
         "torchrun says that this process is rank 8 of 8, 1 of 4 on this machine, "
         "but ranks are from 0 to the number of ranks - 1; check the launcher"),
        ({**TORCHRUN, "LOCAL_RANK": "4"},
         "torchrun says that this process is rank 5 of 8, 4 of 4 on this machine, "
         "but ranks are from 0 to the number of ranks - 1; check the launcher"),
        ({**SLURM, "SLURM_NTASKS": "many"},
         "the environment variable SLURM_NTASKS must be a number, it is 'many'; check the launcher"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"},
         "the environment variable SLURM_LOCALID must be a number, it is missing; check the launcher"),
    ],
)  # fmt: skip
def test_malformed_environment(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        find_worker(environment)
    assert str(error.value) == sentence


# --- variables for torch ---


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replaces `os.environ` with an empty dict."""
    empty: dict[str, str] = {}
    monkeypatch.setattr("os.environ", empty)
    return empty


def test_a_workers_place_is_announced(environment: dict[str, str]) -> None:
    export_rank_variables(RankInfo(5, 8, 1, 4, "Slurm"), "tcp://10.0.0.1:6000")
    environment.pop("PYTEST_CURRENT_TEST", None)
    assert environment == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000",
    }  # fmt: skip


def test_rendezvous_of_the_launcher_takes_precedence(environment: dict[str, str]) -> None:
    environment.update(MASTER_ADDR="a", MASTER_PORT="1")
    export_rank_variables(RankInfo(0, 2, 0, 2, "torchrun"), "tcp://b:2")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("a", "1")


def test_rendezvous_without_a_port_gets_the_default(environment: dict[str, str]) -> None:
    environment["MASTER_ADDR"] = "a"
    export_rank_variables(RankInfo(0, 2, 0, 2, "Slurm"), None)
    assert environment["MASTER_PORT"] == "29500"


def test_missing_rendezvous(environment: dict[str, str]) -> None:
    with pytest.raises(UserError) as error:
        export_rank_variables(RankInfo(0, 4, 0, 4, "Slurm"), None)
    assert str(error.value) == (
        "Slurm started 4 processes, but MASTER_ADDR is not set; export MASTER_ADDR and MASTER_PORT, "
        "or give --init-method tcp://HOST:PORT"
    )


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tcp://localhost:12345", ("localhost", 12345)),
        ("tcp://10.0.0.1:1", ("10.0.0.1", 1)),
        ("tcp://[::1]:29500", ("::1", 29500)),
        ("localhost:12345", None),
        ("tcp://localhost", None),
        ("tcp://:12345", None),
        ("tcp://localhost:port", None),
        ("tcp://localhost:0", None),
        ("tcp://localhost:65536", None),
        ("tcp://localhost:12345/", None),
        ("tcp://localhost:²", None),
        ("env://", None),
        ("", None),
    ],
)
def test_parse_init_method(url: str, expected: tuple[str, int] | None) -> None:
    assert parse_rendezvous_url(url) == expected
    if expected is not None:
        assert parse_init_method(url) == (expected[0], str(expected[1]))
        return
    with pytest.raises(UserError, match="must look like tcp://HOST:PORT, for example tcp://localhost:12345"):
        parse_init_method(url)


@pytest.mark.parametrize(
    ("exported", "launcher", "threads"), [("5", "", 5), ("5", "torchrun", 5), ("1", "", 1), ("1", "torchrun", 0), ("4,2", "", 0)]
)  # fmt: skip
def test_exported_threads_are_a_wish_unless_torchrun_filled_them_in(
    environment: dict[str, str], exported: str, launcher: str, threads: int
) -> None:
    environment["OMP_NUM_THREADS"] = exported
    assert threads_from_environment(ProcessFacts(2, 2, 8, launcher)) == threads


def test_workers_inherit_threads_unless_the_user_chose(environment: dict[str, str]) -> None:
    assert set_worker_environment(3)[0] == "OMP_NUM_THREADS=3"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert ("GLOO_SOCKET_IFNAME" in environment) == (sys.platform == "linux")
    environment.update(OMP_NUM_THREADS="7", GLOO_SOCKET_IFNAME="eth0")
    assert set_worker_environment(3) == [], "nothing of ours"
    assert (environment["OMP_NUM_THREADS"], environment["GLOO_SOCKET_IFNAME"]) == ("7", "eth0")


@pytest.mark.parametrize(
    ("text", "seconds"), [("3600", 3600.0), ("1.5", 1.5), ("", None), ("x", None), ("0", None), ("-3", None)]
)
def test_nccl_timeout(text: str, seconds: float | None) -> None:
    assert nccl_timeout_seconds({"NCCL_TIMEOUT": text}) == seconds


def test_no_nccl_timeout() -> None:
    assert nccl_timeout_seconds({}) is None
