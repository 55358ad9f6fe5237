"""How the processes of a run join into one process group, and how they leave it.

Neither torch's store nor gloo nor NCCL asks who connects. Where the job has a secret, each rank proves to all others that it knows it
before the process group is made, and a key that follows from the secret authenticates the values which ranks exchange.
"""

import contextlib
import datetime
import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pentatron.parallel.rendezvous import (
    SECRET,
    MeetingError,
    MeetingPoint,
    failed_meeting,
    is_loopback,
    listener_of,
)

# What a process without a GPU of its own says of it.
_NO_GPU = "none"


def join(
    device: torch.device, rank: int, world_size: int, timeout: datetime.timedelta, point: MeetingPoint
) -> bytes | None:
    """Meets the others. GPUs talk through NCCL where no two processes share one, else through gloo.

    Returns the key of the values that ranks exchange; None where the job has no secret.
    """
    gpu = gpu_of(device)
    try:
        store = open_store(point, rank, world_size, timeout)
        store.set_timeout(timeout)
        # Asked before anything is chosen: a process may see one GPU of many, and what it sees is not what its neighbours see.
        gpus, key = introduced(store, point, gpu, rank, world_size)
        backend = "cpu:gloo,cuda:nccl" if each_has_its_own(gpus) else "gloo"
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
    return key


def open_store(point: MeetingPoint, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """The store at a meeting point, which torch also finds in the environment.

    On a loopback address rank 0 listens there alone, where torch would listen on all addresses.
    """
    if rank > 0 or point.is_served or not is_loopback(point.host):
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        return store
    place = (point.host, point.port, world_size, True, timeout)
    return TCPStore(*place, master_listen_fd=listener_of(point).detach())


def introduced(
    store: Store, point: MeetingPoint, own: str, rank: int, world_size: int
) -> tuple[list[str], bytes | None]:
    """What every rank says of itself, and the key of their job, after all have proved that they know its secret.

    The proofs are over random numbers of all ranks, so that none can be repeated from another job or an earlier start.
    """
    secret = point.secret
    job = "" if secret is None else hmac.digest(secret, b"name of the job", "sha256").hex()
    if rank == 0:
        store.set("job", job)
    elif store.get("job").decode() != job:
        raise MeetingError(
            f"rank {rank} met a process of another job at {point}; choose another --master-port (MASTER_PORT) for one of the two, and "
            f"give every process of a job the same {SECRET}, if it has one"
        )
    store.set(f"rank/{rank}", f"{secrets.token_hex(16)} {own}")
    said = store.multi_get([f"rank/{number}" for number in range(world_size)])
    found = [words.decode(errors="replace").partition(" ")[2] for words in said]
    if secret is None:
        return found, None
    key = hmac.digest(secret, b"key" + hashlib.sha256(b"\n".join(said)).digest(), "sha256")
    proofs = [hmac.digest(key, b"proof of rank %d" % number, "sha256").hex() for number in range(world_size)]
    store.set(f"proof/{rank}", proofs[rank])
    shown = store.multi_get([f"proof/{number}" for number in range(world_size)])
    for number, (proof, expected) in enumerate(zip(shown, proofs)):
        if not hmac.compare_digest(bytes(proof), expected.encode()):
            raise MeetingError(
                f"a process that does not know the secret of this job has joined it at {point}, as rank {number} or beside it; choose "
                f"another --master-port (MASTER_PORT)"
            )
    return found, key


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


def gpu_of(device: torch.device) -> str:
    """What tells a GPU from all others, whatever number it has here."""
    if device.type != "cuda":
        return _NO_GPU
    about = torch.cuda.get_device_properties(device)
    return _NO_GPU if " MIG " in about.name else str(about.uuid)
