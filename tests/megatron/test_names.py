"""Every documented name can be imported under Megatron's path and under Pentatron's.

The table of modules is complete.
"""

import dataclasses
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pentatron.errors import UserError
from pentatron.megatron.core import parallel_state
from pentatron.megatron.core.tensor_parallel import ColumnParallelLinear
from pentatron.megatron.core.transformer.transformer_config import TransformerConfig, core_of
from pentatron.megatron.module_table import MODULES, UNAVAILABLE
from pentatron.megatron.names import as_megatron
from pentatron.megatron.training import get_args
from pentatron.settings.core_config import CoreTransformerConfig
from tests.harness import run_distributed

ROOT = Path(__file__).parent.parent.parent
ROWS = [
    (re.findall(r"`([\w.]+)`", row[0]), re.findall(r"`(\w+)`", row[1]), re.findall(r"`([\w.]+)`", row[2]))
    for line in (ROOT / "docs/megatron-names.md").read_text().splitlines()
    if len(row := [cell.strip() for cell in line.strip("|").split(" | ")]) == 3 and row[0].startswith("`meg")
]
IMPORTS = """
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.core import mpu
import megatron.training.training, megatron.legacy
assert megatron.training.training.__name__ == "pentatron.megatron.training.training"
assert megatron.training.training.__spec__.name == "pentatron.megatron.training.training"
import pentatron.megatron.core.models.gpt as ours
assert ours.GPTModel is GPTModel, "one class under two names"
"""


def import_everything() -> None:
    """Imports all names; only for a process of its own, because `megatron` is replaced in it."""
    for known in [known for known in sys.modules if known.split(".")[0] == "megatron"]:
        del sys.modules[known]
    as_megatron()
    exec(IMPORTS, {})
    assert len(ROWS) > 30
    for theirs, names, ours in ROWS:
        for module in theirs:
            mirrored = importlib.import_module(f"pentatron.{module}".replace(".mpu", ".parallel_state"))
            found = importlib.import_module("megatron.core").mpu if module.endswith("mpu") else None
            assert (found or importlib.import_module(module)) is mirrored
            for name in names:
                assert hasattr(mirrored, name), f"{module}.{name}"
        for module in ours:
            importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'megatron\.core\.nothing'"):
        importlib.import_module("megatron.core.nothing")


def test_the_table_of_names_is_true() -> None:
    run_distributed(import_everything, 1)


def test_the_table_names_the_modules_that_names_come_from() -> None:
    for theirs, names, ours in ROWS:
        row = MODULES[theirs[0].removeprefix("megatron.")]
        from_modules = {
            f"pentatron.{module}"
            for module, imported in row.items()
            if imported == "*"
            or {word.split(" as ")[-1].strip() for word in imported.split(",")} & set(names)
        }
        assert not names or from_modules == set(ours), theirs[0]


PLAIN = """
import sys, pickle, pkgutil
import pentatron.megatron
assert "torch" not in sys.modules, "the table needs no torch"
import pentatron.megatron.core
assert pentatron.megatron.core.transformer.mlp.MLP.__name__ == "MLP", "submodules are attributes, as in Megatron"
assert "module_table.py" in repr(pentatron.megatron.core.transformer.mlp)
from pentatron.megatron.core.datasets.gpt_dataset import *
config = GPTDatasetConfig(random_seed=1, sequence_length=2)
assert pickle.loads(pickle.dumps(config)) == config
# A pickle that names the class by Megatron's module.
old = b"cpentatron.megatron.core.datasets.gpt_dataset\\nGPTDatasetConfig\\n."
assert pickle.loads(old) is GPTDatasetConfig
"""


def test_modules_of_the_table_are_ordinary_modules() -> None:
    shown = python(PLAIN)
    assert shown.returncode == 0, shown.stderr


def import_every_row() -> None:
    for row, imports in MODULES.items():
        module = importlib.import_module(f"pentatron.megatron.{row}")
        assert module.__doc__ and module.__name__ == f"pentatron.megatron.{row}"
        assert all(hasattr(module, attribute) for attribute in module.__all__)
        assert bool(module.__all__) == bool(imports) and set(module.__all__) <= set(dir(module))
        parent = row.rpartition(".")[0]
        assert not parent or parent in MODULES, f"{parent} needs a row"
        for attribute in UNAVAILABLE.get(row, {}):
            with pytest.raises(ImportError, match=f"megatron.{row}.{attribute} is not available: "):
                getattr(module, attribute)


def test_every_row_of_the_table_is_a_module() -> None:
    run_distributed(import_every_row, 1)


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron": raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_one_import_finds_the_names_where_the_real_package_is_not_installed() -> None:
    shown = python(f"{BLOCKED}import pentatron.megatron.install\n{IMPORTS}")
    assert shown.returncode == 0, shown.stderr
    assert "UserWarning" not in shown.stderr
    without = python(f"{BLOCKED}import pentatron.megatron\nimport megatron")
    assert "No module named 'megatron'" in without.stderr


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_an_installed_megatron_is_left_alone_unless_asked() -> None:
    left = python("import pentatron.megatron.install, megatron; print(megatron.__path__)")
    assert left.returncode == 0 and "site-packages" in left.stdout
    assert "megatron-core is installed" in left.stderr and "as_megatron() puts" in left.stderr
    asked = python(
        "from pentatron.megatron import as_megatron; as_megatron(); import megatron; print(megatron.__name__)"
    )
    assert asked.stdout == "pentatron.megatron\n"
    late = python("import megatron; from pentatron.megatron import as_megatron; as_megatron()")
    assert "call as_megatron() before anything imports it" in late.stderr


def test_a_configuration_by_hand_becomes_a_model() -> None:
    qwen = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        num_moe_experts=4,
        moe_aux_loss_coeff=0.01,
    )
    assert (qwen.ffn_hidden_size, qwen.kv_channels) == (128, 8)
    core = core_of(qwen)
    assert isinstance(core, CoreTransformerConfig) and core.moe.num_experts == 4
    assert core.moe.moe_aux_loss_coeff == (0.01,) and core.add_qkv_bias and core.hidden_dropout == 0.1
    with pytest.warns(UserWarning, match="gated_linear_unit is SwiGLU here"):
        core_of(dataclasses.replace(qwen, activation_func=F.gelu))
    with pytest.raises(UserError, match="activation_func=relu is not available"):
        core_of(dataclasses.replace(qwen, activation_func=F.relu))


def test_without_a_run_the_accessors_say_so() -> None:
    for ask in (get_args, parallel_state.get_data_parallel_group, parallel_state.is_pipeline_first_stage):
        with pytest.raises(UserError, match="there is no run yet"):
            ask()
    assert not parallel_state.is_initialized()


def test_one_ranks_share_of_a_linear_layer() -> None:
    layer = ColumnParallelLinear(4096, 16384, tp_size=4)
    assert layer.out_per_partition == 4096 and layer.weight.shape == (4096, 4096)
    x = torch.rand(1, 2, 4096)
    assert torch.equal(layer(x), F.linear(x, layer.weight)) and layer.weight.std() < 0.03
    with pytest.raises(UserError, match="10 outputs cannot be shared by 4 tensor ranks"):
        ColumnParallelLinear(8, 10, 4)
