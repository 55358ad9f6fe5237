"""The pages under docs/how-it-works and docs/guides: the code they name exists, and their pictures are what the code draws."""

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.harness import run_distributed
from tests.parity.test_theory import LARGE, bytes_on_a_rank

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from draw_pictures import pictures  # noqa: E402  (scripts/ is not a package)
from pictures.zero import bytes_kept  # noqa: E402

PAGES = sorted(ROOT.glob("docs/how-it-works/*.md"))
# `train/step.py: train_step, ValidTokens`, or a file alone.
NAMED = re.compile(r"`((?:\w+/)+\w+\.py)(?:: ([\w., ]+))?`")


def missing_code(text: str) -> list[str]:
    """What a page names and the package does not have."""
    missing = []
    for file, names in NAMED.findall(text):
        path = next((p for p in (ROOT / "pentatron" / file, ROOT / file) if p.exists()), None)
        if path is None:
            missing.append(file)
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        missing += [f"{file}: {name}" for name in filter(None, names.split(", ")) if not defines(tree, name)]
    return missing


def defines(tree: ast.Module | ast.ClassDef, name: str) -> bool:
    head, _, rest = name.partition(".")
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == head:
            return not rest or (isinstance(node, ast.ClassDef) and defines(node, rest))
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_that_is_named_exists(page: Path) -> None:
    assert missing_code(page.read_text(encoding="utf-8")) == []


def test_missing_code_would_be_seen() -> None:
    text = "`train/step.py: train_step, gone` `train/gone.py` `train/trainer.py: Trainer.run, Trainer.gone`"
    assert missing_code(text) == ["train/step.py: gone", "train/gone.py", "train/trainer.py: Trainer.gone"]
    named = NAMED.findall((ROOT / "docs/how-it-works/step.md").read_text(encoding="utf-8"))
    assert len(named) > 30, "the page of a step says where things happen"


def test_pictures_are_what_the_code_draws() -> None:
    for name, drawn in pictures():
        kept = (ROOT / "docs/images" / name).read_text(encoding="utf-8")
        assert kept == drawn, f"{name} is out of date: make pictures"


def test_every_picture_is_shown_somewhere() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name, _ in pictures() if f"images/{name}" not in shown] == []


@pytest.mark.parametrize("stage", range(4))
def test_the_picture_of_zero_has_the_bytes_that_are_held(stage: int) -> None:
    words = f"{LARGE} --bf16 --zero-stage {stage} --global-batch-size 2"
    ranks = 2
    whole = run_distributed(bytes_on_a_rank, 1, words=f"{LARGE} --bf16")[0]["moments"] / 8
    weights, gradients, master, moments = bytes_kept(stage, ranks)
    held = run_distributed(bytes_on_a_rank, ranks, words=words)[0]
    assert held["moments"] / whole == pytest.approx(moments, rel=0.02)
    assert (held["parameters"] + held["master"]) / whole == pytest.approx(weights + master, rel=0.02)
    if stage != 2:
        # Stage 2 has a bucket on top of it, as parallelism.md says.
        assert held["gradients"] / whole == pytest.approx(gradients, rel=0.02)
