"""A full disk costs log lines, but does not stop training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pentatron.monitor.display import SilentDisplay
from pentatron.monitor.recorder import AppendedFile, Recorder
from pentatron.parallel.world import single_process
from pentatron.train import results, step_hooks
from pentatron.train.output import Output
from pentatron.train.run_folder import RunFolder
from pentatron.train.session import run_training
from tests.support import resolved

FULL = Path("/dev/full")


class Said(SilentDisplay):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


class Failing(Recorder):
    name = "numbers.txt"

    def saved(self, step: int) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.skipif(not FULL.is_char_device(), reason="a device of Linux")
def test_unwritable_log_lines_are_reported_once() -> None:
    display = Said()
    output = Output(display, AppendedFile(FULL, lambda text: None), [Failing()])
    for step in (1, 2):
        output.say(f"step {step}")
        output.saved(step, "saved")
    output.close()
    told = [text for text in display.texts if text.startswith("warning: ")]
    assert [text for text in display.texts if text not in told] == ["step 1", "step 2"]
    assert len(told) == 2 and "train.log cannot be written (No space left on device)" in told[0]
    assert "numbers.txt cannot be written" in told[1]


def test_files_beside_the_checkpoints_that_cannot_be_written_end_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders and a file in place of the outputs stand in for a full disk."""
    for name in ("loss.svg", "app_metrics.json"):
        (tmp_path / name).mkdir()
    (tmp_path / "profile").touch()
    words = f"--run-dir {tmp_path} --profile --profile-step-start 1 --profile-step-end 2"
    outcome = run_training(resolved(words), single_process(), resumes=True)
    log = (tmp_path / "train.log").read_text()
    assert outcome.ending is None and "finished: loss " in log and "checkpoint from iteration       5" in log
    told = " ".join(capsys.readouterr().out.split())
    for name in ("loss.svg", "app_metrics.json"):
        assert f"warning: {name} cannot be written (Is a directory); the run itself is complete" in told
    place = tmp_path / "profile" / "rank-00000.json"
    assert (
        f"warning: the profile {place} cannot be written (File exists); the run continues without it" in told
    )


@pytest.mark.parametrize("content", [None, "", '{"traceEvents": [{"ph": "X"}, {'])
def test_a_profile_that_is_not_whole_is_no_profile(content: str | None, tmp_path: Path) -> None:
    """The profiler itself does not report a missing or truncated file."""
    place = tmp_path / "rank-00000.json"

    def export(text: str | None) -> None:
        if text is not None:
            place.write_text(text)

    trace = SimpleNamespace(export_chrome_trace=lambda path: export(content))
    with pytest.raises(OSError, match=r"No such file|not whole"):
        step_hooks._export(trace, str(place))
    whole = SimpleNamespace(export_chrome_trace=lambda path: export('{"traceEvents": []\n}\n'))
    step_hooks._export(whole, str(place))


def test_a_checkpoint_that_cannot_be_read_for_a_sample_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **named: object) -> None:
        raise OSError(5, "Input/output error", "weights.bin")

    monkeypatch.setattr(results, "open_continuation", broken)
    words = f"--run-dir {tmp_path} --sample-prompt a --sample-tokens 4"
    config = resolved(words).config
    datasets: Any = SimpleNamespace(tokenizer=object())
    display = Said()
    results._show_sample(config, RunFolder(tmp_path), datasets, Output(display, None, []))
    assert display.texts == [
        "note: no sample text was generated (--sample-prompt): weights.bin: Input/output error"
    ]
