"""Processes of ranks: which rank they are, where, and how they end."""

import dataclasses
import os
import re
import signal
import string
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron import pretrain
from zorse_megatron.emulate import fork_server, rank_jobs
from zorse_megatron.emulate.rank_jobs import (
    ForkClient,
    RankJob,
    RanksEnd,
    run_spawned,
)
from zorse_megatron.errors import LaunchError, Problem, RankFailure
from zorse_megatron.launch.rank_environment import (
    VARIABLE,
    hosts_in,
    launched_rank,
    queue_environment,
    share_gpus,
)
from zorse_megatron.processes import num_processors

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-11]",
    "SLURMD_NODENAME": "gpu09",
}


OF_STEP = ("srun", 3, 8, 1, "gpu09", "gpu08")
COMPONENT = {"SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]", "SLURM_STEP_NODELIST": "b[1-4]"}
OWN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "ZORSE_NODE_NAME": "left"}
PLACES = {
    "torchrun": (TORCHRUN, ("torchrun", 5, 8, 1, "worker", "head", 29500)),
    "srun, rank 0 on the first host": (SRUN, OF_STEP),
    "srun, rank 0 in the first component": (SRUN | COMPONENT, (*OF_STEP[:5], "a1")),
    "what the user sets comes first": (SRUN | OWN, (*OF_STEP[:4], "left", "127.0.0.1", 1234)),
    "torchrun inside a job of Slurm": (SRUN | TORCHRUN, ("torchrun", 5, 8, 1, "gpu09")),
    "by hand, alone": ({}, ("none", 0, 1, 0, "worker")),
}


@pytest.mark.parametrize(("environment", "expected"), PLACES.values(), ids=PLACES)
def test_which_rank_this_is(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    place = launched_rank(environment, "worker")
    found = dataclasses.astuple(place)  # launcher, rank, world size, local rank, node, master
    assert found[: len(expected)] == expected
    if environment == TORCHRUN:
        assert place.torch_environment() == TORCHRUN


def test_every_rank_of_a_step_has_the_same_port_and_another_step_another_one() -> None:
    ports = {launched_rank(SRUN | {"SLURM_PROCID": str(n)}, "host").master_port for n in range(8)}
    assert len(ports) == 1
    assert launched_rank(SRUN | {"SLURM_STEP_ID": "1"}, "host").master_port not in ports


def test_ranks_of_all_components_of_a_heterogeneous_job_have_the_same_port() -> None:
    """As Slurm 22.05 sets them: the second component has a number of its own."""
    first = {"SLURM_JOB_ID_HET_GROUP_0": "812", "SLURM_JOB_ID_HET_GROUP_1": "813"}
    port = launched_rank(SRUN | first, "host").master_port
    assert launched_rank(SRUN | first | {"SLURM_JOB_ID": "813"}, "host").master_port == port
    without = {name: value for name, value in SRUN.items() if name != "SLURM_JOB_ID"}
    assert launched_rank(without | first, "host").master_port == port
    assert launched_rank(without | {"SLURM_JOBID": "812"}, "host").master_port == port


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_one_process_in_an_allocation_of_several_tasks_is_told_of_srun(
    step: dict[str, str],
) -> None:
    shell = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | step
    with pytest.raises(LaunchError, match="Put srun in front"):
        launched_rank(shell, "host")


def test_every_missing_variable_is_named() -> None:
    with pytest.raises(LaunchError) as caught:
        launched_rank({"RANK": "one", "WORLD_SIZE": "2"}, "host")
    assert [problem.where for problem in caught.value.problems] == [
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]


def test_a_rank_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(LaunchError, match="rank 8 of 8"):
        launched_rank(TORCHRUN | {"RANK": "8"}, "host")


_NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=4)


@given(prefix=_NAMES, numbers=st.lists(st.integers(0, 999), min_size=1, max_size=6, unique=True))
def test_a_list_in_brackets_is_each_of_its_hosts(prefix: str, numbers: list[int]) -> None:
    inner = ",".join(f"{number:03}" for number in numbers)
    assert list(hosts_in(f"{prefix}[{inner}],z")) == [*(f"{prefix}{n:03}" for n in numbers), "z"]


@given(prefix=_NAMES, first=st.integers(0, 50), count=st.integers(1, 20))
def test_a_range_is_every_number_in_it(prefix: str, first: int, count: int) -> None:
    last = first + count - 1
    expected = [f"{prefix}{number:02}-ib" for number in range(first, last + 1)]
    assert list(hosts_in(f"{prefix}[{first:02}-{last:02}]-ib")) == expected


# Jobs.


def waiting(directory, limit_s):
    """Two servers, which would wait forever."""
    return RankJob(name="x", entry="http.server", arguments=("0",), world_size=2,
                   directory=directory, limit_s=limit_s)  # fmt: skip


def test_what_is_over_its_time_is_ended(tmp_path):
    started_s = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        run_spawned(waiting(tmp_path, 1.0))
    assert time.monotonic() - started_s < 30
    found = [problem.found for problem in raised.value.problems]
    assert len(found) == 2 and all(re.fullmatch(r"no end in \d+ s", each) for each in found)
    assert ranks_in(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_survives_who_started_it(number, status, tmp_path):
    """SIGINT is Python's own."""
    code = (
        "from pathlib import Path\n"
        "from pathlib import PosixPath\n"
        "from zorse_megatron.emulate.rank_jobs import RankJob, exits_on_signals, run_spawned\n"
        f"job = RankJob(**{vars(waiting(tmp_path, 60.0))!r})\n"
        "with exits_on_signals():\n"
        "    run_spawned(job)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as starter:
        until(lambda: len(ranks_in(tmp_path)) == 2)
        starter.send_signal(number)
        assert starter.wait(60) == status
    try:
        until(lambda: not ranks_in(tmp_path))
    finally:
        for pid in ranks_in(tmp_path):
            os.kill(int(pid), signal.SIGKILL)


def until(holds, limit_s=60.0):
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def ranks_in(directory):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and runs_in(pid, directory)]


def runs_in(pid, directory):
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(directory)
    except OSError:
        return False


@pytest.mark.parametrize("statuses", [(None, None), (0, None)])
def test_ranks_that_had_to_be_ended_have_failed(statuses, tmp_path):
    for rank in range(2):
        (tmp_path / f"rank_{rank}.txt").write_text("waits")
    end = RanksEnd(job=waiting(tmp_path, 3.0), statuses=statuses, wall_s=3.0)
    with pytest.raises(RankFailure) as raised:
        end.check()
    ended = statuses.count(None)
    assert [problem.found for problem in raised.value.problems] == ["no end in 3 s"] * ended


def test_what_fails_says_its_last_lines(tmp_path):
    job = dataclasses.replace(waiting(tmp_path, 20.0), entry="no_such_module", world_size=1)
    with pytest.raises(RankFailure, match="No module named no_such_module"):
        run_spawned(job)
    run_spawned(dataclasses.replace(job, entry="this"))
    assert "Beautiful is better than ugly" in (tmp_path / "rank_0.txt").read_text()


@pytest.mark.parametrize(
    ("log", "reason"), [("what\nCUDA is lost", "CUDA is lost"), ("", "exit status 1")]
)
def test_ranks_on_gpus_are_spawned_where_they_cannot_be_forked(log, reason, monkeypatch, capsys):
    def fail(*_args, **_kwargs):
        remedy = f"Its last lines:\n{log}"
        problem = Problem(where="server", found="exit status 1", expected="a line", remedy=remedy)
        raise RankFailure("gone", [problem])

    monkeypatch.setattr(rank_jobs, "ForkClient", fail)
    with rank_jobs.runner_here(has_gpu=True) as run_job:
        assert run_job is run_spawned
    assert capsys.readouterr().out.endswith(f"takes longer: {reason}\n")
    with pytest.raises(RankFailure), rank_jobs.runner_here(has_gpu=False):
        """Nothing takes the place of forked ranks on a CPU."""


# The child ends at once; a real server has no thread beside its own.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("lost", [RuntimeError("CUDA is lost\nelsewhere"), None])
def test_a_server_whose_children_cannot_use_cuda_ends(lost, monkeypatch, capfd):
    def ones(*_args, **_kwargs):
        if lost is not None:
            raise lost

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", ones)
    with nullcontext() if lost is None else pytest.raises(SystemExit):
        fork_server._refuse_broken_cuda()
    said = "" if lost is None else "a forked process cannot use CUDA: CUDA is lost\n"
    assert capfd.readouterr().err == said


def test_a_run_has_as_many_hardware_queues_as_there_are_unless_its_user_has_chosen():
    assert queue_environment({}) == {VARIABLE: "32"}
    assert queue_environment({VARIABLE: "1"}) == {}


def test_each_rank_that_shares_is_another_host_to_nccl():
    environments = [{"RANK": str(rank), "ZORSE_SHARE_GPUS": "1"} for rank in range(3)]
    for each in environments:
        share_gpus(each)
    assert len({each["NCCL_HOSTID"] for each in environments}) == 3
    untouched = {"RANK": "1"}
    share_gpus(untouched)
    assert untouched == {"RANK": "1"}


SPAWNED = """\
import os, runpy, signal
runpy.run_module("zorse_megatron.pretrain", run_name={name!r}, alter_sys=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def status_of(name: str) -> int:
    """As `multiprocessing.spawn._fixup_main_from_name` runs the module of the parent's main."""
    return subprocess.run([sys.executable, "-c", SPAWNED.format(name=name)], check=False).returncode


@pytest.mark.slow
def test_a_spawned_process_ignores_the_signal() -> None:
    assert status_of("__mp_main__") == 0


@pytest.mark.slow
def test_whoever_imports_the_module_does_not() -> None:
    assert status_of("zorse_megatron.pretrain") == -signal.SIGTERM


def test_what_fails_lets_go_of_its_iterators(monkeypatch):
    """Before Python waits for their workers: it keeps the error, and so its frames, until then."""
    held = []

    def run(argv, *, setup=None):
        iterator = type("Iterator", (), {})()
        held.append(weakref.ref(iterator))
        raise ValueError(argv)

    monkeypatch.setattr(pretrain, "run", run)
    with pytest.raises(ValueError, match="flag") as kept:
        pretrain.main(["flag"])
    assert held[0]() is None, kept


GONE_AT_ITS_FIRST_JOB = """
import sys
print("{}", flush=True)
sys.stdin.readline()
sys.exit("no memory left")
"""


def test_a_server_that_has_gone_is_told_for_every_job(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(GONE_AT_ITS_FIRST_JOB)
    client = ForkClient("server", working_directory=tmp_path)
    job = RankJob(name="x", arguments=(), world_size=1, limit_s=60.0, directory=tmp_path)
    for _ in range(2):
        with pytest.raises(RankFailure, match="found exit status 1") as failure:
            client.run(job)
        assert "no memory left" in str(failure.value)
    client.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot restrict it")
def test_only_those_that_this_process_may_use_count():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert num_processors() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("there", "expected"), [(6, 6), (None, 1)])
def test_elsewhere_all_of_them_count(there, expected, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: there)
    assert num_processors() == expected
