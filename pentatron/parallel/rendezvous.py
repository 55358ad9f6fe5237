"""Rendezvous of the ranks: connectivity checks before the process group is created, and error messages.

Torch would wait for minutes and then report a socket error. Trying the address first gives each kind of
failure its own message: unknown host name, port in use, machine unreachable, missing processes.
"""

import contextlib
import ipaddress
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pentatron.errors import UserError
from pentatron.text import plural

_RETRY_SECONDS = 0.3
# A host name that does not resolve within this time will not; a machine may take much longer to come up.
_DNS_TIMEOUT = 5.0
NOTICE_SECONDS = 30.0
# Environment variables: the secret of a job, and the file descriptor of the socket that rank 0 inherits.
SECRET, LISTENER = "PENTATRON_JOB_SECRET", "PENTATRON_LISTENER"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SHORTEST_SECRET = 16
# All ranks may connect before rank 0 accepts.
_BACKLOG = 4096

CHECKLIST = (
    "what to check on every machine:",
    "  1. the machines can ping each other, and their names mean the same address everywhere",
    "  2. no firewall closes MASTER_PORT, nor the ports above 1024 that the processes choose themselves",
    "  3. MASTER_ADDR and MASTER_PORT are the same everywhere, and name the machine of rank 0",
    "  4. every machine has the same code, settings and data, under the same paths",
    "  5. every machine has the same versions of torch and NCCL (`pentatron doctor` prints them)",
)


class RendezvousError(UserError):
    """The rendezvous failed, or a collective timed out."""


@dataclass(frozen=True)
class Rendezvous:
    """Address of the rendezvous. `is_served`: the launcher serves it (torchrun's store); otherwise rank 0
    will.

    `listener` is the file descriptor of the listening socket that rank 0 inherits from the launcher. `secret`
    is known to the ranks of this job only; None if the job has none.
    """

    host: str
    port: int
    is_served: bool = False
    listener: int | None = None
    secret: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def wait_for_rendezvous(point: Rendezvous, rank: int, patience: float, report: Callable[[str], None]) -> None:
    """Waits until a rendezvous at `point` is possible; raises the reason after at most `patience` seconds."""
    _resolve(point, patience)
    if rank == 0 and not point.is_served:
        if point.listener is None:
            listening_socket(point).close()
        return
    started, notified, reason = time.monotonic(), False, ""
    while True:
        waited = time.monotonic() - started
        try:
            left = max(0.1, patience - waited)
            socket.create_connection((point.host, point.port), timeout=min(10.0, left)).close()
            return
        except OSError as error:
            reason = _reason(error)
        if waited > patience:
            raise RendezvousError(
                f"rank 0 could not be reached at {point} within {patience:.0f} seconds ({reason}); check that MASTER_ADDR and "
                f"MASTER_PORT (or --init-method) name the machine of rank 0 and its port, that rank 0 was started, and that no "
                f"firewall is in between"
            )
        if waited > NOTICE_SECONDS and not notified:
            notified = True
            report(f"still waiting for rank 0 at {point} ({reason}); the limit is {patience / 60:.0f} min")
        time.sleep(_RETRY_SECONDS)


@contextmanager
def slow_rendezvous_notice(text: str | None, report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Reports `text` if the rendezvous takes long. Yields a function to call when it has succeeded."""
    reminder = threading.Timer(NOTICE_SECONDS, report, [text])
    reminder.daemon = True
    if text is not None:
        reminder.start()
    try:
        yield reminder.cancel
    finally:
        reminder.cancel()


def slow_rendezvous_text(rank: int, ranks: int, has_launcher: bool) -> str | None:
    """Returns the notice of a rank whose rendezvous takes long, or None.

    Rank 0 reports for all waiting ranks. If rank 0 has ended because its port was taken, the other ranks are
    connected to another program, and torch waits for its answer until the timeout. Rank 1 reports that,
    unless a launcher ends it together with rank 0.
    """
    if rank == 0 and ranks > 1:
        others = ranks - 1
        return f"still waiting for the {others} other {plural(others, 'process')} of this run; are all of them started?"
    if rank == 1 and not has_launcher:
        return (
            "still waiting: the address of rank 0 accepts connections, but the rendezvous does not complete. If rank 0 has exited, another "
            "program uses its port: end this process and set another MASTER_PORT (or --init-method) for all processes"
        )
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the machine answers, but nothing listens on that port"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or type(error).__name__


def _resolve(point: Rendezvous, patience: float) -> None:
    deadline = time.monotonic() + min(patience, _DNS_TIMEOUT)
    while True:
        try:
            socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                reason = error.strerror if isinstance(error, OSError) else "not a host name"
                raise RendezvousError(
                    f"the host name '{point.host}' cannot be resolved ({reason}); set MASTER_ADDR (or --init-method) to the name "
                    f"or the address of the machine of rank 0"
                ) from None
        time.sleep(_RETRY_SECONDS)


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or `localhost`.

    Other names may resolve to loopback on one machine only.
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_single_machine(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are on this machine, judged by the rendezvous address or the launcher's variables."""
    fills_machine = environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE", "none")
    return fills_machine or is_loopback(environment.get("MASTER_ADDR", ""))


def loopback_variables(
    environment: Mapping[str, str], names: Sequence[str] = (GLOO_INTERFACE, NCCL_INTERFACE)
) -> dict[str, str]:
    """Returns the variables that bind gloo and NCCL to loopback, except those the user has set."""
    return {name: "lo" for name in names if name not in environment and sys.platform == "linux"}


def listening_socket(point: Rendezvous) -> socket.socket:
    """Returns a listening socket: on the rendezvous address if that is loopback, else on all addresses."""
    host = "127.0.0.1" if point.host == "localhost" else point.host
    family = socket.AF_INET6 if is_loopback(point.host) and ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host if is_loopback(point.host) else "", point.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"port {point.port} cannot be used for the rendezvous ({error.strerror}); another job or an earlier run may use it: set "
            f"another MASTER_PORT (--master-port, --init-method) for all processes, or leave --master-port out to take a free one"
        ) from None
    return listener


def inherited_or_new_socket(point: Rendezvous) -> socket.socket:
    """Returns the listening socket that rank 0 has inherited, or a new one."""
    if point.listener is not None:
        with contextlib.suppress(OSError):
            inherited = socket.socket(fileno=point.listener)
            if inherited.getsockname()[1] == point.port:
                inherited.set_inheritable(False)
                return inherited
            # The descriptor belongs to another file, so it must not be closed here.
            inherited.detach()
    return listening_socket(point)


def job_secret(environment: Mapping[str, str]) -> bytes | None:
    """Returns the secret of this rank's job, or None."""
    secret = environment.get(SECRET, "")
    if secret and len(secret) < _SHORTEST_SECRET:
        raise RendezvousError(
            f"{SECRET} has {len(secret)} characters, which can be guessed; export the same random one on every machine, such as the "
            f"output of: openssl rand -hex 32"
        )
    return secret.encode() or None


def rendezvous_error(message: str, world_size: int) -> RendezvousError:
    """Translates torch's error about a failed process group into a message with advice."""
    timed_out = re.search(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients", message)
    if timed_out is not None:
        return RendezvousError(
            f"rendezvous timed out: {timed_out[2]} of {timed_out[3]} processes joined within {timed_out[1]} seconds; start all of them with the same "
            f"command, and check that WORLD_SIZE (torchrun: --nnodes × --nproc_per_node; --world-size) is their real number"
        )
    if "EADDRINUSE" in message:
        return RendezvousError(
            "the port of the rendezvous is taken by another job or an earlier run; set another MASTER_PORT for all processes"
        )
    if "Unable to find address for" in message or "no socket interface found" in message:
        return RendezvousError(
            "a network interface named in the environment does not exist on this machine; export GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME with one that does (`pentatron doctor` lists them), or unset them"
        )
    reason = message.strip().splitlines()[0] if message.strip() else "no reason given"
    return RendezvousError(
        f"the {world_size} processes could not form a process group ({reason}); check that MASTER_ADDR and MASTER_PORT "
        f"name the machine of rank 0 and a free port, that no firewall is in between, and that all {world_size} "
        f"processes were started"
    )


# Parts of torch's messages about a peer that timed out, and about one that disconnected.
_TIMEOUT_SIGNS = ("Timed out waiting", "Watchdog caught collective operation timeout", "Timeout at NCCL work")
_DISCONNECT_SIGNS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused"),
    *("NCCL communicator was aborted", "remote process exited or there was a network error"),
)


def collective_error(message: str, timeout_minutes: float) -> UserError | None:
    """Translates the error of a failed collective: another rank timed out or is gone.

    None for other errors.
    """
    if any(sign in message for sign in _TIMEOUT_SIGNS):
        seconds = timeout_minutes * 60
        limit = f"{seconds:.0f} seconds" if seconds < 120 else f"{timeout_minutes:.0f} minutes"
        return RendezvousError(
            f"another rank did not answer within {limit}, so this one stops; if it is only slow, raise "
            f"--distributed-timeout-minutes (or NCCL_TIMEOUT, in seconds), if it hangs, look at its last lines, and if the network "
            f"is at fault, export NCCL_DEBUG=INFO to see what NCCL does, NCCL_SOCKET_IFNAME to name the interface, or "
            f"NCCL_IB_DISABLE=1 to disable InfiniBand"
        )
    for reason in _DISCONNECT_SIGNS:
        if reason in message:
            # The rank that failed reports the cause; the operation that noticed it here would only distract.
            return UserError(f"lost contact with another rank ({reason}), so this one stops too")
    return None
