"""A training job under Slurm: its steps, its processes, and the same job uninterrupted."""

import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.megatron.launch import run_ranks
from tests.slurm.local_slurm import LocalSlurm

STEPS, SAVED_EVERY = 80, 15
TIMEOUT_S = 300.0
THIS_MACHINE = {"MASTER_ADDR": "127.0.0.1"}  # where all nodes are


def metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(
    step: int, directory: Path, slurm: LocalSlurm, job: str, *, since: int = 0
) -> None:
    """Wait until the job, which may be pending, has logged this step after its `since` first."""
    log = directory / f"zorse-{job}.txt"
    deadline_s = time.monotonic() + TIMEOUT_S
    turns = itertools.count()
    while not any(line["iteration"] >= step for line in metrics(directory)[since:]):
        assert time.monotonic() < deadline_s, log.read_text() if log.exists() else "not started"
        if next(turns) % 5 == 0:  # each time Slurm is asked takes more than to read the log
            slurm.look_again(job)
        time.sleep(0.2)


def process_of(task: int, conf: Path, module: bytes = b"zorse_megatron.pretrain") -> int:
    """The process that runs a module in a task of the Slurm with this configuration.

    The first one: those that load its data are its copies, with numbers that may be lower.
    """
    variables_of_task = (f"SLURM_CONF={conf}", f"SLURM_PROCID={task}", "SLURM_STEP_ID=0")
    wanted, found = {variable.encode() for variable in variables_of_task}, []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = set((process / "environ").read_bytes().split(b"\0"))
            started = int((process / "stat").read_text().rpartition(")")[2].split()[19])
        except OSError:
            continue
        if wanted <= variables and module in words:
            found.append((started, int(process.name)))
    if not found:
        raise LookupError(f"no process of task {task}")
    return min(found)[1]


def wait_for_end(task: int, conf: Path) -> None:
    """Wait until a task has no ranks."""
    deadline_s = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(LookupError):
        while process_of(task, conf):
            assert time.monotonic() < deadline_s, f"task {task} still trains"
            time.sleep(0.1)


def run_uninterrupted(training: Sequence[str], world_size: int, directory: Path) -> Path:
    """Run the command at one go as forked ranks; where it has left metrics and checkpoints."""
    whole = directory / "uninterrupted"
    whole.mkdir()
    moved = {name: str(whole / name) for name in ("checkpoints", "metrics.jsonl")}
    flags = [moved.get(word, word) for word in training]
    run_ranks(flags, world_size, timeout_s=TIMEOUT_S).check()
    return whole


def steps_lost_to_kills(found: Sequence[dict[str, Any]]) -> int:
    """How often a start went back to the last checkpoint; it goes on there, and to the end."""
    numbers = [line["iteration"] for line in found]
    assert (numbers[0], numbers[-1]) == (1, STEPS)
    jumps = [(before, after) for before, after in pairwise(numbers) if after != before + 1]
    assert all(after < before and after % SAVED_EVERY == 1 for before, after in jumps)
    return len(jumps)
