"""Tests what a run does with checkpoints in its folder, depending on program and flags."""

from pathlib import Path
from typing import Any

import pytest

from pentatron.settings.entry_points import PRETRAIN_GPT, STANDARD, TRAIN, EntryPoint
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import ProcessFacts, Start, how_to_resume, start_of

LEAST = "--mock-data --vocab-size 50 --train-iters 4"


def start(words: str, entry: EntryPoint, restarted: bool = False) -> Start:
    found = resolve(gather(f"{LEAST} {words}".split(), entry), ProcessFacts(1))
    return start_of(found.settings, found.given("load"), entry.resumes or restarted)


@pytest.mark.parametrize(
    ("words", "entry", "expected"),
    [
        ("", TRAIN, Start.RESUME),
        ("--load x", TRAIN, Start.RESUME),
        ("--fresh", TRAIN, Start.NEW),
        ("", PRETRAIN_GPT, Start.NEW),
        ("--save a", PRETRAIN_GPT, Start.NEW),
        ("--save a --load b", PRETRAIN_GPT, Start.NEW),
        ("--save a --load b --finetune", PRETRAIN_GPT, Start.NEW),
        ("--save a --load a", PRETRAIN_GPT, Start.RESUME),
        ("--save r/checkpoints --load r", PRETRAIN_GPT, Start.RESUME),
        ("--save a --load a --finetune", PRETRAIN_GPT, Start.IN_PLACE),
        ("--save a --load a --no-load-optim", PRETRAIN_GPT, Start.IN_PLACE),
        ("--save a --load a/step-00000004", PRETRAIN_GPT, Start.IN_PLACE),
        ("--load b --skip-train", PRETRAIN_GPT, Start.IN_PLACE),
        ("--skip-train", PRETRAIN_GPT, Start.RESUME),
        ("", STANDARD, Start.NEW),
    ],
)
def test_a_start_follows_from_program_and_flags(words: str, entry: EntryPoint, expected: Start) -> None:
    assert start(words, entry) is expected


@pytest.mark.parametrize(
    "words", ["", "--save a", "--save a --load b --finetune", "--save a --load a --finetune"]
)
def test_restart_resumes_with_any_command(words: str) -> None:
    assert start(words, PRETRAIN_GPT) is not Start.RESUME
    assert start(words, PRETRAIN_GPT, restarted=True) is Start.RESUME


def test_only_save_asks_megatrons_programs_for_checkpoints() -> None:
    def saves(words: str, entry: EntryPoint) -> Any:
        return resolve(
            gather(f"{LEAST} {words}".split(), entry), ProcessFacts(1)
        ).config.checkpoint.save_checkpoints

    assert not saves("", PRETRAIN_GPT) and not saves("--run-dir a", PRETRAIN_GPT)
    assert saves("--save a", PRETRAIN_GPT) and saves("--save-checkpoints", PRETRAIN_GPT)
    assert not saves("--save a --no-save-checkpoints", PRETRAIN_GPT)
    assert saves("", TRAIN) and saves("", STANDARD)


def test_resume_hint_matches_the_command() -> None:
    assert how_to_resume(Start.RESUME, "a") == "the same command resumes from there"
    assert "--load a" in how_to_resume(Start.NEW, "a")


def test_a_saved_configuration_writes_nothing_into_the_run_it_is_of(tmp_path: Path) -> None:
    from pentatron.settings.files import HEADER

    other = tmp_path / "other"
    other.mkdir()
    text = (
        f'{HEADER}\nrun:\n  # run_dir: "{tmp_path}/first"  # flag\nlog:\n  tensorboard_dir: "{{0}}"  # flag\n'
        f'  wandb_save_dir: "{tmp_path}/elsewhere"  # flag\n'
    )
    for place, expected in (
        (f"{other}/tb", f"{tmp_path}/mine/tb"),
        # The folder of that run had this path before it was moved.
        (f"{tmp_path}/first/tb", f"{tmp_path}/mine/tb"),
        (f"{tmp_path}/shared", f"{tmp_path}/shared"),
    ):
        (other / "config.yaml").write_text(text.format(place))
        words = f"{LEAST} --config {other}/config.yaml --run-dir {tmp_path}/mine"
        log = resolve(gather(words.split(), TRAIN), ProcessFacts(1)).config.log
        assert log.tensorboard_dir == expected and log.wandb_save_dir == f"{tmp_path}/elsewhere"
        typed = resolve(
            gather(f"{words} --tensorboard-dir {other}/tb".split(), TRAIN), ProcessFacts(1)
        ).config.log
        assert typed.tensorboard_dir == f"{other}/tb", "what is typed is meant"
    (other / "settings.yaml").write_text(text.format(f"{other}/tb").replace(HEADER, ""))
    words = f"{LEAST} --config {other}/settings.yaml --run-dir {tmp_path}/mine"
    log = resolve(gather(words.split(), TRAIN), ProcessFacts(1)).config.log
    assert log.tensorboard_dir == f"{other}/tb", "no run wrote this file"
