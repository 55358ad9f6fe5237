"""Writes docs/faults.md: `make faults` writes the matrix, `make adversary` a section of its own."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
# Sections at the end of the page, each written by a command of its own.
ADDED = ("## The adversary",)


def added_sections(text: str) -> str:
    """Returns the sections at the end, which `make faults` keeps."""
    places = [at for heading in ADDED if (at := text.find(f"\n{heading}\n")) >= 0]
    return text[min(places) + 1 :] if places else ""


def write_matrix(text: str, page: Path = PAGE) -> None:
    """Writes the page except the sections at its end."""
    kept = added_sections(page.read_text(encoding="utf-8")) if page.exists() else ""
    page.write_text(f"{text.rstrip()}\n" + (f"\n{kept.rstrip()}\n" if kept else ""), encoding="utf-8")


def write_section(heading: str, text: str, page: Path = PAGE) -> None:
    """Adds or replaces one section at the end of the page."""
    assert heading in ADDED
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    rest = added_sections(before)
    matrix = before[: len(before) - len(rest)] if rest else before
    others = {name: part for name in ADDED if name != heading and (part := _section(rest, name))}
    parts = [others.get(name, "") if name != heading else f"{heading}\n\n{text}" for name in ADDED]
    page.write_text(
        "\n\n".join([matrix.rstrip(), *(p.rstrip() for p in parts if p)]) + "\n", encoding="utf-8"
    )


def _section(text: str, heading: str) -> str:
    if f"{heading}\n" not in text:
        return ""
    body = text[text.index(f"{heading}\n") :]
    end = body.find("\n## ", 1)
    return body if end < 0 else body[:end]
