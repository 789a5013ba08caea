"""Three emulated nodes: a rank is killed, then the agent of a node; then the time limit comes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.megatron.launch import run_ranks
from tests.megatron.test_checkpoints import MAX_DIFFERENCE
from tests.printed import run_zorse
from tests.slurm.local_slurm import LocalSlurm, local_slurm, why_not
from tests.slurm.test_slurm import (
    PYTHON,
    SAVED_EVERY,
    STEPS,
    THIS_MACHINE,
    TIMEOUT_S,
    TRAINING,
    metrics,
    process_of,
    wait_for_step,
)

PARTITIONS = {"new": {"new0": 1, "new1": 1}, "old": {"old0": 1}}
CLUSTER = """
nodes:
  - {name: new0, gpus: 1 x L4, nics: 10 Gb/s}
  - {name: new1, gpus: 1 x L4, nics: 10 Gb/s}
  - {name: old0, gpus: 1 x T4, nics: 10 Gb/s}
"""
AGENT = b"torch.distributed.run"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSlurm]:
    """Commands run in the directory of the job."""
    monkeypatch.chdir(tmp_path)
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    with local_slurm(tmp_path, PARTITIONS) as running:
        yield running


def launch() -> None:
    """Write `job.sh` here, for a plan of all nodes."""
    plan = ("zorse", "plan", "--cluster", "cluster.yaml", "--out", "plan.json", "--use-all")
    run_zorse([*plan, "--", *TRAINING])
    files = ("plan.json", "--cluster", "cluster.yaml", "--slurm", "job.sh", "--elastic")
    partitions = ("--partition", "L4=new", "--partition", "T4=old", "--python", "./python")
    options = ("--min-gpus", "2", "--plan-options=--use-all")
    run_zorse(["zorse", "launch", *files, *partitions, *options, "--", *TRAINING])


def starts(directory: Path) -> list[list[str]]:
    """The nodes of each start."""
    (log,) = directory.glob("plans-for-fewer-nodes/zorse-*.jsonl")
    return [json.loads(line)["nodes"] for line in log.read_text().splitlines()]


def trained_since(count: int, step: int, directory: Path, slurm: LocalSlurm, job: str) -> None:
    """Wait until steps have been trained that are not among the first `count` lines."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not any(line["iteration"] >= step for line in metrics(directory)[count:]):
        log = directory / f"zorse-{job}.txt"
        assert time.monotonic() < deadline_s, log.read_text()
        slurm.look_again(job)
        time.sleep(0.2)


@pytest.mark.timeout(1500)
def test_a_job_goes_on_without_what_is_killed_and_ends_as_one_process(
    slurm: LocalSlurm, tmp_path: Path
) -> None:
    launch()
    conf = tmp_path / "slurm.conf"
    job = slurm.submit(tmp_path / "job.sh", **THIS_MACHINE)
    wait_for_step(SAVED_EVERY + 5, tmp_path, slurm, job)
    os.kill(process_of(1, conf), signal.SIGKILL)
    time.sleep(2)  # the ranks that are left log no more
    trained_since(len(metrics(tmp_path)), 2 * SAVED_EVERY + 5, tmp_path, slurm, job)
    os.kill(process_of(2, conf, AGENT), signal.SIGKILL)
    time.sleep(2)
    trained_since(len(metrics(tmp_path)), 3 * SAVED_EVERY + 5, tmp_path, slurm, job)
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # as before the time limit
    about = slurm.wait(job, timeout_s=TIMEOUT_S)
    log = (tmp_path / f"zorse-{job}.txt").read_text()
    assert "Restarts=1" in about and "JobState=COMPLETED" in about, log
    assert starts(tmp_path) == [["new0", "new1", "old0"]] * 2 + [["new0", "new1"]] + [
        ["new0", "new1", "old0"]
    ]
    stock = tmp_path / "stock"
    stock.mkdir()
    moved = {name: str(stock / name) for name in ("checkpoints", "metrics.jsonl")}
    entry = "tests.slurm.all_documents_entry"
    flags = [moved.get(word, word) for word in TRAINING]
    run_ranks(flags, 1, entry=entry, timeout_s=TIMEOUT_S).check()
    expected = {line["iteration"]: line["lm loss"] for line in metrics(stock)}
    found = metrics(tmp_path)
    for line in found:
        assert abs(line["lm loss"] - expected[line["iteration"]]) <= MAX_DIFFERENCE
    numbers = [line["iteration"] for line in found]
    assert (numbers[0], numbers[-1]) == (1, STEPS)
    # What was trained since the last checkpoint is lost to a kill; nothing is to the stop.
    jumps = [(before, after) for before, after in pairwise(numbers) if after != before + 1]
    assert len(jumps) == 2
    assert all(after < before and after % SAVED_EVERY == 1 for before, after in jumps)


@pytest.mark.timeout(600)
def test_bad_input_ends_the_job_for_good(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Neither torchrun nor Slurm starts it again and again."""
    launch()
    script = tmp_path / "job.sh"
    script.write_text(script.read_text().replace("--lr-warmup-iters 2", "--lr-warmup-itres 2"))
    job = slurm.submit(script, **THIS_MACHINE)
    about = slurm.wait(job, timeout_s=TIMEOUT_S)
    log = (tmp_path / f"zorse-{job}.txt").read_text()
    assert "Restarts=0" in about and "ExitCode=2:0" in about, log
    assert "bad input, which the last start has said" in log
    assert len(starts(tmp_path)) == 1
