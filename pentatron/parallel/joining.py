"""How the processes of a run join into one process group, and how they leave it."""

import contextlib
import datetime
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pentatron.parallel.meeting import failed_meeting

# What a process without a GPU of its own says of it.
_NO_GPU = "none"


def join(device: torch.device, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    """Meets the others where the environment says. GPUs talk through NCCL where no two processes share one, else through gloo."""
    gpu = gpu_of(device)
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        # Asked before anything is chosen: a process may see one GPU of many, and what it sees is not what its neighbours see.
        backend = (
            "cpu:gloo,cuda:nccl" if each_has_its_own(_gpus_of_all(store, gpu, rank, world_size)) else "gloo"
        )
        # No device is named here: torch would then send all messages of a group through one queue, in which those that wait hold up others.
        dist.init_process_group(
            backend,
            store=PrefixStore("default_pg", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise failed_meeting(str(error), world_size) from None


def leave(failed: bool) -> None:
    """`failed`: the others may wait for what this rank will not send any more, and this one for them. NCCL would let nobody go before
    all that was begun has ended; so it is broken off."""
    if not dist.is_initialized():
        return
    if failed and "nccl" in str(dist.get_backend_config()):
        # Torch has no public way. What ended the run counts, and not that this fails as well.
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def each_has_its_own(gpus: Sequence[str]) -> bool:
    """NCCL refuses two ranks on one GPU, and slices of one; gloo serves them, more slowly."""
    return _NO_GPU not in gpus and max(Counter(gpus).values()) == 1


def _gpus_of_all(store: Store, own: str, rank: int, world_size: int) -> list[str]:
    store.set(f"gpu/{rank}", own)
    return [found.decode() for found in store.multi_get([f"gpu/{number}" for number in range(world_size)])]


def gpu_of(device: torch.device) -> str:
    """What tells a GPU from all others, whatever number it has here."""
    if device.type != "cuda":
        return _NO_GPU
    about = torch.cuda.get_device_properties(device)
    return _NO_GPU if " MIG " in about.name else str(about.uuid)
