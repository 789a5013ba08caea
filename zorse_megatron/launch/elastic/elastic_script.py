"""The batch script of a job that goes on with the nodes that are left."""

import shlex
from collections.abc import Sequence

from zorse_megatron.launch.batch_script import BatchOptions, component_comments, sbatch_lines
from zorse_megatron.launch.components import JobComponent
from zorse_megatron.launch.training_command import TrainingCommand

_SETTINGS = """\
MAX_RESTARTS=${MAX_RESTARTS:-20}    # failures in a row without a new checkpoint, and restarts
GRACE_S=${GRACE_S:-30}              # seconds until ranks are ended after those of a node have ended
"""
_SUPERVISE = """\
# Starts the ranks, and starts them again with the nodes that answer when some have failed. Before
# the time limit Slurm sends it USR1.
exec "$PYTHON" -m zorse_megatron supervise \\
    --max-restarts "$MAX_RESTARTS" --grace "$GRACE_S" --python "$PYTHON" \\
    {options} \\
    -- {training}
"""


def elastic_script(
    components: Sequence[JobComponent],
    training: TrainingCommand,
    options: BatchOptions,
    *,
    supervised: Sequence[str],
    given: Sequence[str],
    title: str,
) -> str:
    """Return the text of the script.

    `components`: of the nodes that this job asks for. `supervised`: options of `zorse supervise`,
    with the plan and the cluster file of all nodes. `given`: the training command.
    """
    words = TrainingCommand(words=tuple(given), resumes=True).lines()
    parts = [
        "#!/bin/bash",
        f"# {' '.join(title.split())}",
        "# Written by zorse launch; submit it with sbatch, from the directory of its files.",
        *component_comments(components),
        *sbatch_lines(components, training, options),
        "",
        f"PYTHON={shlex.quote(options.python)}",
        _SETTINGS,
        _SUPERVISE.format(options=_in_lines(supervised), training=" \\\n    ".join(words)),
    ]
    return "\n".join(parts)


def _in_lines(options: Sequence[str]) -> str:
    """Each option with its value in a line of its own."""
    lines: list[str] = []
    for word in options:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n    ".join(lines)
