"""Tests the summary at the end of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pentatron.errors import UserError
from pentatron.train import results
from pentatron.train.output import Output
from pentatron.train.results import _fall, print_summary
from pentatron.train.run_folder import RunFolder
from tests.support import resolved
from tests.train.test_full_disk import Said


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([4.0], "loss 4.000"),
        ([4.0, 3.0], "loss 4.000 → 3.000 (down 25 %)"),
        ([4.0] * 6 + [2.0, 2.0], "loss 4.000 → 2.000 (down 50 %)"),
        ([4.0, *[3.0] * 30, *[1.0] * 10], "loss 4.000 → 1.000 (down 75 %)"),
        ([0.0, 1.0], "loss 1.000"),
        ([1.0, 2.0], "loss 1.000 → 2.000 (up 100 %)"),
    ],
)
def test_a_short_run_is_not_averaged_with_its_beginning(losses: list[float], said: str) -> None:
    assert _fall(losses) == said


def test_a_prompt_that_cannot_be_continued_fails_no_run_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_long(*given: object, **more: object) -> None:
        raise UserError("the prompt has 600 tokens, but the model has 32 positions; shorten it")

    monkeypatch.setattr(results, "open_continuation", too_long)
    display, config = Said(), resolved(f"--sample-prompt long --run-dir {tmp_path}").config
    print_summary(config, RunFolder(tmp_path), SimpleNamespace(tokenizer=object()), Output(display))  # type: ignore[arg-type]
    note, folder = display.texts
    assert note.startswith("note: no sample text was generated (--sample-prompt): the prompt has 600 tokens")
    assert folder.startswith(f"run folder: {tmp_path}")
