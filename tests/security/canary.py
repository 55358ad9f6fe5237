"""A canary file that appears if untrusted code runs, and the payloads that would create it."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from pentatron.cli.main import main


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def pickled(canary: Path) -> bytes:
    return pickle.dumps({"weights": Payload(canary)})


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Runs a command line; returns exit code, standard output and standard error.

    Exceptions that the command does not turn into a sentence are raised.
    """
    code = main([str(word) for word in words])
    told = capsys.readouterr()
    return code, told.out, told.err


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Runs a command that must be refused; returns its one sentence."""
    code, _, complaint = run(capsys, *words)
    assert code == 2 and complaint.startswith("pentatron: ") and complaint.count("\n") == 1, complaint
    assert "unknown flag" not in complaint, "the command must be refused for what it reads"
    assert not any(ord(letter) < 32 for letter in complaint[:-1]), "a sentence must not steer the terminal"
    return complaint
