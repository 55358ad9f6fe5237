"""Runs megatron-core on a CPU: builds its GPTModel, loads our checkpoints and saves its own.

    python megatron_core_process.py JOBS.json

A separate process, since it patches torch and megatron-core to run without a GPU and without memory reports.
For every job, the tensors of model and optimizer by megatron-core's names, and the logits of a fixed batch,
are written to a file.
"""

import contextlib
import json
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")

LAYERS, HIDDEN, HEADS, VOCABULARY, PADDED, LENGTH = 2, 32, 4, 100, 128, 16
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCABULARY
RMS = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "layernorm_epsilon": 1e-6,
}
ROTARY = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
MIXTURE = {
    **RMS,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 48,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_dtype": "fp32",
}
# Settings of each family for megatron-core: those of TransformerConfig and those of GPTModel.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": (
        {
            "ffn_hidden_size": 128,
            "activation_func": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        },
        {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True},
    ),
    "qwen": ({**RMS, "ffn_hidden_size": 64, "add_qkv_bias": True, "qk_layernorm": True}, ROTARY),
    "mixture": (MIXTURE, ROTARY),
    # With a layer without experts, every layer has tensors of its own.
    "pattern": ({**MIXTURE, "moe_layer_freq": [0, 1]}, ROTARY),
}


def build(family: str) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    settings, of_model = FAMILIES[family]
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **settings,
    )
    if "moe_layer_freq" in settings:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        return GPTModel(config, spec, vocab_size=PADDED, max_sequence_length=LENGTH, **of_model)
    spec = get_gpt_layer_local_spec(
        num_experts=settings.get("num_moe_experts"),
        moe_grouped_gemm=False,
        qk_layernorm=settings.get("qk_layernorm", False),
        normalization=settings.get("normalization"),
    )
    return GPTModel(config, spec, vocab_size=PADDED, max_sequence_length=LENGTH, **of_model)


def states(model: Any, optimizer: Any, apart: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sharded states of model and optimizer, by megatron-core's own functions.

    `apart`: its other form, with gate, up and every expert in tensors of their own.
    """
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    of_model = model.sharded_state_dict(metadata={"singleton_local_shards": apart})
    of_optimizer = optimizer.state_dict()
    numbers = get_param_id_to_sharded_param_map(of_model, model.parameters())
    optim_state_to_sharding_state(of_optimizer, numbers, exclude_keys=("step",))
    of_optimizer["state"]["common_step"] = 1.0
    return of_model, of_optimizer


def new_optimizer(model: Any) -> Any:
    """Returns an optimizer after one step, which creates its moments."""
    made = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.step()
    return made


def seen(model: Any, optimizer: Any) -> dict[str, Any]:
    named = dict(model.named_parameters())
    moments = {
        kind: {name: optimizer.state[parameter][kind] for name, parameter in named.items()}
        for kind in ("exp_avg", "exp_avg_sq")
    }
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    with torch.no_grad():
        logits = model.eval()(TOKENS, positions, mask)
    return {"weights": tensors, **moments, "logits": logits}


def load(family: str, folder: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    model = build(family)
    optimizer = new_optimizer(model)
    of_model, of_optimizer = states(model, optimizer)
    found = dist_checkpointing.load({"model": of_model, "optimizer": of_optimizer}, folder)
    model.load_state_dict(found["model"])
    for number, parameter in enumerate(model.parameters()):
        for kind in ("exp_avg", "exp_avg_sq"):
            optimizer.state[parameter][kind] = found["optimizer"]["state"][number][kind]
    common = dist_checkpointing.load_common_state_dict(folder)
    return {**seen(model, optimizer), "args": vars(common["args"]), "iteration": common["iteration"]}


def save(family: str, folder: str, arguments: dict[str, Any], apart: bool) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    Path(folder).mkdir(parents=True)
    model = build(family)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    optimizer = new_optimizer(model)
    of_model, of_optimizer = states(model, optimizer, apart)
    state = {
        "model": of_model,
        "optimizer": of_optimizer,
        "args": Namespace(**arguments),
        "iteration": arguments["iteration"],
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"num_steps": arguments["consumed_train_samples"]},
    }
    dist_checkpointing.save(state, folder)
    return seen(model, optimizer)


def main(jobs: list[dict[str, Any]]) -> None:
    # Before megatron-core is imported, which queries the GPU for its buffers.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import moe_utils

    # It reads this name, which only Transformer Engine defines.
    moe_utils.te_general_gemm = None
    filesystem_async._process_memory = lambda: 0
    tensor_parallel.get_cuda_rng_tracker().fork = lambda name="": contextlib.nullcontext()
    parallel_state.initialize_model_parallel(1, 1)
    torch.manual_seed(3)
    for job in jobs:
        if job["do"] == "load":
            made = load(job["family"], job["folder"])
        else:
            made = save(job["family"], job["folder"], job["arguments"], job["apart"])
        torch.save(made, job["out"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
