"""A job on three emulated nodes is killed, stopped, resumed; `megatron/test_tutorial` measures and
plans for such a job. And two nodes with unmodified Megatron, in a layout of its own.
"""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.megatron.checkpoint_jobs import read_checkpoint
from tests.megatron.comparison import MODEL_FLAGS
from tests.megatron.launch import run_ranks
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.stock_log import iterations
from tests.printed import run_zorse
from tests.slurm.forked_ranks import forking_server
from tests.slurm.local_slurm import LocalSlurm
from tests.slurm.trained_job import (
    SAVED_EVERY,
    STEPS,
    THIS_MACHINE,
    TIMEOUT_S,
    metrics,
    process_of,
    run_uninterrupted,
    steps_lost_to_kills,
    wait_for_step,
)
from tests.unit.test_stock_plans import inputs_for
from zorse_megatron.flags.table import WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.plan.plan import ClusterFingerprint
from zorse_megatron.plan.plan_file import load_plan, save_plan
from zorse_megatron.planner.baselines.stock_layouts import Grid, plan_of_grid

KILLED_AFTER, STOPPED_AFTER = SAVED_EVERY + 3, 2 * SAVED_EVERY
KILLED_TASK = 3
# In another order than the nodes of Slurm, which the ranks follow.
CLUSTER = """\
nodes:
  - {name: old0, gpus: 1 x T4, nics: 10 Gb/s}
  - {name: new1, gpus: 1 x L4, nics: 10 Gb/s}
  - {name: new0, gpus: 2 x L4, nics: 10 Gb/s}
"""
PARTITIONS = ("--partition", "L4=new", "--partition", "T4=old", "--python", "./python")


def unlike_tensors(*runs: Path) -> list[str]:
    """Names of parameters and optimizer state whose bits differ in the last checkpoints of two."""
    mine, theirs = (
        {name: value for name, value in read[0].items() if isinstance(value, torch.Tensor)}
        for read in (read_checkpoint(run / f"checkpoints/iter_{STEPS:07d}") for run in runs)
    )
    assert mine.keys() == theirs.keys() and mine
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.timeout(1200)
def test_a_job_that_is_killed_and_stopped_ends_as_if_uninterrupted(
    slurm: LocalSlurm, training: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    plan = ("zorse", "plan", "--cluster", "cluster.yaml", "--out", "plan.json", "--use-all")
    run_zorse([*plan, "--", *training])
    assert load_plan(tmp_path / "plan.json").world_size == KILLED_TASK + 1
    files = ("plan.json", "--cluster", "cluster.yaml", "--node-names", "--slurm", "job.sh")
    run_zorse(["zorse", "launch", *files, *PARTITIONS, "--", *training])
    with forking_server() as forks:
        job = slurm.submit(tmp_path / "job.sh", **THIS_MACHINE, **forks, GRACE_S="10")
        wait_for_step(KILLED_AFTER, tmp_path, slurm, job)
        os.kill(process_of(KILLED_TASK, tmp_path / "slurm.conf"), signal.SIGKILL)
        slurm.wait_for_restart(job, 1, timeout_s=TIMEOUT_S)
        since = len(metrics(tmp_path))
        wait_for_step(STOPPED_AFTER, tmp_path, slurm, job, since=since)
        slurm.run("scancel", "--signal=USR1", "--batch", job)  # as before the time limit
        about = slurm.wait(job, timeout_s=TIMEOUT_S)
    log = (tmp_path / f"zorse-{job}.txt").read_text()
    assert "Restarts=2" in about and "ExitCode=0:0" in about, log
    assert "status 137 after 0 restarts: back into the queue" in log
    assert "status 0 after 1 restarts: back into the queue" in log

    command = [*training, "--zorse-plan", str(tmp_path / "plan.json")]
    whole = run_uninterrupted(command, KILLED_TASK + 1, tmp_path)
    expected = {step["iteration"]: step["lm loss"] for step in metrics(whole)}
    found = metrics(tmp_path)
    assert [step["lm loss"] for step in found] == [expected[step["iteration"]] for step in found]
    # What was trained since the last checkpoint is lost to the kill; nothing is to the stop.
    assert steps_lost_to_kills(found) <= 1
    assert run_megatron_ranks(1, unlike_tensors, tmp_path, whole) == [[]]


STOCK_SCRIPT = Path(__file__).parents[1] / "megatron" / "stock_script.py"
STOCK_CLUSTER = """\
nodes:
  - {name: new0, gpus: 2 x L4, nics: 10 Gb/s}
  - {name: old0, gpus: 1 x T4, nics: 10 Gb/s}
"""
# The later node first, and the GPUs of the other one in reverse.
STOCK_GRID = Grid(layers=(1, 2, 1), width=1, micro_batch_size=1, mode="none")
STOCK_ORDER = (2, 1, 0)
STOCK_TRAINING = (
    *(*MODEL_FLAGS, *WITHOUT_EVALUATION, *WITHOUT_WORKERS, *TOKENIZER_FLAGS),
    *("--train-iters", "2", "--split", "90,5,5"),
)
# In Megatron's default format each rank would start a process that writes.
SAVING = ("--save", "saved", "--save-interval", "2", "--ckpt-format", "torch")
BY_HAND = (
    *("--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Et|tt|tL"),
    "--use-distributed-optimizer",
)


def test_unmodified_megatron_trains_in_its_layout(
    slurm: LocalSlurm, tmp_path: Path, corpus: Path
) -> None:
    """Unlike nodes with unlike numbers of GPUs, by the script alone."""
    training = [*STOCK_TRAINING, "--data-path", str(corpus)]
    (tmp_path / "two.yaml").write_text(STOCK_CLUSTER)
    inputs = inputs_for(STOCK_GRID, 8)
    inputs.cluster = ClusterFingerprint(gpu_kinds=("L4", "L4", "T4"))
    save_plan(plan_of_grid(inputs, STOCK_GRID, STOCK_ORDER), tmp_path / "stock.json")
    files = ("stock.json", "--cluster", "two.yaml", "--stock", "--slurm", "stock.sh")
    run_zorse(["zorse", "launch", *files, *PARTITIONS, "--", str(STOCK_SCRIPT), *training, *SAVING])
    with forking_server() as forks:  # all but rank 0
        job = slurm.submit(tmp_path / "stock.sh", **THIS_MACHINE, **forks, MAX_RESTARTS="0")
        about = slurm.wait(job, timeout_s=TIMEOUT_S)
    said = (tmp_path / f"zorse-{job}.txt").read_text()
    assert "JobState=COMPLETED" in about, said
    started = sorted(re.findall(r"^started with (.*)$", said, re.MULTILINE))
    assert [line.split() for line in started] == [
        ["SLURMD_NODENAME=new0", "RANK=1", "LOCAL_RANK=0", *_variables("1,0")],
        ["SLURMD_NODENAME=new0", "RANK=2", "LOCAL_RANK=1", *_variables("1,0")],
        ["SLURMD_NODENAME=old0", "RANK=0", "LOCAL_RANK=0", *_variables("0")],
    ]
    plain = run_ranks(
        [*training, *BY_HAND], 3, entry="tests.megatron.stock_script", timeout_s=TIMEOUT_S
    ).check()
    expected = [(line.iteration, line.lm_loss) for line in iterations(plain.outputs[-1])]
    assert [(line.iteration, line.lm_loss) for line in iterations(said)] == expected
    assert len(expected) == 2
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"


def _variables(gpus: str) -> list[str]:
    return ["CUDA_DEVICE_MAX_CONNECTIONS=None", f"CUDA_VISIBLE_DEVICES={gpus}"]
