"""Translates DeepSpeed configuration files into settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from pentatron.errors import UserError
from pentatron.settings.deepspeed import TARGETS, read_deepspeed
from pentatron.settings.entry_points import MEGATRON
from pentatron.settings.resolve import Resolved, gather, resolve
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import ProcessFacts

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 2,
    },
    "bf16": {"enabled": False},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.2},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 1e-5,
            "warmup_max_lr": 1e-4,
            "warmup_num_steps": 5,
            "warmup_type": "linear",
            "total_num_steps": 50,
        },
    },
    "tensorboard": {"enabled": True, "output_path": "tb", "job_name": "x"},
    "wandb": {"enabled": False, "project": "p"},
    "wall_clock_breakdown": False,
    "amp": {"enabled": True},
    "flops_profiler": {"enabled": False},
}


def written(folder: Path, content: Any) -> str:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(content))
    return str(path)


def resolved(folder: Path, content: Any, words: str = "") -> Resolved:
    line = f"--deepspeed --deepspeed_config {written(folder, content)} {words}"
    return resolve(gather(line.split(), MEGATRON), ProcessFacts(2, 2))


def test_every_key_becomes_the_setting_that_does_the_same(tmp_path: Path) -> None:
    found = resolved(tmp_path, EVERYTHING)
    values = found.config.flat()
    expected = {
        "global_batch_size": 16, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "clip_grad": 0.5, "log_interval": 7,
        "zero_stage": 2, "overlap_grad_reduce": True, "ddp_bucket_size": 500_000_000, "optimizer_cpu_offload": True,
        "fp16": True, "bf16": False, "loss_scale": None, "initial_loss_scale": 4096.0, "loss_scale_window": 500, "hysteresis": 3,
        "min_loss_scale": 2.0, "optimizer": "adam", "lr": 1e-4, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-7,
        "weight_decay": 0.2, "lr_decay_style": "linear", "lr_warmup_iters": 5, "lr_decay_iters": 50, "lr_warmup_init": 1e-5,
        "tensorboard_dir": "tb", "wandb_project": None,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    told = [n for n in found.notices if "ds_config.json: " in n]
    assert sorted(n.split(": ")[1].split()[0] for n in told) == [
        "amp.enabled",
        "tensorboard.job_name",
        "wall_clock_breakdown",
        "zero_optimization.offload_optimizer.pin_memory",
    ]


@pytest.mark.parametrize("said", [{}, {"warmup_type": "log"}], ids=["by default", "log"])
def test_non_linear_warm_up_is_reported(tmp_path: Path, said: dict[str, str]) -> None:
    content = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, **said}}}
    found = resolved(tmp_path, content)
    assert found.config.optim.lr_warmup_iters == 5
    assert [n for n in found.notices if "the warm-up is linear;" in n] != []


def test_auto_leaves_the_setting_alone_and_flags_win(tmp_path: Path) -> None:
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 0.5,
    }
    values = resolved(tmp_path, content, "--bf16 --clip-grad 2.0 --micro-batch-size 3").config.flat()
    assert (values["micro_batch_size"], values["bf16"], values["clip_grad"]) == (3, True, 2.0)


def test_the_file_of_this_repository_is_read_whole() -> None:
    found, notices = read_deepspeed(str(ROOT / "ds_config.json"))
    assert {name: assigned.value for name, assigned in found.items()} == {"clip_grad": 1.0, "zero_stage": 1}
    assert notices == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "weights are not offloaded"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "'nvme' is not supported"),
        ({"optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' is not supported"),
        ({"optimizer": {"type": "Lamb"}}, "'Lamb' is not supported; write AdamW or SGD"),
        ({"scheduler": {"type": "OneCycle"}}, "'OneCycle' is not supported"),
        ({"gradient_clipping": "much"}, "gradient_clipping"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "optimizer.params.betas"),
        (
            {"zero_optimization": {"stage": 9}},
            "ds_config.json: zero_optimization.stage: must be one of 0, 1, 2, 3",
        ),
        (["stage"], "one JSON object"),
    ],
)
def test_unsupported_deepspeed_settings_are_refused(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ds_config\.json") as error:
        read_deepspeed(written(tmp_path, content))
    assert said in str(error.value)


def test_a_missing_file_names_the_flag() -> None:
    with pytest.raises(
        UserError, match=r"nowhere\.json does not exist; check the path given to --deepspeed_config"
    ):
        read_deepspeed("nowhere.json")


def test_every_target_is_a_setting() -> None:
    assert {target.setting for targets in TARGETS.values() for target in targets} <= set(all_settings())


def test_deepspeed_flag_has_a_notice() -> None:
    found = resolve(gather(["--deepspeed"], MEGATRON), ProcessFacts(1))
    assert any(n.startswith("--deepspeed: DeepSpeed is not used") for n in found.notices)
