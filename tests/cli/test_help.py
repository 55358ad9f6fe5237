"""Tests help and dispatch: every setting is listed, torch stays out, a mistake is one line and code 2."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.__main__ import main as program
from pentatron.cli.main import COMMANDS, main
from pentatron.cli.options import entry_help
from pentatron.settings.entry_points import ENTRY_POINTS, EXAMPLE, PARALLEL_3D, PRETRAIN_GPT, TRAIN
from pentatron.settings.run_config import all_settings, sections

ROOT = Path(__file__).parents[2]
# Runs a command; exit code 90 means that it has imported torch.
WITHOUT_TORCH = """
import sys
from pentatron.cli.main import main
code = main(sys.argv[1:])
sys.exit(90 if "torch" in sys.modules else code)
"""


def python(*words: str) -> "subprocess.CompletedProcess[str]":
    hidden = ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "NCCL_TIMEOUT")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=environment, timeout=60
    )


# --- speed ---


@pytest.mark.parametrize(
    "words",
    ["--help", "train --help", "train --help model", "config --nproc-per-node 2",
     "config --device cpu --mock-data --vocab-size 9 --train-iters 3", "config --help", "presets",
     "layout --tp_size 2 --pp_size 2 --draw", "layout --help",
     "train --num-layer 3", "train --nproc-per-node 2 --hidden-size 7 --num-attention-heads 2", "nonsense", "--version"],
)  # fmt: skip
def test_torch_is_not_imported(words: str) -> None:
    done = python("-c", WITHOUT_TORCH, *words.split())
    assert done.returncode == (2 if done.stderr else 0), done.stderr


def test_help_comes_at_once() -> None:
    """Measures CPU time, which does not depend on the load of the machine."""

    def computed() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def seconds() -> float:
        start = computed()
        assert python("-m", "pentatron", "train", "--help").returncode == 0
        return computed() - start

    assert min(seconds() for _ in range(3)) < 0.5


# --- help of an entry point ---


@pytest.mark.parametrize("entry", ENTRY_POINTS.values(), ids=lambda e: e.name)
def test_help_lists_every_setting_in_its_group(entry: object) -> None:
    assert isinstance(entry, type(TRAIN))
    text = entry_help(entry)
    assert text.startswith(f"usage: {entry.name} ")
    titles = [f"{cls.__doc__}  ({entry.name} --help {section})" for section, cls in sections().items()]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    for item in all_settings().values():
        at = list(sections()).index(item.section)
        group = text[places[at] : places[at + 1] if at + 1 < len(places) else None]
        assert re.search(rf"^  (--[a-z0-9-]+, )*{item.flag}\b(?!-)", group, re.MULTILINE), item.name
        for spelling in item.spellings:
            if not spelling.flag.startswith("no-"):
                assert f"--{spelling.flag}" in group, spelling.flag


def test_help_is_narrow_enough_to_read() -> None:
    lines = entry_help(TRAIN).splitlines()
    assert max(map(len, lines)) <= 112
    assert not [line for line in lines if line != line.rstrip()]


def test_help_of_one_group() -> None:
    text = entry_help(TRAIN, "optim")
    assert "--adam-beta1 X" in text and "--num-layers" not in text


def line_of(text: str, flag: str) -> str:
    """Returns the help entry of a flag with its continuation lines joined."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"  (--[a-z0-9-]+, )*{flag}\b(?!-)", line))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" " * 8))
    return " ".join(" ".join(lines[start:end]).split())


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--lr", "--lr, --learning-rate X peak learning rate; default 0.0003"),
        ("--zero-stage", "--zero-stage 0|1|2|3, --use-distributed-optimizer ZeRO stage, sharding over data-parallel ranks: 0 nothing, "
                         "1 optimizer state, 2 also gradients, 3 also parameters; default 0"),
        ("--verify-checkpoint", "--verify-checkpoint, --no-verify-checkpoint verify checksums before resuming, and of a "
                                "new checkpoint before the last verified one is deleted; default on"),
        ("--bf16", "--bf16 bf16 weights and activations, fp32 master weights and gradients"),
        ("--rope-fusion", "--rope-fusion, --no-rope-fusion fused rotary kernel; default on; accepted, has no effect"),
        ("--tokenizer-type", "--tokenizer-type TEXT type of the tokenizer; one of HuggingFaceTokenizer, HFTokenizer, "
                             "GPT2BPETokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, "
                             "ByteTokenizer, NullTokenizer, SFTTokenizer"),
        ("--rampup-batch-size", "--rampup-batch-size N ... START INCREMENT SAMPLES: increase the global batch size from "
                                "START to its final value within SAMPLES samples"),
        ("--num-workers", "--num-workers N data loading processes per rank; default 0"),
        ("--micro-batch-size", "--micro-batch-size N samples per micro-batch of a rank (1)"),
        ("--global-batch-size", "--global-batch-size N samples per optimizer step over all ranks (micro-batch × data-parallel size)"),
    ],
)  # fmt: skip
def test_lines_of_help(flag: str, line: str) -> None:
    assert line_of(entry_help(TRAIN), flag) == line


def test_help_follows_the_entry_point() -> None:
    assert not re.search(r" --batch-size\b", entry_help(TRAIN))
    assert line_of(entry_help(EXAMPLE), "--global-batch-size").startswith(
        "--global-batch-size, --batch-size N "
    )
    assert line_of(entry_help(EXAMPLE), "--global-batch-size").endswith("; default 8")
    assert line_of(entry_help(PARALLEL_3D), "--rank-batch-size").startswith(
        "--rank-batch-size, --batch-size N "
    )
    assert line_of(entry_help(PRETRAIN_GPT), "--lr-decay-style").endswith("; default linear")
    assert "`pentatron config --as train_3d_parallel.py` with the same arguments" in entry_help(PARALLEL_3D)


# --- dispatch ---


def test_usage_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert all(re.search(rf"^  {command} ", shown, re.MULTILINE) for command in COMMANDS)


def test_train_help_through_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert capsys.readouterr().out == entry_help(TRAIN) + "\n"
    assert main(["train", "--help", "optim"]) == 0
    assert capsys.readouterr().out == entry_help(TRAIN, "optim") + "\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "unknown command 'trian' (did you mean train?); `pentatron --help` lists the commands"),
        ("xyz", "unknown command 'xyz'; `pentatron --help` lists the commands"),
        ("train --num-layer 3",
         "unknown flag --num-layer (did you mean --num-layers?); pentatron train --help lists them all"),
        ("config --num-layer=3",
         "unknown flag --num-layer (did you mean --num-layers?); pentatron train --help lists them all"),
        ("plan --preset llama3-8b --gpuss 8", "unknown flag --gpuss (did you mean --gpus?); pentatron plan --help lists them all"),
        ("config --alll", "unknown flag --alll (did you mean --all?); pentatron config --help lists them all"),
        ("launch torchrun --gpus-per-node 2 --max-restart 3",
         "unknown flag --max-restart (did you mean --max-restarts?); pentatron launch --help lists them all"),
        ("layout --drow", "unknown flag --drow (did you mean --draw?); pentatron layout --help"),
        ("verify --everthing", "unknown flag --everthing (did you mean --everything?); pentatron verify --help"),
        ("bench --step 3", "unknown flag --step (did you mean --steps?); pentatron bench --help"),
        ("bench --find-microbatch", "unknown flag --find-microbatch (did you mean --find-micro-batch?); pentatron bench --help"),
        ("launch slurm --nodez 2 --gpus-per-node 8", "unknown flag --nodez (did you mean --nodes?)"),
        # An unknown flag is reported before a missing value, whose flag it may misspell, and before wrong
        # values.
        ("launch slurm --nodes 2 --gpu-per-node 8", "unknown flag --gpu-per-node (did you mean --gpus-per-node?); pentatron launch --help"),
        ("layout --draw x --tp_siz 2", "unknown flag --tp_siz (did you mean --tp-size?)"),
        ("bench --steps 0 --prest demo", "unknown flag --prest (did you mean --preset?)"),
        ("checkpoint reshard --tp_siz 2", "unknown flag --tp_siz (did you mean --tp-size?)"),
        ("plan --preset llama3-8b --gpu 8", "--gpu 8 is unknown (a number of GPUs is --gpus 8); use one of"),
        ("plan nowhere --gpus 8", "nowhere does not exist; name a Hugging Face folder or a run, or a model with --preset NAME"),
        ("plan folder --gpus 8", "folder holds no checkpoint and no Hugging Face model; name"),
        ("plan llama3-8b --gpus 8", "there is no folder llama3-8b; the preset of that name is --preset llama3-8b"),
        ("generate file.txt", "file.txt is a file; name a run"),
        ("train --run-dir file.txt", "the run folder file.txt cannot be written (it is a file); choose another"),
        ("help trian", "unknown command 'trian' (did you mean train?)"),
        ("prepare --output-prefix --overwrite", "--output-prefix needs a value"),
        ("prepare --output-prefix= --overwrite", "--output-prefix needs a value"),
        ("monitor --interval", "--interval needs a value"),
        ("data show --indx 3", "unknown flag --indx (did you mean --index?); pentatron data show --help"),
        ("config --al", "unknown flag --al (did you mean --all?)"),
        ("train --lr x", "--lr must be a number, not 'x'"),
        ("train --config nowhere.yaml", "configuration file nowhere.yaml does not exist; check the path given to --config"),
        ("config --preset demoo", "unknown preset 'demoo' (did you mean demo?); there are: demo, "),
        ("presets demo", "pentatron presets takes no arguments; use a preset with: pentatron train --preset NAME"),
        ("train --nproc-per-node 2 --hidden-size 60 --num-attention-heads 7",
         "--hidden-size 60 is not divisible by --num-attention-heads 7; use 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 or 60 heads"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("file.txt").touch()
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"pentatron: {sentence}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_mistakes_of_a_small_command_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--workers", "x", "--output-prefx=o"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  1. --workers must be a whole number, not 'x'",
        "  2. unknown flag --output-prefx (did you mean --output-prefix?); pentatron prepare --help lists them",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan --gpus x --prest llama3-8b",
         ["unknown flag --prest (did you mean --preset?)", "--gpus must be a whole number, not 'x'"]),
        ("data show --part x --data-pth y",
         ["unknown flag --data-pth (did you mean --data-path?)", "--part must be one of train, valid, test, not 'x'"]),
        ("bench --steps many --warmup=few --prest demo",
         ["unknown flag --prest", "--steps must be a whole number", "--warmup must be a whole number"]),
        ("launch torchrun --time 3 --nodes two --gpus-per-node 2 --prest demo",
         ["unknown flag --prest", "--time is a Slurm option; leave it out", "--nodes must be a whole number"]),
        ("config --as nobody --num-layer 3", ["unknown flag --num-layer", "--as must be one of pentatron train"]),
        ("layout --all=perhaps --tp_siz 2", ["unknown flag --tp_siz", "--all must be true or false, not 'perhaps'"]),
        ("verify --everything=so --tp_siz 2", ["unknown flag --tp_siz", "--everything must be true or false"]),
        ("checkpoint reshard a b --no-chek --progress-bar so",
         ["unknown flag --no-chek (did you mean --no-check?)", "--progress-bar must be one of auto, on, off, not 'so'"]),
        ("checkpoint diff a b --tolerance x --jsn", ["--tolerance must be a number, not 'x'", "unknown flag --jsn"]),
        ("monitor --interval soon --onse", ["--interval must be a number", "unknown flag --onse"]),
        ("generate model --top-p 2 --batch-size 0 --seed -1",
         ["--top-p 2.0 must be above 0 and at most 1", "--seed -1 must be from 0", "--batch-size 0 must be 1 or more"]),
        ("import a b --dtype int8 --verify=never", ["--dtype must be one of fp32, bf16, fp16", "--verify must be true or false"]),
        ("doctor --jsn --no_trails", ["unknown flag --jsn", "unknown flag --no_trails (did you mean --no-trials?)"]),
    ],
)  # fmt: skip
def test_mistakes_in_options_and_settings_are_reported_together(
    words: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()[1:]
    assert captured.out == "" and len(lines) == len(told)
    assert all(sentence in captured.err for sentence in told)
    assert told[0] in lines[0]


def test_missing_options_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--workers", "0"]) == 2
    said = capsys.readouterr().err
    for name in (
        "--input is missing",
        "--output-prefix is missing",
        "--tokenizer-type is missing",
        "--workers 0",
    ):
        assert name in said


@pytest.mark.parametrize("words", ["data describe", "checkpoint verify", "plan", "launch slurm"])
def test_help_is_found_by_every_way(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = set()
    for asked in (f"{words} --help", f"{words} -h", f"help {words}"):
        assert main(asked.split()) == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1 and shown.pop().startswith("usage: pentatron ")


class _Interrupted:
    """Raises KeyboardInterrupt during the import of pentatron.cli.main."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pentatron.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_is_answered_from_the_first_moment_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "meta_path", [_Interrupted(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "pentatron.cli.main")
    assert program() == 130
    assert capfd.readouterr().err == "pentatron: interrupted during startup\n"


def test_as_a_process_a_mistake_has_no_traceback() -> None:
    done = python("-m", "pentatron", "train", "--num-layer", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "pentatron: unknown flag --num-layer (did you mean --num-layers?); pentatron train --help lists them all\n"
    )


@pytest.mark.parametrize("script", [name for name in ENTRY_POINTS if name.endswith(".py")])
def test_the_guides_scripts_have_the_same_help(script: str) -> None:
    done = python(str(ROOT / script), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout == entry_help(ENTRY_POINTS[script]) + "\n"


def test_lists_are_shown_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "moe"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "one or several; default aux_loss " in shown and "('" not in shown
