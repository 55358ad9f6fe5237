"""Documents: shown outputs are real, links resolve, and both READMEs have the same sections."""

import re
import shlex
from pathlib import Path

import pytest

from pentatron.cli.launch import USAGE
from pentatron.cli.main import main
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.resolve import gather

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PARALLELISM = ROOT / "docs/how-it-works/parallelism.md"
PAGES = [
    *READMES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/use/*.md")),
    *sorted(ROOT.glob("docs/how-it-works/*.md")),
    *sorted(ROOT.glob("docs/guides/*.md")),
    *sorted(ROOT.glob("docs/zh/*/*.md")),
]
_LAUNCH = re.compile(r" *pentatron launch (slurm|torchrun) --nodes 2 ")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return [text for _, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def shown_outputs() -> list[tuple[Path, str]]:
    return [
        (page, block) for page in PAGES for block in blocks(page) if block.startswith("$ pentatron layout")
    ]


def is_shown(lines: list[str], output: str) -> bool:
    """Whether the lines occur in the output, in order; `...` stands for any number of lines."""
    at = 0
    for part in "\n".join(lines).split("...\n"):
        at = output.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@pytest.mark.parametrize(
    ("page", "block"), shown_outputs(), ids=lambda value: value.name if isinstance(value, Path) else ""
)
def test_layouts_are_drawn_as_the_command_draws_them(
    page: Path, block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    command, *lines = block.splitlines()
    assert main(command.split()[2:]) == 0
    output = capsys.readouterr().out
    assert is_shown(lines, output), "renew it with: python scripts/draw_layouts.py"
    changed = [line.replace("F0", "F9") for line in lines]
    assert not is_shown(changed, output), "another drawing would be seen"


def launch_commands() -> list[str]:
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES} | {ROOT: USAGE}
    return [line.strip() for text in pages.values() for line in text.splitlines() if _LAUNCH.match(line)]


@pytest.mark.parametrize("command", launch_commands())
def test_launch_commands_write_a_script(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in shlex.split(command)[1:] if word != "--submit"]
    assert main([*words, "--write", "-"]) == 0, capsys.readouterr().err
    assert "torchrun" in capsys.readouterr().out


def test_there_are_drawings() -> None:
    assert {page for page, _ in shown_outputs()} == {
        PARALLELISM,
        ROOT / "docs/zh/how-it-works/parallelism.md",
        ROOT / "docs/use/layouts.md",
        ROOT / "docs/zh/use/layouts.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        assert (page.parent / path).exists(), f"{page.name}: {target}"
        if anchor and not path:
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}, (
                target
            )


def commands(page: Path) -> list[str]:
    """The code of a page without its comments."""
    return [re.sub(r" *# .*", "", block) for block in blocks(page)]


def test_both_readmes_have_the_same_sections_and_commands() -> None:
    english, chinese = READMES
    assert commands(english) == commands(chinese)
    levels = [re.findall(r"^#+(?= )", BLOCK.sub("", page.read_text()), re.MULTILINE) for page in READMES]
    assert levels[0] == levels[1]
    rows = [len(re.findall(r"^\|", page.read_text(), re.MULTILINE)) for page in READMES]
    assert rows[0] == rows[1]


def test_the_methods_are_compared() -> None:
    """Checks the traffic and memory of each parallel method against guide 002."""
    table = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in PARALLELISM.read_text(encoding="utf-8").splitlines()
        if row.count("|") == 6
    }
    expected = {
        "data (DP)": ["low", "none"], "tensor (TP)": ["high", "high"], "pipeline (PP)": ["medium", "high"],
        "ZeRO-2": ["medium", "medium"], "ZeRO-3": ["high", "very high"],
    }  # fmt: skip
    assert {name: cells[2:] for name, cells in table.items() if name in expected} == expected


def train_commands() -> list[str]:
    """Returns the training commands that a reader could type: those without `...`."""
    pages = [*PAGES, *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs/LOG.md"})]
    lines = [
        line
        for page in pages
        for block in blocks(page)
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("pentatron train ") and "--help" not in line and "..." not in line
    ]
    return sorted(set(lines))


@pytest.mark.parametrize("command", train_commands())
def test_training_commands_name_data_and_length(command: str) -> None:
    """Data and length are given or come from the demo; without them a run would not start."""
    words = [
        str(ROOT / word) if word.startswith("configs/") else word
        for word in shlex.split(command, comments=True)
    ]
    draft = gather(words[2:], TRAIN)
    assert not draft.wrong
    assert any((draft.data_path, draft.corpus, draft.mock_data, draft.dataset_size)), "no data"
    assert draft.train_iters is not None, "no length"
