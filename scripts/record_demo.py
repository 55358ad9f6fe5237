"""Records the pictures of the README: runs the demo in a pseudo-terminal and draws its output.

    python scripts/record_demo.py                       # the demo as `make demo` runs it
    python scripts/record_demo.py --train-iters 40      # further arguments go to `pentatron train`

Writes docs/images/demo.svg (the terminal) and docs/images/loss.svg (the run's own curve). --run-dir must not
be given: the run is made in a temporary folder.
"""

import io
import os
import pty
import re
import shlex
import shutil
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
ROWS, COLUMNS = 50, 104
MOST_LINES = 60


def main(words: Sequence[str]) -> int:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(Path(sys.executable).with_name("pentatron")), "train", *words]
        printed, status = run_in_terminal(command, Path(scratch))
        if status != 0:
            print(f"the demo ended with exit code {status}; no picture was changed", file=sys.stderr)
            return 1
        prompt = f"$ pentatron {shlex.join(command[1:])}"
        (IMAGES / "demo.svg").write_text(terminal_picture(prompt, screen(printed)), encoding="utf-8")
        [curve] = Path(scratch).rglob("loss.svg")
        shutil.copy(curve, IMAGES / "loss.svg")
    print(f"wrote {IMAGES / 'demo.svg'} and {IMAGES / 'loss.svg'}")
    return 0


def run_in_terminal(command: Sequence[str], folder: Path) -> tuple[str, int]:
    """Runs a command in a pseudo-terminal and echoes it; returns its output and its exit code."""
    process, terminal = pty.fork()
    if process == 0:
        termios.tcsetwinsize(sys.stdout.fileno(), (ROWS, COLUMNS))
        os.chdir(folder)
        # On PATH, as in an active environment, so that no path gets into the picture.
        path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
        os.execve(
            command[0],
            command,
            {**os.environ, "PATH": path, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
        )
    printed = bytearray()
    while chunk := _read(terminal):
        printed += chunk
        sys.stdout.buffer.write(chunk)
        sys.stdout.flush()
    _, status = os.waitpid(process, 0)
    return printed.decode(errors="replace"), os.waitstatus_to_exitcode(status)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        # Linux raises this when the other end of a pseudo-terminal has closed.
        return b""


def screen(printed: str) -> list[str]:
    """Returns the lines that stay on the screen; of a redrawn line, its last state."""
    lines = []
    for line in printed.replace("\r\n", "\n").split("\n"):
        last = re.split(r"\r|\x1b\[2K", line)[-1]
        # Keeps colours, and removes other escape sequences, such as hiding the cursor.
        lines.append(re.sub(r"\x1b\[\??[\d;]*[A-Za-ln-z]", "", last).rstrip())
    while lines and not lines[-1]:
        lines.pop()
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], "⋮", *lines[-half:]]
    return lines


def terminal_picture(prompt: str, lines: Sequence[str]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text(prompt, style="bold"))
    for line in lines:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="pentatron", unique_id="demo")
    # Fonts from the network do not load inside an <img>; the reader's own monospace font is used.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    # Some renderers drop leading spaces without this attribute.
    return svg.replace("<svg ", '<svg xml:space="preserve" ', 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
