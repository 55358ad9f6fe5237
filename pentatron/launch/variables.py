"""Environment variables of a run: what a launcher sets where the user has not, and what acts on whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pentatron.config.decided import DeviceFacts
from pentatron.config.decisions import decide
from pentatron.config.run import RunConfig

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Read by NCCL itself, in every worker; NCCL_TIMEOUT is read by nobody but us.
OF_NCCL = "NCCL_"
OUR_OWN = ("NCCL_TIMEOUT",)


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    reason: str


def connections_for(config: RunConfig) -> Variable | None:
    """One queue to the GPU lets communication start in the order of the computation that it hides behind.

    Sharded parameters are gathered beside the computation, and so are updated ones with --overlap-param-gather, which one queue would
    forbid: what is gathered later stands before what is computed now.
    """
    sizes = config.parallel
    if sizes.tensor_model_parallel_size * sizes.context_parallel_size == 1:
        return None
    if decide(config, DeviceFacts()).param_overlap.on:
        return None
    return Variable(CONNECTIONS, "1", "so that kernels start in the order in which they were queued")


def variables_of_a_job(
    config: RunConfig, nodes: int, processes: int, cpus: int, uses_gpus: bool
) -> list[Variable]:
    """What the script of a job sets, each unless the user has; without `cpus` the node counts its cores itself."""
    counted = f"$(( $(nproc) > {processes} ? $(nproc) / {processes} : 1 ))"
    threads = str(max(1, cpus // processes)) if cpus else counted
    found = [Variable("OMP_NUM_THREADS", threads, "the cores of a node divided among its workers")]
    connections = connections_for(config)
    if uses_gpus and connections is not None:
        found.append(connections)
    if uses_gpus and nodes > 1:
        found.append(
            Variable("NCCL_DEBUG", "WARN", "NCCL says what goes wrong between nodes, and nothing else")
        )
    return found


def describe(environment: Mapping[str, str], on_gpu: bool, nccl: bool, alone: bool) -> list[str]:
    """Lines that say which of the user's variables act on this run, and which cannot."""
    given = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(OF_NCCL) and name not in OUR_OWN
    ]
    lines = []
    if given and nccl:
        lines.append(f"NCCL reads from the environment: {', '.join(given)}")
    elif given:
        reason = (
            "one process sends no messages" if alone else "messages go through gloo here, not through NCCL"
        )
        lines.append(f"{', '.join(given)}: {reason}, so this changes nothing")
    if CONNECTIONS in environment:
        written = f"{CONNECTIONS}={environment[CONNECTIONS]}"
        lines.append(
            f"CUDA reads from the environment: {written}" if on_gpu else f"{written}: there is no GPU here"
        )
    return lines


def chosen_interfaces(pattern: str, interfaces: Sequence[str]) -> list[str]:
    """The interfaces NCCL_SOCKET_IFNAME lets NCCL use: prefixes by commas, `^` all but those, `=` whole names."""
    exclude, text = pattern.startswith("^"), pattern.lstrip("^")
    exact, text = text.startswith("="), text.lstrip("=")
    names = [name for name in text.split(",") if name]
    if not names:
        return list(interfaces)

    def matches(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return [interface for interface in interfaces if matches(interface) != exclude]


def interface_problem(environment: Mapping[str, str], interfaces: Sequence[str]) -> str | None:
    pattern = environment.get("NCCL_SOCKET_IFNAME", "")
    if not pattern or chosen_interfaces(pattern, interfaces):
        return None
    return (
        f"NCCL_SOCKET_IFNAME={pattern} names no network interface of this machine, which has {', '.join(interfaces)}; "
        f"export one of those, or unset the variable"
    )
