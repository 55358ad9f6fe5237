"""A disk that is full takes lines from the log, and no training."""

from pathlib import Path

import pytest

from pentatron.monitor.display import Silent
from pentatron.monitor.recorder import Recorder
from pentatron.train.output import Output

FULL = Path("/dev/full")


class Said(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


class Failing(Recorder):
    name = "numbers.txt"

    def saved(self, step: int) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.skipif(not FULL.exists(), reason="a device of Linux")
def test_lines_that_cannot_be_written_are_told_of_once() -> None:
    display = Said()
    output = Output(display, FULL.open("w", encoding="utf-8"), [Failing()])
    for step in (1, 2):
        output.say(f"step {step}")
        output.saved(step, "saved")
    output.close()
    told = [text for text in display.texts if text.startswith("warning: ")]
    assert [text for text in display.texts if text not in told] == ["step 1", "step 2"]
    assert len(told) == 2 and "train.log cannot be written (No space left on device)" in told[0]
    assert "numbers.txt cannot be written" in told[1]
