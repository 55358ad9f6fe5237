"""Renders chat templates in a process of its own, whose memory and time are limited.

    python -I -S chat_sandbox.py FOLDER...

The folders hold jinja2 and markupsafe. Each line of standard input is a request in JSON, each line of standard output its answer;
the end of the input ends the process. `chat_template.py` starts it and knows both. Nothing of Pentatron is imported here.

A template comes with a model, so it is a program of a stranger. jinja2's sandbox keeps it from Python's objects, but not from filling
the memory or running forever: texts double in a loop, filters pad, macros call themselves. The kernel's limits hold for all of them.
"""

import contextlib
import datetime
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

sys.path += sys.argv[1:] if __name__ == "__main__" else []

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

# What a template may add to the messages; enough for lists of tools and instructions, too little to fill the memory.
LARGEST_ADDITION = 1 << 20
LARGEST_REPETITION = 1 << 16
LARGEST_POWER = 64
# Of all loops over numbers together.
MOST_ROUNDS = 1 << 20
# Of the text of an error, which a template can choose.
LONGEST_REASON = 300
_MARKS = "generation_marks"

Span = tuple[int, int]


class Refused(Exception):
    """A template that cannot be read, or does not render a conversation. `is_syntax`: it renders none at all."""

    def __init__(self, reason: str, is_syntax: bool = False) -> None:
        super().__init__(reason)
        self.is_syntax = is_syntax


class Template:
    """A compiled template and the texts of the tokens it may name. `day` is the date that it gets, the same in every run."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], day: str) -> None:
        self.source, self.special_tokens = source, special_tokens
        self.day = datetime.date.fromisoformat(day)
        self.rounds = 0
        try:
            self.compiled = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise Refused(
                f"is not a template that can be read (line {error.lineno}: {error.message})", is_syntax=True
            ) from None
        except RecursionError:
            raise Refused("is nested too deeply to be read", is_syntax=True) from None

    def render(self, messages: Sequence[Any], tools: Any, cuts: Sequence[tuple[int, bool]]) -> dict[str, Any]:
        """The text of the whole conversation with the spans that the template marks, or that of every cut if it marks none.

        A cut is a number of first messages, and whether the text ends where an answer is to begin.
        """
        size = len(json.dumps([messages, tools], ensure_ascii=False))
        words = {**self.special_tokens, "messages": list(messages), "tools": tools, "documents": None}
        if self.has_marks:
            count, answer_follows = cuts[0]
            text, spans = self._marked({**words, "messages": messages[:count], "add_generation_prompt": answer_follows}, size)  # fmt: skip
            return {"texts": [text], "spans": spans}
        texts: list[str | int] = []
        for count, answer_follows in cuts:
            cut = {**words, "messages": messages[:count], "add_generation_prompt": answer_follows}
            try:
                text = self._run({**cut, _MARKS: ("", "")}, size)
            except Refused as refusal:
                # The texts before it may be all that is needed.
                return {"texts": texts, "refused": str(refusal)}
            # Most are the beginning of the first: then their length tells everything.
            is_beginning = bool(texts) and str(texts[0]).startswith(text)
            texts.append(len(text) if is_beginning else text)
        return {"texts": texts}

    def _marked(self, words: Mapping[str, Any], size: int) -> tuple[str, list[Span]]:
        text = self._run({**words, _MARKS: ("", "")}, size)
        begin, end = _marks_outside(json.dumps([words["messages"], words["tools"]], ensure_ascii=False))
        parts, spans = _unmark(self._run({**words, _MARKS: (begin, end)}, size), begin, end)
        if parts != text:
            raise Refused("writes something else because of its own {% generation %} marks")
        return text, spans

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template says itself what the model is to learn."""
        parsed = self._environment.parse(self.source)
        return any(_is_mark(block) for block in parsed.find_all(nodes.CallBlock))

    @cached_property
    def _environment(self) -> "_Sandbox":
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        # Chance has no place in data that must be the same in every run.
        environment.globals.pop("lipsum")
        environment.filters.pop("random")
        day = self.day
        environment.globals["raise_exception"] = _raise
        environment.globals["range"] = self._range
        environment.globals["strftime_now"] = lambda form: day.strftime(form)
        return environment

    def _range(self, *numbers: int) -> range:
        """Counts the rounds of all loops over numbers, nested ones too, also if they write nothing."""
        found = safe_range(*numbers)
        self.rounds += len(found)
        if self.rounds > MOST_ROUNDS:
            raise SecurityError(f"more than {MOST_ROUNDS} rounds of loops")
        return found

    def _run(self, words: Mapping[str, Any], size: int) -> str:
        pieces: list[str] = []
        left = size * 8 + LARGEST_ADDITION
        self.rounds = 0
        try:
            for piece in self.compiled.generate(**words):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    raise Refused("writes without end")
        except (Refused, MemoryError):
            raise
        except SecurityError as error:
            raise Refused(
                f"reaches for what no template needs ({_short(error)}), so it was stopped; use it only after reading it"
            ) from None
        except TemplateError as error:
            raise Refused(f"says: {_short(error)}") from None
        except RecursionError:
            raise Refused("calls itself too deeply, so it was stopped") from None
        # Whatever else a template can raise: a missing key, a wrong type, a range that is too long.
        except Exception as error:
            raise Refused(f"fails ({type(error).__name__}: {_short(error)})") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also without the short ways to fill the memory, whose refusal names them."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        repeated = next((len(side) for side in (left, right) if hasattr(side, "__len__")), None)
        times = next((side for side in (left, right) if isinstance(side, int)), 0)
        if repeated is not None and repeated * times > LARGEST_REPETITION:
            raise SecurityError(f"a text or list repeated {times} times")
        if operator == "**" and abs(right) > LARGEST_POWER:
            raise SecurityError(f"a power of {right}")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` around what the model is to learn."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.Name(_MARKS, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, marks: tuple[str, str], caller: Macro) -> str:
        return f"{marks[0]}{caller()}{marks[1]}"


def _is_mark(block: nodes.CallBlock) -> bool:
    called = block.call.node
    return isinstance(called, nodes.ExtensionAttribute) and called.identifier == _Generation.identifier


def _marks_outside(text: str) -> tuple[str, str]:
    """Two texts that do not occur in another."""
    number = 0
    while f"\ue000{number}\ue001" in text or f"\ue002{number}\ue003" in text:
        number += 1
    return f"\ue000{number}\ue001", f"\ue002{number}\ue003"


def _unmark(marked: str, begin: str, end: str) -> tuple[str, list[Span]]:
    """The text without marks, and the spans that lay between them."""
    first, *rest = marked.split(begin)
    text, spans = first, []
    for part in rest:
        inside, _, after = part.partition(end)
        if end in after or end in first:
            raise Refused("has {% generation %} marks inside one another")
        spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, [span for span in spans if span[0] < span[1]]


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what would be dangerous in a web page."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def _limit(memory_bytes: int, cpu_seconds: float) -> None:
    """Limits this process as a whole: the next request may use so much memory and so many more seconds of a core."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        until = int(usage.ru_utime + usage.ru_stime + cpu_seconds) + 1
        # A soft limit ends the process and can be raised by it again; the sandbox has no way to do so.
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _forbid() -> None:
    """Nothing is written to files, also no core; signals for the whole group are the parent's to answer."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(kind, (0, 0))


def main() -> int:
    _forbid()
    template: Template | None = None
    for line in sys.stdin.buffer:
        exhausted = False
        try:
            request: dict[str, Any] = json.loads(line)
            _limit(request["memory_bytes"] + 16 * len(line), request["cpu_seconds"])
            if "template" in request:
                template = None
                template = Template(**request["template"])
            assert template is not None
            answer = json.dumps(template.render(*request["render"]) if "render" in request else {})
        except Refused as refusal:
            answer = json.dumps({"syntax" if refusal.is_syntax else "refused": str(refusal)})
        except MemoryError:
            answer, exhausted = json.dumps({"exhausted": "memory"}), True
        except Exception as error:
            # Of the compiler behind jinja2, or of json where messages are nested too deeply.
            answer = json.dumps({"refused": f"fails ({type(error).__name__}: {_short(error)})"})
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()
        if exhausted:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
