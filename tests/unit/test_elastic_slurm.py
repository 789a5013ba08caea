"""The elastic job with made-up answers of Slurm's programs."""

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli_samples import FLAGS, runner_in
from zorse_megatron.errors import LaunchError
from zorse_megatron.launch.elastic.back_in_queue import RESTARTS, back_in_queue, requeues_of
from zorse_megatron.launch.elastic.slurm_nodes import SlurmNodes, allocated, nodes_up
from zorse_megatron.launch.rank_environment import launched_rank
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster

CLUSTER = parse_cluster(b"""
nodes:
  - {name: gpu01, gpus: 2 x L4, nics: 10 Gb/s}
  - {name: gpu02, gpus: 2 x L4, nics: 10 Gb/s}
  - {name: old, gpus: 1 x T4, nics: 10 Gb/s}
""")
HET_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[01-02]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "old.site.org",
    "SLURM_NTASKS_PER_NODE": "2",
}
# Writes down how it was called; what it says and how it ends is in a file beside it.
PROGRAM = """#!/bin/bash
here=$(dirname "$0")
printf '%s\\n' "${0##*/} $*" >> "$here/calls"
env > "$here/env-${0##*/}"
[[ -f $here/${0##*/}.does ]] && . "$here/${0##*/}.does"
exit 0
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("srun", "sbatch", "scontrol", "sinfo", "scancel"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return programs


def calls(slurm: Path) -> list[list[str]]:
    return [shlex.split(line) for line in (slurm / "calls").read_text().splitlines()]


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], **more}


def test_nodes_of_all_components() -> None:
    found = [(each.node.name, each.host, each.component) for each in allocated(CLUSTER, HET_JOB)]
    assert found == [("gpu01", "gpu01", 0), ("gpu02", "gpu02", 0), ("old", "old.site.org", 1)]
    plain = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu02,elsewhere"}
    assert [(each.host, each.component) for each in allocated(CLUSTER, plain)] == [("gpu02", None)]


def machines(**options: Any) -> SlurmNodes:
    return SlurmNodes(
        cluster=CLUSTER,
        training=("--num-layers", "4", "--save", "s"),
        environment=environment(**HET_JOB),
        python="python",
        **options,
    )


def test_nodes_that_fail_or_do_not_answer_in_time_are_lost(slurm: Path) -> None:
    (slurm / "srun.does").write_text("case $* in *=gpu01*) exit 1;; *=old*) exec sleep 9;; esac\n")
    assert machines(answer_s=0.3).answering() == {"gpu02"}
    for call in calls(slurm):
        assert "--overlap" in call and "--ntasks=1" in call


def test_nodes_that_srun_cannot_ask_are_lost_and_why_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonesuch")
    nobody = machines()
    assert nobody.answering() == frozenset()
    assert capsys.readouterr().out.count("srun cannot be run") == 1
    nobody.ask_to_save()
    assert "could not be asked to save" in capsys.readouterr().out


def files_for(path: Path, *names: str) -> Any:
    nodes = (f"  - {{name: {name}, gpus: 1 x L4, nics: 10 Gb/s}}\n" for name in names)
    path.write_text("nodes:\n" + "".join(nodes))
    return type("F", (), {"cluster": path, "plan": Path("plan.json")})


def test_ranks_are_not_started_on_nodes_of_other_jobs(slurm: Path, tmp_path: Path) -> None:
    files = files_for(tmp_path / "left.yaml", "gpu02", "new")
    with pytest.raises(LaunchError, match="nodes that this job does not have: new; expected those"):
        machines().start(files, 0)
    assert not (slurm / "calls").exists()


def test_a_step_that_cannot_be_started_ends_those_before_it(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "srun.does").write_text("exec sleep 9\n")
    real, begun = subprocess.Popen, []

    def once(*args: Any, **kwargs: Any) -> Any:
        if begun:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        begun.append(real(*args, **kwargs))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", once)
    with pytest.raises(LaunchError, match="for node old: found Resource temporarily unavailable"):
        machines().start(files_for(tmp_path / "left.yaml", "gpu02", "old"), 0)
    assert begun[0].wait(5) == -signal.SIGTERM


def test_every_node_gets_a_step_whose_tasks_have_the_ranks_of_the_file(
    slurm: Path, tmp_path: Path
) -> None:
    path = tmp_path / "left.yaml"
    path.write_text(
        "nodes:\n  - {name: gpu02, gpus: 2 x L4, nics: 10 Gb/s}\n"
        "  - {name: old, gpus: 1 x T4, nics: 10 Gb/s}\n"
    )
    files: Any = type("F", (), {"cluster": path, "plan": Path("plan.json")})
    # Each step writes its own variables.
    (slurm / "srun.does").write_text('env > "$here/env-$3-$ZORSE_FIRST_RANK"\n')
    runs = machines(srun_options=("--cpus-per-task=8",)).start(files, 3)
    for run in runs:
        while run.poll() is None:
            pass
    assert [run.node for run in runs] == ["gpu02", "old"]
    first, second = sorted(calls(slurm), key=lambda call: call[1])
    assert {"--het-group=0", "--nodelist=gpu02", "--ntasks=2", "--cpus-per-task=8"} <= {*first}
    assert {"--het-group=1", "--nodelist=old.site.org", "--ntasks=1"} <= {*second}
    for call in (first, second):
        assert {"--zorse-plan", "plan.json", "--zorse-cluster", str(path), "--load"} <= {*call}
        assert "--kill-on-bad-exit=0" in call  # else srun ends ranks that are saving
    seen = []
    for path in slurm.glob("env---*"):
        said = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
        assert "SLURM_NTASKS_PER_NODE" not in said
        assert said["MASTER_ADDR"] == "gpu02"
        for local in range(2 if "gpu02" in path.name else 1):
            task = {**said, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(local), "SLURM_NTASKS": "2"}
            rank = launched_rank({**task, "SLURM_LOCALID": str(local)}, "host")
            seen.append((rank.rank, rank.local_rank, rank.world_size, rank.master_port))
    assert sorted(each[:3] for each in seen) == [(0, 0, 3), (1, 1, 3), (2, 0, 3)]
    assert len({each[3] for each in seen}) == 1


def test_nodes_that_slurm_could_give(slurm: Path) -> None:
    (slurm / "sinfo.does").write_text(
        "printf '%s\\n' 'gpu01 idle' 'gpu02 mixed' 'old down*' 'login idle' 'gpu01 idle'\n"
    )
    assert nodes_up(CLUSTER, environment(), idle=False) == {"gpu01", "gpu02"}
    assert nodes_up(CLUSTER, environment(), idle=True) == {"gpu01"}
    (slurm / "sinfo.does").write_text("printf '%s\\n' 'gpu01 idle*' 'gpu02 drained'\n")
    assert nodes_up(CLUSTER, environment(), idle=False) == frozenset()
    (slurm / "sinfo.does").write_text("exit 1\n")
    assert nodes_up(CLUSTER, environment(), idle=False) == frozenset()


def test_goes_back_as_it_is_or_as_another_job(slurm: Path) -> None:
    def go(wanted: list[str]) -> bool:
        variables = environment(**HET_JOB, SLURM_CONF="conf", SLURM_RESTART_COUNT="2")
        return back_in_queue(
            "7",
            variables,
            asked=["a", "b"],
            wanted=wanted,
            write_script=lambda nodes: Path("-".join(nodes)),
        )

    assert go(["b", "a"])
    assert go(["b"])
    assert calls(slurm) == [["scontrol", "requeue", "7"], ["sbatch", "--parsable", "b"]]
    told = (slurm / "env-sbatch").read_text().splitlines()
    assert "SLURM_CONF=conf" in told and f"{RESTARTS}=3" in told
    assert not any(line.startswith(("SLURM_JOB", "SLURM_HET")) for line in told)
    (slurm / "sbatch.does").write_text("echo full >&2; exit 1\n")
    assert not go(["b"])


def test_how_often_slurm_has_requeued_a_job(slurm: Path) -> None:
    (slurm / "scontrol.does").write_text("echo JobId=7 Requeue=1 Restarts=2 BatchFlag=1\n")
    assert requeues_of("7", environment()) == 2
    (slurm / "scontrol.does").write_text("exit 1\n")
    assert requeues_of("7", environment()) == -1


def test_the_script_keeps_its_job_when_a_node_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner_in(tmp_path, monkeypatch)
    launch = ("launch", "plan.json", "--cluster", "cluster.yaml", "--slurm", "job.sh", "--elastic")
    options = ("--min-gpus", "4", "--plan-options", "--profile profile.json", "--partition", "p")
    training = (*FLAGS, "--save", "a b", "--save-interval", "9")
    done = run(*launch, *options, "--", *training)
    assert done.exit_code == 0, done.output
    script = (tmp_path / "job.sh").read_text()
    subprocess.run(["bash", "-n", "job.sh"], check=True, cwd=tmp_path)
    components = script.count("#SBATCH hetjob") + 1
    for line in ("--no-kill", "--requeue", "--partition=p"):
        assert script.count(f"#SBATCH {line}\n") == components
    assert "--nodelist=new\n" in script and "--nodelist=old\n" in script
    # The words that the script's shell gives to the supervisor.
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = script.replace("PYTHON=python", "PYTHON=./python")
    told = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    words = told.stdout.decode().split("\0")[:-1]
    assert words[:3] == ["-m", "zorse_megatron", "supervise"]
    assert words[words.index("--") + 1 :] == list(training)
    assert words[words.index("--plan-options") + 1] == "--profile profile.json"
    assert words[words.index("--min-gpus") + 1] == "4"
    # The supervisor reads all of its options; outside of a job it says so.
    said = run(*words[2:])
    assert "found no Slurm job around this command" in said.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slurm", "job.sh", "--elastic"), "found no --save in the training command"),
        (("--torchrun", "--elastic", "--grow", "now"), "found it with --torchrun"),
        (("--slurm", "job.sh", "--min-gpus", "4"), "found it without --elastic"),
        (("--slurm", "job.sh", "--elastic", "--grow", "soon"), "found 'soon'"),
    ],
)
def test_odd_options(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner_in(tmp_path, monkeypatch)
    done = run("launch", "plan.json", "--cluster", "cluster.yaml", *words, "--json", "--", *FLAGS)
    assert done.exit_code == 1
    assert said in f"found {json.loads(done.output)['problems'][0]['found']}"
