"""Tests failed rendezvous and timeouts: one sentence with advice, and a checklist on several machines."""

import contextlib
import io
import os
import socket
import time

import pytest
import torch.distributed as dist

from pentatron.cli.main import main
from pentatron.errors import UserError
from pentatron.parallel import rendezvous
from tests.cli.test_parallel_commands import free_port
from tests.harness import run_distributed

SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 50 --dataset-size 100 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --eval-interval 0 --threads-per-process 1"
).split()


def hang(*words: object, **named: object) -> None:
    time.sleep(5)
    raise UserError("this rank was stuck, and the others did not wait for it")


def train_here(run_dir: str, variables: dict[str, str], hangs: int | None = None) -> tuple[int, str]:
    """Runs `pentatron train` as a worker with `variables` of a launcher; returns exit code and stderr."""
    place = {
        "RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_WORLD_SIZE": dist.get_world_size(),
    }
    dist.destroy_process_group()
    os.environ.update({name: str(number) for name, number in place.items()}, LOCAL_RANK=str(place["RANK"]))
    os.environ.update(CUDA_VISIBLE_DEVICES="", **variables)
    if hangs == place["RANK"]:
        import pentatron.train.trainer as trainer

        trainer.train_step = hang  # type: ignore[assignment]
    if hangs is None:
        rendezvous.NOTICE_SECONDS = 0.5
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        code = main(["train", *SMALL, "--run-dir", run_dir])
    return code, told.getvalue()


def alone(tmp_path: object, **variables: str) -> list[str]:
    """Returns the stderr lines of the only worker of a run that expects two."""
    usual = {"MASTER_ADDR": "127.0.0.1", "NCCL_TIMEOUT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    [(code, told)] = run_distributed(
        train_here,
        1,
        run_dir=str(tmp_path),
        variables={**usual, "LOCAL_RANK": variables["RANK"], **variables},
    )
    assert code == 2, told
    assert "Traceback" not in told
    return told.splitlines()


def test_an_unknown_machine(tmp_path: object) -> None:
    [line] = alone(tmp_path, RANK="1", MASTER_ADDR="no such machine", MASTER_PORT="29500")
    assert line.startswith("pentatron: rank 1: the host name 'no such machine' cannot be resolved (")
    assert line.endswith(
        "set MASTER_ADDR (or --init-method) to the name or the address of the machine of rank 0"
    )


def test_rank_0_never_listens(tmp_path: object) -> None:
    port = free_port()
    waiting, line = alone(tmp_path, RANK="1", MASTER_PORT=str(port))
    assert f"rank 1: still waiting for rank 0 at 127.0.0.1:{port}" in waiting
    assert (
        f"rank 0 could not be reached at 127.0.0.1:{port} within 1 seconds (the machine answers, but nothing listens"
        in line
    )
    assert "firewall" in line and "rank 0 was started" in line


def test_a_port_that_is_taken(tmp_path: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [line] = alone(tmp_path, RANK="0", MASTER_PORT=str(port))
    assert f"port {port} cannot be used for the rendezvous" in line and "set another MASTER_PORT" in line


def test_fewer_processes_than_announced_on_several_machines(tmp_path: object) -> None:
    place = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    waiting, first, *rest = alone(tmp_path, RANK="0", MASTER_PORT=str(free_port()), **place)
    assert "rank 0: still waiting for the 1 other process of this run" in waiting
    assert "1 of 2 processes joined within" in first and "WORLD_SIZE" in first
    checks = " ".join(rest)
    assert all(word in checks for word in ("ping", "firewall", "MASTER_ADDR", "same code", "NCCL")), rest
    assert [line.split(".")[0].strip() for line in rest[1:]] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("url", ["localhost:29500", "tcp://localhost", "http://localhost:29500"])
def test_invalid_init_method(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", *SMALL, "--init-method", url]) == 2
    assert f"--init-method {url} must look like tcp://HOST:PORT" in capsys.readouterr().err


def test_a_rank_that_hangs(tmp_path: object) -> None:
    """The other rank gives up after NCCL_TIMEOUT and prints what to try."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NCCL_TIMEOUT": "3"}
    (code, told), _ = run_distributed(
        train_here, 2, run_dir=str(tmp_path), variables=variables, hangs=1, timeout=60
    )
    assert code == 1
    assert "still waiting" not in told, "they had met"
    assert "rank 0: another rank did not answer within 3 seconds, so this one stops" in told
    assert (
        "raise --distributed-timeout-minutes (or NCCL_TIMEOUT, in seconds)" in told
        and "Traceback" not in told
    )
