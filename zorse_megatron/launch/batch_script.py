"""The batch script of a training job under Slurm.

One `#SBATCH` block for each component, as `man sbatch` has it for heterogeneous jobs; srun deals
tasks out component by component, and in blocks to the nodes of each.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.checkpoints.folder import TRACKER
from zorse_megatron.launch.components import JobComponent
from zorse_megatron.launch.node_starter import TASK, asked_for_node, node_starter
from zorse_megatron.launch.torchrun_lines import OWN_STORES, described
from zorse_megatron.launch.training_command import TrainingCommand
from zorse_megatron.schema.plan.spans import spell

_OF_SRUN_TOO = "cpus-per-task="
_PARAMETERS = """\
MAX_RESTARTS=${MAX_RESTARTS:-20}    # a job that was started again so often ends at its next failure
GRACE_S=${GRACE_S:-60}              # seconds until ranks are ended after one of them has ended
"""
_ELASTIC_PARAMETERS = """\
# So often it fails in a row without a new checkpoint, and goes back into the queue after a failure.
export MAX_RESTARTS=${{MAX_RESTARTS:-20}}
export RUN=zorse-$SLURM_JOB_ID {own_stores}
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

    job_name: str = "zorse"
    python: str = "python"
    """The interpreter that has zorse-megatron, on every node."""
    names_nodes: bool = False
    """Ask for the nodes by the names in the cluster file."""
    elastic: "Elastic | None" = None
    """Let the job go on with the nodes that are left when one of them fails."""
    signal_s: int = 120
    """How long before its end the job is told to save, in seconds."""
    more: tuple[str, ...] = ()
    """Further options of sbatch without their dashes, for every component: `time=24:00:00`."""


def batch_script(
    components: Sequence[JobComponent],
    training: TrainingCommand,
    options: BatchOptions,
    *,
    title: str,
) -> str:
    """Return the text of the script. `title`: what it trains, in one line."""
    parts = [
        "#!/bin/bash",
        f"# {' '.join(title.split())}",  # names in it may have several lines
        "# Written by zorse launch; submit it with sbatch, from the directory of its files.",
        *_component_comments(components),
        *_sbatch_lines(components, training, options),
        "",
        f"PYTHON={shlex.quote(options.python)}",
        _parameters(training, options),
        *([_LATEST.format(tracker=_tracker(training))] if training.resumes else []),
        _RANKS,
        *(f"export {variable}" for variable in training.variables),
        *_starter(components, training, options),
        *([_SIGNALS] if training.resumes else []),
        _srun(components, training, options),
    ]
    noted = _NOTED if options.elastic is not None else ""
    return "\n".join(parts) + "\n" + (_WAIT + noted + _REQUEUE if training.resumes else "")


def _starter(
    components: Sequence[JobComponent], training: TrainingCommand, options: BatchOptions
) -> list[str]:
    """What is started on each node, where that is not a rank on each GPU."""
    if training.module is not None:
        return []
    fewest = None if options.elastic is None else options.elastic.fewest_nodes
    return [node_starter(components, save_s=options.signal_s, fewest_nodes=fewest)]


def _tracker(training: TrainingCommand) -> str:
    return shlex.quote(str(Path(training.save or ".", TRACKER)))


def _parameters(training: TrainingCommand, options: BatchOptions) -> str:
    if options.elastic is not None:
        plans = shlex.quote(str(options.elastic.plans))
        return _ELASTIC_PARAMETERS.format(plans=plans, own_stores=OWN_STORES)
    if training.resumes:
        return _PARAMETERS
    return "".join(line for line in _PARAMETERS.splitlines(True) if "RESTARTS" not in line)


def _component_comments(components: Sequence[JobComponent]) -> list[str]:
    """Say which ranks are in which component."""
    lines = []
    for number, component in enumerate(components):
        ranks = component.ranks
        nodes = f"{len(component.nodes)} x " if len(component.nodes) > 1 else ""
        gpus = described(component.nodes[0]).partition(", ")[2]
        lines.append(
            f"#   component {number}: ranks {spell([(ranks.start, ranks.stop)])}, {nodes}{gpus}"
        )
    return lines


def _sbatch_lines(
    components: Sequence[JobComponent], training: TrainingCommand, options: BatchOptions
) -> list[str]:
    """Return the lines that ask Slurm for the components."""
    job = [f"--job-name={options.job_name}", "--output=%x-%j.txt", "--open-mode=append"]
    restarts = ["--requeue"] if training.resumes else ["--no-requeue"]
    blocks = []
    for component in components:
        stays = ["--no-kill"] if options.elastic is not None else []
        asked = [*_nodes(component, training, options), *restarts, *stays]
        more = (f"--{option}" for option in _further(training, options))
        blocks.append([*asked, *more])
    blocks[0] = job + blocks[0]
    if training.resumes:
        blocks[0].append(f"--signal=B:USR1@{options.signal_s}")
    joined = [[f"#SBATCH {shlex.quote(option)}" for option in block] for block in blocks]
    lines = joined[0]
    for block in joined[1:]:
        lines += ["#SBATCH hetjob", *block]
    return lines


def _further(training: TrainingCommand, options: BatchOptions) -> list[str]:
    """Those of the user's that are not for a rank, where Slurm starts nodes."""
    mine = training.module is not None
    return [option for option in options.more if mine or not option.startswith(_OF_SRUN_TOO)]


def _nodes(component: JobComponent, training: TrainingCommand, options: BatchOptions) -> list[str]:
    gpus = component.gpus_per_node
    asked = [f"--nodes={len(component.nodes)}"]
    if component.partition is not None:
        asked.insert(0, f"--partition={component.partition}")
    if options.names_nodes:
        asked.append(f"--nodelist={','.join(node.name for node in component.nodes)}")
    if training.module is None:
        return [*asked, *asked_for_node(component, options.more)]
    return [*asked, f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]


def _srun(
    components: Sequence[JobComponent], training: TrainingCommand, options: BatchOptions
) -> str:
    # Since 22.05 srun does not take this one over from sbatch.
    asked = [
        shlex.quote(f"--{option}")
        for option in _further(training, options)
        if option.startswith(_OF_SRUN_TOO)
    ]
    # Of a node's one task all ranks may use all cores.
    asked += ["--cpu-bind=none"] if training.module is None else []
    if len(components) > 1:
        asked.append(f"--het-group={','.join(map(str, range(len(components))))}")
    # An agent that has gone is no reason to end the others, whose ranks meet again.
    ends = "--no-kill --wait=0" if options.elastic is not None else '--wait="$GRACE_S"'
    flags = " \\\n    ".join(training.lines())
    task = TASK if training.module is None else f'"$PYTHON" -m {training.module}'
    return (
        f"{' '.join(['srun', *asked])} --mpi=none --distribution=block --kill-on-bad-exit=0 "
        f"{ends} \\\n"
        f"    {task} \\\n    {flags}{' &' if training.resumes else ''}"
    )
