"""Ranks of a job end in time, with their last words, and none outlives who started it."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from zorse_megatron.emulate.rank_jobs import RankJob, RanksEnd, run_spawned
from zorse_megatron.errors import RankFailure
from zorse_megatron.launch.rank_environment import share_gpus


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
        "from tests.unit.test_rank_jobs import waiting\n"
        "from zorse_megatron.emulate.rank_jobs import exits_on_signals, run_spawned\n"
        "with exits_on_signals():\n"
        f"    run_spawned(waiting(Path({str(tmp_path)!r}), 60.0))\n"
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


def test_each_rank_that_shares_is_another_host_to_nccl():
    environments = [{"RANK": str(rank), "ZORSE_SHARE_GPUS": "1"} for rank in range(3)]
    for each in environments:
        share_gpus(each)
    assert len({each["NCCL_HOSTID"] for each in environments}) == 3
    untouched = {"RANK": "1"}
    share_gpus(untouched)
    assert untouched == {"RANK": "1"}
