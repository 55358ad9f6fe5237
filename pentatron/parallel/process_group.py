"""Process group creation and teardown, with authentication of the ranks.

Neither torch's store nor gloo nor NCCL authenticates connections. If the job has a secret, each rank proves
to all others that it knows it before the process group is created, and a key derived from the secret
authenticates the Python objects that ranks exchange.
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
    Rendezvous,
    RendezvousError,
    inherited_or_new_socket,
    is_loopback,
    rendezvous_error,
)

# The GPU identifier of a process that has no GPU of its own.
_NO_GPU = "none"


def init_process_group(
    device: torch.device, rank: int, world_size: int, timeout: datetime.timedelta, point: Rendezvous
) -> bytes | None:
    """Creates the default process group. Uses NCCL if every process has its own GPU, otherwise gloo.

    Returns the HMAC key for exchanged Python objects; None if the job has no secret.
    """
    gpu = gpu_of(device)
    try:
        store = open_store(point, rank, world_size, timeout)
        store.set_timeout(timeout)
        # Ask all ranks: with CUDA_VISIBLE_DEVICES a process does not see which GPUs the others use.
        gpus, key = exchange_gpus(store, point, gpu, rank, world_size)
        backend = "cpu:gloo,cuda:nccl" if all_gpus_distinct(gpus) else "gloo"
        # No `device_id`: torch would then run all point-to-point messages of a group on one stream, where one
        # waiting message blocks the others.
        dist.init_process_group(
            backend, store=PrefixStore("default_pg", store), rank=rank, world_size=world_size, timeout=timeout
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise rendezvous_error(str(error), world_size) from None
    return key


def open_store(point: Rendezvous, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """Returns the store of the rendezvous.

    On a loopback address rank 0 listens on that address only; torch would listen on all addresses.
    """
    if rank > 0 or point.is_served or not is_loopback(point.host):
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        return store
    address = (point.host, point.port, world_size, True, timeout)
    return TCPStore(*address, master_listen_fd=inherited_or_new_socket(point).detach())


def exchange_gpus(
    store: Store, point: Rendezvous, gpu: str, rank: int, world_size: int
) -> tuple[list[str], bytes | None]:
    """Exchanges the GPU identifiers of all ranks; returns them and the key of the job, None without a secret.

    Every rank first proves that it knows the secret. The proofs include random numbers of all ranks, so they
    cannot be replayed from another job or an earlier start.
    """
    secret = point.secret
    job = "" if secret is None else hmac.digest(secret, b"name of the job", "sha256").hex()
    if rank == 0:
        store.set("job", job)
    elif store.get("job").decode() != job:
        raise RendezvousError(
            f"rank {rank} connected to another job at {point}; choose another --master-port (MASTER_PORT) for one of the two, and "
            f"give every process of a job the same {SECRET}, if it has one"
        )
    store.set(f"rank/{rank}", f"{secrets.token_hex(16)} {gpu}")
    introductions = store.multi_get([f"rank/{number}" for number in range(world_size)])
    gpus = [introduction.decode(errors="replace").partition(" ")[2] for introduction in introductions]
    if secret is None:
        return gpus, None
    key = hmac.digest(secret, b"key" + hashlib.sha256(b"\n".join(introductions)).digest(), "sha256")
    proofs = [hmac.digest(key, b"proof of rank %d" % number, "sha256").hex() for number in range(world_size)]
    store.set(f"proof/{rank}", proofs[rank])
    shown = store.multi_get([f"proof/{number}" for number in range(world_size)])
    for number, (proof, expected) in enumerate(zip(shown, proofs)):
        if not hmac.compare_digest(bytes(proof), expected.encode()):
            raise RendezvousError(
                f"a process that does not know the secret of this job has joined it at {point}, as rank {number} or beside it; choose "
                f"another --master-port (MASTER_PORT)"
            )
    return gpus, key


def destroy_process_group(failed: bool) -> None:
    """Destroys the process group.

    After a failure other ranks may wait for messages that this rank will not send, and it for theirs. NCCL
    would block until all running collectives end, so it is aborted.
    """
    if not dist.is_initialized():
        return
    if failed and "nccl" in str(dist.get_backend_config()):
        # Torch has no public function for this. Errors here must not hide the one that ended the run.
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def all_gpus_distinct(gpus: Sequence[str]) -> bool:
    """Whether every process has a GPU of its own. NCCL refuses shared GPUs and MIG slices; gloo is slower."""
    return _NO_GPU not in gpus and max(Counter(gpus).values()) == 1


def gpu_of(device: torch.device) -> str:
    """Returns the UUID of the process's GPU, or `_NO_GPU` for a CPU or a MIG slice."""
    if device.type != "cuda":
        return _NO_GPU
    properties = torch.cuda.get_device_properties(device)
    return _NO_GPU if " MIG " in properties.name else str(properties.uuid)
