"""Chinese pages have the sections, code, pictures, tables and links of the English pages."""

import os
import re
from pathlib import Path

import pytest

from tests.test_documents import BLOCK, commands
from tests.test_pages import PAGES, ROOT, missing_code

ENGLISH, CHINESE = ROOT / "docs", ROOT / "docs/zh"
# The line at the top of a page that links to the other language.
SWITCH = re.compile(r"^(?:English \| \[中文\]\((\S+)\)|\[English\]\((\S+)\) \| 中文)$", re.MULTILINE)


def translated(page: Path) -> Path:
    return CHINESE / page.relative_to(ENGLISH)


def outline(page: Path, text: str) -> dict[str, list[str]]:
    """Returns the properties that a page and its translation must share.

    A link to a translated page counts as a link to the English page.
    """
    prose = BLOCK.sub("", SWITCH.sub("", text))
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)\s]+)\)", prose)]
    found = [Path(os.path.normpath(page.parent / path)) if path else page for path, _, _ in targets]
    return {
        "headings": re.findall(r"^#+(?= )", prose, re.MULTILINE),
        "links and pictures": sorted(
            str(ENGLISH / path.relative_to(CHINESE) if path.is_relative_to(CHINESE) else path)
            for path in found
        ),
        "rows of tables": [str(len(re.findall(r"^\|", prose, re.MULTILINE)))],
        "flags": sorted(set(re.findall(r"`--[a-z][\w-]+", prose))),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ENGLISH)))
def test_a_page_is_the_same_in_chinese(page: Path) -> None:
    other = translated(page)
    english, chinese = page.read_text(encoding="utf-8"), other.read_text(encoding="utf-8")
    assert outline(page, english) == outline(other, chinese)
    assert commands(page) == commands(other)
    assert missing_code(chinese) == []
    assert re.search(r"[\u4e00-\u9fff]", chinese)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ENGLISH)))
def test_a_page_and_its_other_language_lead_to_each_other(page: Path) -> None:
    for here, there in ((page, translated(page)), (translated(page), page)):
        found = SWITCH.search(here.read_text(encoding="utf-8"))
        assert found is not None and (here.parent / (found[1] or found[2])).resolve() == there.resolve()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ENGLISH)))
def test_anchors_are_headings(page: Path) -> None:
    """Checks anchors in the same page and in other pages, in both languages."""
    for here in (page, translated(page)):
        text = BLOCK.sub("", here.read_text(encoding="utf-8"))
        for path, anchor in re.findall(r"\]\(([^)\s#]*\.md)?#([^)\s]+)\)", text):
            there = BLOCK.sub("", (here.parent / path if path else here).read_text(encoding="utf-8"))
            titles = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{here.name}: {path}#{anchor}"


def test_no_page_is_chinese_alone() -> None:
    assert {translated(page) for page in PAGES} == set(CHINESE.rglob("*.md"))
