"""What becomes of an elastic Slurm job when its training has ended; Slurm's answers are made up."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli_samples import FLAGS
from tests.unit.test_elastic_slurm import calls, environment, slurm
from zorse_megatron.cli.commands.zorse_supervise import _Supervised
from zorse_megatron.cli.elastic_launch import ElasticJob
from zorse_megatron.cli.elastic_options import ElasticOptions
from zorse_megatron.launch.elastic.supervise import Limits, Outcome, Supervisor, Wish

__all__ = ["slurm"]
CLUSTER = """
nodes:
  - {name: gpu01, gpus: 2 x L4, nics: 10 Gb/s}
  - {name: gpu02, gpus: 2 x L4, nics: 10 Gb/s}
"""
Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Status of the batch script, and the programs that it has called, for such an outcome."""
    (slurm / "sinfo.does").write_text("echo gpu01 allocated; echo gpu02 allocated\n")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)

    def of(*outcomes: Outcome, lost: str = "nobody", ends: int = 0) -> tuple[int, list[str]]:
        (slurm / "srun.does").write_text(f"case $* in *={lost}*) exit 1;; esac\n")
        (slurm / "calls").write_text("")
        left = list(outcomes)

        def trains(self: Supervisor) -> Outcome:
            if ends:
                os.kill(os.getpid(), ends)
            found = left.pop(0)
            assert ends != signal.SIGUSR1 or self.wishes.wish is Wish.STOP
            return found

        monkeypatch.setattr(Supervisor, "run", trains)
        job = ElasticJob(
            plan=tmp_path / "plan.json",
            cluster=tmp_path / "cluster.yaml",
            given=(*FLAGS, "--save", str(tmp_path)),
            partitions=("L4=fast",),
            sbatch=(),
            python="python",
            elastic=ElasticOptions(
                plans=tmp_path / "plans", min_gpus=1, plan_options="", plan_limit_s=9, grow="now"
            ),
        )
        in_job = environment(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="gpu[01-02]")
        handlers = [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)]
        try:
            status = _Supervised(job, in_job, Limits()).run()
        finally:
            for number, handler in zip((signal.SIGUSR1, signal.SIGTERM), handlers, strict=True):
                signal.signal(number, handler)
        return status, [" ".join(call) for call in calls(slurm) if call[0] != "sinfo"]

    return of


def test_a_job_that_is_done_or_failed_stays_out_of_the_queue(run: Run) -> None:
    assert run(Outcome(status=0)) == (0, [])
    assert run(Outcome(status=3)) == (3, [])


def test_the_time_limit_sends_it_back(run: Run) -> None:
    stopped = Outcome(status=0, wish=Wish.STOP, has_saved=True)
    status, called = run(stopped, ends=signal.SIGUSR1)
    assert (status, called) == (1, ["scontrol requeue 7"])  # with 0 it would seem COMPLETED
    assert run(Outcome(status=2, wish=Wish.STOP)) == (2, [])  # it would be as bad again


def test_nodes_that_have_come_are_used_in_place_or_waited_for(run: Run) -> None:
    grown = Outcome(status=0, wish=Wish.GROW, has_saved=True)
    status, called = run(grown, Outcome(status=0))
    assert status == 0 and not any("requeue" in each for each in called)
    status, called = run(grown, lost="gpu02")
    assert status == 1 and called[-1] == "scontrol requeue 7"


def test_a_signal_of_slurm_ends_it_also_while_it_goes_back(run: Run, slurm: Path) -> None:
    assert run(Outcome(status=0), ends=signal.SIGTERM)[0] == 128 + signal.SIGTERM
    (slurm / "scontrol.does").write_text("[[ $1 == requeue ]] && kill -TERM $PPID && sleep 5\n")
    status, called = run(Outcome(status=0, wish=Wish.STOP, has_saved=True))
    assert status == 128 + signal.SIGTERM and called[0] == "scontrol requeue 7"
