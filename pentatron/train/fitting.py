"""Whether the layout can take every batch of the run: said before its first step, so that no run ends where its batch grows."""

from pathlib import Path

from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.batch_sizes import sizes_problem
from pentatron.config.decisions import decide
from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig
from pentatron.errors import AgreedError
from pentatron.parallel.collectives import on_some_ranks
from pentatron.parallel.world import World
from pentatron.train.device_facts import device_facts
from pentatron.train.fp8 import require_fp8
from pentatron.train.state import TrainState


def require_fitting_start(resolved: Resolved, world: World) -> None:
    """Before anything is built: that the device can do it, and the batches of a run that certainly begins at its first step."""
    require_fp8(decide(resolved.config, device_facts(resolved.config, world.device)).fp8)
    save, load = resolved.config.checkpoint.save, resolved.config.checkpoint.load
    loads_another = (
        resolved.given("load") and load is not None and Path(load).resolve() != Path(save).resolve()
    )

    def require() -> None:
        if not (loads_another or CheckpointStore(Path(save), keep=None).steps()):
            require_fitting_batches(resolved.config, TrainState())

    on_some_ranks(world.is_first, require, world.everyone)


def require_fitting_batches(config: RunConfig, state: TrainState) -> None:
    """From where a run stands: what is behind it may have had another layout."""
    problem = sizes_problem(config, state.consumed_samples, state.step)
    if problem is not None:
        raise AgreedError(problem)
