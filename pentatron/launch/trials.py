"""Quick trials of what training needs most: a matmul, and processes that add numbers up together."""

import socket
import subprocess
import time
from collections.abc import Mapping

from pentatron.launch.machine import OK, PROBLEM, Finding
from pentatron.launch.processes import python_command
from pentatron.parallel.meeting import loopback_variables
from pentatron.text import plural

_PATIENCE = 90


def matmul(device: str, size: int = 512) -> Finding:
    """A product compared with one in double precision on the CPU."""
    import torch

    name = f"matmul on {device}"
    try:
        left, right = (torch.randn(size, size, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        a, b = left.to(device), right.to(device)
        result = a @ b
        began = time.perf_counter()
        result = (a @ b).cpu()
        seconds = time.perf_counter() - began
        off = float((result.double() - left.double() @ right.double()).abs().max())
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return Finding(
            "trials", name, reason, PROBLEM, "the build of torch does not fit this device or its driver"
        )
    # TF32 keeps ten bits of each factor.
    if off > size * 2**-9:
        return Finding(
            "trials", name, f"off by {off:.3g}", PROBLEM, "the device computes wrongly: do not train on it"
        )
    return Finding("trials", name, f"{2 * size**3 / seconds / 1e9:.0f} GFLOP/s in fp32, off by {off:.1e}")


def all_reduce(backend: str, size: int, environment: Mapping[str, str]) -> Finding:
    """Real processes, as a run has them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = python_command(["-m", "pentatron.launch.handshake", backend])
    processes = [
        subprocess.Popen(
            [*words, str(rank), str(size), str(port)],
            env={
                **environment,
                **loopback_variables(environment),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    name = f"all-reduce, {backend}"
    try:
        ended = [process.communicate(timeout=_PATIENCE) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
            process.communicate()
        return Finding("trials", name, f"no answer within {_PATIENCE} s", PROBLEM, _advice(backend))
    wrong = next((err for process, (_, err) in zip(processes, ended) if process.returncode), None)
    if wrong is not None:
        reason = wrong.strip().splitlines()[-1] if wrong.strip() else "a process died"
        return Finding("trials", name, reason, PROBLEM, _advice(backend))
    slowest = max(float(out.split()[-1]) for out, _ in ended)
    return Finding("trials", name, f"{size} {plural(size, 'process')}, 1 MiB in {slowest * 1e3:.1f} ms", OK)


def _advice(backend: str) -> str:
    if backend == "nccl":
        return "export NCCL_DEBUG=INFO and look at its lines; NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 show which path is at fault"
    return "processes on this machine must reach each other through the loopback interface: look at firewalls and GLOO_SOCKET_IFNAME"
