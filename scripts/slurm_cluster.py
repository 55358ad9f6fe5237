"""Starts a Slurm cluster of two nodes on this machine, as any user, in its own folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
# Loopback addresses as names, so that the host names from scontrol can be reached.
NODES = ("127.0.0.1", "127.0.0.2")

# `linuxproc` signals every process of a job, as cgroups do on a real cluster. Jobs in `high` preempt those in
# `low`.
CONFIGURATION = """\
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldPort={control}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2
ReturnToService=2
KillWait=30
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def find_program(name: str) -> str | None:
    """Finds a program also in the sbin folders, where Debian keeps the daemons."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


class Cluster:
    """Runs the daemons in the foreground as children of this process.

    It ends these children only, so it never touches the pid file of another cluster.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            self.ask("scancel", "--user", str(os.getuid()), check=False)
            deadline = time.monotonic() + 40
            while self.ask("squeue", "--noheader", check=False) and time.monotonic() < deadline:
                time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def ask(self, *words: str, check: bool = True) -> str:
        """Runs a Slurm command and returns its output."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns the fields of a job by name."""
        shown = self.ask("scontrol", "show", "job", "--oneliner", number)
        return {name: value for name, _, value in (word.partition("=") for word in shown.split())}

    def _start(self) -> None:
        for name in ("state", "log", "munge"):
            (self.folder / name).mkdir()
        # All users of the machine must be able to reach the socket; only this one may read the key.
        (self.folder / "munge").chmod(0o755)
        self.folder.chmod(0o755)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        control, *ports = free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 State=UNKNOWN"
            for name, port in zip(NODES, ports)
        ]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host, user=user, folder=self.folder, control=control, nodes="\n".join(nodes)
            )
        )
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        # --force: others may write to a folder under /tmp, acceptable for a key that lives for minutes.
        words = [f"--{option}={self.folder}/munge/{name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *words)
        self._until(lambda: (self.folder / "munge" / "socket").exists(), "munged does not open its socket")
        self._daemon("slurmctld", "-D", "-f", f"{self.folder}/slurm.conf")
        for name in NODES:
            self._daemon("slurmd", "-D", "-f", f"{self.folder}/slurm.conf", "-N", name)
        self._until(self._is_idle, "the nodes do not become idle")

    def _daemon(self, name: str, *words: str) -> None:
        program = find_program(name)
        assert program is not None
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    [program, *words], env=self.environment, stdout=out, stderr=out, cwd=self.folder
                )
            )

    def _is_idle(self) -> bool:
        states = self.ask("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T", check=False)
        return states.split() == ["idle"] * len(NODES)

    def _until(self, holds: object, complaint: str) -> None:
        assert callable(holds)
        deadline = time.monotonic() + 60
        while not holds():
            if time.monotonic() > deadline or any(d.poll() is not None for d in self._daemons):
                raise RuntimeError(f"{complaint}; its logs are in {self.folder / 'log'}")
            time.sleep(0.2)
