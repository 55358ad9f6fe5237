"""Files are renamed, synced and given temporary names in one module: pentatron/files.py."""

import ast
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pentatron"
THE_PLACE = "files.py"

OF_OS = frozenset({"rename", "renames", "replace", "link", "fsync", "fdatasync", "sync"})


def breaches(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """Returns the lines that rename, replace or sync files, or make temporary ones."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, "tempfile") for alias in node.names if alias.name == "tempfile"]
        elif isinstance(node, ast.ImportFrom):
            named = {alias.name for alias in node.names} if node.module == "os" else set()
            found += [(node.lineno, f"os.{name}") for name in sorted(named & OF_OS)]
            found += [(node.lineno, "tempfile")] * (node.module == "tempfile")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found += [(node.lineno, f"os.{node.attr}")] * (node.attr in OF_OS)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not _is_os(node.func):
            # `str.replace` takes two arguments; `datetime.replace` and `dataclasses.replace` take keywords.
            one = len(node.args) == 1 and not node.keywords
            found += [(node.lineno, f".{node.func.attr}()")] * (
                one and node.func.attr in ("rename", "replace")
            )
    return found


def _is_os(function: ast.Attribute) -> bool:
    return isinstance(function.value, ast.Name) and function.value.id == "os"


def breaches_of(path: Path) -> list[tuple[int, str]]:
    return breaches(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_files_are_renamed_and_synced_in_one_place() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 100
    found = {
        (name, what): line
        for path in sources
        if (name := path.relative_to(PACKAGE).as_posix()) != THE_PLACE
        for line, what in breaches_of(path)
    }
    assert found == {}


def test_the_rule_sees_what_it_forbids() -> None:
    """Control."""
    wrong = """
import tempfile
from tempfile import mkdtemp
from os import fsync, path
os.replace(a, b)
os.fdatasync(file)
submit(os.fsync, descriptor)
Path(a).rename(b)
half.replace(whole)
"""
    seen = [what for _, what in breaches(ast.walk(ast.parse(wrong)))]
    assert sorted(seen) == [
        *(".rename()", ".replace()"),
        *("os.fdatasync", "os.fsync", "os.fsync", "os.replace"),
        *("tempfile", "tempfile"),
    ]
    right = "text.replace('a', 'b'); dataclasses.replace(x, y=1); now.replace(hour=3); os.path.join(a, b); files.rename(a, b)"
    assert breaches(ast.walk(ast.parse(right))) == []
    assert breaches_of(PACKAGE / THE_PLACE)
