"""What the configuration says about the stages of the pipeline: how the layers are divided, and what each costs."""

from pentatron.config.moe_layers import inner_widths, moe_layers
from pentatron.config.parameters import attention_sizes, matrices_of
from pentatron.config.settings import Settings
from pentatron.layout.ranks import Grid
from pentatron.layout.schedules import FOLDED
from pentatron.layout.stages import Costs, Division


def grid_of(s: Settings) -> Grid:
    """The grid of ranks; with experts and nothing said, one expert is cut like a dense layer."""
    tensor = s.tensor_model_parallel_size
    of_experts = (s.expert_tensor_parallel_size or tensor) if s.num_experts else 1
    return Grid(
        tensor=tensor,
        context=s.context_parallel_size,
        data=s.data_parallel_size,
        pipeline=s.pipeline_model_parallel_size,
        expert=s.expert_model_parallel_size,
        expert_tensor=of_experts,
        kv_copies=max(1, tensor // s.num_query_groups),
        instances=s.num_distributed_optimizer_instances if s.zero_stage == 3 else 1,
    )


def division_of(s: Settings) -> Division:
    """How the layers are to be divided. Wishes about the ends mean nothing to a single rank."""
    ranks, virtual = (
        s.pipeline_model_parallel_size,
        s.virtual_pipeline_model_parallel_size or 1,
    )
    written = s.pipeline_model_parallel_layout
    if ranks == 1:
        return Division(ranks, virtual, written=written)
    return Division(
        ranks=ranks,
        virtual=virtual,
        first=s.decoder_first_pipeline_num_layers,
        last=s.decoder_last_pipeline_num_layers,
        count_embedding=s.account_for_embedding_in_pipeline_split,
        count_head=s.account_for_loss_in_pipeline_split,
        even=s.num_layers_per_virtual_pipeline_stage is not None,
        written=written,
        folded=s.pipeline_schedule in FOLDED,
    )


def costs_of(s: Settings) -> Costs:
    """Multiplications for one token of a full sequence; looking up an embedding takes none."""
    hidden, attention = s.hidden_size, attention_sizes(s)
    projections = attention.linear_qkv.multiplications + attention.linear_proj.multiplications
    mlp = matrices_of(s) * hidden * _inner_width(s)
    # A token looks back at half the sequence on average, once for the scores and once for the values.
    scores = s.seq_length * attention.linear_proj.inputs
    return Costs(layer=projections + mlp + scores, embedding=0, head=hidden * (s.padded_vocab_size or 0))


def _inner_width(s: Settings) -> float:
    """Of a feed-forward part; the mean, where some layers have experts and some do not."""
    layers = s.num_layers
    sparse = 0
    if s.num_experts is not None:
        try:
            sparse = sum(moe_layers(s.moe_layer_freq, layers))
        except ValueError:
            # A rule will say what is wrong with it.
            sparse = layers
    return inner_widths(s, s, sparse) / layers
