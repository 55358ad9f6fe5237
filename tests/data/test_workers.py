"""Tests that encoding workers ignore Ctrl-C, which the parent handles."""

import os
import signal

import pytest

from pentatron.data.encode import EncodingSettings, Workers
from pentatron.data.text_files import Chunk, Position
from pentatron.data.tokenizer import TokenizerSettings


def test_ctrl_c_does_not_end_a_worker_that_has_just_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk(b'{"text": "a"}\n', 0, 1, "json", Position(1), 0)
    settings = EncodingSettings(TokenizerSettings("ByteTokenizer"), ("text",), False, False)

    def interrupted(self: Workers) -> object:
        connection = start(self)
        [process] = self._processes.values()
        os.kill(process.pid, signal.SIGINT)
        return connection

    start = Workers._start
    monkeypatch.setattr(Workers, "_start", interrupted)
    with Workers(settings, 1) as workers:
        [(read, _)] = workers.encode([chunk])
    assert read == chunk
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
