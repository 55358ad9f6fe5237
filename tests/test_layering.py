"""A package imports only packages of a strictly lower level."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pentatron"

LEVELS = {
    # Modules that every package may import.
    "checksums": -1,
    "errors": -1,
    "files": -1,
    "text": -1,
    # The table of GPUs.
    "devices": 0,
    "layout": 0,
    "settings": 1,
    "ops": 2,
    "parallel": 3,
    "nn": 4,
    "optim": 4,
    "monitor": 4,
    "checkpoint": 5,
    "models": 6,
    "data": 6,
    "supervise": 6,
    "hf": 7,
    "interchange": 7,
    "plan": 7,
    "generate": 8,
    "train": 9,
    "compare": 10,
    "launch": 10,
    "bench": 10,
    "simulate": 10,
    "cli": 11,
    "megatron": 12,
}


def imported_packages(source: str) -> set[str]:
    """Returns the subpackages of pentatron that a module imports, at any nesting level."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that a reader sees the level"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("pentatron.")}


def upward_imports(package: str, source: str) -> set[str]:
    # `__main__` imports packages only when it runs.
    inside = imported_packages(source) - {package, "__version__", "__main__"}
    return {other for other in inside if LEVELS[other] >= LEVELS[package]}


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem in LEVELS)


def test_no_module_imports_upward() -> None:
    """Checks all modules in one test: hundreds of tests take far longer to report than to run."""
    assert len(MODULES) > 100
    found = {
        module: upward_imports(
            module.relative_to(PACKAGE).with_suffix("").parts[0], module.read_text(encoding="utf-8")
        )
        for module in MODULES
    }
    assert {module: packages for module, packages in found.items() if packages} == {}


def test_every_package_has_a_level() -> None:
    packages = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(LEVELS)


@pytest.mark.parametrize(
    "source",
    [
        "from pentatron.train.step import train_step",
        "import pentatron.cli.main",
        "def f():\n    from pentatron import models",
        "from pentatron.optim.update_rules import clip_factor",
    ],
)
def test_an_upward_import_is_seen(source: str) -> None:
    assert upward_imports("nn", source)


def test_settings_and_layout_do_not_import_torch() -> None:
    for package in ("layout", "settings"):
        for module in (PACKAGE / package).rglob("*.py"):
            text = module.read_text(encoding="utf-8")
            assert "import torch" not in text and "from torch" not in text, module
