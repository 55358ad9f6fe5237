"""Whether the processes of a run find each other, and what to say when they do not.

Torch waits for minutes and then reports a socket; here the address is tried first, so that each kind of failure has its own
sentence: a name that is unknown, a port that is taken, a machine that does not answer, processes that never came.
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

_PAUSE = 0.3
# A name that is unknown for this long will not become known; a machine may take much longer to come up.
_PATIENCE_WITH_NAMES = 5.0
SILENCE = 30.0
# Variables of the environment: a job's secret, and the number of the socket that rank 0 inherits.
SECRET, LISTENER = "PENTATRON_JOB_SECRET", "PENTATRON_LISTENER"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SHORTEST_SECRET = 16
# All ranks of a machine may come before rank 0 is ready for them.
_BACKLOG = 4096

CHECKLIST = (
    "the machines can ping each other, and their names mean the same address everywhere",
    "no firewall closes MASTER_PORT, nor the ports above 1024 that the processes choose themselves",
    "MASTER_ADDR and MASTER_PORT are the same everywhere, and name the machine of rank 0",
    "every machine has the same code, settings and data, under the same paths",
    "every machine has the same versions of torch and NCCL (`pentatron doctor` prints them)",
)


class MeetingError(UserError):
    """The processes did not find each other, or wait for each other in vain."""


@dataclass(frozen=True)
class MeetingPoint:
    """`is_served`: a launcher listens there already; otherwise rank 0 will. `listener`: the number of a socket that it has inherited for that.

    `secret`: what the ranks of this job know and no other process does, where they have one.
    """

    host: str
    port: int
    is_served: bool = False
    listener: int | None = None
    secret: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def reach(point: MeetingPoint, rank: int, patience: float, tell: Callable[[str], None]) -> None:
    """Returns when the processes can meet there; raises what is wrong after `patience` seconds at the latest."""
    _require_known_name(point, patience)
    if rank == 0 and not point.is_served:
        if point.listener is None:
            listening_at(point).close()
        return
    began, told, reason = time.monotonic(), False, ""
    while True:
        waited = time.monotonic() - began
        try:
            left = max(0.1, patience - waited)
            socket.create_connection((point.host, point.port), timeout=min(10.0, left)).close()
            return
        except OSError as error:
            reason = _why(error)
        if waited > patience:
            raise MeetingError(
                f"nobody could be met at {point} within {patience:.0f} seconds ({reason}); check that MASTER_ADDR and "
                f"MASTER_PORT (or --init-method) name the machine of rank 0 and its port, that rank 0 was started, and that no "
                f"firewall is in between"
            )
        if waited > SILENCE and not told:
            told = True
            tell(
                f"still waiting for rank 0 at {point} ({reason}); it is given {patience / 60:.0f} minutes in all"
            )
        time.sleep(_PAUSE)


@contextmanager
def waiting_aloud(text: str | None, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Says after a while that others have not come; what it yields is called when they have."""
    reminder = threading.Timer(SILENCE, tell, [text])
    reminder.daemon = True
    if text is not None:
        reminder.start()
    try:
        yield reminder.cancel
    finally:
        reminder.cancel()


def what_is_waited_for(rank: int, ranks: int, has_launcher: bool) -> str | None:
    """What to say of a meeting that takes long; None: others speak for this rank.

    The first rank speaks for all that wait. Where it is gone because its port was taken, the others are connected to whatever has taken
    it, and torch waits for an answer for as long as for a rank: the second says so, unless a launcher ends it with the first.
    """
    if rank == 0 and ranks > 1:
        others = ranks - 1
        return f"still waiting for the {others} other {plural(others, 'process')} of this run; are all of them started?"
    if rank == 1 and not has_launcher:
        return (
            "still waiting, and something listens where rank 0 is to be; if rank 0 has ended, that is another program: end this process "
            "and set another MASTER_PORT (or --init-method) for all of them"
        )
    return None


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the machine answers, but nothing listens on that port"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or type(error).__name__


def _require_known_name(point: MeetingPoint, patience: float) -> None:
    deadline = time.monotonic() + min(patience, _PATIENCE_WITH_NAMES)
    while True:
        try:
            socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                reason = error.strerror if isinstance(error, OSError) else "no name of a machine"
                raise MeetingError(
                    f"the machine '{point.host}' is unknown here ({reason}); set MASTER_ADDR (or --init-method) to the name "
                    f"or the address of the machine of rank 0"
                ) from None
        time.sleep(_PAUSE)


def is_loopback(host: str) -> bool:
    """Only addresses and `localhost`: another name may mean a loopback address on its own machine alone, and be used by several."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def stays_on_this_machine(environment: Mapping[str, str]) -> bool:
    """Whether no rank of the job can be on another machine, by where they meet or by what the launcher says."""
    if is_loopback(environment.get("MASTER_ADDR", "")):
        return True
    return environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE", "none")


def loopback_variables(
    environment: Mapping[str, str], names: Sequence[str] = (GLOO_INTERFACE, NCCL_INTERFACE)
) -> dict[str, str]:
    """What makes the sockets of gloo and NCCL unreachable from outside, beside what the user has set."""
    return {name: "lo" for name in names if name not in environment and sys.platform == "linux"}


def listening_at(point: MeetingPoint) -> socket.socket:
    """A socket that listens on a loopback address, if that is the meeting point, and else on all addresses of this machine."""
    here = "127.0.0.1" if point.host == "localhost" else point.host
    family = socket.AF_INET6 if is_loopback(point.host) and ":" in here else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((here if is_loopback(point.host) else "", point.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise MeetingError(
            f"port {point.port} cannot be used as the meeting point ({error.strerror}); another job or an earlier run may hold it: set "
            f"another MASTER_PORT (--master-port, --init-method) for all processes, or leave --master-port out to take a free one"
        ) from None
    return listener


def listener_of(point: MeetingPoint) -> socket.socket:
    """The socket that rank 0 has inherited, or a new one."""
    if point.listener is not None:
        with contextlib.suppress(OSError):
            inherited = socket.socket(fileno=point.listener)
            if inherited.getsockname()[1] == point.port:
                inherited.set_inheritable(False)
                return inherited
            # The number is of another file, which is not ours to close.
            inherited.detach()
    return listening_at(point)


def job_secret(environment: Mapping[str, str]) -> bytes | None:
    """The secret of this rank's job; None where none was given."""
    found = environment.get(SECRET, "")
    if found and len(found) < _SHORTEST_SECRET:
        raise MeetingError(
            f"{SECRET} has {len(found)} characters, which can be guessed; export the same random one on every machine, such as the "
            f"output of: openssl rand -hex 32"
        )
    return found.encode() or None


def failed_meeting(message: str, world_size: int) -> MeetingError:
    """What torch says when a process group does not come about, as a sentence with its advice."""
    found = re.search(
        r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined", message
    )
    if found is not None:
        return MeetingError(
            f"{found[2]} of {found[3]} processes came within {found[1]} seconds; start all of them with the same command, and "
            f"check that WORLD_SIZE (torchrun: --nnodes × --nproc_per_node; --world-size) is their real number"
        )
    if "EADDRINUSE" in message:
        return MeetingError(
            "the port of the meeting point is taken by another job or an earlier run; set another MASTER_PORT for all processes"
        )
    if "Unable to find address for" in message or "no socket interface found" in message:
        return MeetingError(
            "a network interface named in the environment does not exist on this machine; export GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME with one that does (`pentatron doctor` lists them), or unset them"
        )
    reason = message.strip().splitlines()[0] if message.strip() else "no reason given"
    return MeetingError(
        f"the {world_size} processes could not meet ({reason}); check that MASTER_ADDR and MASTER_PORT "
        f"name the machine of rank 0 and a free port, that no firewall is in between, and that all {world_size} "
        f"processes were started"
    )


# What torch's backends say of a peer that is silent for too long, and of one that is gone.
_SILENT = ("Timed out waiting", "Watchdog caught collective operation timeout", "Timeout at NCCL work")
_GONE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused"),
    *("NCCL communicator was aborted", "remote process exited or there was a network error"),
)


def lost_contact(message: str, timeout_minutes: float) -> UserError | None:
    """What a failed collective means: another rank is silent, or gone; None if it is no such failure."""
    if any(sign in message for sign in _SILENT):
        seconds = timeout_minutes * 60
        limit = f"{seconds:.0f} seconds" if seconds < 120 else f"{timeout_minutes:.0f} minutes"
        return MeetingError(
            f"another rank did not answer within {limit}, so this one stops; if it is only slow, raise "
            f"--distributed-timeout-minutes (or NCCL_TIMEOUT, in seconds), if it hangs, look at its last lines, and if the network "
            f"is at fault, export NCCL_DEBUG=INFO to see what NCCL does, NCCL_SOCKET_IFNAME to name the interface, or "
            f"NCCL_IB_DISABLE=1 to do without InfiniBand"
        )
    reason = next((sign for sign in _GONE if sign in message), None)
    if reason is None:
        return None
    # Whoever failed has said why; what we were doing when we noticed would only bury it.
    return UserError(f"lost contact with another rank ({reason}), so this one stops too")


def checklist(between: str) -> Sequence[str]:
    """Lines to go through when machines do not reach each other."""
    return (f"what to check on {between}:", *(f"  {n}. {text}" for n, text in enumerate(CHECKLIST, 1)))
