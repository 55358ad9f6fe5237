"""Reports missing files together with all other configuration errors, before anything starts."""

from pathlib import Path

import pytest

from pentatron.cli.configure import prepare
from pentatron.cli.main import main
from pentatron.megatron.program import UserProgram
from pentatron.settings.entry_points import TRAIN
from pentatron.train.model import CONFIGURED

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --device cpu --nproc-per-node 2"
)
NO_LENGTH = "the length of the run is unknown; give --train-iters"
NO_DATA = "no data file nowhere.idx; give the prefix of a prepared .bin/.idx pair without its ending"
NO_MODEL = "--load nowhere does not exist; check the path, or leave it out to start from scratch"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("--vocab-size 9 --data-path nowhere", [NO_DATA, NO_LENGTH]),
        ("--vocab-size 9 --data-path nowhere --train-iters 2", [NO_DATA]),
        ("--vocab-size 9 --data-path nowhere --epochs 2", [NO_DATA]),
        ("--vocab-size 9 --train-data-path nowhere --valid-data-path there --train-iters 2",
         [NO_DATA, NO_DATA.replace("nowhere", "there")]),
        ("--vocab-size 9 --data-path 0.3 nowhere there --train-iters 2",
         [NO_DATA.replace("file nowhere.idx", "files 0.3.idx, nowhere.idx, there.idx")]),
        ("--sft --tokenizer-type ByteTokenizer --data-path chats.jsonl", ["there is no file chats.jsonl; with --sft", NO_LENGTH]),
        ("--sft --tokenizer-type ByteTokenizer --data-path 0.5 chats.jsonl --train-iters 2",
         ["--sft reads every conversation once in an epoch, so the weight 0.5 has no meaning"]),
        # No error about values that only the missing model has: the vocabulary size, heads that 2 ranks can
        # share.
        ("--load nowhere --data-path nowhere --tp 2 --num-attention-heads 7", [NO_MODEL, NO_DATA, NO_LENGTH]),
        ("--load nowhere --dataset-size 8 --train-iters 2", [NO_MODEL]),
        ("--load nowhere --dataset-size 8 --num-layers 0 --train-iters 2", [NO_MODEL, "--num-layers 0 must be more than 0"]),
        ("--load nowhere --dataset-size 8 --pp 3 --train-iters 2", [NO_MODEL, "2 processes are too few"]),
        ("--load nowhere --dataset-size 8 --pp 3 --train-iters 2 --use-mp-args-from-checkpoint-args", [NO_MODEL]),
    ],
)  # fmt: skip
def test_all_problems_are_reported_at_once(
    words: str, problems: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *MODEL.split(), *words.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    if len(problems) > 1:
        assert lines[0] == f"pentatron: {len(problems)} problems in the configuration:"
        lines = [line.partition(". ")[2] for line in lines[1:]]
    assert len(lines) == len(problems), lines
    for line, problem in zip(lines, problems):
        assert line.removeprefix("pentatron: ").startswith(problem)
    assert list(here.iterdir()) == [], "nothing was started"


def test_data_files_may_be_absent_in_config_and_with_a_provider() -> None:
    words = [*MODEL.split(), *"--vocab-size 9 --data-path nowhere --train-iters 2".split()]
    assert prepare(words, TRAIN).resolved.config.data.data_path == ("nowhere",)

    def provider(numbers: object) -> tuple[None, None, None]:
        return None, None, None

    own = UserProgram(provider, lambda: None, lambda *_: None, {})  # type: ignore[arg-type, return-value]
    assert CONFIGURED.reads_named_data and not own.reads_named_data
