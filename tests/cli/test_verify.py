"""Runs `pentatron verify` as a user does."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pentatron.cli.main import main, run_guarded
from pentatron.cli.verify import verify_command
from tests.harness import run_distributed
from tests.harness.forked import fork_workers_too

PLANTING = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pentatron.cli.main import run_guarded
from pentatron.cli.verify import verify_command
from tests.parity.bugs import plant

plant("norm gradients not summed")
sys.exit(run_guarded(lambda: verify_command(sys.argv[1:], [sys.argv[0]])))
"""
SP = ("--tp_size", "2", "--sequence-parallel")


def verify_here(words: Sequence[str], restart: Sequence[str], fork_workers: bool) -> tuple[int, str]:
    if fork_workers:
        fork_workers_too()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run_guarded(lambda: verify_command(words, restart))
    return code, out.getvalue()


def verify(
    *words: str, restart: Sequence[str] = ("-m", "pentatron", "verify"), fork_workers: bool = False
) -> tuple[int, str]:
    """Runs `pentatron verify` in a forked process, which saves the import of torch.

    Its workers are started afresh, or forked with `fork_workers`.
    """
    named = {"words": words, "restart": restart, "fork_workers": fork_workers}
    [ended] = run_distributed(verify_here, 1, timeout=150.0, process_group=False, **named)
    return ended


def test_a_sound_layout_ends_with_code_0() -> None:
    code, out = verify(*SP)
    assert code == 0, out
    assert "2 processes in the layout ..." in out
    assert "the layout computes the same numbers as one process: all " in out


def test_a_wrong_layout_ends_with_code_1_and_names_the_parameter(tmp_path: Path) -> None:
    script = tmp_path / "planting.py"
    script.write_text(PLANTING)
    code, out = verify(*SP, "--json", restart=[str(script)], fork_workers=True)
    assert code == 1, out
    found = json.loads(out)
    assert not found["passes"] and found["processes"] == 2
    assert found["first"] == "gradients 1 of final_norm.bias", "backward comes to it first"
    worst = next(iter(found["parameters"].items()))
    assert "norm" in worst[0] and worst[1]["gradients 1"] > 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--tp_size 4 --dp_size 8",
            "this layout needs 32 processes, more than the 16 that verify starts on one machine; add --shrink-data to run 8",
        ),
        (
            "--tp_size 4 --pp_size 8 --shrink-data",
            "this layout needs 32 processes, more than the 16 that verify starts on one machine; use smaller parallel sizes",
        ),
        (
            "--zero-stage 3 --pp_size 2 --pipeline-schedule zero-bubble",
            "--pipeline-schedule zero-bubble defers weight gradients until after --zero-stage 3 has reduced the gradients of a layer and freed its weights; use 1f1b, gpipe or interleaved, or --zero-stage 2",
        ),
    ],
)
def test_layout_that_verify_cannot_run_is_refused(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words.split()]) == 2
    assert capsys.readouterr().err == f"pentatron: {sentence}\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: pentatron verify")
