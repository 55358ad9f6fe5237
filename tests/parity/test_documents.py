"""Documents inside sequences, in all axes: compared with one process and with each document alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from pentatron.compare.trial import Trajectory, gaps
from pentatron.data.gpt_dataset import next_token_sample
from pentatron.data.loader import Batch, collate
from pentatron.data.sample_index import Boundaries
from pentatron.layout.documents import DocumentStarts
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.nn import context_attention
from pentatron.train.model import ParallelModel, build_parallel_model
from pentatron.train.step import evaluate
from tests.harness import run_distributed
from tests.parity.cases import FAMILIES, Layout
from tests.parity.references import SHORT, TIMEOUT, on_one_process, reference, spread
from tests.parity.trajectory import here, on_a_rank
from tests.parity.verdicts import disagreements, failures
from tests.support import resolved

RESET = "--reset-position-ids --reset-attention-mask"
ALL = f"{RESET} --eod-mask-loss"
NARROW = "--window-size 3,0"
TP, PP, CP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
SP = "--sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CORE = "--recompute-granularity selective --recompute-modules core_attn"

LAYOUTS = (
    (Layout("tp2 sp core_attn", 2, f"{TP} {SP} {CORE}", both=ALL, micro_batch=4), "llama"),
    (Layout("pp2", 2, PP, both=ALL, micro_batch=4), "gpt"),
    (Layout("cp2 p2p full", 2, f"{CP} {FULL}", both=f"{ALL} {NARROW}", micro_batch=8), "llama"),
    (Layout("cp2 a2a", 2, f"{CP} --cp-comm-type a2a", both="--reset-attention-mask", micro_batch=4), "gpt"),
    (Layout("dp2 zero3", 2, "--zero-stage 3", both=ALL, micro_batch=4), "llama"),
    (Layout("tp2 cp2 all_gather", 4, f"{TP} {CP} --cp-comm-type all_gather", both=ALL), "llama"),
)


@pytest.mark.parametrize(("layout", "family"), LAYOUTS, ids=lambda given: getattr(given, "name", given))
def test_a_layout_computes_the_same_numbers(layout: Layout, family: str) -> None:
    ranks = spread(layout, family)
    assert failures(gaps(ranks, reference(layout, family))) == []
    assert disagreements(ranks) == []


def unmasked_later_stages() -> None:
    """Only the stage with the embedding masks documents."""
    forward = CausalLM.forward

    def forgetful(self: CausalLM, *given: Any, **named: Any) -> torch.Tensor:
        if self.embedding is None:
            named.pop("documents")
        return forward(self, *given, **named)

    CausalLM.forward = forgetful  # type: ignore[method-assign]


def unmasked_in_the_ring() -> None:
    right = context_attention.chunk_blocks
    context_attention.chunk_blocks = lambda documents, queries, keys, size, window: right(
        None, queries, keys, size, 1000 if window is None else window
    )


def own_tokens_cut_documents() -> None:
    """Documents are computed from a rank's own tokens, as if these were a whole sequence."""
    own_tokens = ParallelModel.local_tokens

    def cut(self: ParallelModel, batches: Sequence[Batch]) -> list[Batch]:
        ranks = self.axes.context.size
        return [dataclasses.replace(b, documents=_divided(b, ranks)) for b in own_tokens(self, batches)]

    ParallelModel.local_tokens = cut  # type: ignore[method-assign]


def _divided(batch: Batch, ranks: int) -> DocumentStarts:
    return tuple(tuple(sorted({start // ranks for start in starts})) for starts in batch.documents or ())


MISTAKES = {
    "unmasked_later_stages": (unmasked_later_stages, "pp2"),
    "unmasked_in_the_ring": (unmasked_in_the_ring, "cp2 p2p full"),
    "own_tokens_cut_documents": (own_tokens_cut_documents, "cp2 a2a"),
}


def with_a_mistake(words: str, mistake: str) -> Trajectory:
    MISTAKES[mistake][0]()
    return on_a_rank(words)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake: str) -> None:
    (found,) = (pair for pair in LAYOUTS if pair[0].name == MISTAKES[mistake][1])
    layout, family = found
    words = f"{layout.command(family)} {SHORT}"
    ranks = run_distributed(with_a_mistake, layout.ranks, timeout=TIMEOUT, words=words, mistake=mistake)
    assert failures(gaps(ranks, reference(layout, family))) != []


@pytest.mark.parametrize("flag", ALL.split())
def test_a_flag_that_is_left_out_is_seen(flag: str) -> None:
    """Leaves out one flag at a time.

    The model has learned positions: rotary ones are relative, so their start in a document does not matter.
    """
    others = " ".join(word for word in ALL.split() if word != flag)
    expected = on_one_process(Layout("", 1, "", both=ALL).alone("gpt"))
    assert failures(gaps([on_one_process(Layout("", 1, "", both=others).alone("gpt"))], expected)) != []


EOD = 60
LENGTHS = ((5, 1, 10), (16,), (1, 1, 3, 11), (9, 7))


def documents() -> list[list[npt.NDArray[np.int64]]]:
    """Returns the documents of every sample; each ends with EOD, and together they fill the sequence."""
    draw = np.random.default_rng(4)
    return [[np.append(draw.integers(0, EOD, n - 1), EOD) for n in lengths] for lengths in LENGTHS]


def packed() -> Batch:
    boundaries = Boundaries(EOD, reset_positions=True, reset_attention=True, mask_loss=True)
    return collate(
        [next_token_sample(np.append(np.concatenate(sample), 0), boundaries) for sample in documents()]
    )


def built(words: str) -> CausalLM:
    config = resolved(words).config
    return build_model(config.model, config.run.seed, torch.device("cpu"))


def one_by_one(words: str) -> list[list[float]]:
    """Returns the loss of every token of every document, run alone; the last token has none."""
    model = built(words)
    found = []
    for sample in documents():
        losses: list[float] = []
        for document in sample:
            tokens = torch.from_numpy(document)[None]
            positions, labels = torch.arange(len(document))[None], torch.roll(tokens, -1, 1)
            losses += [*model(tokens, positions, labels)[0, :-1].tolist(), 0.0]
        found.append(losses)
    return found


WORDS = "--num-layers 2 --num-attention-heads 4"


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("more", ["", NARROW])
def test_packed_documents_have_the_losses_of_each_by_itself(family: str, more: str) -> None:
    words = f"{WORDS} {FAMILIES[family]} --hidden-dropout 0 {more}"
    model, batch = built(words), packed()
    found = model(batch.tokens, batch.position_ids, batch.labels, documents=batch.documents) * batch.loss_mask
    assert found.sum() > 100
    torch.testing.assert_close(found, torch.tensor(one_by_one(words)), rtol=2e-6, atol=2e-6)
    unmasked = model(batch.tokens, batch.position_ids, batch.labels) * batch.loss_mask
    assert (unmasked - found).abs().max() > 1e-3


def mean_losses_of_packed(words: str) -> list[float]:
    found = []
    for exchange in ("p2p", "all_gather", "a2a"):
        config = resolved(f"{words} --cp-comm-type {exchange}", dist.get_world_size()).config
        found.append(evaluate(build_parallel_model(config, here(config)), [packed()], 1)[0])
    return found


def test_packed_documents_on_context_ranks_have_the_mean_of_each_by_itself() -> None:
    words = f"{WORDS} {FAMILIES['llama']}"
    expected = np.concatenate(one_by_one(words))
    mean = expected.sum() / np.count_nonzero(expected)
    spread_words = f"{words} {CP} --micro-batch-size 4 --global-batch-size 4"
    for found in run_distributed(mean_losses_of_packed, 2, timeout=TIMEOUT, words=spread_words):
        assert found == pytest.approx([mean] * 3, rel=1e-6)
