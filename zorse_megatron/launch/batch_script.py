"""The batch script of a training job under Slurm: its options, its nodes, edits to it.

One `#SBATCH` block for each component, as `man sbatch` has it for heterogeneous jobs; srun deals
tasks out component by component, and in blocks to the nodes of each.
"""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from zorse_megatron.errors import LaunchError, OutputError, Problem
from zorse_megatron.files.read_write import stream_of
from zorse_megatron.files.wording import did_you_mean
from zorse_megatron.inputs.cluster import Cluster, Node
from zorse_megatron.launch.training_command import (
    MAX_RESTARTS,
    OWN_STORES,
    TrainingCommand,
    described,
)
from zorse_megatron.live.checkpoint_files import TRACKER
from zorse_megatron.plan.spans import spell

# Which nodes a Slurm job asks for together: the components of a heterogeneous job.


_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class JobComponent:
    """Nodes that follow each other in the cluster file and are alike: either may be the other."""

    partition: str | None
    """Slurm's partition; None: the site's default."""
    nodes: tuple[Node, ...]

    @property
    def gpus_per_node(self) -> int:
        """GPUs, and ranks, of each of its nodes."""
        return len(self.nodes[0].gpu_kinds)

    @property
    def ranks(self) -> range:
        """The global ranks of its GPUs."""
        return range(self.nodes[0].first_rank, self.nodes[-1].ranks.stop)


def components_of(cluster: Cluster, partitions: Mapping[str, str]) -> tuple[JobComponent, ...]:
    """Cut the cluster into components, in the order of its ranks.

    `partitions`: name of a node or kind of a node's first GPU -> partition; the name of a node
    comes first, and "" stands for all others. Slurm deals tasks out component by component, so
    that ranks land on the right kinds of GPU whichever nodes it picks. Raises LaunchError for a
    key that is neither a node nor a kind of the cluster.
    """
    known = {"", *(node.name for node in cluster.nodes), *cluster.gpu_kinds}
    problems = [_unknown(key, known) for key in partitions if key not in known]
    if problems:
        raise LaunchError("the partitions do not fit the cluster", problems)

    def likeness(node: Node) -> tuple[str | None, Node]:
        return _partition_of(node, partitions), dataclasses.replace(node, name="", first_rank=0)

    return tuple(
        JobComponent(partition=alike[0], nodes=tuple(nodes))
        for alike, nodes in groupby(cluster.nodes, likeness)
    )


def refuse_odd_names(cluster: Cluster) -> None:
    """Raise LaunchError for nodes whose names Slurm would read as something else, or not at all."""
    problems = [
        Problem(
            where="--node-names",
            found=f"a node named {node.name!r} in the cluster file",
            expected="the name that Slurm has for it: letters, digits, dots, dashes, underscores",
            remedy="Name the nodes as sinfo -N does, or leave --node-names out.",
        )
        for node in cluster.nodes
        if not _HOST_NAME.fullmatch(node.name)
    ]
    if problems:
        raise LaunchError("the nodes cannot be asked for by name", problems)


def _partition_of(node: Node, partitions: Mapping[str, str]) -> str | None:
    _, first = min(zip(node.numbers, node.gpu_kinds, strict=True))
    for key in (node.name, first, ""):
        if key in partitions:
            return partitions[key]
    return None


def _unknown(key: str, known: set[str]) -> Problem:
    return Problem(
        where="--partition",
        found=f'"{key}"',
        expected="a kind of GPU or a node of the cluster",
        remedy=did_you_mean(key, known - {""}),
    )


_SIGNAL_S = 120
"""How long before its end the job is told to save, in seconds."""
_CPUS = "cpus-per-task="
"""What srun, too, has to be told of the user's own options."""
_PARAMETERS = """\
MAX_RESTARTS=${MAX_RESTARTS:-20}    # a job that was started again so often ends at its next failure
GRACE_S=${GRACE_S:-60}              # seconds until ranks are ended after one of them has ended
"""
_ELASTIC_PARAMETERS = """\
# So often it fails in a row without a new checkpoint, and goes back into the queue after a failure.
export MAX_RESTARTS=${{MAX_RESTARTS:-20}}
export RUN=zorse-$SLURM_JOB_ID {own_stores}
export ZORSE_TOKEN=${{ZORSE_TOKEN:-$(od -An -N16 -tx8 /dev/urandom)}}    # ranks meet by it
OUTCOME={plans}/$RUN.outcome    # what torchrun does not tell: 0, it is done; 2, it is given up
"""
_LATEST = """\
# What the latest checkpoint is, before and after.
latest() {{ cat -- {tracker} 2>/dev/null; }}
before=$(latest)
"""
_RANKS = """\
# Local ranks count GPUs as the cluster file does, and not the fastest one first.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
"""
_SIGNALS = """\
# Before the time limit Slurm sends USR1 to this script; TERM lets the ranks save and end.
stopped=
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
"""
_WAIT = """\
srun_pid=$!
while kill -0 "$srun_pid" 2>/dev/null; do
    wait "$srun_pid"    # a signal ends it, too, with a status of its own
done
wait "$srun_pid"
status=$?
"""
_REQUEUE = """\

# Status 2 is bad input, which another start does not change. A job that is stopped starts again as
# often as it takes, as long as it has saved something each time.
restarts=${SLURM_RESTART_COUNT:-0}
saved=
[[ $(latest) == "$before" ]] || saved=1
if ((status != 2)) && { [[ $stopped && $saved ]] ||
    { { [[ $stopped ]] || ((status != 0)); } && ((restarts < MAX_RESTARTS)); }; }; then
    echo "status $status after $restarts restarts: back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit "$status"
    echo "zorse: error: Slurm does not take the job back, so it ends here and is not done."
    echo "Submit it again: it goes on from its last checkpoint."
    ((status != 0)) || status=1    # after a save it is 0, and the job would seem COMPLETED
elif [[ $stopped ]] && ((status == 0)); then
    echo "zorse: error: stopped after $restarts restarts before it has saved anything: it ends."
    status=1
fi
exit "$status"
"""

_NOTED = """\
[[ -s $OUTCOME ]] && status=$(<"$OUTCOME")
"""

_BY_THE_CLUSTER = "Leave it out: the cluster file says how many ranks a node has, one for each GPU."
_AT_SUBMISSION = "Give it to sbatch itself, whose own options come before those in the script."
_BY_NAME = "Name the nodes in the cluster file, and give zorse launch --node-names."
_BY_SCRIPT = "Leave it out: this is the script, which sbatch runs."
_ONCE = "Leave it out: every task of the array would train into the same checkpoint."
_BY_SAVE = "Leave it out: the job goes back into the queue if its command has --save."
OWN_OPTIONS = {
    "job-name": _AT_SUBMISSION,
    "output": _AT_SUBMISSION,
    "open-mode": _AT_SUBMISSION,
    "partition": "Give it as zorse launch --partition.",
    "nodes": _BY_THE_CLUSTER,
    "nodefile": _BY_NAME,
    "nodelist": _BY_NAME,
    "ntasks": _BY_THE_CLUSTER,
    "ntasks-per-core": _BY_THE_CLUSTER,
    "ntasks-per-gpu": _BY_THE_CLUSTER,
    "ntasks-per-node": _BY_THE_CLUSTER,
    "ntasks-per-socket": _BY_THE_CLUSTER,
    "gpus": _BY_THE_CLUSTER,
    "gpus-per-node": _BY_THE_CLUSTER,
    "gpus-per-socket": _BY_THE_CLUSTER,
    "gpus-per-task": _BY_THE_CLUSTER,
    "wrap": _BY_SCRIPT,
    "array": _ONCE,
    "requeue": _BY_SAVE,
    "no-requeue": _BY_SAVE,
    "signal": "Leave it out: the script saves at its own; for an earlier one change its line.",
}
"""Option that the script writes, or that contradicts it -> what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """A job of which nodes may be lost."""

    fewest_nodes: int
    """With fewer it waits, and then goes back into the queue."""
    plans: Path
    """Where it notes how it has ended."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What the script asks Slurm for, beside the GPUs."""

    python: str = "python"
    """The interpreter that has zorse-megatron, on every node."""
    names_nodes: bool = False
    """Ask for the nodes by the names in the cluster file."""
    elastic: Elastic | None = None
    """Let the job go on with the nodes that are left when one of them fails."""
    more: tuple[str, ...] = ()
    """Further options of sbatch without their dashes, for every component: `time=24:00:00`."""


# How ranks are started by torchrun, once on each node: stock Megatron's, and elastic jobs'.
#
# Slurm numbers tasks component by component, and node by node in each; with one task on each node
# that is the node's rank. torchrun needs a time of its own to let ranks save: it ends them after 30
# s (`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`).


_TASK = r'bash -c "$(declare -p GPUS PYTHON); $(declare -f on_node); on_node \"\$@\"" bash'
"""Of srun, followed by script and flags."""
_ON_NODE = """\
GPUS=({gpus})    # numbers of each node's GPUs among those that Slurm gives, in the order of ranks
export MASTER_ADDR=${{MASTER_ADDR:-$SLURMD_NODENAME}}
export MASTER_PORT=${{MASTER_PORT:-$((20000 + 7 * SLURM_JOB_ID % 10000))}}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{save_s}}}
on_node() {{
    local mine given at
    IFS=, read -ra mine <<<"${{GPUS[SLURM_PROCID]}}"
    IFS=, read -ra given <<<"${{CUDA_VISIBLE_DEVICES-}}"
    for at in "${{!mine[@]}}"; do mine[at]=${{given[mine[at]]-${{mine[at]}}}}; done
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${{mine[*]}}")
    export CUDA_VISIBLE_DEVICES
    exec "$PYTHON" -m torch.distributed.run {nodes} \\
        --nproc-per-node "${{#mine[@]}}" {meets} "$@"
}}
"""
_ALL_NODES = (
    '--nnodes "${#GPUS[@]}" --node-rank "$SLURM_PROCID"',
    '--master-addr "$MASTER_ADDR" \\\n        --master-port "$MASTER_PORT"',
)
_MEET = (
    '--rdzv-backend c10d --rdzv-id "$RUN" \\\n        '
    '--rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-conf "is_host=$((SLURM_PROCID == 0))"'
)


def batch_script(
    components: Sequence[JobComponent],
    training: TrainingCommand,
    options: BatchOptions,
    *,
    title: str,
) -> str:
    """Return the text of the script. `title`: what it trains, in one line."""
    return _Script(components=components, training=training, options=options).text(title)


@dataclass(frozen=True, kw_only=True)
class _Script:
    components: Sequence[JobComponent]
    training: TrainingCommand
    options: BatchOptions

    @property
    def _starts_nodes(self) -> bool:
        """Whether Slurm starts torchrun on each node, and not a rank on each GPU."""
        return self.training.module is None

    def text(self, title: str) -> str:
        training = self.training
        tracker = shlex.quote(str(Path(training.save or ".", TRACKER)))
        parts = [
            "#!/bin/bash",
            f"# {' '.join(title.split())}",  # names in it may have several lines
            "# Written by zorse launch; submit it with sbatch, from the directory of its files.",
            *self._component_comments(),
            *self._sbatch_lines(),
            "",
            f"PYTHON={shlex.quote(self.options.python)}",
            self._parameters(),
            *([_LATEST.format(tracker=tracker)] if training.resumes else []),
            _RANKS,
            *(f"export {variable}" for variable in training.variables),
            *([self._node_starter()] if self._starts_nodes else []),
            *([_SIGNALS] if training.resumes else []),
            self._srun(),
        ]
        noted = _NOTED if self.options.elastic is not None else ""
        return "\n".join(parts) + "\n" + (_WAIT + noted + _REQUEUE if training.resumes else "")

    def _parameters(self) -> str:
        if self.options.elastic is not None:
            plans = shlex.quote(str(self.options.elastic.plans))
            return _ELASTIC_PARAMETERS.format(plans=plans, own_stores=OWN_STORES)
        if self.training.resumes:
            return _PARAMETERS
        return "".join(line for line in _PARAMETERS.splitlines(True) if "RESTARTS" not in line)

    def _component_comments(self) -> list[str]:
        """Say which ranks are in which component."""
        lines = []
        for number, component in enumerate(self.components):
            ranks = component.ranks
            nodes = f"{len(component.nodes)} x " if len(component.nodes) > 1 else ""
            gpus = described(component.nodes[0]).partition(", ")[2]
            lines.append(
                f"#   component {number}: ranks {spell([(ranks.start, ranks.stop)])}, {nodes}{gpus}"
            )
        return lines

    def _sbatch_lines(self) -> list[str]:
        """Return the lines that ask Slurm for the components."""
        resumes = self.training.resumes
        blocks = []
        for component in self.components:
            restarts = ["--requeue"] if resumes else ["--no-requeue"]
            stays = ["--no-kill"] if self.options.elastic is not None else []
            more = (f"--{option}" for option in self._further)
            blocks.append([*self._nodes(component), *restarts, *stays, *more])
        blocks[0] = ["--job-name=zorse", "--output=%x-%j.txt", "--open-mode=append", *blocks[0]]
        if resumes:
            blocks[0].append(f"--signal=B:USR1@{_SIGNAL_S}")
        joined = [[f"#SBATCH {shlex.quote(option)}" for option in block] for block in blocks]
        lines = joined[0]
        for block in joined[1:]:
            lines += ["#SBATCH hetjob", *block]
        return lines

    @property
    def _further(self) -> list[str]:
        """The user's options, without what counts for a rank where Slurm starts nodes."""
        more = self.options.more
        return [each for each in more if not (self._starts_nodes and each.startswith(_CPUS))]

    def _nodes(self, component: JobComponent) -> list[str]:
        gpus = component.gpus_per_node
        asked = [f"--nodes={len(component.nodes)}"]
        if component.partition is not None:
            asked.insert(0, f"--partition={component.partition}")
        if self.options.names_nodes:
            asked.append(f"--nodelist={','.join(node.name for node in component.nodes)}")
        if self._starts_nodes:
            return [*asked, *self._task_of_node(component)]
        return [*asked, f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]

    def _task_of_node(self, component: JobComponent) -> list[str]:
        """Return sbatch's options for one task on each node, with the cores of all its ranks.

        The user's `cpus-per-task` is for a rank. A node that has more GPUs than are used is asked
        for whole, so that their numbers hold.
        """
        node, more = component.nodes[0], self.options.more
        gpus = max(node.numbers) + 1
        whole = ["--exclusive"] if gpus > len(node.numbers) else []
        cores = [text.removeprefix(_CPUS) for text in more if text.startswith(_CPUS)]
        if cores or not any(text.startswith("cpus-per-gpu=") for text in more):
            each, ranks = (cores or ["1"])[-1], len(node.gpu_kinds)
            whole.append(f"--{_CPUS}{int(each) * ranks if each.isdecimal() else each}")
        return ["--ntasks-per-node=1", f"--gpus-per-node={gpus}", *whole]

    def _node_starter(self) -> str:
        """Return the function that each node runs."""
        numbers = (node.numbers for component in self.components for node in component.nodes)
        gpus = " ".join(",".join(map(str, each)) for each in numbers)
        nodes, meets = _ALL_NODES
        if self.options.elastic is not None:
            most = f'{self.options.elastic.fewest_nodes}:"${{#GPUS[@]}}"'
            nodes, meets = f"--nnodes {most} --max-restarts {MAX_RESTARTS}", _MEET
        return _ON_NODE.format(gpus=gpus, save_s=_SIGNAL_S, nodes=nodes, meets=meets)

    def _srun(self) -> str:
        # Since 22.05 srun does not take this one over from sbatch.
        asked = [shlex.quote(f"--{each}") for each in self._further if each.startswith(_CPUS)]
        # Of a node's one task all ranks may use all cores.
        asked += ["--cpu-bind=none"] if self._starts_nodes else []
        if len(self.components) > 1:
            asked.append(f"--het-group={','.join(map(str, range(len(self.components))))}")
        # An agent that has gone is no reason to end the others, whose ranks meet again.
        is_elastic = self.options.elastic is not None
        ends = "--no-kill --wait=0" if is_elastic else '--wait="$GRACE_S"'
        flags = " \\\n    ".join(self.training.lines())
        task = _TASK if self._starts_nodes else f'"$PYTHON" -m {self.training.module}'
        return (
            f"{' '.join(['srun', *asked])} --mpi=none --distribution=block --kill-on-bad-exit=0 "
            f"{ends} \\\n"
            f"    {task} \\\n    {flags}{' &' if self.training.resumes else ''}"
        )


# Detect whether a script was edited since it was written.


_LINE = re.compile(rb"^# checksum ([0-9a-f]{16})\n", re.MULTILINE)


def with_checksum(script: str) -> str:
    """Add a comment, after the first ones, that no longer fits once the script is edited."""
    *first, rest = script.split("\n", 3)
    return "\n".join([*first, f"# checksum {_checksum(script.encode())}", rest])


def refuse_edited(path: Path, script: str) -> None:
    """Raise OutputError if writing `script` would lose what somebody wrote or changed."""
    if stream_of(path) is not None or not path.exists():
        return
    try:
        there = path.read_bytes()
    except OSError:
        return  # the writer says why
    marked = _LINE.search(there)
    if there == script.encode() or (marked and _is_whole(there, marked)):
        return
    raise OutputError.of(
        "the script is not replaced",
        where=str(path),
        found="a script that was edited since zorse launch wrote it"
        if marked
        else "a file that zorse launch did not write",
        expected="a script as zorse launch wrote it, or none yet",
        remedy="Choose another path, or give --force to replace it.",
    )


def _is_whole(script: bytes, marked: re.Match[bytes]) -> bool:
    return marked[1].decode() == _checksum(script[: marked.start()] + script[marked.end() :])


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
