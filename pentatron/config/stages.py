"""What the configuration says about the stages of the pipeline: how the layers are divided, and what each costs."""

from collections.abc import Mapping
from typing import Any

from pentatron.config.moe_layers import inner_widths, moe_layers
from pentatron.layout.ranks import Grid
from pentatron.layout.schedules import FOLDED
from pentatron.layout.stages import Costs, Division


def grid_of(values: Mapping[str, Any]) -> Grid:
    """The grid of ranks; with experts and nothing said, one expert is cut like a dense layer."""
    tensor = values["tensor_model_parallel_size"]
    of_experts = (values["expert_tensor_parallel_size"] or tensor) if values["num_experts"] else 1
    return Grid(
        tensor=tensor,
        context=values["context_parallel_size"],
        data=values["data_parallel_size"],
        pipeline=values["pipeline_model_parallel_size"],
        expert=values["expert_model_parallel_size"],
        expert_tensor=of_experts,
        kv_copies=max(1, tensor // values["num_query_groups"]),
        instances=values["num_distributed_optimizer_instances"] if values["zero_stage"] == 3 else 1,
    )


def division_of(values: Mapping[str, Any]) -> Division:
    """How the layers are to be divided. Wishes about the ends mean nothing to a single rank."""
    ranks, virtual = (
        values["pipeline_model_parallel_size"],
        values["virtual_pipeline_model_parallel_size"] or 1,
    )
    written = values["pipeline_model_parallel_layout"]
    if ranks == 1:
        return Division(ranks, virtual, written=written)
    return Division(
        ranks=ranks,
        virtual=virtual,
        first=values["decoder_first_pipeline_num_layers"],
        last=values["decoder_last_pipeline_num_layers"],
        count_embedding=values["account_for_embedding_in_pipeline_split"],
        count_head=values["account_for_loss_in_pipeline_split"],
        even=values["num_layers_per_virtual_pipeline_stage"] is not None,
        written=written,
        folded=values["pipeline_schedule"] in FOLDED,
    )


def costs_of(values: Mapping[str, Any]) -> Costs:
    """Multiplications for one token of a full sequence; looking up an embedding takes none."""
    hidden, attended = values["hidden_size"], values["num_attention_heads"] * values["kv_channels"]
    projections = hidden * (2 * attended + 2 * values["num_query_groups"] * values["kv_channels"])
    mlp = (3 if values["gated_linear_unit"] else 2) * hidden * _inner_width(values)
    # A token looks back at half the sequence on average, once for the scores and once for the values.
    scores = values["seq_length"] * attended
    return Costs(
        layer=projections + mlp + scores, embedding=0, head=hidden * (values["padded_vocab_size"] or 0)
    )


def _inner_width(values: Mapping[str, Any]) -> float:
    """Of a feed-forward part; the mean, where some layers have experts and some do not."""
    layers = values["num_layers"]
    sparse = 0
    if values["num_experts"] is not None:
        try:
            sparse = sum(moe_layers(values["moe_layer_freq"], layers))
        except ValueError:
            # A rule will say what is wrong with it.
            sparse = layers
    return inner_widths(values, sparse) / layers
