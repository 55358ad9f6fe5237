"""What a layer is built on: the axes it is spread over, and how it computes."""

from dataclasses import dataclass, field, replace

from pentatron.config.parallel import ParallelConfig
from pentatron.nn.options import LayerOptions
from pentatron.parallel.context_axis import WHOLE_SEQUENCES, ContextAxis, context_axis
from pentatron.parallel.expert_axis import NO_EXPERTS_ELSEWHERE, ExpertAxis, expert_axis
from pentatron.parallel.linear_options import LinearOptions
from pentatron.parallel.tensor_axis import WHOLE_LAYERS, TensorAxis, tensor_axis
from pentatron.parallel.world import World


@dataclass(frozen=True)
class Axes:
    """Of one process by default. A layer hands them on to its parts; how linear layers multiply lies in
    `tensor`."""

    tensor: TensorAxis = WHOLE_LAYERS
    context: ContextAxis = WHOLE_SEQUENCES
    expert: ExpertAxis = NO_EXPERTS_ELSEWHERE
    options: LayerOptions = field(default_factory=LayerOptions)

    def with_linear(self, linear: LinearOptions) -> "Axes":
        """The same for layers that multiply in another way."""
        return replace(self, tensor=replace(self.tensor, linear=linear))

    def out_of_graphs(self) -> "Axes":
        """The same for the parts of a layer that is not compiled."""
        plain = self.with_linear(replace(self.tensor.linear, in_graph=False))
        return replace(plain, options=replace(self.options, compile=None))


ONE_PROCESS = Axes()


def axes_of(world: World, parallel: ParallelConfig) -> Axes:
    return Axes(
        tensor_axis(world, parallel.sequence_parallel),
        context_axis(world, parallel.cp_comm_type),
        expert_axis(world),
    )
