"""Which rank of the job this process is, from torchrun's or srun's environment.

Slurm's variables are those of srun's manual page (OUTPUT ENVIRONMENT VARIABLES), torchrun's those
of PyTorch's elastic documentation. What torchrun says comes first: it may run inside a Slurm job.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.inputs.cluster import Cluster, Node

NODE_NAME = "ZORSE_NODE_NAME"
"""Names the node in place of its host name: several nodes may be pretended on one machine."""

OUTCOME = "ZORSE_OUTCOME"
"""Names the file that says how ranks have ended, where their launcher cannot tell."""

Launcher = Literal["torchrun", "srun", "none"]

_NO_JOB = "the processes were not started as a job"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
# Numbers from here on are not steps of srun: batch scripts, interactive shells (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Below the ports that Linux hands out by itself (32768), above those of services.
_PORTS = range(20_000, 30_000)
_PORTS_PER_JOB = 7
"""This many consecutive steps have distinct ports, and so have consecutive jobs."""


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """One process of a job."""

    launcher: Launcher
    """none: it was started by hand, as the only one."""
    rank: int
    world_size: int
    local_rank: int
    """Number on its node: which of the node's GPUs it takes."""
    node: str
    """Name of its node."""
    master_address: str
    master_port: int

    def torch_environment(self) -> dict[str, str]:
        """Return the variables of torchrun, which torch.distributed and Megatron read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def launched_rank(environment: Mapping[str, str], host_name: str) -> LaunchedRank:
    """Return which rank this process is; without torchrun and srun the only one.

    `host_name`: of this machine; ZORSE_NODE_NAME and the name that Slurm has for the node come
    first. Raises LaunchError with every variable that is missing or makes no sense.
    """
    node = node_name(environment, host_name)
    if "RANK" in environment:
        numbers = _numbers(environment, _TORCHRUN, texts=("MASTER_ADDR",))
        return _launched(environment, "torchrun", numbers, node, environment["MASTER_ADDR"])
    if _is_in_step(environment):
        return _launched_by_slurm(environment, node)
    _refuse_lone_task(environment)
    port = _number_or(environment, "MASTER_PORT", _PORTS.start)
    return LaunchedRank(
        launcher="none",
        rank=0,
        world_size=1,
        local_rank=0,
        node=node,
        master_address="127.0.0.1",
        master_port=port,
    )


def note_outcome(environment: Mapping[str, str], status: int) -> None:
    """Note, of an elastic job, that it is done (0, by rank 0) or that its input is bad."""
    path = environment.get(OUTCOME)
    if path and (status or environment.get("RANK") == "0"):
        with contextlib.suppress(OSError):
            Path(path).write_text(str(status), encoding="utf-8")


def port_of_step(job: int, step: int) -> int:
    """Return a port for the ranks of one step to meet at."""
    return _PORTS[(_PORTS_PER_JOB * job + step) % len(_PORTS)]


def node_name(environment: Mapping[str, str], host_name: str) -> str:
    """Return what this node is called: by the user, by Slurm, by itself."""
    return environment.get(NODE_NAME) or environment.get("SLURMD_NODENAME") or host_name


def hosts_in(node_list: str) -> Iterator[str]:
    """Yield the hosts of a Slurm node list, in its order.

    >>> list(hosts_in("gpu[01-03,07],login"))
    ['gpu01', 'gpu02', 'gpu03', 'gpu07', 'login']
    """
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        yield from _expanded(entry.strip())


def _expanded(entry: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", entry)
    if match is None:
        yield entry
        return
    prefix, ranges, rest = match.groups()
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            # Leading zeros are part of the name.
            for ending in _expanded(rest):
                yield f"{prefix}{number:0{len(first)}}{ending}"


def _is_in_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process (a batch script also has SLURM_PROCID)."""
    step = environment.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environment and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _launched_by_slurm(environment: Mapping[str, str], node: str) -> LaunchedRank:
    numbers = _numbers(environment, _SRUN)
    master = environment.get("MASTER_ADDR") or _first_host(environment)
    # Each component of a heterogeneous job has a number of its own: that of the first one counts.
    own = "SLURM_JOB_ID" if "SLURM_JOB_ID" in environment else "SLURM_JOBID"
    first = "SLURM_JOB_ID_HET_GROUP_0"
    job = _number_or(environment, first if first in environment else own, 0)
    step = _number_or(environment, "SLURM_STEP_ID", 0)
    numbers["MASTER_PORT"] = _number_or(environment, "MASTER_PORT", port_of_step(job, step))
    return _launched(environment, "srun", numbers, node, master)


def _first_host(environment: Mapping[str, str]) -> str:
    """The host of rank 0; in a job of several components that of the first one."""
    names = ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    for name in names:
        if environment.get(name):
            return next(hosts_in(environment[name]))
    raise LaunchError.of(
        _NO_JOB,
        where="SLURM_STEP_NODELIST",
        found="no such variable",
        expected="the list of the step's nodes, whose first one has rank 0",
        remedy="Start the command with srun, or set MASTER_ADDR to the host of rank 0.",
    )


def _launched(
    environment: Mapping[str, str],
    launcher: Launcher,
    numbers: Mapping[str, int],
    node: str,
    master: str,
) -> LaunchedRank:
    names = _TORCHRUN if launcher == "torchrun" else _SRUN
    rank, world_size, local_rank = (numbers[name] for name in names[:3])
    if not rank < world_size:
        raise LaunchError.of(
            _NO_JOB,
            where=f"{names[0]}, {names[1]}",
            found=f"rank {rank} of {world_size}",
            expected="ranks from 0 to one less than their number",
            remedy=f"Leave both to {launcher}.",
        )
    return LaunchedRank(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        node=node,
        master_address=master,
        master_port=numbers["MASTER_PORT"],
    )


def _refuse_lone_task(environment: Mapping[str, str]) -> None:
    """A batch script or a shell inside an allocation of several tasks runs once, not once each."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and tasks not in ("", "1"):
        raise LaunchError.of(
            _NO_JOB,
            where="SLURM_NTASKS",
            found=f"{tasks} tasks, and one process that srun did not start",
            expected="one process for each task",
            remedy="Put srun in front of the command.",
        )


def _numbers(
    environment: Mapping[str, str], names: tuple[str, ...], *, texts: tuple[str, ...] = ()
) -> dict[str, int]:
    """Return the whole numbers; raises LaunchError with all variables that have none."""
    problems = [
        Problem(
            where=name,
            found=f'"{environment[name]}"' if name in environment else "no such variable",
            expected="a text" if name in texts else "a whole number",
            remedy="Start the command with torchrun or srun, which set it.",
        )
        for name in names
        if not (environment.get(name) if name in texts else _is_number(environment.get(name)))
    ]
    if problems:
        raise LaunchError(_NO_JOB, problems)
    return {name: int(environment[name]) for name in names if name not in texts}


def _number_or(environment: Mapping[str, str], name: str, default: int) -> int:
    return _numbers(environment, (name,))[name] if environment.get(name) else default


def _is_number(text: str | None) -> bool:
    return text is not None and text.isdecimal() and len(text) < 12


# The rank of a process that srun started on a node of the cluster file.


def torch_environment(
    launched: LaunchedRank, environment: Mapping[str, str], cluster: Cluster | None
) -> dict[str, str]:
    """Return the variables that torch.distributed and Megatron lack; none under torchrun.

    Slurm numbers tasks in its own order of nodes. With `cluster`, whose nodes bear the names that
    Slurm has for them, a task takes the rank that the file has for its node and local number, so
    that the order does not matter; rank 0, and with it the job's store, is on the file's first
    node (MASTER_ADDR overrides its address). Raises LaunchError where the job's nodes are not
    those of the file.
    """
    if launched.launcher != "srun":
        return {}
    variables = launched.torch_environment()
    if cluster is None:
        return variables
    problems = list(_problems(launched, cluster))
    if problems:
        raise LaunchError("the job's nodes are not those of the cluster file", problems)
    node = node_called(cluster, launched.node)
    assert node is not None
    variables["RANK"] = str(node.first_rank + launched.local_rank)
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR") or cluster.nodes[0].name
    return variables


def node_called(cluster: Cluster, name: str) -> Node | None:
    """Return the node of that name, or of the same host name without its domain."""
    for spelling in (str, _host):
        for node in cluster.nodes:
            if spelling(node.name) == spelling(name):
                return node
    return None


def _host(name: str) -> str:
    return name.partition(".")[0]


def _problems(launched: LaunchedRank, cluster: Cluster) -> Iterator[Problem]:
    if launched.world_size != cluster.world_size:
        yield Problem(
            where="--zorse-cluster",
            found=f"{launched.world_size} tasks in this step of Slurm's",
            expected=f"{cluster.world_size}, one for each GPU of the cluster file",
            remedy="Write the batch script again with zorse launch.",
        )
    node = node_called(cluster, launched.node)
    if node is None:
        yield Problem(
            where="--zorse-cluster",
            found=f'this task on node "{launched.node}", which the file does not have',
            expected=f"one of {', '.join(node.name for node in cluster.nodes)}",
            remedy="Ask Slurm for these nodes (zorse launch --node-names does), or leave the "
            "flag out where any nodes of these kinds will do.",
        )
    elif launched.local_rank >= len(node.gpu_kinds):
        yield Problem(
            where="--zorse-cluster",
            found=f"task {launched.local_rank} of node {node.name} (counted from 0)",
            expected=f"{len(node.gpu_kinds)} tasks there, one for each GPU",
            remedy="Write the batch script again with zorse launch.",
        )


# How many hardware queues the streams of a rank's GPU share.
#
# CUDA deals streams out to so many queues as `CUDA_DEVICE_MAX_CONNECTIONS` says (8 without it, 32
# at most). What waits at the head of a queue holds back the other streams of it. What ranks launch
# for a plan's lists cannot hang for that (docs/how-it-works.md), but it may be late.


VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32


def queue_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set before CUDA starts: as many queues as there are, unless the user has chosen."""
    return {} if VARIABLE in environment else {VARIABLE: str(MOST_QUEUES)}


def stock_environment() -> dict[str, str]:
    """What `validate_args` of stock Megatron (0.19) asks for with tensor parallelism.

    It does so for GPUs older than Blackwell.
    """
    return {VARIABLE: "1"}


# Lets several ranks share a GPU, to try things out where there are fewer GPUs than ranks.
#
# NCCL refuses two ranks on one GPU of one host (`src/init.cc`, "Duplicate GPU detected"). With
# names of their own for the host (NCCL's user guide, "NCCL_HOSTID") ranks are on different machines
# as far as it knows, and talk over sockets. Slow; up to five ranks have shared an H200 so.


SHARE_GPUS = "ZORSE_SHARE_GPUS"
"""Environment variable: 1 where ranks may share GPUs."""


def share_gpus(environment: MutableMapping[str, str]) -> None:
    """Set what NCCL needs for that, if it is asked for; before the process uses NCCL."""
    if environment.get(SHARE_GPUS) != "1":
        return
    environment.update(
        NCCL_HOSTID=f"zorse-rank-{environment.get('RANK', '0')}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NET="Socket",
        NCCL_IB_DISABLE="1",
    )
