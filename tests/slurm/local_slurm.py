"""A Slurm of several nodes on this machine: its own munged, slurmctld and one slurmd for each node.

Everything it writes lies in one directory, and all daemons end with the block. Its nodes are
processes, so that they share this machine's address, cores and files. Needs root, as slurmd does,
and a slurmd that may run several times on a machine (Debian's slurm-wlm is built so).
"""

import contextlib
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scancel",
    "scontrol",
    "sinfo",
    "squeue",
)
_START_TIMEOUT_S = 60.0
# Slurm holds a requeued job back for as long as a credential may live; by default two minutes.
_CREDENTIAL_S = 5
_UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
# Daemons lie in directories that are not on every user's path.
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))


def why_not() -> str | None:
    """Say why there can be no Slurm here; None where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"found no {', '.join(missing)}: install Debian's slurm-wlm and munge"
    return None if os.geteuid() == 0 else "a Slurm of one's own is started by root"


@dataclass(frozen=True, kw_only=True)
class LocalSlurm:
    """A running Slurm."""

    directory: Path
    environment: Mapping[str, str] = field(repr=False)

    def run(self, *words: str, timeout_s: float = 60, **more: str) -> str:
        """Run a command of Slurm's and return what it prints; `more`: variables."""
        done = subprocess.run(
            words,
            env={**self.environment, **more},
            cwd=self.directory,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, script: Path, *options: str, **variables: str) -> str:
        """Submit a batch script and return its number."""
        return self.run("sbatch", "--parsable", *options, str(script), **variables).strip()

    def about(self, job: str) -> str:
        """Return all that Slurm knows of a job, one line for each component."""
        return self.run("scontrol", "--oneliner", "show", "job", job)

    def look_again(self, job: str) -> None:
        """Have a pending job looked at: a requeued one is only when some job changes."""
        if "JobState=PENDING Reason=None" in self.about(job):
            self.run("scontrol", "update", f"JobId={job}", "Comment=look again")

    def wait(self, job: str, *, timeout_s: float) -> str:
        """Wait until a job has ended for good; return what Slurm says about it."""
        return self._wait(
            job, lambda about: not any(f"JobState={s}" in about for s in _UNFINISHED), timeout_s
        )

    def wait_for_restart(self, job: str, number: int, *, timeout_s: float) -> None:
        """Wait until a job runs for another time."""
        wanted = (f"Restarts={number} ", "JobState=RUNNING")
        self._wait(job, lambda about: all(word in about for word in wanted), timeout_s)

    def cancel_all(self) -> None:
        """End all jobs: steps would outlive the daemons."""
        if jobs := self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", "--full", *jobs)
            for job in jobs:
                self.wait(job, timeout_s=_START_TIMEOUT_S)

    def _wait(self, job: str, done: Callable[[str], bool], timeout_s: float) -> str:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            about = self.about(job)
            if done(about):
                return about
            self.look_again(job)
            time.sleep(0.5)
        raise TimeoutError(f"after {timeout_s} s: {self.about(job)}")


@contextlib.contextmanager
def local_slurm(
    directory: Path, partitions: Mapping[str, Mapping[str, int]]
) -> Iterator[LocalSlurm]:
    """Start one; `partitions`: partition -> node -> number of its (pretended) GPUs."""
    nodes = {name: gpus for part in partitions.values() for name, gpus in part.items()}
    conf = directory / "slurm.conf"
    ports = _free_ports(1 + len(nodes))
    conf.write_text(_configuration(directory, partitions, ports))
    (directory / "gres.conf").write_text(
        "".join(
            f"NodeName={node} Name=gpu File=/dev/tty[{8 * i}-{8 * i + gpus - 1}]\n"
            for i, (node, gpus) in enumerate(nodes.items())
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": _PATH}
    with contextlib.ExitStack() as stack:

        def start(*words: str) -> None:
            log = stack.enter_context((directory / f"{Path(words[0]).name}.out").open("a"))
            daemon = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
            stack.callback(_stop, daemon)

        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": key, "socket": directory / "munge.sock"}
        files |= {
            name: directory / f"munged.{name}" for name in ("log-file", "pid-file", "seed-file")
        }
        start(
            "munged",
            "--force",
            "--foreground",
            *(f"--{name}={path}" for name, path in files.items()),
        )
        _wait_for(files["socket"].exists)
        start("slurmctld", "-D", "-f", str(conf))
        for node in nodes:
            start("slurmd", "-D", "-f", str(conf), "-N", node)
        slurm = LocalSlurm(directory=directory, environment=environment)
        _wait_for(lambda: _num_idle(slurm) == len(nodes))
        try:
            yield slurm
        finally:
            slurm.cancel_all()


def _configuration(
    directory: Path, partitions: Mapping[str, Mapping[str, int]], ports: list[int]
) -> str:
    host = socket.gethostname().partition(".")[0]
    user = pwd.getpwuid(os.geteuid()).pw_name
    lines = [
        "ClusterName=test",
        # It says on which port ranks meet, and there may be another Slurm on this machine.
        f"FirstJobId={random.randrange(1, 1_000_000)}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={directory}/munge.sock,cred_expire={_CREDENTIAL_S}",
        f"StateSaveLocation={directory}/state",
        f"SlurmctldPidFile={directory}/slurmctld.pid",
        f"SlurmdPidFile={directory}/slurmd-%n.pid",
        f"SlurmdSpoolDir={directory}/spool-%n",
        f"SlurmctldLogFile={directory}/slurmctld.log",
        f"SlurmdLogFile={directory}/slurmd-%n.log",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=sched_interval=2,bf_interval=2",
        "GresTypes=gpu",
        "MpiDefault=none",
        "KillWait=5",
    ]
    number = 1
    for partition, nodes in partitions.items():
        for node, gpus in nodes.items():
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} "
                f"CPUs=8 Gres=gpu:{gpus}"
            )
            number += 1
        default = "YES" if partition == next(iter(partitions)) else "NO"
        lines.append(f"PartitionName={partition} Nodes={','.join(nodes)} Default={default}")
    return "\n".join(lines) + "\n"


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has, below those that Linux hands out by itself."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(range(10_000, 32_000), 100 * count):
            each = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                break
        return ports


def _num_idle(slurm: LocalSlurm) -> int:
    try:
        return slurm.run("sinfo", "--noheader", "-N", "-o", "%T").split().count("idle")
    except RuntimeError:  # slurmctld does not answer yet
        return 0


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"Slurm has not started after {_START_TIMEOUT_S} s")
        time.sleep(0.1)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(timeout=20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
