"""Models are complete once built: only a layer's constructor decides how the layer computes.

`fully_shard` is the only exception.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pentatron"
SOURCES = sorted(
    path
    for name in ("nn", "models", "train", "parallel", "megatron")
    for path in (PACKAGE / name).rglob("*.py")
)

# Attributes that a layer sets in its constructor, including its parts and parameters.
CHOSEN = frozenset(
    "forward recompute fp8 scale deferred kernels cache_in_use fuses_gate cross_entropy multi_layer_graph runs_whole graph_break_reason graph_breaks "
    "options axis core_attention attention mlp experts head embedding final_norm weight bias".split()
)
# The object under construction, and the context of an autograd function.
OWN = frozenset({"self", "cls", "ctx"})
# Methods that run while a layer is built.
CONSTRUCTORS = frozenset({"__init__", "_compile", "declare_weight"})
# A function that changes finished models has such a prefix and such a parameter.
VERBS = ("use_", "fuse_", "defer_", "compile_", "tie_", "enable_", "disable_")
MODELS = frozenset({"stage", "stages", "model", "models", "module", "modules", "layer", "layers"})


def targets(node: ast.AST) -> list[ast.expr]:
    """Returns the targets of an assignment, with tuples unpacked."""
    match node:
        case ast.Assign():
            found = list(node.targets)
        case ast.AnnAssign() | ast.AugAssign():
            found = [node.target]
        case _:
            return []
    return [part for one in found for part in (one.elts if isinstance(one, ast.Tuple) else [one])]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in OWN


def sets_by_name(node: ast.AST) -> bool:
    """Whether this is `setattr(another_object, ...)`."""
    if not isinstance(node, ast.Call) or not node.args or is_own(node.args[0]):
        return False
    return ast.unparse(node.func) == "setattr"


def breaches(source: str) -> list[str]:
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        for target in targets(node):
            if isinstance(target, ast.Attribute) and target.attr in CHOSEN and not is_own(target.value):
                found.append(f"line {target.lineno}: {ast.unparse(target)} is assigned from outside")
        if sets_by_name(node):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    for function in functions(tree):
        parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        if function.name.startswith(VERBS) and parameters & MODELS:
            found.append(f"line {function.lineno}: {function.name} changes a finished model")
        if function.name in CONSTRUCTORS:
            continue
        for node in ast.walk(function):
            if any(ast.unparse(target) == "self.forward" for target in targets(node)):
                found.append(f"line {function.lineno}: self.forward is replaced after construction")
    return found


def test_layers_are_changed_by_their_constructors_alone() -> None:
    assert len(SOURCES) > 60
    found = {str(path): lines for path in SOURCES if (lines := breaches(path.read_text(encoding="utf-8")))}
    assert found == {}


def test_changes_of_built_models_are_found() -> None:
    """Control: the ways in which models used to be changed."""
    wrong = """
def use_fp8(stages):
    for module in stages:
        module.fp8 = "e4m3"
        module.forward, other = compiled(module.forward), 1
        self.stage.multi_layer_graph = None
        setattr(module, "recompute", True)

class Layer:
    def __init__(self):
        self.forward = compiled(self.forward)

    def switch(self):
        self.forward = None
"""
    found = breaches(wrong)
    assert len(found) == 6, found
    assert sorted(line.split(":")[0] for line in found) == [f"line {n}" for n in (13, 2, 4, 5, 6, 7)]
