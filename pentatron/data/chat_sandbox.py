"""Program that renders chat templates in a separate process with limited memory and CPU time.

    python -I -S chat_sandbox.py FOLDER...

The folders contain jinja2 and markupsafe. Each line of standard input is a JSON request, each line of
standard output its response; the process exits at the end of its input. `chat_template.py` starts it. It
must not import Pentatron.

A template comes with a model, so it is untrusted code. jinja2's sandbox blocks access to Python objects,
but does not limit memory or time: strings double in a loop, filters pad, macros recurse. The resource
limits of the kernel cover all of these.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

sys.path += sys.argv[1:] if __name__ == "__main__" else []

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

# Characters that a template may add to the messages: enough for tool lists and instructions, too few to
# exhaust memory.
LARGEST_ADDITION = 1 << 20
LARGEST_REPETITION = 1 << 16
LARGEST_POWER = 64
# Iterations of all `range` loops of a template together.
MOST_ROUNDS = 1 << 20
# Characters of an error message, which a template can choose.
LONGEST_REASON = 300
_MARKS = "generation_marks"

Span = tuple[int, int]


class TemplateRefused(Exception):
    """Raised for a template that cannot be parsed (`is_syntax`) or does not render a conversation."""

    def __init__(self, reason: str, is_syntax: bool = False) -> None:
        super().__init__(reason)
        self.is_syntax = is_syntax


class Template:
    """A compiled template, the special tokens available to it, and the date that it sees."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], day: str) -> None:
        self.source, self.special_tokens = source, special_tokens
        self.day = datetime.date.fromisoformat(day)
        self.rounds = 0
        try:
            self.compiled = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateRefused(
                f"is not a template that can be read (line {error.lineno}: {error.message})", is_syntax=True
            ) from None
        except RecursionError:
            raise TemplateRefused("is nested too deeply to be read", is_syntax=True) from None

    def render(self, messages: Sequence[Any], tools: Any, cuts: Sequence[tuple[int, bool]]) -> dict[str, Any]:
        """Renders every cut of a conversation, or only the first if the template has generation marks.

        A cut is the number of leading messages to render, and whether to add the generation prompt. With
        marks, the response also contains the spans marked as generated.
        """
        size = len(json.dumps([messages, tools], ensure_ascii=False))
        texts: list[str | int] = []
        for length, answer_follows in cuts:
            variables = {**self.special_tokens, "messages": messages[:length], "tools": tools}
            variables |= {"documents": None, "add_generation_prompt": answer_follows, _MARKS: ("", "")}
            if self.has_marks:
                text, spans = self._marked(variables, size)
                return {"texts": [text], "spans": spans}
            try:
                text = self._run(variables, size)
            except TemplateRefused as refusal:
                # The caller may not need this cut and those after it.
                return {"texts": texts, "refused": str(refusal)}
            # Most texts are a prefix of the first one: sending their length keeps the response linear in
            # size.
            is_prefix = bool(texts) and str(texts[0]).startswith(text)
            texts.append(len(text) if is_prefix else text)
        return {"texts": texts}

    def _marked(self, variables: Mapping[str, Any], size: int) -> tuple[str, list[Span]]:
        """Renders with and without marker strings; returns the text and the spans marked as generated."""
        text = self._run(variables, size)
        content = json.dumps([variables["messages"], variables["tools"]], ensure_ascii=False)
        # Markers that do not occur in the messages.
        marks = ((f"\ue000{number}\ue001", f"\ue002{number}\ue003") for number in count())
        begin, end = next(pair for pair in marks if not any(mark in content for mark in pair))
        unmarked, spans = _unmark(self._run({**variables, _MARKS: (begin, end)}, size), begin, end)
        if unmarked != text:
            raise TemplateRefused("renders a different text because of its {% generation %} marks")
        return text, spans

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template has {% generation %} blocks."""
        calls = [block.call.node for block in self._environment.parse(self.source).find_all(nodes.CallBlock)]
        extensions = [call.identifier for call in calls if isinstance(call, nodes.ExtensionAttribute)]
        return _Generation.identifier in extensions

    @cached_property
    def _environment(self) -> "_Sandbox":
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        # Randomness would make the tokens of a conversation differ between runs.
        environment.globals.pop("lipsum")
        environment.filters.pop("random")
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["range"] = self._range
        environment.globals["strftime_now"] = self.day.strftime
        return environment

    def _range(self, *numbers: int) -> range:
        """Replaces `range` and counts the iterations of all loops over it."""
        values = safe_range(*numbers)
        self.rounds += len(values)
        if self.rounds > MOST_ROUNDS:
            raise SecurityError(f"more than {MOST_ROUNDS} rounds of loops")
        return values

    def _run(self, variables: Mapping[str, Any], size: int) -> str:
        pieces: list[str] = []
        left = size * 8 + LARGEST_ADDITION
        self.rounds = 0
        try:
            for piece in self.compiled.generate(**variables):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    raise TemplateRefused("writes without end")
        except (TemplateRefused, MemoryError):
            raise
        except SecurityError as error:
            raise TemplateRefused(
                f"accesses a forbidden attribute ({_short(error)}), so it was stopped; read the template before you use it"
            ) from None
        except TemplateError as error:
            raise TemplateRefused(f"says: {_short(error)}") from None
        except RecursionError:
            raise TemplateRefused("recurses too deeply, so it was stopped") from None
        # Anything else a template can raise: a missing key, a wrong type, a range that is too long.
        except Exception as error:
            raise TemplateRefused(f"fails ({type(error).__name__}: {_short(error)})") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, which also refuses large repetitions and powers."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        length = next((len(side) for side in (left, right) if hasattr(side, "__len__")), None)
        times = next((side for side in (left, right) if isinstance(side, int)), 0)
        if length is not None and length * times > LARGEST_REPETITION:
            raise SecurityError(f"a text or list repeated {times} times")
        if operator == "**" and abs(right) > LARGEST_POWER:
            raise SecurityError(f"a power of {right}")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """Implements `{% generation %}` blocks, which mark the text that the model learns to generate."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.Name(_MARKS, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, marks: tuple[str, str], caller: Macro) -> str:
        return f"{marks[0]}{caller()}{marks[1]}"


def _unmark(marked: str, begin: str, end: str) -> tuple[str, list[Span]]:
    """Removes the markers; returns the text and the non-empty spans between them."""
    first, *rest = marked.split(begin)
    text, spans = first, []
    for part in rest:
        inside, _, after = part.partition(end)
        if end in after or end in first:
            raise TemplateRefused("has {% generation %} marks inside one another")
        spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, [span for span in spans if span[0] < span[1]]


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def _limit(memory_bytes: int, cpu_seconds: float) -> None:
    """Limits the memory of this process, and the CPU time of the next request."""
    with contextlib.suppress(ValueError, OSError):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        until = int(usage.ru_utime + usage.ru_stime + cpu_seconds) + 1
        # Only soft limits, so that the next request can raise them; code inside the sandbox cannot call
        # setrlimit.
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _restrict_process() -> None:
    """Forbids writing files and core dumps, and ignores signals sent to the process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(kind, (0, 0))


def main() -> int:
    _restrict_process()
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
        except TemplateRefused as refusal:
            answer = json.dumps({"syntax" if refusal.is_syntax else "refused": str(refusal)})
        except MemoryError:
            answer, exhausted = json.dumps({"exhausted": "memory"}), True
        except Exception as error:
            # Raised by Python's compiler on jinja2's output, or by json if messages are nested too deeply.
            answer = json.dumps({"refused": f"fails ({type(error).__name__}: {_short(error)})"})
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()
        if exhausted:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
