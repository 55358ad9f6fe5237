"""The axes a layer is spread over, together: what a model is built on."""

from dataclasses import dataclass

from pentatron.config.parallel import ParallelConfig
from pentatron.parallel.context_axis import WHOLE_SEQUENCES, ContextAxis, context_axis
from pentatron.parallel.expert_axis import NO_EXPERTS_ELSEWHERE, ExpertAxis, expert_axis
from pentatron.parallel.tensor_axis import WHOLE_LAYERS, TensorAxis, tensor_axis
from pentatron.parallel.world import World


@dataclass(frozen=True)
class Axes:
    """Of one process by default."""

    tensor: TensorAxis = WHOLE_LAYERS
    context: ContextAxis = WHOLE_SEQUENCES
    expert: ExpertAxis = NO_EXPERTS_ELSEWHERE


ONE_PROCESS = Axes()


def axes_of(world: World, parallel: ParallelConfig) -> Axes:
    return Axes(
        tensor_axis(world, parallel.sequence_parallel),
        context_axis(world, parallel.cp_comm_type),
        expert_axis(world),
    )
