"""Tests chat templates: tokens equal to `transformers`, loss masks of answers, and the sandbox."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentatron.data.chat_template import find_chat_template, special_tokens
from pentatron.data.conversations import (
    Conversation,
    ConversationEncoder,
    MarkedText,
    Tokens,
    encode_marked,
    parse_conversation,
)
from pentatron.data.tokenizer import ByteTokenizer, FileTokenizer, NullTokenizer
from pentatron.errors import UserError
from tests.data.chats import CHATML, STYLES, THINKING, WholeTemplate, tokenizer_folder

TODAY = datetime.date(2024, 7, 26)
TALK = [
    {"role": "user", "content": "hello, what is 12 and 34?\n"},
    {"role": "assistant", "content": "\n 46 — é漢\u200d🙂"},
    {"role": "user", "content": " and  the answer of  "},
    {"role": "assistant", "content": "you are helpful"},
]


def template(source: str) -> WholeTemplate:
    return WholeTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, TODAY)


def chat(messages: list[dict[str, Any]]) -> Conversation:
    return parse_conversation(json.dumps({"messages": messages}))


def encode(writer: ConversationEncoder, conversation: Conversation) -> list[Tokens]:
    return writer.tokens(writer.texts(conversation))


def learned(tokenizer: Any, source: str, messages: list[dict[str, Any]]) -> list[str]:
    """Returns the texts of consecutive learned tokens in every sample."""
    found = []
    for sample in encode(ConversationEncoder(tokenizer, template(source)), chat(messages)):
        edges = np.flatnonzero(np.diff(sample.in_loss, prepend=False, append=False))
        found += [tokenizer.decode(sample.ids[a:b]) for a, b in edges.reshape(-1, 2)]
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return FileTokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), None))


@pytest.mark.parametrize("style", STYLES)
def test_tokens_are_those_of_transformers(tmp_path: Path, style: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path, STYLES[style], in_config=style == "instructions")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    found = find_chat_template(folder)
    assert found is not None
    # transformers uses the current date.
    ours = WholeTemplate(found[0], special_tokens(folder), datetime.datetime.now().date())
    system = [{"role": "system", "content": "you are helpful"}]
    for messages in (TALK, TALK[:2], system + TALK):
        if style == "instructions" and messages[0]["role"] == "system":
            with pytest.raises(UserError, match="Only user and assistant roles"):
                ours.render(messages)
            continue
        asked = {"tokenize": False, "add_generation_prompt": True}
        assert ours.render(messages[:-1], answer_follows=True).text == theirs.apply_chat_template(
            messages[:-1], **asked
        )
        (sample,) = encode(ConversationEncoder(FileTokenizer(folder), ours), chat(messages))
        marks = style == "marked"
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marks)
        assert sample.ids == expected["input_ids"]
        if marks:
            assert sample.in_loss.astype(int).tolist() == expected["assistant_masks"]


def test_answers_are_learned_and_nothing_else(tokenizer: FileTokenizer) -> None:
    # The first line break of an answer is one token with that of the template before it.
    assert learned(tokenizer, STYLES["chatml"], TALK) == [
        "\n\n 46 — é漢\u200d🙂<|im_end|>\n",
        "you are helpful<|im_end|>\n",
    ]
    assert learned(tokenizer, STYLES["headers"], TALK) == [
        "46 — é漢\u200d🙂<|eot_id|>",
        "you are helpful<|eot_id|>",
    ]
    assert learned(tokenizer, STYLES["instructions"], TALK)[1] == " you are helpful</s>"
    assert learned(tokenizer, STYLES["marked"], TALK)[1] == "you are helpful<|im_end|>"
    read_only = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    assert learned(tokenizer, STYLES["chatml"], read_only) == ["you are helpful<|im_end|>\n"]
    calls = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "<é>"}]}]
    assert learned(tokenizer, STYLES["headers"], calls) == ['[{"name": "<é>"}]<|eot_id|>']


def test_a_template_that_rewrites_the_past(tokenizer: FileTokenizer) -> None:
    # Each answer is trained after the prompt that the model sees at inference.
    samples = encode(ConversationEncoder(tokenizer, template(THINKING)), chat(TALK))
    assert len(samples) == 2
    for place, sample in zip((1, 3), samples):
        asked = template(THINKING).render(TALK[:place], answer_follows=True).text
        assert tokenizer.decode(sample.ids).startswith(asked)
        assert sample.in_loss.sum() == len(sample.ids) - len(tokenizer.encode(asked))
    assert len(encode(ConversationEncoder(tokenizer, template(THINKING)), chat(TALK[:2]))) == 1
    unstable = "{{ messages | length }}" + CHATML
    with pytest.raises(UserError, match="cannot be cut into question and answer"):
        encode(ConversationEncoder(tokenizer, template(unstable)), chat(TALK))


def test_places_of_tokens_without_a_library() -> None:
    text = "ask é: yes ü, no"
    ((ids, marks),) = encode_marked(ByteTokenizer(), [MarkedText(text, ((7, 12),))])
    assert bytes(np.array(ids)[marks].tolist()).decode() == text[7:12]
    ((ids, marks),) = encode_marked(NullTokenizer(99), [MarkedText("1 2 3 4", ((3, 7),))])
    assert (ids, marks.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    with pytest.raises(UserError, match="NullTokenizer does not give the character offsets"):
        encode_marked(NullTokenizer(99), [MarkedText("1 2 3 4", ((1, 3), (5, 7)))])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "accesses a forbidden"),
        ("{{ messages.append(1) }}", "accesses a forbidden"),
        ("{{ raise_exception.__globals__.json }}", "accesses a forbidden"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "accesses a forbidden"),
        ("{% for i in range(10 ** 12) %}x{% endfor %}", "fails|accesses"),
        ("{{ 'x' * 10 ** 12 }}", "repeated"),
        ("{{ 10 ** 10000 }}", "a power of"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'xxxxxxxxxx' }}{% endfor %}{% endfor %}",
            "end",
        ),
        ("{% include '/etc/passwd' %}", "fails"),
        ("{{ messages[7].role + 1 }}", "says"),
        ("{{ lipsum() }}", "says"),
        ("{% if %}", "not a template that can be read .line 1"),
        ("{{ '%s' | random }}", "not a template that can be read|No filter"),
    ],
)
def test_templates_stay_in_their_sandbox(source: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        template(source).render(TALK)


def test_templates_by_name(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, None)
    assert find_chat_template(folder) is None
    config = folder / "tokenizer_config.json"
    for names, expected in ((("tools", "default"), "of default"), (("tools", "rag"), None)):
        listed = [{"name": name, "template": f"of {name}"} for name in names]
        config.write_text(json.dumps({"chat_template": listed}), encoding="utf-8")
        if expected is None:
            with pytest.raises(UserError, match="templates tools, rag and none called default"):
                find_chat_template(folder)
        else:
            assert find_chat_template(folder) == (expected, config)
    # chat_template.jinja has precedence.
    (folder / "chat_template.jinja").write_text("mine", encoding="utf-8")
    assert find_chat_template(folder) == ("mine", folder / "chat_template.jinja")


def test_templates_get_lists() -> None:
    source = "{% for m in (messages + [{'role': 'x', 'content': '!'}])[::-1] %}{{ m.content }}{% endfor %}"
    assert template(source).render(chat(TALK).messages[2:]).text == "!you are helpful and  the answer of  "


def test_marks_do_not_come_from_the_text() -> None:
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}|"
    text = "a\ue0000\ue001b\ue0020\ue003c"
    found = template(source).render([{"role": "assistant", "content": text}])
    assert (found.text, found.generated) == (f"{text}|", ((0, len(text)),))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ('{"text": "a"}', "has the keys text; it should be"),
        ('{"messages": [], "completion": ""}', "different layouts"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"content": "a"}]}', "no role in message 1"),
        ('{"messages": [{"role": "user"}]}', "no content in message 1"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no answer to train on"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}', "weight 2"),
        ('{"input": 1, "output": "a"}', "has no text as input"),
        ('{"output": "a"}', "has no text as input"),
        ('{"instruction": "add", "input": "1", "output": "a"}', "has instruction beside"),
        ('{"prompt": "a", "completion": ["b"]}', "not both texts"),
    ],
)
def test_invalid_conversation_is_refused(line: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        parse_conversation(line)


def test_the_three_layouts_are_one_conversation() -> None:
    messages = parse_conversation(json.dumps({"messages": TALK[:2]}))
    pair = {"input": TALK[0]["content"], "output": TALK[1]["content"]}
    assert parse_conversation(json.dumps(pair)) == messages
    lists = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert parse_conversation(json.dumps(lists)).in_loss == (3,)
    with_system = parse_conversation(json.dumps({**pair, "system": "be brief"}))
    assert [m["role"] for m in with_system.messages] == ["system", "user", "assistant"]
    # Prompt and completion are concatenated without a template and followed by the end token.
    plain = parse_conversation('{"prompt": "1 + 1 =", "completion": " 2"}')
    (sample,) = encode(ConversationEncoder(ByteTokenizer(), template(CHATML)), plain)
    assert bytes(sample.ids[:-1]) == b"1 + 1 = 2" and sample.ids[-1] == ByteTokenizer.eod
    assert sample.in_loss.tolist() == [False] * 7 + [True] * 3
