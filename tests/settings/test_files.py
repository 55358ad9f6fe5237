"""Tests YAML, TOML and JSON files: nested or flat, any spelling, errors that name file and key."""

import json
from pathlib import Path

import pytest

from pentatron.errors import ConfigError, UserError
from pentatron.settings.entry_points import EXAMPLE, PARALLEL_3D, TRAIN, EntryPoint
from pentatron.settings.files import read_file
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import Assigned, ProcessFacts
from pentatron.train.run_folder import config_text

ROOT = Path(__file__).parents[2]


def read(folder: Path, text: str, name: str = "a.yaml", entry: EntryPoint = TRAIN) -> dict[str, object]:
    (folder / name).write_text(text, encoding="utf-8")
    return {key: assigned.value for key, assigned in read_file(str(folder / name), entry).items()}


def complaints(folder: Path, text: str, name: str = "a.yaml", entry: EntryPoint = TRAIN) -> list[str]:
    """Returns the error sentences without the folder, which differs between runs."""
    with pytest.raises(UserError) as error:
        read(folder, text, name, entry)
    found = error.value.problems if isinstance(error.value, ConfigError) else [str(error.value)]
    return [sentence.replace(f"{folder}/", "") for sentence in found]


EXPECTED = {"num_layers": 3, "lr": 1e-5, "bf16": True, "data_path": ("a", "b"), "run_dir": "runs/x"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flat.yaml", "num_layers: 3\nlr: 1e-5\nbf16: true\ndata_path: [a, b]\nrun_dir: runs/x\n"),
        ("flat.yml", "num-layers: 3\nlearning_rate: 1e-5\nbf16: yes\ndata-path: a b\nrun-dir: runs/x\n"),
        ("no-suffix", "num_layers: 3\nlr: 0.00001\nbf16: true\ndata_path:\n- a\n- b\nrun_dir: runs/x\n"),
        ("nested.yaml",
         "model: {num_layers: 3}\noptim:\n  lr: 1.0e-5\nprecision:\n  bf16: true\ndata:\n  data_path: [a, b]\nrun:\n  run_dir: runs/x\n"),
        ("mixed.yaml", "num_layers: 3\noptim: {lr: 1e-5}\nbf16: true\ndata: {data_path: [a, b]}\nrun_dir: runs/x\nmodel:\n"),
        ("flat.toml", 'num_layers = 3\nlr = 1e-5\nbf16 = true\ndata_path = ["a", "b"]\nrun_dir = "runs/x"\n'),
        ("nested.toml",
         'run_dir = "runs/x"\n[model]\nnum_layers = 3\n[optim]\nlr = 1e-5\n[precision]\nbf16 = true\n[data]\ndata_path = ["a", "b"]\n'),
        ("flat.json", json.dumps({**EXPECTED, "data_path": ["a", "b"]})),
        ("nested.json",
         json.dumps({"model": {"num_layers": 3}, "optim": {"lr": 1e-5}, "bf16": True, "data_path": "a b", "run_dir": "runs/x"})),
    ],
)  # fmt: skip
def test_every_way_to_write_a_file(tmp_path: Path, name: str, text: str) -> None:
    found = read(tmp_path, text, name)
    assert found == EXPECTED
    assert type(found["lr"]) is float


def test_the_source_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("lr: 1\n")
    assert read_file(str(path), TRAIN) == {"lr": Assigned(1.0, f"file {path}")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("swiglu: true", {"gated_linear_unit": True}),
        ("disable_bias_linear: true", {"add_bias_linear": False}),
        ("disable_bias_linear: false", {"add_bias_linear": True}),
        ("no_rope_fusion: true", {"rope_fusion": False}),
        ("no_load_optim: true", {"no_load_optim": True}),
        ("use_rotary_position_embeddings: true", {"position_embedding_type": "rope"}),
        ("use_distributed_optimizer: true", {"zero_stage": 1}),
        ("use_distributed_optimizer: false", {"zero_stage": 0}),
        ("progress_bar: on", {"progress_bar": "on"}),
        ("progress_bar: off", {"progress_bar": "off"}),
        ("keep_checkpoints: none", {"keep_checkpoints": None}),
        ("keep_checkpoints: null", {"keep_checkpoints": None}),
        ("data_path:", {"data_path": ()}),
        ("rampup_batch_size: [16, 16, 100]", {"rampup_batch_size": (16, 16, 100)}),
        ("split: 99,1,0", {"split": "99,1,0"}),
        ("train_iters: 1e3", {"train_iters": 1000}),
        ("language_model: {num_layers: 3}\nmodel_parallel: {tp_size: 2}",
         {"num_layers": 3, "tensor_model_parallel_size": 2}),
        ("{}", {}),
    ],
)  # fmt: skip
def test_values(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_layer: 3", "a.yaml: num_layer: unknown setting (did you mean num_layers?)"),
        ("optim: {lrr: 3}", "a.yaml: optim.lrr: unknown setting (did you mean lr?)"),
        ("optm: {lr: 3}", "a.yaml: optm: unknown section (did you mean optim?); there are run, model, moe, data, train, "
                          "optim, parallel, precision, memory, kernels, checkpoint, loop, log, launch, language_model, model_parallel"),
        ("model: qwen3-8b", "a.yaml: model is a section; write its settings indented below it"),
        ("model: {num_layers: many}", "a.yaml: model.num_layers must be a whole number, not 'many'"),
        ("num_layers: 2.5", "a.yaml: num_layers must be a whole number, not '2.5'"),
        ("num_layers: true", "a.yaml: num_layers must be a whole number, not 'True'"),
        ("num_layers:", "a.yaml: num_layers needs a value"),
        ("num_layers: [1, 2]", "a.yaml: num_layers must be a whole number, not several"),
        ("lr: {a: 1}", "a.yaml: lr must be a number, not several"),
        ("lr: .inf", "a.yaml: lr must be a number, not 'inf'"),
        ("save: true", "a.yaml: save must be text, not 'True'"),
        ("bf16: 1", "a.yaml: bf16 must be true or false, not '1'"),
        ("normalization: rms", "a.yaml: normalization must be one of LayerNorm, RMSNorm, not 'rms'"),
        ("config: b.yaml", "a.yaml: config: a file cannot name another; give --config once, on the command line"),
        ("batch_size: 3", "a.yaml: batch_size is ambiguous here: use --micro-batch-size (samples per "
                          "micro-batch) or --global-batch-size instead"),
        ("lr: 1\noptim: {learning_rate: 2}", "a.yaml: lr and optim.learning_rate are the same setting; keep one"),
        ("lr: 1\nlr: 2", "configuration file a.yaml gives lr twice; keep one"),
        ("model: {num_layers: 1, num_layers: 2}", "configuration file a.yaml gives num_layers twice; keep one"),
        ("- lr\n- 3", "a.yaml holds no settings: write one 'name: value' a line"),
        ("", "a.yaml holds no settings: write one 'name: value' a line"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, text: str, sentence: str) -> None:
    assert complaints(tmp_path, text) == [sentence]


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    found = complaints(tmp_path, "num_layer: 3\nlr: x\noptm: {}\nbf16: true\nseed: 1.5\n")
    assert [sentence.split(":")[1].split()[0] for sentence in found] == ["num_layer", "lr", "optm", "seed"]


def test_json_that_repeats_a_key(tmp_path: Path) -> None:
    assert complaints(tmp_path, '{"lr": 1, "lr": 2}', "a.json") == [
        "configuration file a.json gives lr twice; keep one"
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "model:\n - x\n  y: 3"), ("a.yaml", "lr: [1"), ("a.toml", "lr = "), ("a.json", '{"lr": }'), ("a.json", "")],
)  # fmt: skip
def test_broken_files(tmp_path: Path, name: str, text: str) -> None:
    (sentence,) = complaints(tmp_path, text, name)
    assert sentence.startswith(f"configuration file {name} is not valid {name.split('.')[1]}: ")
    assert "\n" not in sentence


def test_unreadable_files(tmp_path: Path) -> None:
    def complaint(name: str) -> str:
        with pytest.raises(UserError) as error:
            read_file(str(tmp_path / name), TRAIN)
        return str(error.value).replace(f"{tmp_path}/", "")

    assert complaint("b.yaml") == (
        "configuration file b.yaml does not exist; check the path given to --config"
    )
    (tmp_path / "folder.yaml").mkdir()
    assert complaint("folder.yaml") == "configuration file folder.yaml cannot be read (Is a directory)"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert complaint("binary.yaml") == "configuration file binary.yaml cannot be read (it is not UTF-8 text)"
    (tmp_path / "a.ini").write_text("lr=1")
    assert complaint("a.ini") == "configuration file a.ini is neither .yaml, .toml nor .json"


def test_the_entry_point_gives_batch_size_its_meaning(tmp_path: Path) -> None:
    assert read(tmp_path, "batch_size: 4", entry=EXAMPLE) == {"global_batch_size": 4}
    assert read(tmp_path, "train: {batch-size: 4}", entry=PARALLEL_3D) == {"rank_batch_size": 4}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (TRAIN, "--preset demo --nproc-per-node 2"),
        (EXAMPLE, "--batch-size=16 --epochs=3 --train-steps=1000"),
        (PARALLEL_3D, "--batch_size 8 --num_microbatches 4"),
        (PARALLEL_3D, "--rampup-batch-size 4 4 40 --train-samples 1000 --lr-warmup-fraction 0.03"),
        (
            TRAIN,
            "--preset demo --step-batch-size-schedule 0:4,1K:8 --lr-warmup-samples 20 --lr-decay-samples 900",
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_saved_config_gives_the_same_settings(tmp_path: Path, entry: EntryPoint, words: str) -> None:
    first = resolve(gather(words.split(), entry), ProcessFacts(2, 2))
    path = tmp_path / "config.yaml"
    path.write_text(config_text(first), encoding="utf-8")
    again = resolve(gather(["--config", str(path)], entry), ProcessFacts(2, 2))
    # The saved file names neither its sources nor the folders of the first run, so that the second run gets
    # its own.
    own = dict.fromkeys(("config", "preset", "run_dir", "save", "load"))
    assert again.config.flat() | own == first.config.flat() | own
    assert [n for n in again.notices if not n.startswith("training stops")] == []


def test_saved_config_loads_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fine-tuning that is repeated from its saved file loads the same weights again."""
    monkeypatch.chdir(tmp_path)

    def kept(words: str) -> object:
        first = resolve(
            gather(f"--preset demo --nproc-per-node 1 {words}".split(), TRAIN), ProcessFacts(1, 1)
        )
        Path("config.yaml").write_text(config_text(first), encoding="utf-8")
        again = gather("--config config.yaml --run-dir other".split(), TRAIN)
        return again.load if again.given("load") else None

    assert kept("--run-dir r --load models/qwen") == "models/qwen"
    assert kept("--run-dir r --load Qwen/Qwen2.5-0.5B --save elsewhere") == "Qwen/Qwen2.5-0.5B"
    assert kept("--run-dir . --load qwen") == "qwen", "a folder in the run's is not the run"
    for own in ("", "--load r", "--load r/checkpoints", "--load r/checkpoints/step-00000001", "--load ./r/"):
        assert kept(f"--run-dir r {own}") is None, "the later run must not go on with this one's steps"
    assert kept("--save s --load s") is None


@pytest.mark.parametrize("name", ["large_model.yaml", "medium_model.yaml", "small_model.yaml"])
def test_the_configurations_we_ship_can_be_read(name: str) -> None:
    found = read_file(str(ROOT / "configs" / name), PARALLEL_3D)
    assert {"num_layers", "hidden_size", "train_iters", "lr"} <= set(found)
