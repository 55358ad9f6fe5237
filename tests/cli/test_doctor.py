"""`pentatron doctor` on this machine, and on one with problems."""

import json
import os

import pytest
import torch

from pentatron.cli.main import main
from pentatron.launch import machine
from pentatron.launch.machine import OK, PROBLEM, _peak, check_all_reduce, check_matmul


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "SLURM_", "GLOO_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def findings(capsys: pytest.CaptureFixture[str], healthy: bool) -> dict[tuple[str, str], dict[str, str]]:
    assert main(["doctor", "--json", "--no-trials"]) == (0 if healthy else 1)
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] == healthy
    return {(row["group"], row["name"]): row for row in told["findings"]}


def test_memory_respects_the_control_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: (2**32, 2**30))
    found = findings(capsys, healthy=True)["hardware", "memory"]
    assert found["value"] == "1 GiB of 4 GiB free" and found["advice"]


def test_doctor_reports_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = findings(capsys, healthy=True)
    assert torch.__version__ in found["software", "torch"]["value"]
    assert found["hardware", "cores"]["value"].startswith(str(len(os.sched_getaffinity(0))))
    assert "lo" in found["network", "interfaces"]["value"]
    assert found["variables", "NCCL_DEBUG"]["value"] == "INFO"
    assert found["variables", "CUDA_DEVICE_MAX_CONNECTIONS"]["value"] == "1"
    assert {"memory", "disk"} <= {name for group, name in found if group == "hardware"}
    optional = {"transformers", "tokenizers", "sentencepiece", "tensorboard", "wandb", "rich", "flash-attn"}
    assert optional <= {name for group, name in found if group == "packages"}
    assert any(group == "Slurm" for group, _ in found) and any(group == "GPUs" for group, _ in found)


def test_problems_have_advice_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond9")
    monkeypatch.setattr(machine, "_version", lambda name: "" if name in ("numpy", "wandb") else "1.0")
    found = findings(capsys, healthy=False)
    assert "names no network interface of this machine" in found["network", "interfaces"]["advice"]
    assert found["packages", "numpy"]["advice"] == "pip install numpy"
    assert found["packages", "wandb"]["state"] == OK, "what is optional may be missing"
    assert "pip install wandb for --wandb-project" in found["packages", "wandb"]["value"]
    assert main(["doctor", "--no-trials"]) == 1
    shown = capsys.readouterr().out
    assert "! numpy" in shown and "→ pip install numpy" in shown and "2 to fix first (!)" in shown


@pytest.mark.parametrize(
    ("words", "sentence"), [(["--jsn"], "unknown flag --jsn"), (["now"], "takes only flags, not 'now'")]
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_matmul_is_tried() -> None:
    assert check_matmul("cpu", 64).state == OK
    assert check_matmul("meta", 64).state == PROBLEM, "a device that computes nothing"


def test_two_processes_add_up() -> None:
    """The all-reduce passes on 2 processes; an unknown network interface is reported as a problem."""
    here = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    found = check_all_reduce("gloo", 2, here)
    assert found.state == OK and "2 processes, 1 MiB in" in found.value, found
    found = check_all_reduce("gloo", 1, {**here, "GLOO_SOCKET_IFNAME": "bond9"})
    assert found.state == PROBLEM and "GLOO_SOCKET_IFNAME" in found.advice and "bond9" in found.value, found


@pytest.mark.parametrize(("name", "figure"), [("NVIDIA GeForce RTX 3090", "71"), ("NVIDIA H100 PCIe", "756")])
def test_a_gpu_has_its_own_makers_figure(name: str, figure: str) -> None:
    assert _peak(name) == f", {figure} TFLOP/s in half precision (vendor peak)"
    assert _peak("NVIDIA RTX A6000") == ""
