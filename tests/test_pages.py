"""Pages of the documentation: named code exists, and pictures match what the code draws."""

import ast
import re
import sys
from pathlib import Path

import pytest

from pentatron.layout.check import check
from pentatron.layout.schedules import FOLDED, KINDS, training_schedule
from pentatron.settings.run_config import all_settings
from tests.harness import run_distributed
from tests.parity.test_theory import LARGE, bytes_on_a_rank

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from draw_pictures import pictures  # noqa: E402  (scripts/ is not a package)
from pictures.zero import bytes_kept  # noqa: E402

PAGES = [
    *sorted(ROOT.glob("docs/use/*.md")),
    *sorted(ROOT.glob("docs/how-it-works/*.md")),
    *sorted(ROOT.glob("docs/guides/0*.md")),
]
# `train/step.py: train_step, ValidTokens`, or a file alone.
NAMED = re.compile(r"`((?:\w+/)+\w+\.py)(?:: ([\w., ]+))?`")


def missing_code(text: str) -> list[str]:
    """Returns the code that a page names and the repository does not have."""
    missing = []
    for file, names in NAMED.findall(text):
        path = next(
            (
                p
                for p in (ROOT / "pentatron" / file, ROOT / "pentatron/megatron" / file, ROOT / file)
                if p.exists()
            ),
            None,
        )
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


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "docs/decisions/0042-conflicts-of-the-guides.md"], ids=lambda page: page.name
)
def test_code_that_is_named_exists(page: Path) -> None:
    assert missing_code(page.read_text(encoding="utf-8")) == []


def test_missing_code_would_be_seen() -> None:
    text = "`train/step.py: train_step, gone` `train/gone.py` `train/trainer.py: Trainer.run, Trainer.gone`"
    assert missing_code(text) == ["train/step.py: gone", "train/gone.py", "train/trainer.py: Trainer.gone"]
    named = NAMED.findall((ROOT / "docs/how-it-works/step.md").read_text(encoding="utf-8"))
    assert len(named) > 30, "the page of a step says where things happen"


def test_pictures_are_up_to_date() -> None:
    for name, drawn in pictures():
        kept = (ROOT / "docs/images" / name).read_text(encoding="utf-8")
        assert kept == drawn, f"{name} is out of date: make pictures"


def test_every_picture_is_shown_somewhere() -> None:
    shown = "".join(
        page.read_text(encoding="utf-8")
        for page in (*PAGES, ROOT / "README.md", ROOT / "docs/performance.md")
    )
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
        # ZeRO 2 holds a bucket in addition, as parallelism.md states.
        assert held["gradients"] / whole == pytest.approx(gradients, rel=0.02)


def test_the_table_of_schedules_has_the_schedules_numbers() -> None:
    page = (ROOT / "docs/how-it-works/questions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\| ([\d.]+%) \| ([\d, ]+) \|", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(KINDS)
    for kind, waiting, kept in rows:
        checked = check(training_schedule(kind, 4, 2 if kind in ("interleaved", *FOLDED) else 1, 8))
        assert (f"{checked.bubble:.1%}", ", ".join(map(str, checked.in_flight))) == (waiting, kept), kind


# Heading of docs/how-it-works/questions.md → words that its section must contain.
ANSWERED = {
    "How do data, tensor and pipeline": "**Data.** **Tensor.** **Pipeline.** **Together.**",
    "AllReduce or Send/Recv": "all-reduce reduce-scatter all-gather all-to-all send, receive",
    "NCCL, Gloo or MPI": "**NCCL** **Gloo** MPI NCCL_TIMEOUT",
    "What are world size": "world size local rank LOCAL_RANK",
    "Why micro-batches": "**Memory** **The pipeline** (P − 1) / (M + P − 1)",
    "When are virtual stages": "interleaved dualpipev",
    "How do I choose": "ZeRO tensor pipeline context expert `pentatron plan",
    "How does this compare": "nanoGPT DeepSpeed mixed precision",
    "Training is slow": "batch --tp_size --bf16 --fp16 --num_workers NCCL_IB_DISABLE NCCL_SOCKET_IFNAME",
    "The loss does not fall": "--lr --warmup_steps --bf16 --max_grad_norm 0.5 pentatron data verify",
    "A checklist for speed": "--transformer-impl --sequence-parallel --use-distributed-optimizer --recompute-granularity "
    "--attention-backend --micro-batch-size --overlap-grad-reduce --overlap-param-gather",
}  # fmt: skip


@pytest.mark.parametrize("heading", ANSWERED)
def test_the_questions_of_the_guides_are_answered(heading: str) -> None:
    page = (ROOT / "docs/how-it-works/questions.md").read_text(encoding="utf-8")
    sections = {part.splitlines()[0]: part for part in page.split("\n## ")[1:]}
    section = next(text for title, text in sections.items() if title.startswith(heading))
    assert [word for word in ANSWERED[heading].split() if word not in section] == []


# Flags of torchrun, of entry points and of commands other than `pentatron train`.
OTHERS = set(
    "batch-size draw gpus gpu gpu-memory host-memory efficiency allow-narrowing checkpoint-type dtype load-dir loader loader-transformer-impl max-shard-size model-size "
    "append-eod input interval local-dir master-addr model-path nnodes node-rank num-gpus output-prefix prompt "
    "target-pipeline-parallel-size workers model-type no-check save-dir saver target-tensor-parallel-size tokenizer verify "
    "cpus-per-task extra-index-url families find-micro-batch flag gpus-per-node grace greedy help index json largest nodes only prompt-file "
    "standalone submit temperature time tokens top-p".split()
)


def test_flags_that_the_pages_name_are_flags() -> None:
    """Accepts every spelling of a setting, and the flags of other programs in `OTHERS`."""
    known = {s.flag.replace("_", "-") for item in all_settings().values() for s in item.spellings} | OTHERS
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--([a-z][\w-]+)", text)}
        assert named - known == set(), page.name


def test_python_of_the_pages_runs() -> None:
    found = [
        (page, block)
        for page in PAGES
        for block in re.findall(
            r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        if block.startswith("import torch\n")
    ]
    assert len(found) == 2, "the sum over the ranks, and the class of guide 003"
    for page, block in found:
        exec(compile(block, str(page), "exec"), {})


FRONT_PAGE = ROOT / "docs/README.md"
# A code block, and its output if a text block follows it.
SHOWN = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def test_the_front_page_shows_code_that_runs_and_code_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """A block followed by an output prints that output.

    In other blocks a comment `# FILE` precedes lines of that file.
    """
    blocks = SHOWN.findall(FRONT_PAGE.read_text(encoding="utf-8"))
    assert [bool(output) for _, output in blocks] == [True, True, False, True, False]
    for code, output in blocks:
        if output:
            exec(compile(code, str(FRONT_PAGE), "exec"), {})
            assert capsys.readouterr().out == output
            continue
        source: set[str] = set()
        for line in filter(None, map(str.strip, code.splitlines())):
            if named := re.match(r"# ((?:\w+/)+\w+\.py)", line):
                path = ROOT / named[1] if named[1].startswith("tests/") else ROOT / "pentatron" / named[1]
                source = set(map(str.strip, path.read_text(encoding="utf-8").splitlines()))
            else:
                assert line in source, line
