"""Checksums of files are computed in one module: pentatron/checksums.py."""

import ast
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pentatron"
THE_PLACE = "checksums.py"

NAMES = frozenset({"crc32", "crc32_combine", "adler32"})
# Uses that are allowed elsewhere, with the reason.
ALLOWED = {
    # A checksum of message shapes that two ranks compare; no file.
    "parallel/messages.py"
}


def lines_with_crc32(nodes: Iterable[ast.AST]) -> list[int]:
    """Returns the lines that use a checksum function of zlib or binascii."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [node.lineno] * (node.value.id in ("zlib", "binascii") and node.attr in NAMES)
        elif isinstance(node, ast.ImportFrom) and node.module in ("zlib", "binascii"):
            found += [node.lineno] * any(alias.name in NAMES for alias in node.names)
    return found


def lines_of(path: Path) -> list[int]:
    return lines_with_crc32(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_checksums_of_files_are_computed_in_one_place() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 100
    found = {path.relative_to(PACKAGE).as_posix() for path in sources if lines_of(path)}
    assert found == {THE_PLACE, *ALLOWED}


def test_the_rule_sees_what_it_forbids() -> None:
    """Control."""
    wrong = "zlib.crc32(b'')\nfrom binascii import crc32\nsubmit(zlib.crc32, data)"
    assert sorted(lines_with_crc32(ast.walk(ast.parse(wrong)))) == [1, 2, 3]
    right = "import zlib\nzlib.decompress(b'')\nfrom pentatron.checksums import crc32\ncrc32(b'')"
    assert lines_with_crc32(ast.walk(ast.parse(right))) == []
