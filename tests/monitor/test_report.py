import io

import pytest

from pentatron.monitor.display import LiveBar, PlainLines, open_display
from pentatron.text import duration
from tests.monitor.test_log_lines import REPORT


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3600 * 2 + 61, "2:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    display = open_display("auto", out)
    assert isinstance(display, PlainLines)
    display.work("reading", 1, 10)
    display.work("reading", 5, 10)
    display.step(REPORT, 62)
    display.step(REPORT, 62)
    text = out.getvalue()
    assert text.count("reading ...") == 1, "one line per kind of work"
    assert text.count("step     7/100  loss  6.6130") == 1, "a second line only after some seconds"
    assert "8192 tokens/s" in text and "left 1:02" in text


def test_display_without_step_lines() -> None:
    out = io.StringIO()
    display = open_display("auto", out, shows_steps=False)
    display.step(REPORT, 62)
    display.say("and this is said")
    assert out.getvalue() == "and this is said\n"


def test_a_reader_that_leaves_does_not_stop_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display = PlainLines(Closed())
    display.say("this is not shown")
    display.step(REPORT, 1)
    display.close()


def test_a_live_bar_shows_loss_rate_speed_memory_and_time_left() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    display = open_display("on", out)
    assert isinstance(display, LiveBar)
    display.work("reading", 3, 10)
    display.step(REPORT, 62)
    display.say("a line [with brackets] beside the bar")
    display.close()
    text = out.getvalue()
    for part in (
        "reading",
        "training",
        "7/100",
        "6.6130",
        "2.0e-05",
        "8,192 tok/s",
        "3 MiB",
        "1:02",
        "[with brackets]",
    ):
        assert part in text, part
