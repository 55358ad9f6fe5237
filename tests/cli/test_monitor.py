import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.cli.main import main
from pentatron.cli.monitor import newest_run
from pentatron.errors import UserError


def row(step: int, seconds: float = 2.0, busy: tuple[float, ...] = (), **more: object) -> dict[str, object]:
    found: dict[str, object] = {
        "step": step,
        "loss": 9.0 - step,
        "tokens": 100,
        "consumed_samples": 4 * step,
        "tokens_per_second": 1234.5,
        "memory_bytes": 5 * 2**20,
        "seconds": seconds,
        **more,
    }
    if busy:
        waited = [seconds - b for b in busy]
        found["ranks"] = {
            "busy_seconds": list(busy),
            "collective_seconds": waited,
            "message_seconds": [0.0] * len(busy),
            "memory_bytes": [(7 + rank) * 2**20 for rank in range(len(busy))],
        }
    return found


def make_run(folder: Path, steps: int, total: int = 10, pid: int | None = None) -> Path:
    folder.mkdir(parents=True)
    write(folder, [row(s) for s in range(1, steps + 1)])
    (folder / "config.yaml").write_text(
        f"train:\n  # eval_iters: 3\n  train_iters: {total}  # flag --train-iters\n"
    )
    owner = {"host": socket.gethostname(), "pid": pid or os.getpid(), "since": "now"}
    (folder / ".lock").write_text(json.dumps(owner))
    return folder


def write(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def gone() -> int:
    """Returns the pid of a process that has exited."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_a_running_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    write(folder, [row(1), row(2, validation_loss=7.5), row(3, validation_loss=7.75), row(4)])
    assert main(["monitor", str(folder), "--once", "--interval", "5"]) == 0
    shown = capsys.readouterr().out
    assert f"{folder}: running" in shown and "\x1b" not in shown
    assert "step 4/10  " in shown and "40%  left 0:12" in shown
    assert "loss 5.0000 (mean of 4: 6.5000)" in shown
    assert "validation 7.7500 at step 3 (best 7.5000 at step 2)" in shown and "o validation" in shown
    assert "2.0 samples/s  50 tokens/s  2,000 ms a step" in shown
    assert "5 MiB" in shown and "checkpoint    none yet" in shown


def test_the_slow_rank_and_the_waiting_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    # Rank 2 is the straggler in every step but the third, where rank 3 is slower by chance.
    write(
        folder, [row(s, busy=(1.0, 1.0, 2.0 if s != 3 else 1.0, 1.0 if s != 3 else 1.9)) for s in range(1, 6)]
    )
    assert main(["monitor", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    (slow,) = (line for line in shown.splitlines() if "slowest" in line)
    assert slow.split()[0] == "2" and "slowest: 2.0 × the median" in slow
    assert slow.split()[2:5] == ["2,000", "0", "9"], "busy and waiting milliseconds, memory"
    assert "communication 38% of a step" in shown
    write(folder, [row(s, busy=(1.9, 1.9, 2.0, 1.9)) for s in range(1, 6)])
    assert main(["monitor", str(folder), "--once"]) == 0
    assert "slowest" not in capsys.readouterr().out, "a few percent are no reason to point at anyone"


def test_utilisation_is_held_against_its_aim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    ranks = {"memory_bytes": [2**30, 2**31], "gpu_utilisation": [90.0, 70.0]}
    write(folder, [row(1, ranks=ranks), row(2, ranks=ranks)])
    assert main(["monitor", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "utilisation   80% of the GPUs; aim: above 80%" in shown
    assert "2,048 MiB on rank 1, 1,024 on the rank with the least" in shown
    assert "communication" not in shown, "where waiting is not measured nothing is made up"


def test_many_ranks_are_not_all_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    busy = [1.0] * 100
    busy[77] = 1.5
    write(folder, [row(1, busy=tuple(busy)), row(2, busy=tuple(busy))])
    assert main(["monitor", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "84 more ranks" in shown and len(shown.splitlines()) < 50
    assert any(line.split()[:1] == ["77"] and "slowest" in line for line in shown.splitlines())
    assert any(line.split()[:1] == ["99"] for line in shown.splitlines()), "the fullest one"


def test_a_finished_run_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("step-00000010\n")
    assert main(["monitor", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert ": finished" in shown and "step 10/10" in shown and "left" not in shown
    assert "checkpoints/step-00000010, saved 0:0" in shown


def test_a_run_that_crashed_or_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crashed = make_run(tmp_path / "crashed", steps=4, pid=gone())
    (crashed / "train.log").write_text(" iteration 4/10 | lm loss 1 |\n")
    assert main(["monitor", str(crashed)]) == 0
    shown = capsys.readouterr().out
    assert ": crashed" in shown and "it ended after step 4 without a message" in shown
    stopped = make_run(tmp_path / "stopped", steps=4, pid=gone())
    (stopped / "train.log").write_text("stopped by SIGTERM after step 4; its checkpoint is saved\n")
    assert main(["monitor", str(stopped)]) == 0
    shown = capsys.readouterr().out
    assert ": stopped" in shown and "stopped by SIGTERM after step 4" in shown


def test_a_run_that_failed_is_shown_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", steps=4, pid=gone())
    (folder / "train.log").write_text("x\nerror: rank 3: out of GPU memory (what); try less\n")
    assert main(["monitor", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert ": crashed" in shown and "error: rank 3: out of GPU memory (what); try less" in shown
    assert "without a message" not in shown


def test_run_is_finished_after_its_closing_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    log = folder / "train.log"
    earlier = "run folder: of the first five steps\n"
    log.write_text(f"{earlier} [2026-11-15 10:00:00.0] iteration       10/      10 | lm loss: 1 |\n")
    assert main(["monitor", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert ": running" in shown and "all steps are done; the final checkpoint" in shown
    log.write_text(log.read_text() + "finished: loss 3 → 2\nrun folder: here\n")
    assert main(["monitor", str(folder)]) == 0
    assert ": finished" in capsys.readouterr().out
    ended = make_run(tmp_path / "ended", steps=10, pid=gone())
    (ended / "train.log").write_text(" [now] iteration       10/      10 | lm loss: 1 |\n")
    assert main(["monitor", str(ended)]) == 0
    assert ": crashed" in capsys.readouterr().out


def test_the_time_left_follows_a_batch_that_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 2 samples/s, 8 steps remain: two of 4 samples and six of 8 samples, which take 28 s."""
    folder = make_run(tmp_path / "run", steps=2)
    write(folder, [row(s, global_batch_size=4) for s in (1, 2)])
    with (folder / "config.yaml").open("a") as file:
        file.write("  rampup_batch_size: [4, 4, 15]  # flag\n  # global_batch_size: 8  # derived\n")
    assert main(["monitor", str(folder), "--once"]) == 0
    assert "left 0:28" in capsys.readouterr().out


def test_silent_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    os.utime(folder / "metrics.jsonl", (1e9, 1e9))
    assert main(["monitor", str(folder), "--once"]) == 0
    assert ": silent" in capsys.readouterr().out
    elsewhere = json.dumps({"host": "another", "pid": 1, "since": "now"})
    (folder / ".lock").write_text(elsewhere)
    assert main(["monitor", str(folder), "--once"]) == 0
    assert "its process cannot be checked from this machine" in capsys.readouterr().out


def test_the_lines_go_on_until_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    waits: list[float] = []

    def trains_on(seconds: float) -> None:
        waits.append(seconds)
        write(folder, [row(s) for s in range(1, 5 + 3 * len(waits))])

    monkeypatch.setattr("pentatron.cli.monitor.time.sleep", trains_on)
    assert main(["monitor", str(folder), "--interval", "0.5"]) == 0
    assert waits == [0.5, 0.5]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines[:3]] == ["4/10", "7/10", "10/10"]


def test_on_a_terminal_the_screen_is_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setattr(
        "pentatron.cli.monitor.time.sleep", lambda s: write(folder, [row(i) for i in range(1, 11)])
    )
    assert main(["monitor", str(folder)]) == 0
    first, second = capsys.readouterr().out.split("\x1b[H")[1:]
    assert "step 4/10" in first and "Ctrl-C ends the monitor" in first
    assert "step 10/10" in second and "finished" in second and "Ctrl-C" not in second
    assert second.endswith("\x1b[?25h"), "the cursor is back"


def test_without_a_folder_the_newest_run_is_watched(tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "runs" / "old", 2), make_run(tmp_path / "output_3d_parallel", 2)
    os.utime(old / "metrics.jsonl", (1, 1))
    assert newest_run(tmp_path) == new
    os.utime(new / "metrics.jsonl", (0, 0))
    assert newest_run(tmp_path) == old


def test_nothing_to_watch_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no run was found"):
        newest_run(tmp_path)
    assert main(["monitor", str(tmp_path)]) == 2
    assert "has no metrics.jsonl; name a run folder" in capsys.readouterr().err
    assert main(["monitor", str(tmp_path / "typo")]) == 2
    assert "does not exist; name a run folder" in capsys.readouterr().err


def test_a_wrong_flag_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--intervall", "3"]) == 2
    assert "did you mean --interval?" in capsys.readouterr().err
    assert main(["monitor", "a", "b"]) == 2
    assert "pentatron monitor shows one run" in capsys.readouterr().err
    assert main(["monitor", "--interval", "0"]) == 2
    assert "must be a number of seconds above 0" in capsys.readouterr().err


def test_damaged_files_of_a_run_are_shown_as_far_as_they_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'null\n[]\n{"step": 5, "loss": "low"}\n\xff\xfe\n')
    with (folder / "config.yaml").open("ab") as file:
        file.write(b"\xff\xfe\0\n")
    restart = {"rank": 1, "how": "failed", "steps_lost": 2, "after_step": 3}
    (folder / "restarts.jsonl").write_bytes(json.dumps(restart).encode() + b'\n{"rank": 1, "h')
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_bytes(b"\xff\0")
    for pid in (-1, 0, 10**30, "7"):
        (folder / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "since": "now"}))
        assert main(["monitor", str(folder), "--once"]) == 0
        shown = capsys.readouterr().out
        assert "metrics.jsonl: 4 lines are damaged and were skipped" in shown and "step 4/10" in shown
        assert "restarts      1, 2 steps lost" in shown
