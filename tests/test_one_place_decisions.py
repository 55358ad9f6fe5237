"""Settings that `decide` may ignore are read in `settings/decisions.py` only."""

import ast
from collections.abc import Iterator
from pathlib import Path

from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from tests.support import resolved

PACKAGE = Path(__file__).parent.parent / "pentatron"
DECIDING = {
    *decide(resolved().config, DeviceFacts()).no_effect,
    *("compile", "cuda_graphs", "fused_cross_entropy", "fp8_format"),
}
DECIDES = {"settings/decisions.py"}
# Other readers, which decide nothing, with the reason.
ALLOWED = {
    "settings/parallel.py": "the declaration names the precision in words",
    "settings/core_config.py": "Megatron's name for a setting, asked by layers of users",
    "models/layer_specs.py": "the words of a spec, which ask for what the settings ask for",
    "megatron/arguments.py": "Megatron's name for a setting, in get_args()",
    "settings/model_rules.py": "rules that refuse what fp8 cannot be combined with",
    "settings/layout_rules.py": "a rule that refuses ZeRO 3 with an optimizer in host memory",
    "settings/rules.py": "a rule that refuses CUDA graphs where they are impossible",
    "settings/needs.py": "the need of --memory-snapshot-path, which is that a history was asked for",
    "plan/search.py": "varies the setting, as a remedy for too little memory",
    "plan/advice.py": "compares with a layout in which the setting is varied",
    "cli/plan.py": "refuses what the GPU of a plan cannot, before anything is resolved",
}


def reads(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        name = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base = getattr(node.value, "attr", getattr(node.value, "id", ""))
            # Many objects have a `compile`; the setting is an attribute of a section or of `Settings`.
            other = node.attr == "compile" and base not in ("kernels", "settings", "draft", "s")
            name = None if other else node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            name = getattr(node.slice, "value", None)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            name = getattr(node.args[1], "value", None)
        if isinstance(name, str) and name in DECIDING:
            yield node.lineno, name


def found_in_package() -> dict[str, list[tuple[int, str]]]:
    found = {
        str(path.relative_to(PACKAGE)): list(reads(path.read_text(encoding="utf-8")))
        for path in PACKAGE.rglob("*.py")
    }
    return {path: lines for path, lines in found.items() if lines}


def test_deciding_settings_are_read_in_one_place() -> None:
    found = found_in_package()
    assert {path: lines for path, lines in found.items() if path not in DECIDES | ALLOWED.keys()} == {}
    assert found.keys() >= DECIDES | ALLOWED.keys(), "an exception that nothing needs is deleted"
    assert {name for path in DECIDES for _, name in found[path]} == DECIDING


def test_a_reader_elsewhere_is_seen() -> None:
    source = """
import re, torch
pattern = re.compile("x")
run = torch.compile(run)
def f(config, draft):
    if config.kernels.compile == "on" or draft["fused_update"]:
        return getattr(config.parallel, "overlap_grad_reduce")
    config.bias_swiglu_fusion = False
"""
    assert [name for _, name in sorted(reads(source))] == ["compile", "fused_update", "overlap_grad_reduce"]
