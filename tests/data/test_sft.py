"""Tests supervised fine-tuning: packed and padded training are equal; truncation is reported."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pentatron.checkpoint.state import TrainState
from pentatron.compare.trial import perturb_norms_and_biases
from pentatron.data.loader import build_loader, collate
from pentatron.data.open_data import Datasets, OpenedData, OrderSizes, build_datasets, open_data
from pentatron.data.sample_index import DOCUMENT_STARTS, IndexCache
from pentatron.data.sft import pack
from pentatron.data.tokenizer import ByteTokenizer
from pentatron.errors import AgreedError, ConfigError, UserError
from pentatron.layout.ranks import Grid
from pentatron.monitor.display import SilentDisplay
from pentatron.parallel.collectives import run_on_all_ranks
from pentatron.parallel.world import create_groups, single_process
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.resolve import Resolved, gather, resolve
from pentatron.settings.settings import ProcessFacts
from pentatron.train.model import build_parallel_model
from tests.data.chats import CHATML, tokenizer_folder
from tests.harness import distributed

CPU = torch.device("cpu")
LENGTH = 48
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --train-iters 4 --global-batch-size 2".split()
)


class Said(SilentDisplay):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def lines(count: int = 30) -> list[dict[str, Any]]:
    return [{"input": "ask" * (i % 4 + 1), "output": f"say {i}" + "!" * (i * 7 % 11)} for i in range(count)]


def write(path: Path, conversations: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in conversations), encoding="utf-8")
    return path


def resolved(path: Path, *words: str, length: int = LENGTH) -> Resolved:
    bytes_as_they_are = ["--tokenizer-type", "ByteTokenizer", "--sft-tokenizer-prompt-format", "identity"]
    tokenizer = [] if "--tokenizer-model" in words else [*bytes_as_they_are, "--vocab-size", "257"]
    data = [
        "--sft",
        "--data-path",
        str(path),
        "--seq-length",
        str(length),
        "--split",
        "1",
        "--eval-iters",
        "0",
    ]
    return resolve(gather([*MODEL, *data, *tokenizer, *words], TRAIN), ProcessFacts(1))


def opened(
    path: Path, folder: Path, *words: str, length: int = LENGTH, said: Said | None = None
) -> OpenedData:
    config = resolved(path, *words, length=length).config
    return open_data(config, single_process(CPU), folder, said or Said())


def build(path: Path, folder: Path, *words: str, length: int = LENGTH, said: Said | None = None) -> Datasets:
    found, config = opened(path, folder, *words, length=length, said=said), resolved(path, *words).config
    return build_datasets(found, config, single_process(CPU), TrainState(), folder, Said())


def test_packed_and_padded_give_the_same_loss_and_gradients(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", lines())
    sums, gradients = [], []
    for words in ([], ["--sft-packing"]):
        datasets = build(path, tmp_path / "data", *words)
        rows: Any = datasets.train
        epoch = [rows.dataset[i] for i in range(len(rows.dataset))]
        torch.manual_seed(0)
        model = build_parallel_model(resolved(path, *words).config, single_process(CPU))
        perturb_norms_and_biases(model)
        (stage,) = model.stages.values()
        total = torch.zeros(())
        for first in range(0, len(epoch), 4):
            batch = collate(epoch[first : first + 4])
            losses = stage(batch.tokens, batch.position_ids, batch.labels, documents=batch.documents)
            total = total + (losses * batch.loss_mask).sum()
        if batch.documents is not None:
            # Control: attending to earlier conversations changes the outputs.
            mixed = stage(batch.tokens, batch.position_ids, batch.labels)
            assert not torch.allclose(mixed, losses, atol=1e-3)
        total.backward()
        sums.append((len(epoch), sum(row["loss_mask"].sum() for row in epoch), total.item()))
        gradients.append({name: p.grad.clone() for name, p in stage.named_parameters()})
    (padded_rows, padded_labels, padded), (packed_rows, packed_labels, packed) = sums
    assert packed_rows < padded_rows / 2 and packed_labels == padded_labels
    assert packed == pytest.approx(padded, rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-4)


def test_every_conversation_is_packed_once_with_its_own_positions(tmp_path: Path) -> None:
    said = Said()
    path = write(tmp_path / "chats.jsonl", lines())
    rows: Any = build(path, tmp_path / "data", "--sft-packing", said=said).train
    found: Counter[str] = Counter()
    for i in range(len(rows.dataset)):
        row = rows.dataset[i]
        for begin, end in zip(row[DOCUMENT_STARTS], [*row[DOCUMENT_STARTS][1:], LENGTH]):
            np.testing.assert_array_equal(row["position_ids"][begin:end], np.arange(end - begin))
            part = slice(begin, end)
            if not row["loss_mask"][part].any():
                # Padding, which has the id of a normal token.
                assert end == LENGTH and not row["tokens"][part].any()
                continue
            np.testing.assert_array_equal(row["labels"][begin : end - 1], row["tokens"][begin + 1 : end])
            answer = row["labels"][part][row["loss_mask"][part] == 1]
            assert answer[-1] == ByteTokenizer.eod
            found[bytes(answer[:-1].tolist()).decode()] += 1
    assert found == Counter(line["output"] for line in lines())
    (line,) = [line for line in said.lines if line.startswith("training")]
    filled = 100 * sum(len(c["input"] + c["output"]) for c in lines()) / (len(rows.dataset) * LENGTH)
    assert f"30 conversations packed into {len(rows.dataset)} sequences" in line and f"{filled:.0f}%" in line


def test_order_is_independent_of_ranks_and_survives_a_resume(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", lines(7))
    rows: Any = build(path, tmp_path / "data").train

    def read(consumed: int, micro: int, ranks: int, samples: int) -> list[list[int]]:
        loaders = [iter(build_loader(rows, consumed, micro, rank, ranks)) for rank in range(ranks)]
        batches = [next(loader).tokens for _ in range(samples // (micro * ranks)) for loader in loaders]
        found: list[list[int]] = torch.cat(batches).tolist()
        return found

    whole = read(0, 2, 1, 16)
    assert read(0, 1, 4, 16) == whole and read(8, 2, 2, 8) == whole[8:]
    # Each epoch has every conversation, in another order.
    assert sorted(whole[:7]) == sorted(whole[7:14]) and whole[:7] != whole[7:14]
    other: Any = build(path, tmp_path / "data", "--seed", "7").train
    assert [other[i]["tokens"].tolist() for i in range(7)] != whole[:7]


def test_too_long_conversations_are_reported(tmp_path: Path) -> None:
    long = [{"input": "q" * 60, "output": "lost"}, {"input": "q" * 40, "output": "cut" * 9}]
    path = write(tmp_path / "chats.jsonl", [*lines(3), *long])
    said = Said()
    for words in ([], ["--sft-packing"]):
        rows: Any = build(path, tmp_path / "data", *words, said=said).train
        cut = [r for r in map(rows.dataset.__getitem__, range(len(rows.dataset))) if ord("q") in r["tokens"]]
        assert len(cut) == 1
        assert bytes(cut[0]["labels"][cut[0]["loss_mask"] == 1].tolist()) == b"cutcutcut"
        assert (
            "2 too long and cut at the end (the longest has 68 tokens), 1 of them left out" in said.lines[-1]
        )
    with pytest.raises(UserError, match=r"no conversation .* within 2 tokens; raise --seq-length"):
        build(write(path, long), tmp_path / "data", length=2)


def test_damaged_tokens_of_an_earlier_run_are_made_again(tmp_path: Path) -> None:
    path, data = write(tmp_path / "c.jsonl", lines(30)), tmp_path / "data"
    expected = build(path, data).train[3]["tokens"].tolist()
    (tokens,) = data.glob("sft-*.bin")
    good = tokens.read_bytes()
    for damaged in (bytes([good[0] ^ 1]) + good[1:], good[:-2]):
        tokens.write_bytes(damaged)
        said = Said()
        opened(path, data, said=said)
        assert any("it is tokenized again" in line for line in said.lines)
        assert tokens.read_bytes() == good
    assert build(path, data).train[3]["tokens"].tolist() == expected


def test_several_files_are_one_set(tmp_path: Path) -> None:
    names = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, part in zip(names, (lines(30)[:20], lines(30)[20:]), strict=True):
        write(path, part)
    both = ["--data-path", *map(str, names), "--split", "8,1,1", "--eval-iters", "1"]
    said = Said()
    found = build(names[0], tmp_path, *both, said=said)

    def labels(part: Any, count: int) -> list[list[int]]:
        return sorted(part[i]["labels"].tolist() for i in range(count))

    whole = write(
        tmp_path / "whole.jsonl", [line for at in (0, 20) for line in lines(30)[at : at + (8 if at else 16)]]
    )
    assert labels(found.train, 24) == labels(build(whole, tmp_path).train, 24)
    # Each file is split separately. An epoch has every conversation once, so a file contributes as many
    # samples as it has conversations.
    assert labels(found.valid, 3) == labels(
        build(write(tmp_path / "v.jsonl", [*lines(30)[16:18], lines(30)[28]]), tmp_path).train, 3
    )
    assert found.drawn(0, 48) == {str(names[0]): 32, str(names[1]): 16}
    assert any(line.startswith(f"training, {names[1]}: 8 conversations") for line in said.lines)
    other = opened(names[0], tmp_path, "--data-path", str(names[1]), str(names[0]), *both[3:])
    assert other.identity != opened(names[0], tmp_path, *both).identity
    with pytest.raises(UserError, match=r"there is no file .*absent\.jsonl"):
        build(names[0], tmp_path, "--data-path", str(names[0]), "absent.jsonl")


@distributed(world=2)
def test_tokenizer_missing_on_one_machine_is_an_error_on_all(tmp_path: Path) -> None:
    """An error on one rank is raised on all before any of them waits for the tokens."""
    rank = dist.get_rank()
    path = tmp_path / f"{rank}.jsonl"
    write(path, lines(4))
    folder = tokenizer_folder(tmp_path / f"tokenizer{rank}", CHATML) if rank == 0 else tmp_path / "absent"
    config = resolved(path, "--tokenizer-model", str(folder), "--vocab-size", "2000").config
    world = create_groups(Grid(data=2), rank, rank, CPU)
    with pytest.raises(AgreedError, match="Tokenizer not found"):
        run_on_all_ranks(lambda: open_data(config, world, tmp_path, Said()), world.all_ranks)


def test_shares_to_validate_and_test_with(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", lines(30))
    found = build(path, tmp_path, "--split", "8,1,1", "--eval-iters", "1")
    assert found.valid is not None and found.test is not None

    def texts(part: Any) -> list[list[int]]:
        return sorted(part[i]["labels"].tolist() for i in range(3))

    for part, begin in ((found.valid, 24), (found.test, 27)):
        alone = write(tmp_path / f"{begin}.jsonl", lines(30)[begin : begin + 3])
        assert texts(part) == texts(build(alone, tmp_path).train)
    said = Said()
    without = opened(path, tmp_path, "--split", "9,1,0.001", "--eval-iters", "1", said=said)
    assert without.no_test == "--split 9,1,0.001 leaves none of 30 conversations to test with"
    assert not any("to test with" in line for line in said.lines)


def test_mistakes_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"input": "a", "output": "b"}\n\n{"input": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"line 3 of .*chats.jsonl has the keys input"):
        build(path, tmp_path / "data")
    assert not list((tmp_path / "data").glob("sft-*"))
    write(path, [{"input": "a", "output": "b"}, {"input": "\ud800", "output": "b"}])
    with pytest.raises(UserError, match=r"line 2 of .*chats.jsonl contains half a surrogate pair"):
        build(path, tmp_path / "data")
    folder = tokenizer_folder(tmp_path / "model", "{{ raise_exception('never') }}")
    with pytest.raises(
        UserError, match=r"line 1 of .* cannot be written as text: the chat template of .*jinja says: never"
    ):
        build(path, tmp_path / "data", "--tokenizer-model", str(folder), "--vocab-size", "400")
    bare = tokenizer_folder(tmp_path / "bare", None)
    with pytest.raises(UserError, match=r"has no chat template.*--chat-template FILE"):
        build(path, tmp_path / "data", "--tokenizer-model", str(bare), "--vocab-size", "400")
    write(path, [{"input": "1", "output": " 2"}, {"messages": [{"role": "assistant", "content": "3"}] * 2}])
    with pytest.raises(
        UserError, match=r"line 2 of .* cannot be tokenized: it has more than a question and an answer"
    ):
        build(path, tmp_path / "data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9")
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no conversation"):
        build(path, tmp_path / "data")
    with pytest.raises(UserError, match="there is no file"):
        build(tmp_path / "none.jsonl", tmp_path / "data")


def test_templates_of_folder_and_file_are_different_data(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", lines(3))
    folder = tokenizer_folder(tmp_path / "model", CHATML)
    named = ["--tokenizer-model", str(folder), "--vocab-size", "400"]
    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}", encoding="utf-8")
    own = opened(path, tmp_path / "data", *named)
    changed = opened(path, tmp_path / "data", *named, "--chat-template", str(other))
    again = opened(path, tmp_path / "elsewhere", *named)
    texts = []
    for found in (own, changed):
        assert found.tokenizer is not None
        texts.append(
            found.tokenizer.decode(found.order(OrderSizes([4], []), IndexCache())[0][0]["tokens"].tolist())
        )
    assert texts[0].startswith("<|im_start|>user\n") and "|say" in texts[1]
    assert own.identity == again.identity != changed.identity
    assert (
        opened(path, tmp_path / "data", *named, "--tokenizer-type", "SFTTokenizer").identity == own.identity
    )


def test_flags_act_or_say_why_not(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", lines(3))
    notices = "\n".join(resolved(path, "--reset-attention-mask", "--chat-template", "x").notices)
    assert "--reset-attention-mask: with --sft every conversation is one document" in notices
    assert "--chat-template x: texts are concatenated without a template" in notices
    without = [*MODEL, "--seq-length", "8", "--vocab-size", "9", "--mock-data", "--sft-packing"]
    assert "--sft-packing: there are no conversations" in "\n".join(
        resolve(gather(without, TRAIN), ProcessFacts(1)).notices
    )
    for words, reason in (
        (["--data-path", "a.jsonl"], "--data-path a.jsonl is text"),
        (
            ["--sft", "--data-path", "1", "a.jsonl", "1", "b.jsonl"],
            "the weight 1 has no meaning",
        ),
        (["--sft", "--data-path", "a.jsonl"], "--sft needs a tokenizer"),
        (["--sft-tokenizer-prompt-format", "nemotron-h-aligned"], "--chat-template FILE takes any template"),
        (["--sft-date", "today"], "is not a date"),
    ):
        with pytest.raises(ConfigError, match=reason):
            resolve(
                gather([*MODEL, "--seq-length", "8", "--vocab-size", "9", *words], TRAIN), ProcessFacts(1)
            )


def test_packing_wastes_little() -> None:
    lengths = np.random.RandomState(3).randint(1, 500, size=3000)
    members, bounds = pack(lengths, 1000)
    sums = np.add.reduceat(lengths[members], bounds[:-1])
    assert sorted(members.tolist()) == list(range(3000)) and sums.max() <= 1000
    assert len(sums) <= -(-lengths.sum() // 1000) + 1
