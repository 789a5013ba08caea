"""Four emulated nodes: discovered, profiled, planned, trained on; killed, stopped, resumed.

And two of them with unmodified Megatron, in a layout of its own.
"""

import json
import os
import re
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
from tests.megatron.stock_log import iterations
from tests.printed import run_zorse
from tests.slurm.local_slurm import LocalSlurm, local_slurm, why_not
from tests.unit.test_stock_plans import inputs_for
from zorse_megatron.flags.table import WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.plan.plan import ClusterFingerprint
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.baselines.stock_layouts import Grid, plan_of_grid

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


def run_to_its_end(slurm: LocalSlurm, script: Path, *options: str, **variables: str) -> None:
    job = slurm.submit(script, *options, **THIS_MACHINE, **variables)
    about = slurm.wait(job, timeout_s=TIMEOUT_S)
    (log,) = script.parent.glob(f"zorse*-{job}.txt")
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
    *("--train-iters", "2", "--mock-data", "--split", "90,5,5"),
)
SAVING = ("--save", "saved", "--save-interval", "2")
BY_HAND = (
    *("--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Et|tt|tL"),
    "--use-distributed-optimizer",
)


@pytest.mark.timeout(600)
def test_unmodified_megatron_trains_in_its_layout(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike nodes with unlike numbers of GPUs, by the script alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text(STOCK_CLUSTER)
    inputs = inputs_for(STOCK_GRID, 8)
    inputs.cluster = ClusterFingerprint(gpu_kinds=("L4", "L4", "T4"))
    save_plan(plan_of_grid(inputs, STOCK_GRID, STOCK_ORDER), tmp_path / "stock.json")
    options = ("--slurm", "stock.sh", "--partition", "L4=new", "--partition", "T4=old")
    launch = ("zorse", "launch", "stock.json", "--cluster", "two.yaml", "--stock", *options)
    interpreter = ("--python", str(tmp_path / "python"))
    run_zorse([*launch, *interpreter, "--", str(STOCK_SCRIPT), *STOCK_TRAINING, *SAVING])
    run_to_its_end(slurm, tmp_path / "stock.sh", MAX_RESTARTS="0")
    (log,) = tmp_path.glob("zorse-*.txt")
    said = log.read_text()
    started = sorted(re.findall(r"^started with (.*)$", said, re.MULTILINE))
    assert [line.split() for line in started] == [
        ["SLURMD_NODENAME=new0", "RANK=1", "LOCAL_RANK=0", *_variables("1,0")],
        ["SLURMD_NODENAME=new0", "RANK=2", "LOCAL_RANK=1", *_variables("1,0")],
        ["SLURMD_NODENAME=old0", "RANK=0", "LOCAL_RANK=0", *_variables("0")],
    ]
    plain = run_ranks(
        [*STOCK_TRAINING, *BY_HAND], 3, entry="tests.megatron.stock_script", timeout_s=TIMEOUT_S
    ).check()
    expected = [(line.iteration, line.lm_loss) for line in iterations(plain.outputs[-1])]
    assert [(line.iteration, line.lm_loss) for line in iterations(said)] == expected
    assert len(expected) == 2
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"


def _variables(gpus: str) -> list[str]:
    return ["CUDA_DEVICE_MAX_CONNECTIONS=None", f"CUDA_VISIBLE_DEVICES={gpus}"]
