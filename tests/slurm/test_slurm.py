"""Four emulated nodes: discovered, profiled, planned, trained on; killed, stopped, resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.comparison import MODEL_FLAGS
from tests.megatron.launch import run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.slurm.local_slurm import LocalSlurm, local_slurm, why_not
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster

SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"
STEPS, SAVED_EVERY, KILLED_AFTER, STOPPED_AFTER = 100, 20, 30, 45
WORLD_SIZE = 5
KILLED_TASK = 3
TIMEOUT_S = 300.0
THIS_MACHINE = {"MASTER_ADDR": "127.0.0.1"}  # where all nodes are
TRAINING = (
    *MODEL_FLAGS,
    *("--train-iters", str(STEPS), "--mock-data", "--split", "90,5,5", *TOKENIZER_FLAGS),
    *("--eval-interval", "1000"),
    *(
        "--save",
        "checkpoints",
        "--save-interval",
        str(SAVED_EVERY),
        "--zorse-metrics",
        "metrics.jsonl",
    ),
)
# Partition -> node -> GPUs. The job that measures has them in another order, which the cluster file
# and the ranks follow.
PARTITIONS = {"new": {"new0": 2, "new1": 1}, "old": {"old0": 1, "old1": 1}}
ORDER = (("old", "old0"), ("new", "new1"), ("new", "new0"), ("old", "old1"))
SETTINGS = f"""\
PYTHON="$PWD/python"
CLUSTER=cluster.yaml
PROFILE=profile.json
PLAN=plan.json
JOB=train.sh
TRAINING=({" ".join(TRAINING)})
DISCOVER=(--largest-mb 1 --time-limit 0.1)
MEASURE=(--max-micro-batch 2 --time-limit 1)
PLANNING=(--use-all)
LAUNCH=(--partition L4=new --partition T4=old)
zorse() {{ "$PYTHON" -m zorse_megatron "$@"; }}
"""
# Each node says what it stands for; ranks have one thread, as in the run to compare with.
PYTHON = f"""\
#!/bin/bash
export OMP_NUM_THREADS=1 PYTHONPATH={os.pathsep.join(filter(None, sys.path))}
case $SLURMD_NODENAME in
    new*) export ZORSE_GPU_KIND=L4 ;;
    old*) export ZORSE_GPU_KIND=T4 ;;
esac
exec {sys.executable} "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LocalSlurm]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "settings.sh").write_text(SETTINGS)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for script in ("discover.sh", "plan.sh"):
        shutil.copy(SCRIPTS / script, tmp_path)
    with local_slurm(tmp_path, PARTITIONS) as running:
        yield running


def metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def process_of(task: int, conf: Path) -> int:
    """The process that trains as a task of the Slurm with this configuration."""
    variables_of_task = (f"SLURM_CONF={conf}", f"SLURM_PROCID={task}", "SLURM_STEP_ID=0")
    wanted = {variable.encode() for variable in variables_of_task}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = set((process / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if wanted <= variables and b"zorse_megatron.pretrain" in words:
            return int(process.name)
    raise LookupError(f"no process of task {task}")


def wait_for_step(step: int, directory: Path, slurm: LocalSlurm, job: str) -> None:
    """Wait until the job, which may be pending, has trained so far."""
    log = directory / f"zorse-{job}.txt"
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (steps := metrics(directory)) or steps[-1]["iteration"] < step:
        assert time.monotonic() < deadline_s, log.read_text() if log.exists() else "not started"
        slurm.look_again(job)
        time.sleep(0.2)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint: parameters and the optimizer's state."""
    saved, found = directory / "checkpoints" / f"iter_{STEPS:07d}", directory / "tensors.pt"
    words = [sys.executable, "-m", "tests.slurm.tensors_of", saved, found]
    subprocess.run(words, check=True, cwd=SCRIPTS.parents[1])
    tensors: dict[str, torch.Tensor] = torch.load(found, weights_only=True)
    return tensors


def components() -> list[str]:
    """The options with which sbatch asks for the nodes in their order."""
    words: list[str] = []
    for partition, node in ORDER:
        gpus = PARTITIONS[partition][node]
        asked = {"partition": partition, "nodelist": node, "ntasks": gpus, "gpus-per-node": gpus}
        words += [":"] * bool(words) + [f"--{name}={value}" for name, value in asked.items()]
    return words


def run_to_its_end(slurm: LocalSlurm, script: Path, *options: str) -> None:
    job = slurm.submit(script, *options, **THIS_MACHINE)
    about = slurm.wait(job, timeout_s=TIMEOUT_S)
    (log,) = script.parent.glob(f"zorse-*-{job}.txt")
    assert "JobState=COMPLETED" in about, log.read_text()


@pytest.mark.timeout(1200)
def test_a_job_that_is_killed_and_stopped_ends_as_if_uninterrupted(
    slurm: LocalSlurm, tmp_path: Path
) -> None:
    run_to_its_end(slurm, tmp_path / "discover.sh", *components())
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert [node.name for node in cluster.nodes] == [name for _, name in ORDER]
    assert cluster.gpu_kinds == ("T4", "L4", "L4", "L4", "T4")
    run_to_its_end(slurm, tmp_path / "plan.sh")
    job = slurm.submit(tmp_path / "train.sh", **THIS_MACHINE, GRACE_S="10")
    wait_for_step(KILLED_AFTER, tmp_path, slurm, job)
    os.kill(process_of(KILLED_TASK, tmp_path / "slurm.conf"), signal.SIGKILL)
    slurm.wait_for_restart(job, 1, timeout_s=TIMEOUT_S)
    wait_for_step(STOPPED_AFTER, tmp_path, slurm, job)
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # as before the time limit
    about = slurm.wait(job, timeout_s=TIMEOUT_S)
    log = (tmp_path / f"zorse-{job}.txt").read_text()
    assert "Restarts=2" in about and "ExitCode=0:0" in about, log
    assert "status 137 after 0 restarts: back into the queue" in log
    assert "status 0 after 1 restarts: back into the queue" in log

    whole = tmp_path / "uninterrupted"
    whole.mkdir()
    moved = {name: str(whole / name) for name in ("checkpoints", "metrics.jsonl")}
    flags = [moved.get(word, word) for word in TRAINING]
    flags += ["--zorse-plan", str(tmp_path / "plan.json")]
    entry = "tests.slurm.all_documents_entry"  # as the ranks that Slurm starts
    run_ranks(flags, WORLD_SIZE, entry=entry, timeout_s=TIMEOUT_S).check()
    expected = {step["iteration"]: step["lm loss"] for step in metrics(whole)}
    found = metrics(tmp_path)
    assert [step["lm loss"] for step in found] == [expected[step["iteration"]] for step in found]
    numbers = [step["iteration"] for step in found]
    assert (numbers[0], numbers[-1]) == (1, STEPS)
    # What was trained since the last checkpoint is lost to the kill; nothing is to the stop.
    jumps = [(before, after) for before, after in pairwise(numbers) if after != before + 1]
    assert len(jumps) <= 1
    assert all(after < before and after % SAVED_EVERY == 1 for before, after in jumps)
    mine, theirs = weights(tmp_path), weights(whole)
    assert mine.keys() == theirs.keys() and mine
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
