"""Imports a Hugging Face model with convert.py, trains, exports, and compares generated text."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pentatron.cli.main import main
from pentatron.data.tokenizer import train_bpe
from tests.harness import run_distributed
from tests.hf.support import save, theirs
from tests.hf.test_round_trip import tensors
from tests.train.test_loaded import train_on_a_rank

ROOT = Path(__file__).parents[2]
WORDS = 280
PROMPTS = ["import os\n", "def f(x):\n    return "]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saves a small Qwen model with a tokenizer."""
    found = save(theirs("qwen2", vocab_size=WORDS), tmp_path / "qwen")
    tokenizer = train_bpe(iter(["import os\nimport sys\ndef f(x):\n    return x\n"] * 3), WORDS)
    tokenizer.post_processor = TemplateProcessing(single="$A")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(found)
    return found


def their_text(folder: Path, prompt: str) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(made[0], skip_special_tokens=True)
    return text


def test_the_same_text_at_both_ends(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    convert = str(ROOT / "tools" / "checkpoint" / "convert.py")
    words = f"--model-type GPT --loader llama_mistral --saver core --checkpoint-type hf --model-size qwen2.5 \
        --target-tensor-parallel-size 2 --load-dir {folder} --save-dir {tmp_path / 'ours'} --tokenizer-model {folder}"
    monkeypatch.setattr(sys, "argv", [convert, *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(convert, run_name="__main__")
    assert ended.value.code == 0

    train = f"--load {tmp_path / 'ours'} --finetune --tp_size 2 --pp_size 2 --train-iters 4 --lr 3e-2"
    run_distributed(train_on_a_rank, 4, folder=tmp_path / "run", words=train)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before), "training moved every tensor"

    capsys.readouterr()
    for prompt in PROMPTS:
        expected = their_text(tmp_path / "back", prompt)
        assert expected != their_text(folder, prompt), "what was trained is what speaks"
        for source in ("back", "run"):
            quick = ["--greedy", "--max-new-tokens", "12", "--threads", "1", "--device", "cpu"]
            assert main(["generate", str(tmp_path / source), prompt, *quick]) == 0
            assert capsys.readouterr().out == f"{expected}\n"


def test_a_resumed_fine_tuning_does_not_call_its_own_tokenizer_another_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "import os and return x"}\n' * 40)
    corpus = tmp_path / "corpus"
    prepare = f"prepare --input {tmp_path / 'text.jsonl'} --output-prefix {corpus} --workers 1 --tokenizer-type HFTokenizer --tokenizer-model {folder}"
    assert main(prepare.split()) == 0
    words = (
        f"train --load {folder} --data-path {corpus}_text_document --seq-length 8 --global-batch-size 2 --split 1,0,0 \
        --nproc-per-node 1 --device cpu --run-dir {tmp_path / 'run'} --lr 1e-3"
    )
    assert main([*words.split(), "--train-iters", "2"]) == 0
    capsys.readouterr()
    assert main([*words.split(), "--train-iters", "4"]) == 0
    shown = capsys.readouterr().out
    assert f"note: tokenizer from {tmp_path / 'run'}" in shown
    changed = (
        "note: settings differ from the checkpoint's: --train-iters 4 (was 2), --lr-decay-iters 4 (was 2)\n"
    )
    assert changed in shown, "no other tokenizer was given"
