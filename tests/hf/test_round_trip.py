"""Tests import and export: equal bytes for any family and file size; failures leave nothing behind."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pentatron.checkpoint import tensor_file
from pentatron.checkpoint.find import find_step
from pentatron.checkpoint.format import verify_files
from pentatron.compare.logits import compare_logits
from pentatron.errors import UserError
from pentatron.generate.source import find_weights
from pentatron.hf.convert import ExportOptions, ImportOptions, export_step, import_folder
from pentatron.hf.folder import CONFIG, INDEX
from pentatron.hf.small_files import new_folder
from pentatron.monitor.display import SilentDisplay
from tests.hf.support import save, theirs
from tests.hf.test_oracle import CASES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FAMILIES = """gpt2 gpt2-inner llama-tied-one-kv mistral-head-dim qwen2 qwen3 mixtral qwen2_moe qwen3_moe-tied""".split()


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Compares bytes: `equal` does not distinguish -0 and 0."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def convert(source: Path, out: Path, **options: Any) -> None:
    import_folder(source, out, ImportOptions(**options), SilentDisplay())


def export(checkpoint: Path, out: Path, **options: Any) -> Path:
    export_step(find_step(checkpoint)[0], out, ExportOptions(**options), SilentDisplay())
    return out


@pytest.mark.parametrize("case", FAMILIES)
def test_the_way_there_and_back_changes_no_byte(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far smaller than a tensor: every tensor consists of many blocks.
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 700)
    family, config = CASES[case]
    model = theirs(family, **config).to(BF16)
    source = save(model, tmp_path / "theirs", max_shard_size="30KB")
    convert(source, tmp_path / "ours", file_bytes=30_000)
    found, _ = find_step(tmp_path / "ours")
    verify_files(found.folder, found.manifest)
    assert len(found.manifest.files) > 1 and found.manifest.run_state["weights_only"]
    back = export(tmp_path / "ours", tmp_path / "back", file_bytes=30_000)
    assert same(tensors(source), tensors(back))
    index, theirs_index = (json.loads((folder / INDEX).read_text()) for folder in (back, source))
    assert index["metadata"] == theirs_index["metadata"]
    assert set(index["weight_map"].values()) == {path.name for path in back.glob("*.safetensors")}


def test_export_loads_in_transformers(tmp_path: Path) -> None:
    model = theirs("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    source = save(model, tmp_path / "theirs")
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "README.md").write_text("not carried along")
    convert(source, tmp_path / "ours")
    assert names(tmp_path / "ours") == [
        "huggingface",
        "latest",
        "latest_checkpointed_iteration.txt",
        "step-00000000",
    ]
    back = export(tmp_path / "ours", tmp_path / "back")
    assert names(back) == [name for name in names(source) if name != "README.md"]
    loaded, report = AutoModelForCausalLM.from_pretrained(
        back, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    found, _ = find_step(tmp_path / "ours")
    assert compare_logits(found, back).difference < 1e-5
    # Control: one weight of the reference model is changed.
    with torch.no_grad():
        loaded.model.layers[1].self_attn.k_proj.weight[0] += 0.1
    with pytest.raises(UserError, match="the conversion is wrong"):
        compare_logits(found, save(loaded, tmp_path / "changed"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a model in fp32, in several files."""
    model = theirs("llama", tie_word_embeddings=True)
    return save(model, tmp_path_factory.mktemp("folder"), max_shard_size="10KB")


# --- types ---


def test_types(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fp32, of which bf16 cannot hold every value.*--allow-narrowing"):
        convert(folder, tmp_path / "bf16", dtype=BF16)
    assert not names(tmp_path)
    convert(folder, tmp_path / "bf16", dtype=BF16, allow_narrowing=True)
    rounded = {name: tensor.to(BF16) for name, tensor in tensors(folder).items()}
    assert same(tensors(export(tmp_path / "bf16", tmp_path / "back")), rounded)
    assert json.loads((tmp_path / "back" / CONFIG).read_text())["dtype"] == "bfloat16"
    wide = export(tmp_path / "bf16", tmp_path / "wide", dtype=FP32)
    assert same(tensors(wide), {name: tensor.float() for name, tensor in rounded.items()})
    # Neither bf16 nor fp16 represents all values of the other.
    with pytest.raises(UserError, match="bf16, of which fp16 cannot"):
        export(tmp_path / "bf16", tmp_path / "no", dtype=FP16)


def test_no_number_becomes_infinite(folder: Path, tmp_path: Path) -> None:
    large, keys = tensors(folder), "model.layers.0.self_attn.k_proj.weight"
    large[keys][0, 0], large["model.norm.weight"][0] = 7e4, torch.inf
    source = Path(shutil.copytree(folder, tmp_path / "large", ignore=shutil.ignore_patterns("model*")))
    save_file(large, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"linear_qkv.weight holds 7e\+04, which is beyond the range of fp16"):
        convert(source, tmp_path / "fp16", dtype=FP16, allow_narrowing=True)
    # inf stays inf, and no other value becomes inf.
    convert(source, tmp_path / "bf16", dtype=BF16, allow_narrowing=True)
    back = tensors(export(tmp_path / "bf16", tmp_path / "back"))
    assert sum(int(tensor.isinf().sum()) for tensor in back.values()) == 1


def test_a_tensor_of_parts_of_different_types_loses_nothing(folder: Path, tmp_path: Path) -> None:
    """bf16 keys with fp32 queries and values: the fused tensor is fp32."""
    mixed = tensors(folder)
    for name in [name for name in mixed if "k_proj" in name or "norm" in name]:
        mixed[name] = mixed[name].to(BF16)
    source = tmp_path / "mixed"
    source.mkdir()
    shutil.copy(folder / CONFIG, source)
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "ours")
    back = tensors(export(tmp_path / "ours", tmp_path / "back"))
    assert {name: tensor.dtype for name, tensor in back.items()} == {
        name: FP32 if "k_proj" in name else tensor.dtype for name, tensor in mixed.items()
    }
    assert all(torch.equal(back[name].float(), mixed[name].float()) for name in mixed)


# --- damage and failures: nothing is written ---


def _no_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


def _change(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


DAMAGE = {
    "missing shard": (_no_shard, "lacks model-00001"),
    "extra key": (_change(CONFIG, lambda c: c.update(num_hidden_layers=1)), "layers.1.* has no place"),
    "missing key": (_change(CONFIG, lambda c: c.update(num_hidden_layers=3)), "layers.2.* is missing"),
    "wrong shape": (_change(CONFIG, lambda c: c.update(intermediate_size=47)), r"\[48, 32\], not \[47, 32\]"),
    "unknown family": (_change(CONFIG, lambda c: c.update(model_type="qwen9")), "model_type 'qwen9'"),
    "outside": (
        _change(INDEX, lambda c: c["weight_map"].update({"model.norm.weight": "../x.safetensors"})),
        "is refused",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_nothing_is_written_of_a_damaged_folder(name: str, folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "theirs"))
    damage, message = DAMAGE[name]
    damage(damaged)
    with pytest.raises(UserError, match=message):
        convert(damaged, tmp_path / "a" / "ours")
    assert names(tmp_path) == ["theirs"]


class Stopped(SilentDisplay):
    """Raises KeyboardInterrupt, as Ctrl-C does, after half of the work."""

    def work(self, what: str, done: int, total: int, facts: str = "") -> None:
        if 2 * done > total:
            raise KeyboardInterrupt


def test_interrupted_conversion_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "ours"
    with pytest.raises(KeyboardInterrupt):
        import_folder(folder, out, ImportOptions(), Stopped())
    assert not names(tmp_path)
    convert(folder, out)
    with pytest.raises(KeyboardInterrupt):
        export_step(find_step(out)[0], tmp_path / "back", ExportOptions(), Stopped())
    assert names(tmp_path) == ["new"]


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Limits the file size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fails_is_a_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        disk_of(20_000),
        pytest.raises(UserError, match=r"could not be written .*MiB free.*nothing was left"),
    ):
        convert(folder, tmp_path / "ours")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/ours could not be written .*File exists"):
        convert(folder, tmp_path / "file" / "ours")
    assert names(tmp_path) == ["file"]
    with (
        pytest.raises(UserError, match=r"would take 1,000,000,000.00 GB"),
        new_folder(tmp_path / "large", 10**18),
    ):
        pass
    monkeypatch.setattr("pentatron.files.free_bytes", lambda path: 700_000)
    with pytest.raises(UserError, match=r"would take 1.2 MB and 0.7 MB are free"):
        new_folder(tmp_path / "small", 1_200_000).__enter__()


def test_existing_folder_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    convert(folder, tmp_path / "ours")
    before = sorted(tmp_path.rglob("*"))
    for out in ("ours", "ours/latest"):
        with pytest.raises(UserError, match="exists already and nothing is overwritten"):
            convert(folder, tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before


def test_leftovers_of_the_killed_are_removed_and_work_of_others_is_not(tmp_path: Path) -> None:
    killed, foreign = tmp_path / ".ours.0123abcd", tmp_path / ".ours.notes"
    killed.mkdir()
    foreign.mkdir()
    with new_folder(tmp_path / "ours", 0) as one:
        assert names(tmp_path) == sorted([one.name, foreign.name])
        with (
            pytest.raises(UserError, match="could not be written"),
            new_folder(tmp_path / "ours", 0) as other,
        ):
            # The first process gets the name; the other one fails at the end.
            assert one.exists()
            (one / "done").touch()
            shutil.copytree(one, tmp_path / "ours")
        assert not other.exists()
        shutil.rmtree(tmp_path / "ours")
    assert names(tmp_path) == [foreign.name, "ours"]


def test_a_parent_that_others_use_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour, usage = tmp_path / "new" / "neighbour", shutil.disk_usage(tmp_path)

    def asked(path: Path) -> object:
        neighbour.mkdir(parents=True, exist_ok=True)
        return usage

    monkeypatch.setattr(shutil, "disk_usage", asked)
    with pytest.raises(UserError, match="would take"), new_folder(tmp_path / "new" / "ours", 10**18):
        pass
    assert neighbour.is_dir()


# --- what can be exported ---


def test_paths_of_a_checkpoint(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    convert(folder, run / "checkpoints")
    step = run / "checkpoints" / "step-00000000"
    (run / "checkpoints" / "checkpoints").mkdir()
    monkeypatch.chdir(step)
    for path in (run, run / "checkpoints", step, Path()):
        assert find_step(path)[0].folder == find_weights(str(path), verify=True)[0] == step
    with pytest.raises(UserError, match="does not exist"):
        find_step(tmp_path / "none")
    with pytest.raises(UserError, match=r"holds no usable checkpoint .it is a Hugging Face folder"):
        find_step(folder)
    (tmp_path / "iter_0000500" / "mp_rank_00").mkdir(parents=True)
    for find in (lambda: find_step(tmp_path), lambda: find_weights(str(tmp_path), verify=True)):
        with pytest.raises(UserError, match=r"iter_0000500 .*Megatron-LM.*--ckpt-format torch"):
            find()


def test_a_damaged_step_is_not_exported(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "ours")
    file = next((tmp_path / "ours").rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"sha256 is .*name another step, or --no-check"):
        export(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert not same(tensors(export(tmp_path / "ours", tmp_path / "back", check=False)), tensors(folder))
