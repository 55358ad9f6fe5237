"""Chat templates, which turn a conversation into one text.

Templates come with a model, so they are untrusted code. `chat_sandbox.py` renders them in a process with
limited memory and time; this module finds templates, starts that process and sends it requests.
"""

import atexit
import contextlib
import datetime
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.errors import UserError, explained
from pentatron.text import binary_size, one_line, parse_json

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
DEFAULT_NAME = "default"
_PROGRAM = Path(__file__).with_name("chat_sandbox.py")
# Packages that the sandbox program imports.
_PACKAGES = ("jinja2", "markupsafe")
_READ_BYTES = 1 << 18

Message = Mapping[str, Any]
Span = tuple[int, int]
# The number of leading messages to render, and whether to add the generation prompt.
Cut = tuple[int, bool]


class TemplateRefusal(UserError):
    """Raised for a template that does not render a conversation."""


@dataclass(frozen=True)
class Limits:
    """Resource limits for rendering one conversation.

    CPU seconds stop a template that computes, wall-clock seconds any other wait. `memory_bytes` limits the
    whole process including Python; the size of the conversation is added to it. macOS does not enforce the
    memory limit.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 60.0
    memory_bytes: int = 512 << 20


@dataclass(frozen=True)
class Rendered:
    """A rendered text and its spans marked as generated; None if the template has no marks."""

    text: str
    generated: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, the special tokens available to it, and the fixed date that it sees."""

    source: str
    special_tokens: Mapping[str, str]
    day: datetime.date
    origin: str = "the chat template"
    limits: Limits = Limits()

    def render_cuts(self, messages: Sequence[Message], tools: Any, cuts: Sequence[Cut]) -> Sequence[Rendered]:
        """Renders cuts of one conversation; only the first if the template has generation marks.

        If the template refuses a cut, accessing it or a later one raises TemplateRefusal.
        """
        answer = self._ask({"render": [list(messages), tools, list(cuts)]})
        if "spans" in answer:
            return [Rendered(answer["texts"][0], tuple((a, b) for a, b in answer["spans"]))]
        texts = answer["texts"]
        # An integer is the length of a prefix of the first text.
        rendered = [Rendered(texts[0][:text] if isinstance(text, int) else text) for text in texts]
        if "refused" in answer:
            return _PartialTexts(rendered, f"{self.origin} {one_line(answer['refused'])}")
        return rendered

    def check(self) -> "ChatTemplate":
        """Returns itself if the template compiles, else raises UserError."""
        self._ask({})
        return self

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = _SANDBOX.ask(self, request)
        except RecursionError:
            raise TemplateRefusal("its messages are nested too deeply") from None
        except _SandboxStopped as stop:
            raise TemplateRefusal(
                f"{self.origin} {stop}, so it was stopped; use it only after reading it, or name another with --chat-template FILE"
            ) from None
        if "syntax" in answer:
            raise UserError(
                f"{self.origin} {one_line(answer['syntax'])}; repair it, or name another with --chat-template FILE"
            )
        if "refused" in answer and not answer.get("texts"):
            raise TemplateRefusal(f"{self.origin} {one_line(answer['refused'])}")
        return answer


class _PartialTexts(list[Rendered]):
    """The texts before the first refused cut; later ones raise TemplateRefusal on access."""

    def __init__(self, texts: list[Rendered], refusal: str) -> None:
        super().__init__(texts)
        self.refusal = refusal

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise TemplateRefusal(self.refusal)
        return super().__getitem__(index)


class _SandboxStopped(Exception):
    """The sandbox process ended without a response; the message completes "the chat template ..."."""


class _SandboxProcess:
    """The sandbox process, started on demand and restarted after a stop. A lock serialises requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._template: ChatTemplate | None = None

    def ask(self, template: ChatTemplate, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the response to a request; raises `_SandboxStopped` if a limit was reached."""
        limits = template.limits
        with self._lock:
            known = self._process is not None and self._process.poll() is None and self._template == template
            message = {**request, "memory_bytes": limits.memory_bytes, "cpu_seconds": limits.cpu_seconds}
            if not known:
                tokens, day = dict(template.special_tokens), template.day.isoformat()
                message["template"] = {"source": template.source, "special_tokens": tokens, "day": day}
            line = json.dumps(message).encode() + b"\n"
            try:
                answer = self._exchange(line, limits)
            except BaseException:
                # Also on KeyboardInterrupt: a late response must not be read as that of the next request.
                self._stop()
                raise
            self._template = None if "syntax" in answer or "exhausted" in answer else template
            if "exhausted" in answer:
                self._stop()
                raise _SandboxStopped(_more_memory(limits))
            return answer

    def close(self) -> None:
        """Stops the process; the next request starts a new one."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """Closes the pipes inherited by a forked child, so that the sandbox exits with its parent."""
        self._lock = threading.Lock()
        process, self._process, self._template = self._process, None, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            # The sandbox is not a child of this process: setting the return code keeps Popen from waiting
            # for it.
            process.returncode = 0

    def _exchange(self, line: bytes, limits: Limits) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin.fileno(), process.stdout.fileno()
        deadline = time.monotonic() + limits.wall_seconds
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        # stdin is non-blocking and polled with stdout, so that a large request and response cannot deadlock.
        left, received = memoryview(line), bytearray()
        try:
            while not received.endswith(b"\n"):
                if left:
                    with contextlib.suppress(BlockingIOError):
                        left = left[os.write(stdin, left) :]
                    poll.register(stdin, select.POLLOUT) if left else None
                ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
                if not ready:
                    raise _SandboxStopped(f"takes longer than {limits.wall_seconds:g} seconds for one chat")
                if stdin in ready and not left:
                    poll.unregister(stdin)
                if stdout in ready:
                    data = os.read(stdout, _READ_BYTES)
                    received += data
                    if not data:
                        raise BrokenPipeError
        except BrokenPipeError:
            raise _SandboxStopped(_reason(process.wait(), limits)) from None
        return json.loads(received)

    def _stop(self) -> None:
        process, self._process, self._template = self._process, None, None
        if process is not None:
            process.kill()
            with process:
                # Leaving the block closes the pipes and waits for the process.
                pass


def _start() -> "subprocess.Popen[bytes]":
    """Starts the sandbox program with -I and -S, so that it imports nothing but the packages named here."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    if len(origins) < len(_PACKAGES):
        raise UserError("chat templates need the package jinja2; run: pip install jinja2")
    folders = dict.fromkeys(str(Path(origin).parent.parent) for origin in origins)
    command = [sys.executable, "-I", "-S", str(_PROGRAM), *folders]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _reason(status: int, limits: Limits) -> str:
    if status == -signal.SIGXCPU:
        return f"computes for longer than {limits.cpu_seconds:g} seconds in one conversation"
    if status == -signal.SIGKILL:
        return f"{_more_memory(limits)}, or its process was killed"
    return f"ends the process that renders it (status {status})"


def _more_memory(limits: Limits) -> str:
    return f"takes more than {binary_size(limits.memory_bytes)} of memory for one conversation"


_SANDBOX = _SandboxProcess()
atexit.register(_SANDBOX.close)
os.register_at_fork(after_in_child=_SANDBOX.forget)


# Stops the sandbox process, if one was started; it exits with this process at the latest.
stop_sandbox = _SANDBOX.close


def find_chat_template(folder: Path) -> tuple[str, Path] | None:
    """Returns the chat template of a folder and its file; chat_template.jinja has precedence."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8"), file
    config = folder / CONFIG_FILE
    tokenizer_config = _read_object(config)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if DEFAULT_NAME not in named:
            raise UserError(
                f"{config} has the chat templates {', '.join(map(str, named))} and none called {DEFAULT_NAME}; copy the one to use "
                "into a file and pass it with --chat-template FILE"
            )
        template = named[DEFAULT_NAME]
    return (template, config) if isinstance(template, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the texts of `bos_token` and the other special tokens of a tokenizer folder."""
    tokens = {}
    for file in (SPECIAL_TOKENS_FILE, CONFIG_FILE):
        for name, value in _read_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def read_template(path: Path) -> tuple[str, Path]:
    problem, advice = f"--chat-template {path} cannot be read", "it takes a file with a Jinja template"
    with explained((OSError, UnicodeDecodeError), problem, advice):
        return path.read_text(encoding="utf-8"), path


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with explained(ValueError, f"{path} is not JSON", "check --tokenizer-model"):
        content = parse_json(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
