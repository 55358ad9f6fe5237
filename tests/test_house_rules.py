"""House rules that are checked in the syntax trees of all source files."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "pentatron").rglob("*.py"))
LONGEST_FILE = 600
# Megatron's functions without arguments (get_args(), mpu.*) need a global run: decision 0035.
HOLDS_THE_RUN = ROOT / "pentatron" / "megatron" / "state.py"


# One test per rule, not per file: hundreds of tests take far longer to report than to run.


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_file_length() -> None:
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert len(lengths) > 100
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def breaches(path: Path, nodes: Iterable[ast.AST]) -> list[str]:
    package, found = path.relative_to(ROOT / "pentatron").parts[0], []
    for node in nodes:
        if path != HOLDS_THE_RUN and isinstance(node, ast.Global):
            found.append(f"{path}, line {node.lineno}: a global")
        if (
            package not in ("cli", "__main__.py")
            and isinstance(node, ast.Attribute)
            and node.attr in ("environ", "getenv")
        ):
            found.append(f"{path}, line {node.lineno}: reads the environment")
    return found


def test_no_globals_and_no_environment_outside_the_command_line() -> None:
    assert [line for path in SOURCES for line in breaches(path, nodes_of(path))] == []
    wrong = list(ast.walk(ast.parse("def f():\n    global x\n    x = os.environ['A'], os.getenv('B')")))
    assert len(breaches(ROOT / "pentatron" / "nn" / "loss.py", wrong)) == 3, "control"
    assert len(breaches(ROOT / "pentatron" / "cli" / "main.py", wrong)) == 1


def test_only_megatrons_names_read_the_run_that_is_global() -> None:
    readers = [p for p in SOURCES if "pentatron.megatron" in p.read_text(encoding="utf-8")]
    assert HOLDS_THE_RUN in readers
    assert all(p.is_relative_to(HOLDS_THE_RUN.parent) for p in readers), "the package below does without"


# Names, and words of a guide that users search for.
CAPITALS = ("Tokenizer not found", "Weights & Biases")


def badly_written(nodes: Iterable[ast.AST]) -> list[str]:
    """Errors for users that begin with a capital or end with a full stop."""
    found = []
    for node in nodes:
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("UserError", "AgreedError"):
            continue
        text = node.args[0] if node.args else None
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        first, last = (str(p.value) if isinstance(p, ast.Constant) else "" for p in (parts[0], parts[-1]))
        if first.split(" ")[0].istitle() and not first.startswith(CAPITALS):
            found.append(first)
        if last.endswith(".") and not last.endswith("..."):
            found.append(last)
    return found


def test_errors_for_users_begin_small_and_end_without_a_full_stop() -> None:
    """Errors are printed after `pentatron: `, in lists and inside other errors."""
    assert {path: wrong for path in SOURCES if (wrong := badly_written(nodes_of(path)))} == {}
    wrong = "UserError('No such file')\nUserError(f'{x} is gone.')\nUserError('Weights & Biases is gone')"
    assert badly_written(ast.walk(ast.parse(wrong))) == ["No such file", " is gone."], "control"
