"""Parses conversations from JSON lines and tokenizes them, with a loss mask over the assistant's answers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pentatron.data.chat_template import ChatTemplate, Message, Span, TemplateRefusal
from pentatron.data.text_files import JSON_LINES, is_json_lines, read_chunks
from pentatron.data.tokenizer import Tokenizer
from pentatron.errors import UserError
from pentatron.text import parse_json

Mask = npt.NDArray[np.bool_]
CHUNK_BYTES = 1 << 20
ASSISTANT = "assistant"
FORMS = '{"messages": [{"role": ..., "content": ...}]}, {"input": ..., "output": ...} or {"prompt": ..., "completion": ...}'
# Parts of the prompt in other dataset formats: ignoring them would silently change the prompt.
PARTS_OF_A_QUESTION = ("instruction", "history", "context")


@dataclass(frozen=True)
class Conversation:
    """A conversation, and the indices `in_loss` of the messages that count in the loss.

    `plain` means that the texts are concatenated without a template."""

    messages: tuple[Message, ...]
    in_loss: tuple[int, ...]
    tools: Any = None
    plain: bool = False


@dataclass(frozen=True)
class MarkedText:
    """A text, its spans that count in the loss, and whether an end-of-document token follows it."""

    text: str
    in_loss: tuple[Span, ...]
    ends_document: bool = False


@dataclass(frozen=True)
class Tokens:
    """Token ids and the loss mask over them."""

    ids: list[int]
    in_loss: Mask


@runtime_checkable
class _OffsetTokenizer(Protocol):
    """A tokenizer that returns the character offsets of each token."""

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]: ...


class ConversationEncoder:
    """Converts conversations to texts and tokens.

    Without a template, texts are concatenated and followed by an end-of-document token.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer, self.template = tokenizer, template

    def texts(self, conversation: Conversation) -> list[MarkedText]:
        """Returns one text, or one for each answer if the template renders earlier answers differently."""
        if conversation.plain or self.template is None:
            texts = [_concatenate(conversation)]
        else:
            try:
                texts = apply_template(self.template, conversation)
            except TemplateRefusal as error:
                raise UserError(f"cannot be written as text: {error}") from None
        for marked in texts:
            try:
                marked.text.encode()
            except UnicodeEncodeError as error:
                reason = f"which is not a character ({error.reason})"
                raise UserError(f"contains half a surrogate pair, {reason}") from None
        return texts

    def tokens(self, texts: Sequence[MarkedText]) -> list[Tokens]:
        """Tokenizes a batch of texts, in parallel where the tokenizer supports it."""
        samples = []
        for text, (ids, in_loss) in zip(texts, encode_marked(self.tokenizer, texts)):
            if text.ends_document:
                ends_answer = bool(text.in_loss) and text.in_loss[-1][1] == len(text.text)
                ids, in_loss = [*ids, self.tokenizer.eod], np.append(in_loss, ends_answer)
            samples.append(Tokens(ids, in_loss))
        return samples


def apply_template(template: ChatTemplate, conversation: Conversation) -> list[MarkedText]:
    """Renders a conversation; its answers are the marked spans, or what each adds to its prompt."""
    messages, tools = conversation.messages, conversation.tools
    cuts = [(len(messages), False)]
    for place in conversation.in_loss:
        cuts += [(place, True), (place + 1, False)]
    rendered = template.render_cuts(messages, tools, cuts)
    whole = rendered[0]
    if whole.generated is not None:
        if conversation.in_loss != tuple(assistant_indices(messages)):
            raise UserError("leaves out answers, which a template with {% generation %} marks cannot do")
        return [MarkedText(whole.text, whole.generated)]
    spans: list[tuple[str, Span]] = []
    for number, place in enumerate(conversation.in_loss):
        before, after = rendered[2 * number + 1].text, rendered[2 * number + 2].text
        if not after.startswith(before):
            raise UserError(
                f"cannot be cut into question and answer: {template.origin} writes the text before message {place + 1} differently "
                "once the answer is there; put {% generation %} marks around answers in a copy of it and name that with --chat-template FILE"
            )
        spans.append((after, (len(before), len(after))))
    if all(whole.text.startswith(text) for text, _ in spans):
        return [MarkedText(whole.text, tuple(span for _, span in spans))]
    # The template changes earlier text once messages follow: train each answer after the prompt seen at
    # inference.
    return [MarkedText(text, (span,)) for text, span in spans]


def _concatenate(conversation: Conversation) -> MarkedText:
    text, spans = "", []
    for place, message in enumerate(conversation.messages):
        content = message["content"]
        if not isinstance(content, str):
            raise UserError(f"message {place + 1} has no plain text; only a chat template can write it")
        if place in conversation.in_loss:
            spans.append((len(text), len(text) + len(content)))
        text += content
    return MarkedText(text, tuple(spans), ends_document=True)


def encode_marked(tokenizer: Tokenizer, texts: Sequence[MarkedText]) -> list[tuple[list[int], Mask]]:
    """Tokenizes whole texts; a token counts in the loss if any of its characters does."""
    if not isinstance(tokenizer, _OffsetTokenizer):
        return [_encode_by_prefix(tokenizer, text) for text in texts]
    encoded = tokenizer.encode_with_offsets([text.text for text in texts])
    return [(ids, _overlap(offsets, text)) for (ids, offsets), text in zip(encoded, texts)]


def _overlap(offsets: Sequence[Span], text: MarkedText) -> Mask:
    """Returns for each token whether its character span overlaps a span of `in_loss`."""
    inside = np.zeros(len(text.text) + 1, np.int64)
    for begin, end in text.in_loss:
        inside[begin + 1 : end + 1] = 1
    before = np.cumsum(inside)
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    # Some tokenizers trim spaces from the offsets: a token of one space has an empty span.
    begins = np.where(begins < ends, begins, np.maximum(ends - 1, 0))
    return before[ends] > before[begins]


def _encode_by_prefix(tokenizer: Tokenizer, text: MarkedText) -> tuple[list[int], Mask]:
    """Encodes a prompt and its answer, which begins where the tokens differ from the prompt alone."""
    if len(text.in_loss) != 1 or text.in_loss[0][1] != len(text.text):
        raise UserError(
            f"it has more than a question and an answer, and {tokenizer.kind} does not give the character offsets of its tokens; "
            "use a tokenizer.json"
        )
    ids = tokenizer.encode(text.text)
    prompt = tokenizer.encode(text.text[: text.in_loss[0][0]])
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt)))
    return ids, np.arange(len(ids)) >= shared


def assistant_indices(messages: Sequence[Message]) -> list[int]:
    """Returns the indices of the assistant's messages."""
    return [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]


def missing_file_message(path: Path) -> str:
    return f"there is no file {path}; with --sft, --data-path takes files of JSON lines: {FORMS}"


def read_conversations(path: Path) -> Iterator[tuple[int, Conversation, int]]:
    """Yields the number and conversation of each line of a file, and the bytes read so far."""
    if not path.is_file():
        raise UserError(missing_file_message(path))
    if not is_json_lines(path):
        raise UserError(f"{path} is plain text, but --sft reads JSON lines: {FORMS}")
    for chunk in read_chunks([path], JSON_LINES, CHUNK_BYTES):
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
            if line.strip():
                with at_line(path, number):
                    conversation = parse_conversation(line)
                yield number, conversation, chunk.read


@contextmanager
def at_line(path: Path, number: int) -> Iterator[None]:
    """Prefixes a UserError raised inside the block with the file and line."""
    try:
        yield
    except UserError as error:
        raise UserError(f"line {number} of {path} {str(error).rstrip('.')}") from None


def parse_conversation(line: bytes | str) -> Conversation:
    """Parses one line in any of the supported formats; raises UserError for content that would be ignored."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"is not an object; it should be {FORMS}")
    formats = [name for name in ("messages", "output", "completion") if name in row]
    if len(formats) != 1:
        raise UserError(
            f"has {' and '.join(formats)}, which are different layouts; keep one"
            if formats
            else f"has the keys {', '.join(map(str, row)) or 'none'}; it should be {FORMS}"
        )
    if formats == ["messages"]:
        return _chat(row["messages"], row.get("tools"))
    return _input_and_output(row) if formats == ["output"] else _prompt_and_completion(row)


def _chat(messages: Any, tools: Any, before: int = 0) -> Conversation:
    """Parses a list of messages; the first `before` of them belong to the prompt."""
    if not isinstance(messages, list) or not messages:
        raise UserError("has messages that are not a list of at least one message")
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f'has no role in message {place}; each is {{"role": ..., "content": ...}}')
        content = message.get("content")
        calls = content is None and "tool_calls" in message
        if not (isinstance(content, str | list) or calls):
            raise UserError(f"has no content in message {place} ({message['role']})")
    answers = {at: messages[at].get("weight", 1) for at in assistant_indices(messages) if at >= before}
    for place, weight in answers.items():
        if weight not in (0, 1):
            raise UserError(f"has the weight {weight} in message {place + 1}; it can be 0 or 1")
    # An answer of weight 0 does not count in the loss.
    in_loss = tuple(place for place, weight in answers.items() if weight)
    if not in_loss:
        raise UserError(f"has no answer to train on: no message has the role {ASSISTANT}")
    return Conversation(tuple(messages), in_loss, tools)


def _input_and_output(row: Mapping[str, Any]) -> Conversation:
    if unused := [name for name in PARTS_OF_A_QUESTION if row.get(name)]:
        raise UserError(
            f"has {unused[0]} beside input and output, which can be combined into a prompt in several ways; write them as messages"
        )
    texts = [("system", row["system"])] if row.get("system") is not None else []
    texts += [("user", row.get("input")), (ASSISTANT, row["output"])]
    for role, text in texts:
        if not isinstance(text, str):
            name = {"user": "input", ASSISTANT: "output"}.get(role, role)
            raise UserError(f"has no text as {name}")
    messages = tuple({"role": role, "content": text} for role, text in texts)
    return Conversation(messages, (len(messages) - 1,))


def _prompt_and_completion(row: Mapping[str, Any]) -> Conversation:
    """Parses two texts to concatenate, or two lists of messages, the second of which counts in the loss."""
    prompt, completion = row.get("prompt"), row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat([*prompt, *completion], row.get("tools"), before=len(prompt))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise UserError("has prompt and completion that are not both texts or both lists of messages")
    messages = ({"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion})
    return Conversation(messages, (1,), plain=True)
