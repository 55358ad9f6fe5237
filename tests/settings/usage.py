"""Finds the settings that the source reads by walking over its syntax trees.

A read counts if it can change what a run does: `config.optim.lr`, `self.config.lr` in a class that is given
an `OptimConfig`, `draft.lr` in a derivation. Rules and needs only judge a value and do not count.
"""

import ast
from collections import defaultdict
from pathlib import Path

from pentatron.settings.run_config import all_settings, sections

PACKAGE = Path(__file__).parents[2] / "pentatron"
DECLARATIONS = {"model.py", "training.py", "parallel.py", "output.py", "declaration.py"}
ONLY_CHECK = {"rules.py", "layout_rules.py", "model_rules.py", "training_rules.py", "needs.py", "settings.py"}
# Variables that hold a `Settings` or a `Draft`.
DRAFTS = {"draft", "flags", "s", "settings"}
SECTION_OF = {cls.__name__: section for section, cls in sections().items()}


def settings_read_anywhere() -> dict[str, set[str]]:
    """Returns {setting: modules that read it}."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if module.parts[0] == "settings" and module.name in DECLARATIONS | ONLY_CHECK:
            continue
        for name in settings_read(path.read_text(encoding="utf-8")):
            found[name].add(str(module))
    return found


def settings_read(source: str) -> set[str]:
    """Returns the settings that the source text of a module reads."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in all_settings():
            base = _last_name(node.value)
            if base in DRAFTS or all_settings()[node.attr].section in {base, *aliases[base]}:
                found.add(node.attr)
    return found & set(all_settings())


def _aliases(tree: ast.AST) -> defaultdict[str, set[str]]:
    """Returns {variable or attribute name: sections that it holds somewhere in the module}."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
            if node.annotation.id in SECTION_OF:
                found[node.arg].add(SECTION_OF[node.annotation.id])
        elif isinstance(node, ast.Assign):
            for target, value in _pairs(node.targets[0], node.value):
                if isinstance(value, ast.Attribute) and value.attr in sections():
                    found[_last_name(target)].add(value.attr)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts))
    return [(target, value)]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
