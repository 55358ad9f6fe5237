"""Tests the loss curve in the terminal and the reader of its metrics file."""

import json
import math
from pathlib import Path

from pentatron.monitor.metrics import MetricsFollower
from pentatron.monitor.view import terminal_curve


def test_a_falling_line_falls() -> None:
    lines = terminal_curve([(float(s), 10.0 - s) for s in range(1, 9)], [], 30, 4, braille=False)
    assert (
        lines[0].startswith("9 |")
        and lines[3].startswith("2 |")
        and lines[-1].split()
        == [
            *("step", "1", "step", "8"),
        ]
    )
    stars = [[i for i, letter in enumerate(line) if letter == "*"] for line in lines[:4]]
    firsts = [columns[0] for columns in stars]
    assert firsts == sorted(firsts) and len(set(firsts)) == 4
    every = {column for columns in stars for column in columns}
    assert every == set(range(min(every), max(every) + 1)), "no gap in between"


def test_dots_marks_and_nan() -> None:
    points = [(1.0, 4.0), (2.0, math.nan), (3.0, 2.0), (4.0, 2.0)]
    lines = terminal_curve(points, [(4.0, 6.0)], 20, 3)
    assert lines[0].startswith("6 ┤") and lines[0].endswith("o"), "the mark is above the curve"
    assert any(0x2800 < ord(letter) <= 0x28FF for line in lines for letter in line)
    assert max(map(len, lines)) <= 20
    assert terminal_curve([(1.0, math.nan)], [], 20, 3) == []
    assert len(terminal_curve([(1.0, 3.0)], [], 20, 3)) == 5, "one step is a curve"


def test_follower_reads_only_new_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(file)
    assert follower.poll().step == 0

    def line(step: int, **more: float) -> str:
        return json.dumps({"step": step, "loss": float(step), "seconds": 1.0, **more}) + "\n"

    file.write_text(line(1) + line(2) + '{"step": 3, "lo')
    assert follower.poll().step == 2
    with file.open("w") as out:
        # The last line is written again with a validation loss, and another step follows.
        out.write(line(1) + line(2, validation_loss=7.0) + line(3))
    seen = follower.poll()
    assert seen.step == 3 and seen.validations == {2: 7.0} and [r["step"] for r in seen.recent] == [1, 2, 3]
    # A run that resumes replaces the file; steps after its checkpoint are dropped.
    replacement = tmp_path / "new"
    replacement.write_text(line(1))
    replacement.replace(file)
    assert follower.poll().step == 1 and set(follower.seen.losses) == {1}
