"""Pytest plugin of the scoreboard: keeps only the wanted tests and logs one JSON line per event."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def matches(wanted: str, node_id: str) -> bool:
    """Checks whether a wanted id (a file, a test, or one parameter of a test) covers a collected node id."""
    return node_id == wanted or node_id.startswith((f"{wanted}::", f"{wanted}["))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--scoreboard", metavar="FOLDER", help="holds wanted.json; events.jsonl is written there"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(Path(config.getoption("--scoreboard"))))


class Recorder:
    def __init__(self, folder: Path) -> None:
        self.wanted: list[str] = json.loads((folder / "wanted.json").read_text(encoding="utf-8"))
        self.log = (folder / "events.jsonl").open("a", encoding="utf-8")
        self.status, self.reason = "passed", ""

    def emit(self, **event: object) -> None:
        self.log.write(json.dumps(event) + "\n")
        self.log.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.emit(event="file", id=report.nodeid, status=report.outcome, reason=_reason(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            covered = any(matches(wanted, item.nodeid) for wanted in self.wanted)
            (kept if covered else dropped).append(item)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
        self.emit(event="collected", ids=[item.nodeid for item in kept])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.status, self.reason = "passed", ""
        self.emit(event="start", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed or self.status == "failed":
            return
        # An expected failure is reported as a skip, yet it shows that the item does not hold.
        expected = hasattr(report, "wasxfail")
        self.status = "failed" if report.failed or expected else "skipped"
        self.reason = "expected failure" if expected else _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.emit(event="result", id=nodeid, status=self.status, reason=self.reason)

    def pytest_unconfigure(self) -> None:
        self.log.close()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns one line: the skip's message, the crash message, or the end of the traceback."""
    text = report.longrepr
    if isinstance(text, tuple):
        return str(text[2]).removeprefix("Skipped: ")
    crash = getattr(text, "reprcrash", None)
    lines = (
        crash.message.splitlines()[:1] if crash else [line for line in str(text).splitlines() if line][-1:]
    )
    return lines[0].removeprefix("E ").strip() if lines else ""
