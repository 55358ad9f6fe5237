"""Every flag and command line of the guides is accepted by the program it is written for."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from pentatron.errors import ConfigError
from pentatron.settings.command_line import parse_flags
from pentatron.settings.derive import derive
from pentatron.settings.entry_points import EXAMPLE, PRETRAIN_GPT, TRAIN
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import Assigned, Draft, ProcessFacts
from tests.settings.builders import not_built, problems
from tests.settings.guide_blocks import BLOCKS
from tests.settings.guide_flags import FLAGS

ROOT = Path(__file__).parents[2]
ITEMS = ROOT / "docs/contract/items.yaml"
FLAG_ITEMS = range(52, 135)


@pytest.mark.parametrize("flag", FLAGS)
def test_flag(flag: str) -> None:
    """Parses a flag in the programs of its guides and in `pentatron train`, with a blank or `=`."""
    expected = FLAGS[flag]
    here = () if flag in ("--batch-size", "--batch_size") else (TRAIN,)
    for entry in (*expected.entries, *here):
        for text, value in expected.values.items():
            forms = [[flag, *text.split()]]
            if text and " " not in text:
                forms.append([f"{flag}={text}"])
            for words in forms:
                parsed = parse_flags(words, entry)
                assert parsed.values == {expected.setting: Assigned(value, f"flag {flag}")}, (
                    entry.name,
                    words,
                )
                assert type(parsed.values[expected.setting].value) is type(value)
                assert parsed.notices == []


def flags_of_the_contract() -> dict[str, int]:
    """Returns {flag: first contract item that names it}; an `args.NAME` of item 126 counts as a flag."""
    found: dict[str, int] = {}
    for item in yaml.safe_load(ITEMS.read_text(encoding="utf-8"))["items"]:
        if item["id"] not in FLAG_ITEMS:
            continue
        flags = re.findall(r"--[a-z0-9][a-z0-9_-]*", item["text"])
        if item["id"] == 126:
            flags = [f"--{name.replace('_', '-')}" for name in re.findall(r"`([a-z0-9_]+)`", item["text"])]
        for flag in flags:
            found.setdefault(flag, item["id"])
    return found


def test_the_table_holds_every_flag_of_the_contract() -> None:
    wanted = flags_of_the_contract()
    assert len(wanted) > 110
    assert sorted(set(wanted) - set(FLAGS)) == []


@pytest.fixture
def deepspeed_file() -> None:
    """Copies the DeepSpeed file that a block of guide 003 names into the working folder."""
    shutil.copy(ROOT / "ds_config.json", Path.cwd())


@pytest.mark.usefixtures("deepspeed_file")
@pytest.mark.parametrize("name", BLOCKS)
def test_block_is_understood(name: str) -> None:
    """A block has no unknown word, and every flag in it sets a value."""
    block = BLOCKS[name]
    draft = gather(block.words, block.entry)
    typed = {re.split(r"[= ]", word)[0] for word in block.words if word.startswith("--")}
    told = {source.removeprefix("flag ") for source in draft.sources.values() if source.startswith("flag ")}
    # Qwen3's list gives two flags for RoPE; only the last counts as the origin.
    assert typed - told <= {"--position-embedding-type"}
    comments = [n for n in draft.notices if n.startswith("dropped the comment")]
    assert len(comments) == block.text.count("#")


@pytest.mark.usefixtures("deepspeed_file")
@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.complete])
def test_block_is_refused_only_for_missing_features(name: str) -> None:
    block = BLOCKS[name]
    draft = gather(block.words, block.entry)
    if draft.tokenizer_model and not draft.padded_vocab_size:
        draft.derive("tokenizer", vocab_size=151665)
    assert_only_not_built(draft, ProcessFacts(block.processes, block.processes))


def assert_only_not_built(draft: Draft, facts: ProcessFacts) -> None:
    try:
        resolve(draft, facts)
    except ConfigError as error:
        assert error.problems == not_built(error.problems)


def test_one_shape_block_gives_the_model_it_describes() -> None:
    draft = gather(BLOCKS["001-qwen3-8b"].words, PRETRAIN_GPT)
    shape = {"num_layers": 36, "hidden_size": 4096, "num_query_groups": 8, "vocab_size": 151936}
    assert {name: getattr(draft, name) for name in shape} == shape
    assert draft.qk_layernorm and draft.gated_linear_unit and not draft.add_bias_linear
    assert draft.position_embedding_type == "rope" and draft.layernorm_epsilon == 1e-6


def test_a_comment_reaches_to_the_next_flag() -> None:
    parsed = parse_flags("# bias - only in 2.5 --bf16 --lr 1 # end".split(), PRETRAIN_GPT)
    assert {name: a.value for name, a in parsed.values.items()} == {"bf16": True, "lr": 1.0}
    assert parsed.notices == [
        "dropped the comment '# bias - only in 2.5' from the command line",
        "dropped the comment '# end' from the command line",
    ]


def test_a_blank_that_a_backslash_kept_is_no_word() -> None:
    assert parse_flags(["--bf16", " ", "--lr", "1"], PRETRAIN_GPT).values["lr"].value == 1.0


def test_the_175b_command_needs_its_128_processes() -> None:
    block = BLOCKS["004-175b"]
    found = problems(block.text, ProcessFacts(8, 8), PRETRAIN_GPT, least="")
    assert (
        "8 processes are too few: one copy of the model needs 8 (tensor) × 16 (pipeline) × 1 (context) = 128; "
        "start 128 processes or a multiple, or lower the parallel sizes"
    ) in found


def test_its_reduced_form_fits_on_one_machine() -> None:
    block = BLOCKS["004-reduced"]
    found = problems(block.text, ProcessFacts(8, 8), PRETRAIN_GPT, least="")
    assert found == not_built(found)
    draft = gather(block.words, PRETRAIN_GPT)
    draft.facts = ProcessFacts(8, 8)
    derive(draft)
    assert draft.data_parallel_size == 1


def test_legacy_launchers_local_rank_is_tolerated() -> None:
    for word in ("--local-rank=1", "--local_rank=1"):
        assert parse_flags([word], EXAMPLE).values["local_rank"].value == 1
