"""Tests `pentatron config` and `pentatron presets`: values and origins, without starting a run."""

import json
from pathlib import Path

import pytest

from pentatron.cli.config import unavailable
from pentatron.cli.configure import prepare
from pentatron.cli.main import main
from pentatron.errors import UserError
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.presets import presets
from pentatron.settings.run_config import all_settings, sections

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "SLURM_STEP_ID",
    "NCCL_TIMEOUT",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def show(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["config", *words.split()]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Returns {setting: (value, source)} from the lines of the printed table."""
    lines = [line[2:] for line in text.splitlines() if line.startswith("  ")]
    width = max(38, *(len(line.split()[0]) for line in lines))
    return {
        line[:width].strip(): (line[width + 1 : width + 29].strip(), line[width + 30 :].strip())
        for line in lines
    }


def test_values_and_their_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = Path("a.yaml")
    (tmp_path / path).write_text("preset: demo\nlog_interval: 7\n")
    found = rows(show(capsys, f"--config {tmp_path / path} --hidden_size=384 --nproc-per-node 2"))
    assert found["num_layers"] == ("4", "preset demo")
    assert found["log_interval"] == ("7", f"file {tmp_path / path}")
    assert found["hidden_size"] == ("384", "flag --hidden_size")
    assert found["kv_channels"] == ("64", "derived: 384 hidden / 6 heads")
    assert "seed" not in found, "it is at its default"


def test_groups_and_notices(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--nproc-per-node 2 --no-rope-fusion")
    titles = [line for line in text.splitlines() if line in {cls.__doc__ for cls in sections().values()}]
    assert titles[:2] == ["Run", "Model architecture"]
    model = text[text.index("Model architecture") : text.index("Data and tokenizer")]
    assert "  num_layers " in model and "  lr " not in model and "  seed " not in text
    assert "note: --no-rope-fusion: there is no separate rotary kernel, so this has no effect\n" in text
    assert text.endswith("add --all to print them, --json to print all as JSON\n")


def test_all_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(show(capsys, "--all --nproc-per-node 2"))
    assert set(found) == set(all_settings())
    assert found["seed"] == ("1234", "default")
    assert found["data_path"] == ("none", "default")
    assert found["world_size"] == ("none", "default")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(show(capsys, "--json --nproc-per-node 2 --lr=1e-3"))
    assert list(found) == list(all_settings())
    assert found["lr"] == {"value": 1e-3, "source": "flag --lr"}
    assert found["data_path"] == {"value": [], "source": "default"}
    assert found["num_query_groups"] == {"value": 2, "source": "preset demo"}


def test_the_json_can_be_trained_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Values of `--json` that are passed back with `--config` resolve to the same values."""
    first = json.loads(show(capsys, "--json --nproc-per-node 2 --hidden-size 384"))
    given = {name: row["value"] for name, row in first.items() if row["source"] != "default"}
    path = tmp_path / "again.json"
    path.write_text(json.dumps(given))
    again = json.loads(show(capsys, f"--json --config {path}"))
    assert {n: r["value"] for n, r in again.items() if n != "config"} == {
        n: r["value"] for n, r in first.items() if n != "config"
    }


def test_as_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(
        show(capsys, "--as train_3d_parallel.py --batch_size 8 --num_microbatches 4 --nproc-per-node 2")
    )
    assert found["micro_batch_size"] == ("2", "derived: 8 per rank / 4 micro-batches")
    assert found["run_dir"] == ("output_3d_parallel", "default of train_3d_parallel.py")
    assert rows(show(capsys, "--as=train.py --nproc-per-node 1"))["run_dir"][0] == "output_standard"


@pytest.mark.parametrize("words", ["--as train", "--as=x"])
def test_as_an_unknown_program(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert main(["config", *words.split()]) == 2
    assert "--as must be one of pentatron train, pretrain_gpt.py, " in capsys.readouterr().err


def test_as_without_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--as"]) == 2
    assert capsys.readouterr().err == "pentatron: --as needs a value\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("config", "presets"):
        assert main([command, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: pentatron {command}")


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "config --nproc-per-node 2 --num-attention-heads 12 --num-query-groups 12 --tensor-model-parallel-size 5"
    assert main(words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"pentatron: {len(lines) - 1} problems in the configuration:"
    sentence = (
        "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 5; use 1, 2, 3, 4, 6 or 12"
    )
    assert sentence in [line.split(". ", 1)[1] for line in lines[1:]]


def test_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["preset", "layers", "hidden", "ffn", "heads", "groups", "vocab"]
    table_rows = {
        line.split()[0]: line.split()[1:] for line in lines[1:] if line and not line.startswith("use")
    }
    assert list(table_rows) == list(presets())
    assert table_rows["qwen3-8b"] == ["36", "4096", "12288", "32", "8", "151936"]
    assert table_rows["gpt2"] == ["12", "768", "-", "12", "-", "50257"]
    assert table_rows["mixtral-8x7b"] == ["32", "4096", "14336", "32", "8", "32000"]


def test_preset_with_a_missing_feature_is_reported() -> None:
    """Marks presets that need unavailable settings; no present preset does."""
    local = {"num_layers": 3, "non_persistent_ckpt_type": "local"}
    assert unavailable(local) == "  not available yet: non-persistent checkpoints"
    assert unavailable({"fp8_recipe": "delayed"}) == "  for now with --fp8-recipe tensorwise"
    assert unavailable({"num_layers": 3}) == ""


# --- arguments and environment to a checked configuration ---


def prepared(words: str) -> dict[str, object]:
    return prepare(words.split(), TRAIN).resolved.config.flat()


def test_the_vocabulary_comes_from_the_tokenizer() -> None:
    least = "--mock-data --train-iters 3 --nproc-per-node 1"
    found = prepare(f"{least} --tokenizer-type ByteTokenizer".split(), TRAIN).resolved
    assert found.config.model.vocab_size == 257
    assert found.sources["vocab_size"] == "derived: tokenizer ByteTokenizer"
    assert prepared(f"{least} --tokenizer-type ByteTokenizer --vocab-size 300")["vocab_size"] == 300


def test_a_missing_tokenizer_is_one_problem_among_others() -> None:
    with pytest.raises(UserError) as error:
        prepared(
            "--mock-data --train-iters 3 --nproc-per-node 1 --tokenizer-model /nowhere --min-lr 3 --lr 1"
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "2 problems in the configuration:"
    assert lines[1].startswith("  1. Tokenizer not found: ") and "--tokenizer-model" in lines[1]
    assert lines[2] == "  2. --min-lr 3.0 is above --lr 1.0; lower the first or raise the second"


def test_the_vocabulary_comes_from_the_files_of_gpt2(tmp_path: Path) -> None:
    words = f"--mock-data --train-iters 3 --nproc-per-node 1 --vocab-file {tmp_path}/v.json --merge-file {tmp_path}/m.txt"
    with pytest.raises(UserError, match=r"^Tokenizer not found: no file .*v\.json; check --vocab-file"):
        prepared(words)
    (tmp_path / "v.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n")
    assert prepared(words)["vocab_size"] == 4


def test_processes_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = prepare("--preset demo --global-batch-size 32".split(), TRAIN)
    assert (found.facts.world_size, found.facts.local_processes, found.facts.launcher) == (8, 2, "torchrun")
    assert not found.facts.has_rendezvous
    grid = found.resolved.config.grid
    assert (grid.tensor, grid.pipeline, grid.data) == (2, 2, 2)


def test_one_process_on_the_cpu() -> None:
    found = prepare("--mock-data --vocab-size 9 --train-iters 3 --device cpu".split(), TRAIN)
    assert (found.facts.world_size, found.facts.launcher, found.worker) == (1, "", None)


def test_a_number_of_processes_that_cannot_be() -> None:
    for number in ("0", "-2"):
        with pytest.raises(UserError) as error:
            prepared(f"--nproc-per-node {number}")
        assert str(error.value) == f"--nproc-per-node {number} must be more than 0"


def test_nccl_timeout_is_a_setting_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "3600")
    found = prepare(["--nproc-per-node", "2"], TRAIN).resolved
    assert found.config.launch.distributed_timeout_minutes == 60.0
    assert found.sources["distributed_timeout_minutes"] == "environment NCCL_TIMEOUT=3600"
    assert list(found.notices) == []
    found = prepare("--nproc-per-node 2 --distributed-timeout-minutes 5".split(), TRAIN).resolved
    assert list(found.notices) == [
        "--distributed-timeout-minutes 5.0 has no effect: the environment sets NCCL_TIMEOUT=3600 (seconds)"
    ]
    monkeypatch.setenv("NCCL_TIMEOUT", "long")
    found = prepare(["--nproc-per-node", "2"], TRAIN).resolved
    assert found.config.launch.distributed_timeout_minutes == 10.0
    assert list(found.notices) == ["NCCL_TIMEOUT=long has no effect: it must be a number of seconds above 0"]
