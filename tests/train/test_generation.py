"""Compares text from Hugging Face folders with `transformers`, on one process and on several ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pentatron.errors import UserError
from pentatron.generate.continue_text import (
    Ranks,
    Text,
    generate_texts,
    generation_config,
    load_stages,
)
from pentatron.generate.generate import Sampling, build_generation_model
from pentatron.generate.source import open_source
from pentatron.hf.convert import ImportOptions, import_folder
from pentatron.monitor.display import SilentDisplay
from pentatron.parallel.world import single_process
from tests.harness import run_distributed
from tests.hf.support import EXPERTS, save, theirs
from tests.train.texts import NEW, PROMPTS, texts

HOT = Sampling(1.2, top_k=30, top_p=0.95, seed=4)
SHARED = {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {"num_key_value_heads": 1}),
    "llama3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, **SHARED}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
}


def made(folder: Path, stop: frozenset[int] = frozenset()) -> list[Text]:
    return texts(folder, Ranks(), [Sampling()], stop)[0][0]


def saved(case: str, path: Path, stop: list[int] | None = None) -> tuple[Path, Any]:
    model_type, config = CASES[case]
    model = theirs(model_type, **config)
    model.generation_config.eos_token_id = stop
    return save(model, path), model


def expected(model: Any, stop: list[int] | None) -> tuple[list[list[int]], list[list[float]]]:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    found = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
        eos_token_id=stop,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = found.sequences[:, longest:].tolist()
    logprobs = torch.stack(found.logits, 1).log_softmax(-1).amax(-1).tolist()
    for row in tokens if stop else []:
        end = next((place for place, token in enumerate(row) if token in stop), NEW)
        del row[end:]
    return tokens, [line[: len(row)] for line, row in zip(logprobs, tokens)]


@pytest.mark.parametrize("case", CASES)
def test_prompts_of_any_length_give_the_text_of_transformers(case: str, tmp_path: Path) -> None:
    folder, model = saved(case, tmp_path)
    tokens, logprobs = expected(model, None)
    found = made(folder)
    assert [text.tokens for text in found] == tokens
    for text, theirs_ in zip(found, logprobs):
        assert text.logprobs == pytest.approx(theirs_, abs=1e-4)
    assert {text.end for text in found} == {"length"}


def test_imported_model_generates_the_same_text(tmp_path: Path) -> None:
    """Uses experts, as an import has their weights, but no router state of training."""
    folder, _ = saved("mixtral", tmp_path / "theirs")
    import_folder(folder, tmp_path / "imported", ImportOptions(), SilentDisplay())
    assert made(tmp_path / "imported") == made(folder)


def test_a_folder_says_which_tokens_end_a_text(tmp_path: Path) -> None:
    _, model = saved("llama3.1", tmp_path)
    free, _ = expected(model, None)
    stop = [free[0][4], free[1][2]]
    folder, model = saved("llama3.1", tmp_path, stop)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == stop
    source = open_source(folder)
    assert source.stop == set(stop)
    found = made(folder, source.stop)
    assert [text.tokens for text in found] == expected(model, stop)[0] != free
    assert found[1].end == "stop"


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("llama", Ranks(2, 1)),
        ("mistral with a window", Ranks(2, 1)),
        ("gpt2", Ranks(1, 2)),
        ("qwen2", Ranks(2, 2)),
        ("mixtral", Ranks(2, 1)),
        ("qwen2_moe", Ranks(2, 2, 2)),
    ],
)
def test_spread_over_ranks_the_text_is_the_same(case: str, ranks: Ranks, tmp_path: Path) -> None:
    folder, _ = saved(case, tmp_path)
    samplings = [Sampling(), HOT]
    alone, whole = texts(folder, Ranks(), samplings)
    per_rank = run_distributed(texts, ranks.world_size, folder=folder, ranks=ranks, samplings=samplings)
    for found, _ in per_rank:
        for ours, one in zip(found, alone):
            assert [text.tokens for text in ours] == [text.tokens for text in one]
            for text, same in zip(ours, one):
                assert text.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    assert max(held for _, held in per_rank) < 0.8 * whole, "no rank has the whole model"


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, _ = saved("llama", tmp_path)
    source = open_source(folder)
    with pytest.raises(
        UserError, match="--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3"
    ):
        generation_config(source, Ranks(3))
    with pytest.raises(UserError, match="layers"):
        generation_config(source, Ranks(1, 4))
    with pytest.raises(UserError, match="must divide --tensor-model-parallel-size"):
        generation_config(source, Ranks(1, 1, 2))


def test_half_precision(tmp_path: Path) -> None:
    """Weights are bf16 and rotary frequencies fp32; log-probabilities differ slightly from fp32."""
    folder, _ = saved("qwen3", tmp_path)
    source = open_source(folder)
    config = generation_config(source, Ranks())
    stages = load_stages(source, config, single_process(), torch.bfloat16)
    assert {p.dtype for p in stages[0].parameters()} == {torch.bfloat16}
    assert stages[0].rope is not None and stages[0].rope.inverse_frequencies.dtype == torch.float32
    model = build_generation_model(stages, config.model, single_process())
    found = dict(generate_texts(model, PROMPTS[:1], 1, Sampling(), frozenset(), 1))[0]
    exact = made(folder)[0]
    assert (
        found.logprobs[0] == pytest.approx(exact.logprobs[0], abs=0.1)
        and found.logprobs[0] != exact.logprobs[0]
    )
