"""Runs `pentatron import`, `pentatron export` and tools/checkpoint/convert.py."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.checkpoint.find import find_step
from pentatron.cli.main import main, run_guarded
from pentatron.cli.megatron_convert import MODEL_SIZES, convert_command
from pentatron.monitor import display
from pentatron.monitor.display import SilentDisplay
from tests.harness import run_distributed
from tests.hf.support import save, theirs
from tests.hf.test_round_trip import names, same, tensors
from tests.train.test_loaded import train_on_a_rank

ROOT = Path(__file__).parents[2]
# Flags of the guide's command; tests add their own folders.
GUIDE = """--bf16 --model-type GPT --loader llama_mistral --saver core --target-tensor-parallel-size 2
 --target-pipeline-parallel-size 1 --checkpoint-type hf --model-size qwen2.5 --loader-transformer-impl transformer_engine
 --make-vocab-size-divisible-by 128"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save(theirs("qwen2").bfloat16(), tmp_path_factory.mktemp("folder"))
    (found / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    (found / "tokenizer.model").write_text("its own")
    return found


def test_there_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(folder), str(tmp_path / "ours"), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "differ from those of transformers by at most" in said and "parameters in 17 tensors" in said
    assert (
        main(
            ["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--max-shard-size", "9KB", "--verify"]
        )
        == 0
    )
    assert "differ from those of transformers" in capsys.readouterr().out
    assert same(tensors(tmp_path / "back"), tensors(folder))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    # The other tokenizer replaces all files of the first.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("[]")
    words = ["export", str(tmp_path / "ours"), str(tmp_path / "o"), "--tokenizer", str(tmp_path / "other")]
    assert main(words) == 0
    assert names(tmp_path / "o") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "o" / "tokenizer.json").read_text() == "[]"


def test_a_broken_tokenizer_is_not_carried_along_in_silence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer.json that is not JSON is refused; one that the library cannot read gives a note."""
    (tmp_path / "cut").mkdir()
    cut = tmp_path / "cut" / "tokenizer.json"
    cut.write_text('{"model": {"vocab"')
    words = ["import", str(folder), str(tmp_path / "ours")]
    assert main([*words, "--tokenizer", str(cut.parent)]) == 2
    assert f"{cut} is damaged: it is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    cut.write_text("{}")
    assert main([*words, "--tokenizer", str(cut.parent)]) == 0
    assert (
        "tokenizer.json is copied, but the package tokenizers here cannot read it" in capsys.readouterr().out
    )


def test_export_notes_bf16_and_missing_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Export of a bf16 run without a tokenizer prints a note about the dtype and about the tokenizer."""
    assert main(["import", str(folder), str(tmp_path / "ours"), "--dtype", "fp32"]) == 0
    step = find_step(tmp_path / "ours")[0].folder
    for path in (tmp_path / "ours" / "huggingface").iterdir():
        path.unlink()
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["config"]["precision"]["bf16"] = True
    from pentatron.checkpoint.format import _digest

    (step / "manifest.json").write_text(json.dumps({**manifest, "sha256": _digest(manifest)}))
    capsys.readouterr()
    assert main(["export", str(step), str(tmp_path / "back")]) == 0
    said = capsys.readouterr().out
    assert "note: the weights are written in bf16, the precision of the run (--dtype fp32 writes" in said
    assert (
        "note: no tokenizer came with this model, so the folder has none; --tokenizer DIR adds one\n" in said
    )
    assert same(tensors(tmp_path / "back"), tensors(folder))
    (tmp_path / "words.json").write_text("{}")
    manifest["config"].setdefault("data", {})["tokenizer_model"] = str(tmp_path / "words.json")
    (step / "manifest.json").write_text(json.dumps({**manifest, "sha256": _digest(manifest)}))
    assert main(["export", str(step), str(tmp_path / "again")]) == 0
    named = f"; --tokenizer {tmp_path / 'words.json'} adds the one of the training run\n"
    assert named in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("import", "expected two arguments, the Hugging Face folder and the output"),
        ("import a", "expected two arguments, the Hugging Face folder and the output"),
        ("export a", "expected two arguments, the checkpoint and the output"),
        ("import a b --dtyp fp32", r"unknown flag --dtyp (did you mean --dtype?)"),
        ("import a b --dtype int8", "--dtype must be one of fp32, bf16, fp16, not 'int8'"),
        ("import a b --allow-narrowing", "--allow-narrowing needs --dtype"),
        ("export a b --max-shard-size many", "--max-shard-size many: write a size such as 5GB"),
        ("import none b", "none is not a folder"),
        ("export none b", "none does not exist"),
    ],
)
def test_mistakes_are_sentences(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_without_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["import", str(folder), str(tmp_path / "ours"), "--verify"]) == 2
    assert "pip install transformers" in capsys.readouterr().err
    assert not names(tmp_path)


class Terminated(SilentDisplay):
    """Sends SIGTERM to this process after half of a conversion."""

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        if 2 * done > total:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(display, "open_display", lambda mode: Terminated())
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 130
    assert "ours was not created, and partial files were removed" in capsys.readouterr().err
    assert not names(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


# --- convert.py ---


def convert(words: str) -> int:
    return run_guarded(lambda: convert_command(words.split()))


def test_the_command_of_the_guide(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "checkpoint" / "convert.py"), *GUIDE.split()]
    command += [
        "--load-dir",
        str(folder),
        "--save-dir",
        str(tmp_path / "ours"),
        "--tokenizer-model",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == [
        "--target-tensor-parallel-size",
        "--make-vocab-size-divisible-by",
        "--loader-transformer-impl",
    ]
    assert "loads in any layout" in notes[0]
    found, _ = find_step(tmp_path / "ours")
    assert {record.dtype for record in found.manifest.tensors.values()} == {"bfloat16"}
    assert "tokenizer.model" in names(tmp_path / "ours" / "huggingface")
    # A checkpoint that is loaded in another layout than the requested one exports the same bytes.
    words = (
        f"--load {tmp_path / 'ours'} --finetune --ckpt-format torch_dist --pp_size 2 --bf16 --train-iters 0"
    )
    run_distributed(train_on_a_rank, 2, folder=tmp_path / "run", words=words)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    assert same(tensors(tmp_path / "back"), tensors(folder))
    assert names(tmp_path / "back") == names(folder)


def test_flags_for_experts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--loader mixtral_hf --saver mcore --target-expert-parallel-size 2"
    assert convert(f"--load-dir {folder} --save-dir {tmp_path / 'ours'} {words}") == 0
    assert (
        "note: --target-expert-parallel-size 2: a Pentatron checkpoint loads in any layout"
        in capsys.readouterr().out
    )


def test_a_checkpoint_of_megatron_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"config --load {tmp_path} --mock-data --train-iters 1".split()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500")
    assert main(command) == 2
    assert "iter_0000500 contains no checkpoint" in capsys.readouterr().err
    (tmp_path / "iter_0000500" / "mp_rank_00").mkdir(parents=True)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "one file for each rank" in error and "add --ckpt-format torch to" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model-size llama3", "--model-size llama3 means models of type llama, but"),
        ("--model-size qwen2.5-7B --fp16", "bf16, of which fp16 cannot hold every value"),
        ("--model-size falcon", "--model-size falcon is not known; leave it out"),
        ("--model-type BERT", "--model-type BERT: only GPT is possible"),
        ("--loader mcore", "only llama_mistral or mixtral_hf is possible; only Hugging Face folders"),
        ("--saver megatron", "--saver megatron: only core or mcore is possible"),
        ("--checkpoint-type meta", "--checkpoint-type meta: only hf is possible"),
        ("--loader-transformer-impl other", "only local or transformer_engine is possible"),
        ("--bf16 --fp16", "--bf16 and --fp16 contradict each other"),
        ("--tokenizer-model nowhere", "nowhere has no tokenizer files"),
        ("more", "convert.py takes only flags, not 'more'"),
    ],
)
def test_flags_act_or_are_refused(
    words: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(f"--load-dir {folder} --save-dir {tmp_path / 'ours'} {words}") == 2
    assert message in capsys.readouterr().err
    assert not names(tmp_path)


def test_sizes_of_the_guide_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """`--model-size` takes the sizes that the guide's loader lists."""
    loader = runpy.run_path(
        str(ROOT / "tools" / "checkpoint" / "loader_llama_mistral.py"), run_name="__main__"
    )
    said = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert said == loader["MODEL_SIZES"] == MODEL_SIZES
    assert {"qwen2.5": "qwen2", "llama3": "llama", "mistral": "mistral"}.items() <= said.items()
    assert convert("--help") == 0
    assert all(size in capsys.readouterr().out for size in ("qwen2.5",))
