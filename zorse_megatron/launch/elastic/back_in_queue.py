"""Sends a job back into the queue: as it is, or as a new one for other nodes."""

import re
import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from zorse_megatron.log import say

RESTARTS = "ZORSE_RESTARTS"
"""How often the jobs before this one were started."""


def restarts_of(environment: Mapping[str, str]) -> int:
    """Return how often this job, or those that it goes on from, were started again."""
    return sum(int(environment.get(name) or 0) for name in (RESTARTS, "SLURM_RESTART_COUNT"))


def back_in_queue(
    job: str,
    environment: Mapping[str, str],
    *,
    asked: Collection[str],
    wanted: Collection[str],
    write_script: Callable[[Collection[str]], Path],
) -> bool:
    """Requeue the job, or submit one for the nodes that are wanted; say which, return success.

    `asked`: the nodes of this job. Slurm would wait for each of them.
    """
    if set(wanted) == set(asked):
        say(f"back into the queue: job {job}")
        return _runs(["scontrol", "requeue", job], environment) is not None
    script = write_script(wanted)
    # Of this job's own variables the next one would take some for its own.
    clean = {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_", "ZORSE_"))
    }
    clean |= {name: v for name, v in environment.items() if name == "ZORSE_GPU_KIND"}
    clean[RESTARTS] = str(restarts_of(environment) + 1)
    number = _runs(["sbatch", "--parsable", str(script)], clean)
    if number is None:
        return False
    say(f"job {number.strip()} goes on with {', '.join(wanted)} ({script})")
    return True


def requeues_of(job: str, environment: Mapping[str, str]) -> int:
    """Return how often Slurm has put the job back into the queue; -1 where it does not say."""
    about = _runs(["scontrol", "--oneliner", "show", "job", job], environment) or ""
    found = re.search(r"\bRestarts=(\d+)", about)
    return int(found[1]) if found else -1


def cancel(job: str, environment: Mapping[str, str]) -> None:
    """Take a job that goes on as another one out of the queue."""
    _runs(["scancel", job], environment)


def _runs(command: list[str], environment: Mapping[str, str]) -> str | None:
    """What a command prints; None where it fails, which is said."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except (OSError, subprocess.SubprocessError) as error:
        say(f"error: {command[0]}: {error}")
        return None
    if done.returncode:
        say(f"error: {' '.join(command)}: {done.stderr.strip()}")
        return None
    return done.stdout
