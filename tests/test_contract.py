"""The contract: its data file is complete, its page agrees with it, the scoreboard judges correctly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from contract import main  # noqa: E402  (scripts/ is not a package)
from scoreboard import evidence, items  # noqa: E402
from scoreboard.items import Contract, DataError, Entry, Item, Outcome, State  # noqa: E402

SECTION_SIZES = {
    "1.1": 51, "1.2": 24, "1.3": 52, "1.4": 8, "1.5": 7, "1.6": 5,
    "1.7": 8, "1.8": 29, "1.9": 7, "1.10": 10, "1.11": 61,
}  # fmt: skip


@pytest.fixture(scope="module")
def contract() -> Contract:
    return items.load(ROOT / "docs/contract/items.yaml")


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/contract.md").read_text(encoding="utf-8")


# --- the data file ---


def test_items_are_complete(contract: Contract) -> None:
    assert [item.id for item in contract.items] == list(range(1, 263))
    sizes: dict[str, int] = {}
    for item in contract.items:
        sizes[item.section_number] = sizes.get(item.section_number, 0) + 1
    assert sizes == SECTION_SIZES
    assert [conflict.id for conflict in contract.conflicts] == [f"C{i}" for i in range(1, 33)]


def test_texts_are_undamaged(contract: Contract) -> None:
    """Checks for signs of a bad edit: an open backtick, a line break, a missing full stop."""
    for row in [*contract.items, *contract.conflicts]:
        assert row.text.count("`") % 2 == 0, row.id
        assert row.text == " ".join(row.text.split()), row.id
        assert row.text.endswith("."), row.id


def test_listed_tests_exist(contract: Contract) -> None:
    for target in contract.targets("test"):
        file, *names = target.split("[")[0].split("::")
        assert (ROOT / file).is_file(), target
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf"\b(def|class) {re.escape(name)}\b", source), target


def test_listed_parameters_exist(contract: Contract, request: pytest.FixtureRequest) -> None:
    """Checks the node ids of all files that this run has collected completely."""
    options = request.config.option
    if (
        options.keyword
        or options.deselect
        or options.markexpr != "not sweep"
        or any("::" in word for word in request.config.args)
    ):
        pytest.skip("only some tests of a file were asked for")
    found = [item.nodeid for item in request.session.items]
    files = {node.partition("::")[0] for node in found}
    of_this_run = [target for target in contract.targets("test") if target.partition("::")[0] in files]
    named = {*found, *files, *(node.partition("[")[0] for node in found)}
    assert [target for target in of_this_run if target not in named] == []


def test_decisions_exist(contract: Contract) -> None:
    for conflict in contract.conflicts:
        assert conflict.decision == items.NOT_YET or (ROOT / conflict.decision).is_file(), conflict.id


# --- the page ---


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_page_agrees_with_the_data(contract: Contract, page: str) -> None:
    rows = [cells(line) for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [(int(row[0]), row[1], row[2]) for row in rows] == [
        (item.id, " ".join(item.guides), item.text) for item in contract.items
    ], "run `make contract`"
    shown = {int(row[0]) for row in rows if row[3] == State.NOT_YET}
    assert shown == {item.id for item in contract.items if not item.shown_by}, "run `make contract`"
    assert {row[3] for row in rows} <= set(State)


def test_page_lists_the_conflicts(contract: Contract, page: str) -> None:
    rows = [cells(line) for line in page.splitlines() if re.match(r"\| C\d+ \|", line)]
    assert [(row[0], row[2]) for row in rows] == [(c.id, c.text) for c in contract.conflicts]


# --- the state of an item ---

PASSED, FAILED, SKIPPED = Outcome("passed"), Outcome("failed"), Outcome("skipped")


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ([], State.NOT_YET),
        ([PASSED], State.HOLDS),
        ([PASSED, PASSED], State.HOLDS),
        ([PASSED, FAILED], State.BROKEN),
        ([SKIPPED, FAILED], State.BROKEN),
        ([PASSED, SKIPPED], State.SKIPPED),
        ([PASSED, None], State.BROKEN),
    ],
)
def test_judge(outcomes: list[Outcome | None], state: State) -> None:
    entries = tuple(Entry("command", f"command {i}") for i in range(len(outcomes)))
    item = Item(1, "1.1 A", ("000",), "Text.", False, "", entries)
    known = {entry.key: outcome for entry, outcome in zip(entries, outcomes) if outcome}
    assert items.judge(item, known) is state


LOG = evidence.PytestLog(
    collected=["t/a.py::one", "t/a.py::two[x]", "t/a.py::two[y]", "t/a.py::crashed", "t/a.py::later"],
    results={
        "t/a.py::one": PASSED,
        "t/a.py::two[x]": PASSED,
        "t/a.py::two[y]": Outcome("failed", "failed", "no"),
    },
    files={"t/broken.py": Outcome("failed", "failed", "SyntaxError")},
    running="t/a.py::crashed",
    end="ended with exit code 7",
)


@pytest.mark.parametrize(
    ("wanted", "status", "reason"),
    [
        ("t/a.py::one", "passed", ""),
        ("t/a.py::two[x]", "passed", ""),
        ("t/a.py::two", "failed", "two[y]: no"),
        ("t/a.py", "failed", "two[y]: no"),
        ("t/a.py::tw", "failed", "no such test in t/a.py"),
        ("t/a.py::two[z]", "failed", "no such test in t/a.py"),
        ("t/a.py::crashed", "failed", "pytest ended with exit code 7 in this test"),
        ("t/a.py::later", "failed", "pytest ended with exit code 7 in t/a.py::crashed"),
        ("t/broken.py::one", "failed", "SyntaxError"),
    ],
)
def test_verdict_of_a_node_id(wanted: str, status: str, reason: str) -> None:
    outcome = LOG.verdict(wanted, known=True)
    assert outcome.status == status
    assert reason in outcome.reason


def test_verdict_of_an_unknown_file() -> None:
    assert "no file t/b.py" in LOG.verdict("t/b.py::one", known=False).reason


def test_command_outcomes(tmp_path: Path) -> None:
    assert evidence.run_command("test $PWD -ef .", tmp_path) == PASSED
    assert evidence.run_command("echo why; exit 3", tmp_path) == Outcome("failed", "exit 3", "exit 3: why")
    assert evidence.run_command("sleep 60", tmp_path, limit_s=0.1).label == "timed out"


# --- errors in the data file ---

ITEM = '- {id: 1, section: 1.1 A, guides: ["000"], text: T., shown_by: not yet}'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (f"{ITEM}\n{ITEM}", "item 1 is there twice"),
        (ITEM.replace("id: 1", "id: 2"), "item 1 is missing"),
        (f"{ITEM}\n{ITEM.replace('id: 1', 'id: 2')}", "item 2 is beyond the total of 1"),
        (ITEM.replace("text", "txt"), "item 1 has the unknown key 'txt'"),
        (ITEM.replace("text: T., ", ""), "item 1 lacks the key 'text'"),
        (ITEM.replace("text", "id"), "line 4: the key 'id' is given twice"),
        (ITEM.replace('"000"', "000"), "each quoted"),
        (ITEM.replace("not yet", "soon"), "shown_by must be 'not yet' or a list"),
        (ITEM.replace("not yet", "[{note: x}]"), "either a test or a command"),
        (ITEM.replace("not yet", "[{test: tests/}]"), "neither a test file nor"),
        (ITEM.replace("1.1 A", "Models"), "section must be a number and a title"),
        (ITEM.replace("}", ""), "not valid YAML"),
    ],
)
def test_data_errors(rows: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        items.parse(f'total: 1\nguides: {{"000": A guide}}\nitems:\n{rows}\n')
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# --- the script, end to end ---

TINY = """
    total: 5
    guides: {"000": A guide}
    items:
    - {id: 1, section: 1.1 A, guides: ["000"], text: Passes., shown_by: [{test: "test_tiny.py::test_good"}, {command: "true"}]}
    - {id: 2, section: 1.1 A, guides: ["000"], text: Fails., shown_by: [{test: "test_tiny.py::test_bad"}]}
    - {id: 3, section: 1.2 B, guides: ["000"], text: Unknown., shown_by: [{test: "test_tiny.py::test_gone"}]}
    - {id: 4, section: 1.2 B, guides: ["000"], text: "a|b.", shown_by: not yet}
    - {id: 5, section: 1.3 C, guides: ["000"], text: Skips., shown_by: [{test: "test_tiny.py::test_skip"}]}
"""
TINY_TESTS = """
    import pytest

    def test_good(): pass

    def test_bad(): assert 1 == 2

    def test_unlisted(): open("ran", "w")

    @pytest.mark.skip(reason="needs a moon")
    def test_skip(): pass
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "docs/contract").mkdir(parents=True)
    (tmp_path / "docs/contract/items.yaml").write_text(dedent(TINY))
    (tmp_path / "test_tiny.py").write_text(dedent(TINY_TESTS))
    return tmp_path


def test_script_end_to_end(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [sys.executable, ROOT / "scripts/contract.py", "--root", tiny]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "contract: 1 of 5 items hold, 2 broken, 1 not yet, 1 skipped here"
    assert "test_tiny.py::test_bad: assert 1 == 2" in done.stdout
    assert "test_tiny.py::test_gone: there is no such test in test_tiny.py" in done.stdout
    assert "test_tiny.py::test_skip: needs a moon" in done.stdout
    assert not (tiny / "ran").exists(), "a test that no item lists was run"
    page = (tiny / "docs/contract.md").read_text(encoding="utf-8")
    states = [cells(line)[3] for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert states == ["holds", "broken", "broken", "not yet", "skipped"]

    assert main(["--root", str(tiny)]) == 1
    assert (tiny / "docs/contract.md").read_text(encoding="utf-8") == page, "the page differs from run to run"
    assert capsys.readouterr().out == done.stdout


def test_section_and_list_leave_the_page_alone(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tiny), "--list"]) == 0
    assert capsys.readouterr().out.endswith("contract: 4 of 5 items have entries, 1 not yet\n")
    assert main(["--root", str(tiny), "--section", "1.3"]) == 0
    assert capsys.readouterr().out.endswith(
        "contract 1.3: 0 of 1 items hold, 0 broken, 0 not yet, 1 skipped here\n"
    )
    assert not (tiny / "docs/contract.md").exists()


def test_bad_data_is_one_sentence(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "docs/contract/items.yaml").write_text(dedent(TINY).replace("id: 4", "id: 3"))
    assert main(["--root", str(tiny)]) == 2
    assert capsys.readouterr().err == "docs/contract/items.yaml: item 3 is there twice.\n"


def test_items_without_evidence_say_what_they_wait_for(contract: Contract, page: str) -> None:
    for item in contract.items:
        assert bool(item.waits_for) == (not item.shown_by), item.id
        assert item.waits_for in page


def test_an_item_that_is_shown_waits_for_nothing() -> None:
    text = (ROOT / "docs/contract/items.yaml").read_text(encoding="utf-8")
    wrong = text.replace("\n    shown_by:\n", "\n    waits_for: something.\n    shown_by:\n", 1)
    with pytest.raises(DataError, match="waits_for is for items"):
        items.parse(wrong)
