"""Tests `pentatron generate`: its inputs, its output, and equal text from several processes."""

import io
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from pentatron.cli.convert import import_command
from pentatron.cli.generate import generate_command
from pentatron.cli.main import run_guarded
from pentatron.data.tokenizer import FileTokenizer, train_bpe
from pentatron.generate import source as source_module
from pentatron.parallel.world import single_process
from pentatron.train.session import run_training
from tests.cli.test_train import forked
from tests.hf.support import save, theirs
from tests.support import LLAMA, resolved

WORDS = 280
REFERENCE = Path(__file__).parents[2] / "examples/inference/llama_mistral/huggingface_reference.py"
QUICK = ["--max-new-tokens", "6", "--seed", "1", "--threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a Hugging Face model whose tokenizer prepends `<|endoftext|>` to every text."""
    path = tmp_path_factory.mktemp("model")
    save(theirs("llama", vocab_size=WORDS, tie_word_embeddings=True), path)
    from tokenizers.processors import TemplateProcessing

    tokenizer = train_bpe(iter(["import os\nimport sys\ndef f(x):\n    return x\n"] * 3), WORDS)
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    words = f"{LLAMA} --train-iters 2 --save-interval 1 --keep-checkpoints 2 --run-dir {path}"
    run_training(resolved(words), single_process(), resumes=False)
    return path


def say(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[str, str]:
    code = run_guarded(lambda: generate_command([str(word) for word in words]))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


def objects(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(say(capsys, *words, "--json")[0])
    return found


def test_one_text_several_and_json_say_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = objects(capsys, folder, "import ", "def f(x):", *QUICK)
    assert list(first) == ["prompt", "text", "tokens", "logprobs", "end"]
    assert (first["prompt"], first["end"]) == ("import ", "length")
    assert len(first["tokens"]) == len(first["logprobs"]) == 6 and max(first["logprobs"]) < 0
    tokenizer = FileTokenizer(folder)
    assert tokenizer.decode(first["tokens"]) == first["text"] != second["text"]

    out, err = say(capsys, folder, "import ", *QUICK)
    assert out == f"import {first['text']}\n" and "float32 on cpu" in err
    (tmp_path / "prompts").write_text("import \n\ndef f(x):\n")
    out, _ = say(capsys, folder, "--prompt-file", tmp_path / "prompts", "--batch-size", "1", *QUICK)
    shown = [
        f"--- prompt {n + 1} of 2 ---\n{t['prompt']}{t['text']}\n" for n, t in enumerate((first, second))
    ]
    assert out == "".join(shown)
    monkeypatch.setattr("sys.stdin", io.StringIO("import "))
    (found,) = objects(capsys, folder, "-", *QUICK)
    assert (found["prompt"], found["tokens"]) == ("import ", first["tokens"])


def test_the_file_says_how_a_prompt_begins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = FileTokenizer(folder).encode("import ")
    written = ",".join(map(str, [0, *ids]))
    assert (
        objects(capsys, folder, "import ", *QUICK)[0]["tokens"]
        == (objects(capsys, folder, "--tokens", written, *QUICK)[0]["tokens"])
    )


def test_reference_script_prints_the_output_of_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reference(model: str | Path) -> tuple[object, str, str]:
        words = ["--model_path", str(model), "--prompt", "def f(x):", "--max-new-tokens", "6"]
        monkeypatch.setattr("sys.argv", [str(REFERENCE), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(REFERENCE), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    code, out, err = reference(folder)
    assert code == 0, err
    tokens, *text, command = out.splitlines()
    (ours,) = objects(capsys, folder, "def f(x):", *QUICK, "--greedy")
    assert tokens == f"tokens: {','.join(map(str, ours['tokens']))}"
    assert "\n".join(text) == f"text: def f(x):{ours['text']}"
    assert command.endswith(f"pentatron generate {folder} 'def f(x):' --greedy --max-new-tokens 6")
    code, _, err = reference("nowhere")
    assert code == 2 and "nowhere is not a Hugging Face folder" in err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = reference(tmp_path)
    assert code == 2 and f"transformers cannot open {tmp_path}" in err


def test_an_import_says_the_same_as_its_source(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An import copies the tokenizer and the stop tokens."""
    free = objects(capsys, folder, "import ", *QUICK, "--greedy")[0]
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [WORDS - 1, free["tokens"][3]]})
    )
    assert import_command([str(source), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    (found,) = objects(capsys, tmp_path / "out", "import ", *QUICK, "--greedy")
    stop = free["tokens"].index(free["tokens"][3])
    assert found["end"] == "stop" and found["tokens"] == free["tokens"][:stop]
    assert objects(capsys, source, "import ", *QUICK, "--greedy") == [found]


def test_processes_started_here_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder), "import ", "def f(x):", *QUICK, "--json"]
    expected = objects(capsys, *words)
    command = ["-m", "pentatron", "generate", *words, "--tp", "2"]
    code, out, err = forked(*command, fork_workers=False)
    assert code == 0, err
    found = json.loads(out)
    assert [t["tokens"] for t in found] == [t["tokens"] for t in expected]
    for ours, theirs_ in zip(found, expected):
        assert ours["logprobs"] == pytest.approx(theirs_["logprobs"], abs=1e-4)
    assert "2 tensor × 1 pipeline" in err


def test_a_run_its_checkpoints_and_one_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tokens", "1,2,3;4", "--greedy", *QUICK)
    newest = objects(capsys, run, *words)
    assert newest[0]["text"] is None and newest[1]["prompt"] == [4]
    assert newest == objects(capsys, run / "checkpoints", *words)
    assert newest == objects(capsys, run / "checkpoints" / "step-00000002", *words)
    older = objects(capsys, run / "checkpoints" / "step-00000001", *words)
    assert older[0]["logprobs"] != newest[0]["logprobs"]
    first, second = (",".join(map(str, [*t["prompt"], *t["tokens"]])) for t in newest)
    assert say(capsys, run, *words)[0] == (
        f"--- prompt 1 of 2 ---\n{first}\n--- prompt 2 of 2 ---\n{second}\n"
    )
    assert say(capsys, run, "--tokens", "1,2,3", "--greedy", *QUICK)[0] == f"{first}\n"
    # The model has 16 positions: a prompt of 14 tokens gets two more, and a note.
    many = ",".join(map(str, range(14)))
    assert "ends here: the model has 16 positions" in say(capsys, run, "--tokens", many, *QUICK)[1]

    weights = next((run / "checkpoints" / "step-00000002").glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"oops")
    try:
        out, err = say(capsys, run, *words, "--json")
        assert json.loads(out) == older and "note: " in err and weights.name in err
    finally:
        weights.write_bytes(whole)


def test_flags_without_effect_are_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = say(capsys, run, "--tokens", "1", "--greedy", "--top-k", "3", "--top-p", "0.5", *QUICK)
    assert (
        "note: --top-k 3 --top-p 0.5 --seed 1: greedy decoding takes the most likely token, so this has no effect"
        in err
    )
    _, err = say(capsys, run, "--tokens", "1", *QUICK, "--master-port", "29555")
    assert (
        "note: --master-port 29555: there is one process, so this has no effect" in err
        and "--seed" not in err
    )


def test_a_name_of_the_hub_is_its_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "resolve_folder", {"Somebody/Model-1.5B": folder}.__getitem__)
    assert (
        say(capsys, "Somebody/Model-1.5B", "import ", *QUICK)[0] == say(capsys, folder, "import ", *QUICK)[0]
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "expected a model and a prompt in quotes"),
        ("nowhere x", "the folder nowhere does not exist"),
        ("RUN x", "has no tokenizer; give one with --tokenizer-model DIR, or token ids with --tokens"),
        ("RUN --tokens 1,x", "--tokens must be token ids such as 1,2,3"),
        ("RUN x --tokens 1", "--tokens gives the prompts already"),
        ("RUN --tokens 1,99", "token 99, but the model has the tokens 0 to 60"),
        ("RUN --tokens 1 --top-p 0", "--top-p 0.0 must be above 0 and at most 1"),
        ("RUN --tokens 1 --seed 4294967296", "--seed 4294967296 must be from 0 to 4294967295"),
        ("RUN --tokens 1 --temperature -1", "--temperature -1.0 must be 0 or more"),
        (
            "RUN --tokens 1 --dtype int8",
            "--dtype must be one of auto, float32, fp32, bfloat16, bf16, not 'int8'",
        ),
        (
            "RUN --tokens 1 --tp 3",
            "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3",
        ),
        ("RUN --tokens 1 --pp 3", "layers"),
        (
            "RUN --tokens 1 --spec some module",
            "uses no custom layer spec; leave --spec some module out",
        ),
        (
            "RUN --tokens 1 --greedy --temperature 0.5",
            "--greedy means --temperature 0, but --temperature 0.5",
        ),
        ("RUN --tokens 1 --json=maybe", "--json must be true or false, not 'maybe'"),
        ("RUN --tokens 1 --temprature 0", "did you mean --temperature"),
        ("RUN --prompt-file nowhere", "--prompt-file nowhere cannot be read"),
    ],
)
def test_invalid_requests_are_refused(
    words: str, sentence: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(run) if word == "RUN" else word for word in words.split()]
    assert run_guarded(lambda: generate_command(given)) == 2
    out, err = capsys.readouterr()
    assert sentence in err and not out


def test_missing_gpu_is_reported_once_before_ranks_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("pentatron.supervise.launcher.run_workers", None)
    assert (
        run_guarded(lambda: generate_command([str(folder), "import", "--tp", "2", "--device", "cuda"])) == 2
    )
    assert capsys.readouterr().err.count("torch finds no GPU") == 1
