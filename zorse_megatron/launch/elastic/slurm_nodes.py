"""The nodes of a Slurm job: which answer, and a step of srun on each.

Every node has a step of its own, so that a node that is gone neither keeps the others' step from
its end nor needs to be named by anybody.
"""

import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.launch.cluster_ranks import node_called
from zorse_megatron.launch.elastic.attempt import NodeRun
from zorse_megatron.launch.elastic.replan import JobFiles
from zorse_megatron.launch.rank_environment import (
    FIRST_RANK,
    WORLD_SIZE,
    hosts_in,
    port_of_step,
)
from zorse_megatron.launch.training_command import MODULE, training_of
from zorse_megatron.log import say
from zorse_megatron.schema.cluster.cluster import Cluster, Node
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster

_ANSWER_S = 30.0
_AT_ONCE = 64
# A GPU that has fallen off its bus is not listed. Where there is no driver, nothing is known.
_HAS_GPUS = (
    "if command -v nvidia-smi >/dev/null; then "
    '[ "$(nvidia-smi -L 2>/dev/null | grep -c ^GPU)" -ge "$0" ]; fi'
)
# Whatever sbatch has said of tasks for all nodes would contradict what is said for one.
_OF_THE_JOB = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
    "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_DISTRIBUTION",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """A node of the allocation."""

    node: Node
    """As in the cluster file."""
    host: str
    """As Slurm calls it."""
    component: int | None
    """Of a heterogeneous job; None: the job has one."""


@dataclass(kw_only=True)
class _Step:
    node: str
    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def abandon(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(kw_only=True)
class SlurmNodes:
    """`Machines` of the job that this process is the batch script of."""

    cluster: Cluster
    training: tuple[str, ...]
    """Without what `zorse launch` adds."""
    environment: Mapping[str, str]
    python: str
    srun_options: tuple[str, ...] = ()
    """Of every step, such as --cpus-per-task=8."""
    answer_s: float = _ANSWER_S
    _steps: list[_Step] = field(default_factory=list)

    @property
    def job(self) -> str:
        """Its number; of a heterogeneous job that of the first component."""
        return self.environment.get("SLURM_JOB_ID_HET_GROUP_0") or self.environment["SLURM_JOB_ID"]

    def answering(self) -> frozenset[str]:
        """Nodes on which a step can be started, and which list as many GPUs as they should."""
        nodes = list(allocated(self.cluster, self.environment))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(self._answers, nodes))
        errors = {answer for answer in answers if isinstance(answer, str)}
        if errors:
            say(f"error: srun cannot be run, so nodes seem lost: {', '.join(sorted(errors))}")
        return frozenset(
            each.node.name for each, answer in zip(nodes, answers, strict=True) if answer is True
        )

    def start(self, files: JobFiles, number: int) -> Sequence[NodeRun]:
        """Start a step on each node.

        Raises LaunchError where a node is none of the job's, or srun cannot be run: then no step is
        left. Raises ClusterError for a cluster file that has been damaged meanwhile.
        """
        self._steps = []
        cluster = load_cluster(files.cluster)
        words = training_of(self.training, plan=str(files.plan), cluster=str(files.cluster)).words
        there = {each.node.name: each for each in allocated(self.cluster, self.environment)}
        _refuse_others(files, [node.name for node in cluster.nodes], there)
        first = there[cluster.nodes[0].name]
        # Probes are steps, too, but nobody meets in them.
        port = self.environment.get("MASTER_PORT") or str(port_of_step(int(self.job), number))
        address = self.environment.get("MASTER_ADDR") or first.host
        for node in cluster.nodes:
            variables = {
                FIRST_RANK: str(node.first_rank),
                WORLD_SIZE: str(cluster.world_size),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            }
            command = [*self._srun(there[node.name], len(node.gpu_kinds)), *self.srun_options]
            command += ["--kill-on-bad-exit=0", self.python, "-m", MODULE, *words]
            self._steps.append(self._step(node.name, command, variables))
        return tuple(self._steps)

    def _step(self, node: str, command: Sequence[str], variables: Mapping[str, str]) -> _Step:
        try:
            process = subprocess.Popen(
                command, env=self._variables(variables), stdin=subprocess.DEVNULL
            )
        except OSError as error:
            for step in self._steps:  # their ranks would wait for those that never come
                step.process.terminate()
            problem = Problem(
                where=f"srun, for node {node}",
                found=error.strerror or str(error),
                expected="a step of the job",
                remedy="Look at the limits of the job's first node (processes, memory), and its "
                "PATH.",
            )
            raise LaunchError("the ranks cannot be started", [problem]) from error
        return _Step(node=node, process=process)

    def ask_to_save(self) -> None:
        """Send TERM to all ranks, of which some have not heard where that fails, as is said."""
        try:
            subprocess.run(["scancel", "--signal=TERM", self.job], check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"error: ranks could not be asked to save: {error}")

    def kill(self) -> None:
        """End the steps that are left: TERM has srun abort its own."""
        for step in self._steps:
            if step.poll() is None:
                step.process.terminate()

    def _answers(self, node: SlurmNode) -> bool | str:
        """Whether it does; words: why it cannot be asked."""
        command = self._srun(node, 1)
        command += ["--overlap", "--quiet", "bash", "-c", _HAS_GPUS, str(len(node.node.gpu_kinds))]
        try:
            process = subprocess.Popen(
                command,
                env=self._variables({}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            return error.strerror or str(error)
        try:
            return process.wait(self.answer_s) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False

    def _srun(self, node: SlurmNode, tasks: int) -> list[str]:
        of_component = [] if node.component is None else [f"--het-group={node.component}"]
        return [
            *("srun", *of_component, "--nodes=1", f"--nodelist={node.host}"),
            *(f"--ntasks={tasks}", f"--ntasks-per-node={tasks}"),
            *(f"--gpus-per-node={len(node.node.gpu_kinds)}", "--mpi=none"),
        ]

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
        left = {name: value for name, value in self.environment.items() if name not in _OF_THE_JOB}
        return {**left, **more}


def _refuse_others(files: JobFiles, names: Sequence[str], there: Collection[str]) -> None:
    """Raise LaunchError where nodes are to start ranks that the job does not have."""
    others = [name for name in names if name not in there]
    if not others:
        return
    problem = Problem(
        where=str(files.cluster),
        found=f"nodes that this job does not have: {', '.join(others)}",
        expected=f"those it has ({', '.join(there) or 'none'}), as when the job began",
        remedy="Leave the cluster file as it was as long as the job runs.",
    )
    raise LaunchError("the ranks cannot be started", [problem])


def allocated(cluster: Cluster, environment: Mapping[str, str]) -> Iterator[SlurmNode]:
    """Yield the nodes of the job that the cluster file has, by what Slurm said at its start."""
    lists: list[tuple[int | None, str]] = []
    count = environment.get("SLURM_HET_SIZE")
    if count:
        for number in range(int(count)):
            name = f"SLURM_JOB_NODELIST_HET_GROUP_{number}"
            lists.append((number, environment.get(name, "")))
    else:
        lists.append((None, environment.get("SLURM_JOB_NODELIST", "")))
    for component, text in lists:
        for host in hosts_in(text):
            node = node_called(cluster, host)
            if node is not None:
                yield SlurmNode(node=node, host=host, component=component)


def nodes_up(cluster: Cluster, environment: Mapping[str, str], *, idle: bool) -> frozenset[str]:
    """Return the nodes that Slurm could give to a job now or later; `idle`: only now.

    None of them where sinfo does not answer.
    """
    try:
        said = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %T"],
            env=dict(environment),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    good = {"idle"} if idle else {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
    found = set()
    for line in said.splitlines():
        host, _, state = line.partition(" ")
        node = node_called(cluster, host)
        if node is not None and state.strip() in good:
            found.add(node.name)
    return frozenset(found)
