"""Conversations to learn from: lines of JSON in, tokens out, with a mark on those that the model is to say."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pentatron.data.chat_template import ChatTemplate, Message, Span, TemplateRefusal
from pentatron.data.text_files import JSON_LINES, is_json, read_chunks
from pentatron.data.tokenizer import Tokenizer
from pentatron.errors import UserError
from pentatron.text import parse_json

CHUNK_BYTES = 1 << 20
ASSISTANT = "assistant"
FORMS = '{"messages": [{"role": ..., "content": ...}]}, {"input": ..., "output": ...} or {"prompt": ..., "completion": ...}'
# Parts of a question in other layouts of data: leaving them out in silence would change what is asked.
PARTS_OF_A_QUESTION = ("instruction", "history", "context")


@dataclass(frozen=True)
class Conversation:
    """`learned` are the messages whose words the model is to say; `plain`: the texts follow each other as they are."""

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: Any = None
    plain: bool = False


@dataclass(frozen=True)
class MarkedText:
    """A text, the parts of it to learn, and whether a token that ends a document comes after it."""

    text: str
    learned: tuple[Span, ...]
    ends_document: bool = False


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    learned: npt.NDArray[np.bool_]


@runtime_checkable
class _Locating(Protocol):
    """A tokenizer that tells which characters each token stands for."""

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]: ...


class Writer:
    """Conversations as texts and as tokens. Without a template, texts follow each other as they are and a document ends behind them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer, self.template = tokenizer, template

    def texts(self, conversation: Conversation) -> list[MarkedText]:
        """One sample, or one for each answer where the template writes an earlier answer differently once others follow."""
        if conversation.plain or self.template is None:
            found = [_laid_end_to_end(conversation)]
        else:
            try:
                found = apply_template(self.template, conversation)
            except TemplateRefusal as error:
                raise UserError(f"cannot be written as text: {error}") from None
        for marked in found:
            try:
                marked.text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"holds half a surrogate pair, which is no character ({error.reason})"
                ) from None
        return found

    def tokens(self, texts: Sequence[MarkedText]) -> list[Tokens]:
        """Many texts at once, which a tokenizer may share between cores."""
        return [self._ended(text, *found) for text, found in zip(texts, encode_marked(self.tokenizer, texts))]

    def _ended(self, text: MarkedText, ids: list[int], learned: npt.NDArray[np.bool_]) -> Tokens:
        if not text.ends_document:
            return Tokens(ids, learned)
        ends_answer = bool(text.learned) and text.learned[-1][1] == len(text.text)
        return Tokens([*ids, self.tokenizer.eod], np.append(learned, ends_answer))


def apply_template(template: ChatTemplate, conversation: Conversation) -> list[MarkedText]:
    """The answers are what the template marks, or what it adds to the text that asks for them."""
    messages, tools = conversation.messages, conversation.tools
    cuts = [(len(messages), False)]
    for place in conversation.learned:
        cuts += [(place, True), (place + 1, False)]
    rendered = template.render_cuts(messages, tools, cuts)
    whole = rendered[0]
    if whole.generated is not None:
        wanted = conversation.learned == tuple(answers_of(messages))
        if not wanted:
            raise UserError("leaves out answers, which a template with {% generation %} marks cannot do")
        return [MarkedText(whole.text, whole.generated)]
    spans: list[tuple[str, Span]] = []
    for number, place in enumerate(conversation.learned):
        before, after = rendered[2 * number + 1].text, rendered[2 * number + 2].text
        if not after.startswith(before):
            raise UserError(
                f"cannot be cut into question and answer: {template.origin} writes the text before message {place + 1} differently "
                "once the answer is there; put {% generation %} marks around answers in a copy of it and name that with --chat-template FILE"
            )
        spans.append((after, (len(before), len(after))))
    if all(whole.text.startswith(text) for text, _ in spans):
        return [MarkedText(whole.text, tuple(span for _, span in spans))]
    # Each answer is learned after the text that will stand before it when the model is asked.
    return [MarkedText(text, (span,)) for text, span in spans]


def _laid_end_to_end(conversation: Conversation) -> MarkedText:
    text, spans = "", []
    for place, message in enumerate(conversation.messages):
        content = message["content"]
        if not isinstance(content, str):
            raise UserError(f"message {place + 1} has no plain text; only a chat template can write it")
        if place in conversation.learned:
            spans.append((len(text), len(text) + len(content)))
        text += content
    return MarkedText(text, tuple(spans), ends_document=True)


def encode_marked(
    tokenizer: Tokenizer, texts: Sequence[MarkedText]
) -> list[tuple[list[int], npt.NDArray[np.bool_]]]:
    """The tokens of each whole text, and which of them have a character to learn."""
    if not isinstance(tokenizer, _Locating):
        return [_by_beginning(tokenizer, text) for text in texts]
    encoded = tokenizer.encode_with_places([text.text for text in texts])
    return [(ids, _overlap(places, text)) for (ids, places), text in zip(encoded, texts)]


def _overlap(places: Sequence[Span], text: MarkedText) -> npt.NDArray[np.bool_]:
    inside = np.zeros(len(text.text) + 1, np.int64)
    for begin, end in text.learned:
        inside[begin + 1 : end + 1] = 1
    before = np.cumsum(inside)
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    # A space may be cut from the front of a token until nothing is left of it.
    begins = np.where(begins < ends, begins, np.maximum(ends - 1, 0))
    return before[ends] > before[begins]


def _by_beginning(tokenizer: Tokenizer, text: MarkedText) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """The answer begins where the tokens of the whole are no longer those of the question."""
    if len(text.learned) != 1 or text.learned[0][1] != len(text.text):
        raise UserError(
            f"it has more than a question and an answer, and {tokenizer.kind} does not tell where its tokens stand in a text; use a "
            "tokenizer.json"
        )
    ids = tokenizer.encode(text.text)
    question = tokenizer.encode(text.text[: text.learned[0][0]])
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, question)))
    return ids, np.arange(len(ids)) >= same


def answers_of(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]


def no_file(path: Path) -> str:
    return f"there is no file {path}; with --sft, --data-path takes files of JSON lines: {FORMS}"


def read_conversations(path: Path) -> Iterator[tuple[int, Conversation, int]]:
    """Every line of a file of JSON lines: its number, its conversation, and the bytes of the file read up to it."""
    if not path.is_file():
        raise UserError(no_file(path))
    if not is_json(path):
        raise UserError(f"{path} is plain text, and --sft reads JSON lines: {FORMS}")
    for chunk in read_chunks([path], JSON_LINES, CHUNK_BYTES):
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
            if line.strip():
                with at_line(path, number):
                    found = parse_conversation(line)
                yield number, found, chunk.read


@contextmanager
def at_line(path: Path, number: int) -> Iterator[None]:
    """Says in which line a mistake was found."""
    try:
        yield
    except UserError as error:
        raise UserError(f"line {number} of {path} {str(error).rstrip('.')}") from None


def parse_conversation(line: bytes | str) -> Conversation:
    """One line, in any of the layouts; what could be lost in silence is refused."""
    try:
        found = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"is not an object; it should be {FORMS}")
    layouts = [name for name in ("messages", "output", "completion") if name in found]
    if len(layouts) != 1:
        raise UserError(
            f"has {' and '.join(layouts)}, which are different layouts; keep one"
            if layouts
            else f"has the keys {', '.join(map(str, found)) or 'none'}; it should be {FORMS}"
        )
    if layouts == ["messages"]:
        return _chat(found["messages"], found.get("tools"))
    if layouts == ["output"]:
        return _input_and_output(found)
    return _prompt_and_completion(found)


def _chat(written: Any, tools: Any, before: int = 0) -> Conversation:
    """With `before`, answers among that many first messages belong to the question."""
    if not isinstance(written, list) or not written:
        raise UserError("has messages that are not a list of at least one message")
    for place, message in enumerate(written, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f'has no role in message {place}; each is {{"role": ..., "content": ...}}')
        content = message.get("content")
        calls = content is None and "tool_calls" in message
        if not (isinstance(content, str | list) or calls):
            raise UserError(f"has no content in message {place} ({message['role']})")
    answers = [place for place in answers_of(written) if place >= before]
    learned = [place for place in answers if _weight(written[place], place) != 0]
    if not learned:
        raise UserError(f"has no answer to learn from: no message has the role {ASSISTANT}")
    return Conversation(tuple(written), tuple(learned), tools)


def _weight(message: Message, place: int) -> int:
    """Some layouts say 0 for answers that are there to be read only."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise UserError(f"has the weight {weight} in message {place + 1}; it can be 0 or 1")
    return int(weight)


def _input_and_output(found: Mapping[str, Any]) -> Conversation:
    other = [name for name in PARTS_OF_A_QUESTION if found.get(name)]
    if other:
        raise UserError(
            f"has {other[0]} beside input and output, and how they make one question is not said; write them as messages"
        )
    texts = [("system", found["system"])] if found.get("system") is not None else []
    texts += [("user", found.get("input")), (ASSISTANT, found["output"])]
    for role, text in texts:
        if not isinstance(text, str):
            name = {"user": "input", ASSISTANT: "output"}.get(role, role)
            raise UserError(f"has no text as {name}")
    messages = tuple({"role": role, "content": text} for role, text in texts)
    return Conversation(messages, (len(messages) - 1,))


def _prompt_and_completion(found: Mapping[str, Any]) -> Conversation:
    """Texts stay as they are; lists of messages are one conversation whose end is learned."""
    prompt, completion = found.get("prompt"), found["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat([*prompt, *completion], found.get("tools"), before=len(prompt))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise UserError("has prompt and completion that are not both texts or both lists of messages")
    messages = ({"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion})
    return Conversation(messages, (1,), plain=True)
