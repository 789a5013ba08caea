"""Three emulated nodes: a rank is killed; the time limit comes; a node is lost, and comes back."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron.test_checkpoints import MAX_DIFFERENCE
from tests.printed import run_zorse
from tests.slurm.forked_ranks import forking_server
from tests.slurm.local_slurm import LocalSlurm
from tests.slurm.test_slurm import PARTITIONS
from tests.slurm.trained_job import (
    SAVED_EVERY,
    THIS_MACHINE,
    TIMEOUT_S,
    metrics,
    process_of,
    run_uninterrupted,
    steps_lost_to_kills,
    wait_for_end,
    wait_for_step,
)

CLUSTER = """
nodes:
  - {name: new0, gpus: 1 x L4, nics: 10 Gb/s}
  - {name: new1, gpus: 1 x L4, nics: 10 Gb/s}
  - {name: old0, gpus: 1 x T4, nics: 10 Gb/s}
"""
TWO_NODES = CLUSTER.replace("  - {name: new1, gpus: 1 x L4, nics: 10 Gb/s}\n", "")
AGENT = b"torch.distributed.run"
BEGIN = """
import os, sys, time
from torch.distributed.run import main
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
main(sys.argv[2:])
"""
"""Imports take longer than a few steps of the others."""


def launch(training: tuple[str, ...], cluster: str = CLUSTER) -> None:
    """Write `job.sh` here, for a plan of all nodes."""
    Path("cluster.yaml").write_text(cluster)
    plan = ("zorse", "plan", "--cluster", "cluster.yaml", "--out", "plan.json", "--use-all")
    run_zorse([*plan, "--", *training])
    files = ("plan.json", "--cluster", "cluster.yaml", "--slurm", "job.sh", "--elastic")
    options = ("--min-gpus", "2", "--plan-options=--use-all")
    run_zorse(["zorse", "launch", *files, *PARTITIONS, *options, "--", *training])


def starts(directory: Path) -> list[list[str]]:
    """The nodes of each start."""
    (log,) = directory.glob("plans-for-fewer-nodes/zorse-*.jsonl")
    return [json.loads(line)["nodes"] for line in log.read_text().splitlines()]


@dataclass(frozen=True)
class Command:
    """What a process runs, to be started again as by hand on its node."""

    words: list[str]
    environment: dict[str, str]

    @classmethod
    def of(cls, process: int) -> "Command":
        words, variables = (
            os.fsdecode(Path(f"/proc/{process}/{name}").read_bytes()).split("\0")[:-1]
            for name in ("cmdline", "environ")
        )
        return cls(words, dict(variable.split("=", 1) for variable in variables))

    @contextlib.contextmanager
    def running(self, gate: Path) -> Iterator[Path]:
        """It is ready to begin, and does so when the file is there."""
        python, *words = self.words
        cut = words.index(AGENT.decode())
        with gate.with_suffix(".txt").open("w") as output:
            started = subprocess.Popen(
                [python, "-c", BEGIN, str(gate), *words[cut + 1 :]],
                env=self.environment,
                stdout=output,
                stderr=output,
            )
            try:
                yield gate
            finally:
                started.kill()
                started.wait()


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.mark.timeout(1200)
def test_a_job_goes_on_without_what_is_killed_and_ends_as_one_process(
    slurm: LocalSlurm, training: tuple[str, ...], tmp_path: Path
) -> None:
    launch(training)
    conf = tmp_path / "slurm.conf"
    with forking_server() as forks:

        def wait_for(step: int, *, since: int = 0) -> int:
            wait_for_step(step, tmp_path, slurm, job, since=since)
            return len(metrics(tmp_path))

        def kill(process: int) -> int:
            os.kill(process, signal.SIGKILL)
            time.sleep(2)  # the ranks that are left log no more
            return len(metrics(tmp_path))

        job = slurm.submit(tmp_path / "job.sh", **THIS_MACHINE, **forks)
        wait_for(SAVED_EVERY + 3)
        since = kill(process_of(1, conf))
        since = wait_for(SAVED_EVERY + 2, since=since)
        slurm.run("scancel", "--signal=USR1", "--batch", job)  # as before the time limit
        wait_for(2 * SAVED_EVERY + 3, since=since)
        agent = process_of(2, conf, AGENT)
        command = Command.of(agent)
        since = kill(agent)
        with command.running(tmp_path / "comes-back") as come:
            wait_for(2 * SAVED_EVERY + 1, since=since)
            with stopped(process_of(1, conf, AGENT)):
                come.touch()
                wait_for_end(1, conf)
            about = slurm.wait(job, timeout_s=TIMEOUT_S)
    log = (tmp_path / f"zorse-{job}.txt").read_text()
    assert "Restarts=1" in about and "JobState=COMPLETED" in about, log
    # With new1, too, whose agent hears of the node that comes when its rank has ended.
    everybody = ["new0", "new1", "old0"]
    assert starts(tmp_path) == [everybody] * 3 + [["new0", "new1"], everybody]
    stock = run_uninterrupted(training, 1, tmp_path)
    expected = {line["iteration"]: line["lm loss"] for line in metrics(stock)}
    found = metrics(tmp_path)
    for line in found:
        assert abs(line["lm loss"] - expected[line["iteration"]]) <= MAX_DIFFERENCE
    # What was trained since the last checkpoint is lost to a kill; nothing is to the stop, or to
    # the node that comes back.
    assert steps_lost_to_kills(found) == 2


def test_bad_input_ends_the_job_for_good(
    slurm: LocalSlurm, training: tuple[str, ...], tmp_path: Path
) -> None:
    """Neither torchrun nor Slurm starts it again and again."""
    launch(training, TWO_NODES)
    script = tmp_path / "job.sh"
    script.write_text(script.read_text().replace("--lr-warmup-iters 2", "--lr-warmup-itres 2"))
    with forking_server() as forks:
        job = slurm.submit(script, **THIS_MACHINE, **forks)
        about = slurm.wait(job, timeout_s=TIMEOUT_S)
    log = (tmp_path / f"zorse-{job}.txt").read_text()
    assert "Restarts=0" in about and "ExitCode=2:0" in about, log
    assert "bad input, which the last start has said" in log
    assert len(starts(tmp_path)) == 1
