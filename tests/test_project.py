"""Requirements, scripts, entry points and .gitignore agree with the package."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
# Listed by name, because users keep their own scripts in the same folder.
SCRIPTS = [
    "benchmark.sh",
    "quick_test.sh",
    *(f"run_{name}.sh" for name in "3d_parallel deepspeed megatron multinode pytorch_ddp".split()),
]
ENTRY_POINTS = [
    "megatron_core_training_example.py",
    "pretrain_gpt.py",
    "train.py",
    "train_3d_parallel.py",
    "train_megatron.py",
]


def lines(name: str) -> set[str]:
    return {line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")}


def test_requirements_are_the_core_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert lines("requirements.txt") == set(project["dependencies"])


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines("requirements.lock")}
    assert {w.split(">=")[0].lower() for w in wanted} <= pinned
    assert all("==" in line for line in lines("requirements.lock"))
    assert "torch==2.13.0" in lines("requirements.lock")


@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_scripts_are_well_formed(script: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / script], check=False).returncode == 0
    assert (ROOT / script).stat().st_mode & 0o111, "can be started as it is"


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_show_their_own_help_without_torch(name: str) -> None:
    # pretrain_gpt.py is the example of the API and defines functions of tensors.
    may_know_torch = name == "pretrain_gpt.py"
    program = (
        "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        f"assert {may_know_torch} or 'torch' not in sys.modules"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, ROOT / name], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: {name} ")


def git(*words: str, given: str = "") -> list[str]:
    # Without the developer's global gitignore.
    call = ["git", "-C", ROOT, "-c", "core.excludesFile=/dev/null", *words]
    shown = subprocess.run(call, input=given, capture_output=True, text=True, check=False)
    assert not shown.stderr, shown.stderr
    return shown.stdout.splitlines()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_git_ignores_what_the_guides_leave_and_nothing_of_ours() -> None:
    commands = yaml.safe_load((ROOT / "docs/guides/commands.yaml").read_text(encoding="utf-8"))["commands"]
    left = {
        *(f"{name}/x" for c in commands for name in (*c.get("steps", ()), *c.get("leaves", ()))),
        *"runs/demo/train.log data/my_text_document.bin exported/demo/config.json checkpoints/next/latest my.bin my.idx my.meta".split(),
        *"pentatron.sbatch pentatron.sh data.jsonl vocab.json merges.txt qwen2.5-7b-hf/config.json".split(),
    }
    assert set(git("check-ignore", "--stdin", "--no-index", given="\n".join(sorted(left)))) == left
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []
    ours = ["pentatron/data/new.py", "tests/checkpoint/new.py", "docs/data/x.bin", "new.py"]
    assert git("check-ignore", "--stdin", "--no-index", given="\n".join(ours)) == [], "control"


def test_the_builder_makes_the_configured_model() -> None:
    from gpt_builders import gpt_builder
    from model_provider import model_provider
    from tests.support import resolved

    config = resolved("--num-layers 3").config
    model = model_provider(gpt_builder, config=config)
    assert len(model.layers) == 3
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in model.parameters()), (
        "weights are drawn, not found"
    )
