"""The batch script of an elastic job, with made-up answers of Slurm's programs."""

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from tests.unit.cli_samples import FLAGS

TRAINING = (*FLAGS, "--save", "a b", "--save-interval", "9")
# Each task writes its words down; what has happened meanwhile is a script beside it.
SRUN = """#!/bin/bash
printf '%s\\n' "$*" > srun-options
while [[ $1 != bash ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task "$@"; done
[[ -f happened ]] && . ./happened
exit $(<status)
"""


@pytest.fixture
def job(run: Callable[..., Any], tmp_path: Path) -> Path:
    """A directory with `job.sh` and the programs that it calls."""
    launch = ("launch", "plan.json", "--cluster", "cluster.yaml", "--slurm", "job.sh", "--elastic")
    options = ("--min-gpus", "4", "--plan-options", "--profile profile.json", "--partition", "p")
    named = ("--plans", "p q", "--python", str(tmp_path / "python"))
    done = run(*launch, *options, *named, "--", *TRAINING)
    assert done.exit_code == 0, done.output
    programs = {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\necho "$*" >> requeued\n',
        "python": '#!/bin/bash\nprintf "%s\\0" "$@" > "words-$SLURM_PROCID"\nenv > env\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "p q").mkdir(exist_ok=True)
    (tmp_path / "a b").mkdir()
    return tmp_path


def ended(job: Path, status: int, happened: str = "", **more: str) -> tuple[int, bool]:
    """The status of the batch script, and whether it went back into the queue."""
    (job / "status").write_text(str(status))
    (job / "happened").write_text(happened)
    (job / "requeued").unlink(missing_ok=True)
    path = f"{job}{os.pathsep}/usr/bin{os.pathsep}/bin"
    slurm = {"SLURM_JOB_ID": "9", "SLURMD_NODENAME": "new", "PATH": path, **more}
    done = subprocess.run(["bash", "job.sh"], cwd=job, env=slurm, check=False, capture_output=True)
    return done.returncode, (job / "requeued").exists()


def test_the_script_keeps_its_job_when_a_node_fails(job: Path) -> None:
    script = (job / "job.sh").read_text()
    components = script.count("#SBATCH hetjob") + 1
    for line in ("--no-kill", "--requeue", "--partition=p", "--ntasks-per-node=1"):
        assert script.count(f"#SBATCH {line}\n") == components
    assert "--nodelist=new\n" in script and "--nodelist=old\n" in script
    ended(job, 0)
    asked = shlex.split((job / "srun-options").read_text().partition(" bash ")[0])
    # An agent that ends is no reason to end the others.
    assert {"--no-kill", "--wait=0", "--kill-on-bad-exit=0"} <= {*asked}


def test_every_node_gets_an_agent_of_one_rendezvous(job: Path) -> None:
    ended(job, 0)
    for task in range(2):
        words = (job / f"words-{task}").read_text().split("\0")[:-1]
        assert words[:2] == ["-m", "torch.distributed.run"]
        read = get_args_parser().parse_args(words[2:])
        assert (read.nnodes, read.nproc_per_node, read.rdzv_id) == ("1:2", "4", "zorse-9")
        assert (read.rdzv_backend, read.rdzv_endpoint) == ("c10d", "new:20063")
        assert read.rdzv_conf == f"is_host={int(task == 0)}"  # the node of the batch script
        assert (read.module, read.training_script) == (True, "zorse_megatron")
        given = read.training_script_args
        assert given[0] == "join" and given[given.index("--") + 1 :] == [*TRAINING]
        assert given[given.index("--plan-options") + 1] == "--profile profile.json"
        assert given[given.index("--min-gpus") + 1] == "4"
    said = (job / "env").read_text().splitlines()
    assert {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "MAX_RESTARTS=20"} <= {*said}
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120" in said  # else ranks that save are ended after 30 s


OUTCOME = 'printf {} > "p q/zorse-9.outcome"'


def test_goes_back_into_the_queue_unless_it_is_done_or_given_up(job: Path) -> None:
    assert ended(job, 0) == (0, False)
    assert ended(job, 1) == (1, True)  # such as too few nodes
    assert ended(job, 1, SLURM_RESTART_COUNT="20") == (1, False)
    assert ended(job, 137, OUTCOME.format(0)) == (0, False)  # done without an agent that was killed
    assert ended(job, 1, OUTCOME.format(2)) == (2, False)


def test_the_time_limit_sends_it_back_also_if_it_is_often(job: Path) -> None:
    saves = "kill -USR1 $PPID; sleep 0.5; echo 9 > 'a b/latest_checkpointed_iteration.txt'"
    (job / "scancel").write_text('#!/bin/bash\necho "$*" > cancelled\n')
    (job / "scancel").chmod(0o755)
    (job / "p q" / "zorse-9.outcome").unlink(missing_ok=True)
    assert ended(job, 1, saves, SLURM_RESTART_COUNT="99") == (1, True)
    assert (job / "cancelled").read_text() == "--signal=TERM 9\n"
