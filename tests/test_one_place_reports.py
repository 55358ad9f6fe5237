"""Sizes, JSON output and command options are handled in one module each.

`text.py` formats sizes, `cli/output.py` prints JSON, and `cli/options.py` reads options.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pentatron"
SOURCES = sorted(PACKAGE.rglob("*.py"))
COMMANDS = sorted((PACKAGE / "cli").glob("*.py"))
# Copied next to results, to plot them where this package is not installed.
STANDS_ALONE = PACKAGE / "bench" / "plot_results.py"
# Megatron's interface for additional arguments takes an argparse parser.
THEIR_PARSER = {PACKAGE / "megatron" / "arguments.py"}
# Flags that every command has, and an option of sbatch.
NO_OPTIONS = {"--help", "--version", "--exclusive"}
_UNITS = {"KiB", "MiB", "GiB", "TiB"}
_SIZE = re.compile(r" ?[kMGT]B\b(?!/s)")


def breaches(found: Callable[[ast.AST], Iterator[str]], source: str) -> list[str]:
    return [what for node in ast.walk(ast.parse(source)) for what in found(node)]


def in_files(paths: list[Path], found: Callable[[ast.AST], Iterator[str]]) -> dict[str, list[str]]:
    said = {path: breaches(found, path.read_text(encoding="utf-8")) for path in paths}
    return {path.relative_to(PACKAGE).as_posix(): what for path, what in said.items() if what}


# --- sizes ---


def _power_of_two(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
        return all(isinstance(side, ast.Constant) for side in (node.left, node.right))
    return isinstance(node, ast.Constant) and node.value == 1024


def formatted_sizes(node: ast.AST) -> Iterator[str]:
    """Yields bytes that are divided in an f-string, and names of units."""
    if isinstance(node, ast.Constant) and node.value in _UNITS:
        yield f"the unit {node.value}"
    if not isinstance(node, ast.JoinedStr):
        return
    for value, after in zip(node.values, [*node.values[1:], None]):
        if not isinstance(value, ast.FormattedValue):
            continue
        for part in ast.walk(value.value):
            if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.Div | ast.RShift):
                continue
            text = str(after.value) if isinstance(after, ast.Constant) else ""
            if isinstance(part.op, ast.RShift) or _power_of_two(part.right) or _SIZE.match(text):
                yield f"line {node.lineno}: {ast.unparse(value)}"


def test_sizes_are_formatted_in_one_module() -> None:
    others = [path for path in SOURCES if path not in (PACKAGE / "text.py", STANDS_ALONE)]
    assert len(others) > 200 and in_files(others, formatted_sizes) == {}


def test_a_second_formatter_of_sizes_is_seen() -> None:
    text = (PACKAGE / "text.py").read_text(encoding="utf-8")
    assert len(breaches(formatted_sizes, text)) >= 6, "the module itself"
    for wrong in (
        "f'{n / 2**30:.1f} GiB'",
        "f'{n / 1024**3:.1f}'",
        "f'{n / 1024} free'",
        "f'{(a + b) / 1e6:,.1f} MB'",
        "f'{n >> 20} MiB'",
        "for unit in ('MiB', 'GiB'): pass",
    ):
        assert breaches(formatted_sizes, wrong), wrong
    for right in ("size = n / 2**30", "f'{flops / 1e9:.0f} GFLOP/s'", "f'{rate / 1e9:.0f} GB/s'"):
        assert not breaches(formatted_sizes, right), right


# --- JSON ---


def printed_json(node: ast.AST) -> Iterator[str]:
    """Yields calls that print JSON and serialize it themselves."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
        *("say", "paint", "show", "print"),
        *("sys.stdout.write", "console.print", "display.say"),
    ):
        return
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("json.dumps", "json.dump", "dumps"):
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def test_json_is_printed_in_one_module() -> None:
    assert in_files(COMMANDS, printed_json).keys() == {"cli/output.py"}


def test_json_that_a_command_prints_itself_is_seen() -> None:
    for wrong in (
        "say(json.dumps(data, indent=1))",
        "sys.stdout.write(f'{json.dumps(data)}\\n')",
        "print(json.dumps(data))",
    ):
        assert breaches(printed_json, wrong), wrong
    assert not breaches(printed_json, "file.write_text(json.dumps(data))")


# --- options ---


def options_by_hand(node: ast.AST) -> Iterator[str]:
    """Yields imports of other parsers, and comparisons of words with the name of an option."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {alias.name for alias in node.names}
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if names & {"argparse", "optparse", "getopt"} or (module == "argparse" and names != {"Namespace"}):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if module == "pentatron.settings.command_line" and "normalize_flag" in names:
            yield f"line {node.lineno}: reads flags itself"
    constants: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        constants = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".startswith", ".index", ".remove")):
        constants = node.args
    for constant in constants:
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            name = constant.value
            if re.match(r"--[a-z]", name) and name not in NO_OPTIONS:
                yield f"line {constant.lineno}: {name}"


def test_options_are_read_in_one_module() -> None:
    reader = PACKAGE / "cli" / "options.py"
    assert breaches(options_by_hand, reader.read_text(encoding="utf-8")), "the reader itself"
    others = [path for path in COMMANDS if path != reader]
    assert len(others) > 20 and in_files(others, options_by_hand) == {}
    parsers = [path for path in SOURCES if path.parent.name != "settings" and path not in THEIR_PARSER]
    assert in_files(parsers, lambda node: options_by_hand(node) if _imports(node) else iter(())).keys() <= {
        "cli/options.py"
    }


def _imports(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_options_that_a_command_reads_itself_are_seen() -> None:
    for wrong in (
        "import argparse",
        "from argparse import ArgumentParser",
        "from pentatron.settings.command_line import is_flag, normalize_flag",
        "as_json = '--json' in words",
        "if word == '--draw': pass",
        "word.startswith('--tensors=')",
        "words.remove('--no-check')",
    ):
        assert breaches(options_by_hand, wrong), wrong
    assert not breaches(options_by_hand, "if '--help' in words or '-h' in words: pass")
