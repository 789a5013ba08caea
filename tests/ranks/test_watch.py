"""Ranks that die in every way: who is named, once, how soon, and how all ranks end."""

import os
import re
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks.forked import make_ready, start
from zorse_megatron.live.root_cause import Timeouts
from zorse_megatron.live.watched_rank import LOST_RANK, SharedState, WatchedRank
from zorse_megatron.processes import free_port

WORLD_SIZE = 3
STARTED_S = 4.0
"""What starting three processes may take, on a machine that has other work."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    statuses: list[int]
    output: str
    wall_s: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("zorse: error:")]


def watched_environment(
    deaths: str, work: Path, timeouts: Timeouts | None = None
) -> dict[str, str]:
    """What `watched_entry` reads, beside what a launcher sets."""
    timeouts = timeouts or Timeouts()
    return {
        "ZORSE_TEST_HUB": str(work / "hub"),
        "ZORSE_TEST_DEATHS": deaths,
        "ZORSE_TEST_SILENCE_S": str(timeouts.silence_s),
        "ZORSE_TEST_STOPPED_S": str(timeouts.stopped_s),
        "ZORSE_TEST_MEETING_S": str(timeouts.meeting_s),
    }


def run(
    deaths: str, work: Path, timeouts: Timeouts | None = None, *, num_started: int = WORLD_SIZE
) -> Ended:
    """Run a job with one output for all ranks, as a launcher's; the last ones may not start."""
    started_s, output = time.monotonic(), work / "output"
    ranks = [
        start(
            "tests.ranks.watched_entry",
            (),
            os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1"}
            | watched_environment(deaths, work, timeouts),
            output,
        )
        for rank in range(num_started)
    ]
    for rank in ranks:
        rank.join(max(0.0, started_s + 45 - time.monotonic()))
    for rank in ranks:
        if rank.exitcode is None:
            os.killpg(rank.pid, signal.SIGKILL)
    wall_s = time.monotonic() - started_s
    for rank in ranks:
        rank.join()
    return Ended(
        statuses=[rank.exitcode for rank in ranks], output=output.read_text(), wall_s=wall_s
    )


# `test_torchrun` kills rank 1, and its watcher.
DEATHS = [
    ("0:kill", "rank 0 was killed by signal 9 (SIGKILL) in iteration 5", -9),
    ("2:segv", "rank 2 was killed by signal 11 (SIGSEGV) in iteration 5", -11),
    ("1:leave", "rank 1 ended with status 7, without a word in iteration 5", 7),
    ("0:raise", "rank 0 failed (ValueError: a fault) in iteration 5", 1),
    ("2:raise others:lose", "rank 2 failed (ValueError: a fault) in iteration 5", 1),
    ("2:exit others:lose", "rank 2 has exited alone, with status 7, in iteration 5", 7),
    ("2:kill others:abort", "rank 2 was killed by signal 9 (SIGKILL) in iteration 5", -9),
    ("0:kill-watcher", "rank 0 is gone, and so is the process that watched it", -9),
]
# The entry raises what it refuses.
IN_ONE_WAY = {"others:exit": 7, "others:refuse": 1}
ON_REQUEST = {
    "others:term": ("SIGTERM", -15),
    "others:int": ("SIGINT", -2),
    "others:save-and-end": ("SIGTERM", 0),
}
# Jobs in which a limit has to pass, which is shortened.
LIMITED = {
    "0:stop": Timeouts(stopped_s=2),
    "0:stop-watcher": Timeouts(silence_s=3),
    "1:stop-watcher": Timeouts(silence_s=3),
    "1:lose": Timeouts(silence_s=2),
    "1:hold 0:wait-4 2:hold": Timeouts(silence_s=1.5),
}
ABSENT = ""
"""The job of which the last rank never starts."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All jobs by what happens in them, several at a time, as they mostly wait."""

    def begin(deaths: str, *timeouts: Timeouts, num_started: int = WORLD_SIZE) -> Future[Ended]:
        work = tmp_path_factory.mktemp("job")
        return pool.submit(run, deaths, work, *timeouts, num_started=num_started)

    make_ready()
    with ThreadPoolExecutor(max_workers=4) as pool:
        jobs = {deaths: begin(deaths, timeouts) for deaths, timeouts in LIMITED.items()}
        jobs[ABSENT] = begin("", Timeouts(meeting_s=3), num_started=WORLD_SIZE - 1)
        for deaths in (*(deaths for deaths, _, _ in DEATHS), *IN_ONE_WAY, *ON_REQUEST):
            jobs[deaths] = begin(deaths)
        return {deaths: job.result() for deaths, job in jobs.items()}


@pytest.mark.parametrize(("deaths", "named", "status"), DEATHS)
def test_names_the_dead_once_and_last_within_seconds(
    deaths: str, named: str, status: int, ended: dict[str, Ended]
) -> None:
    """Nothing here is shortened: the limits are those that a job has."""
    job = ended[deaths]
    (line,) = job.errors
    assert named in line
    assert job.output.splitlines()[-1] == line
    dead = int(deaths[0])
    for rank, found in enumerate(job.statuses):
        survived = (LOST_RANK, -signal.SIGABRT) if "abort" in deaths else (LOST_RANK,)
        assert found == status if rank == dead else found in survived
    assert job.wall_s < STARTED_S + 5
    # Of the rank that is at fault, if it can still write one.
    assert job.output.count("Traceback") == ("raise" in deaths)


def test_names_a_stopped_rank(ended: dict[str, Ended]) -> None:
    job = ended["0:stop"]
    (line,) = job.errors
    assert "rank 0 has been stopped (SIGSTOP) for 2 s in iteration 5" in line
    assert all(job.statuses)
    assert job.wall_s < STARTED_S + 7


@pytest.mark.parametrize("dead", [0, 1])
def test_names_a_node_that_is_silent(dead: int, ended: dict[str, Ended]) -> None:
    """A stopped watcher says no more than a node that has lost its network."""
    job = ended[f"{dead}:stop-watcher"]
    (line,) = job.errors
    silent = re.search(rf"rank {dead} has been silent for (\d+) s", line)
    assert silent is not None, line
    assert 3 <= int(silent[1]) <= 6, "3 s, and more where the machine is busy"
    assert job.statuses[1 - dead] == job.statuses[2] == LOST_RANK
    assert job.statuses[dead] == -signal.SIGKILL, "its own rank ends it"


def test_ranks_that_lose_contact_though_all_live_say_so(ended: dict[str, Ended]) -> None:
    job = ended["1:lose"]
    (line,) = job.errors
    assert "rank 1 lost contact to another rank, though every process is alive" in line
    assert "(RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed by peer" in line
    assert job.statuses == [LOST_RANK, 1, LOST_RANK]
    assert job.output.count("Traceback") == 1


def test_a_long_call_that_holds_pythons_lock_is_no_death(ended: dict[str, Ended]) -> None:
    job = ended["1:hold 0:wait-4 2:hold"]
    assert job.statuses == [0, 0, 0] and not job.errors


@pytest.mark.parametrize("deaths", IN_ONE_WAY)
def test_ranks_that_end_in_one_way_say_it_themselves(deaths: str, ended: dict[str, Ended]) -> None:
    job = ended[deaths]
    assert not job.errors
    assert set(job.statuses) == {IN_ONE_WAY[deaths]}
    assert job.wall_s < STARTED_S + 3


@pytest.mark.parametrize("deaths", ON_REQUEST)
def test_a_request_to_end_is_answered_by_what_is_saved(
    deaths: str, ended: dict[str, Ended]
) -> None:
    job, (name, status) = ended[deaths], ON_REQUEST[deaths]
    assert set(job.statuses) == {status}
    said = [line for line in job.output.splitlines() if line.startswith("zorse: ")]
    assert said == [f"zorse: ended by {name}. Iteration 4 is saved."]
    assert job.wall_s < STARTED_S + 3


def test_a_rank_that_does_not_come_to_meet_the_others_is_named(ended: dict[str, Ended]) -> None:
    """As where its node is lost between the rendezvous of an elastic job and its start."""
    job = ended[ABSENT]
    (line,) = job.errors
    assert "rank 2 has not come to meet the others in 3 s" in line
    assert job.statuses == [LOST_RANK] * (WORLD_SIZE - 1)
    assert job.wall_s < STARTED_S + 3 + 5


def test_ranks_do_not_wait_for_long_where_rank_0_does_not_come(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from zorse_megatron.live import hub_address
    from zorse_megatron.live.hub_address import exchange

    monkeypatch.setattr(hub_address, "NAMED_S", 0.5)
    place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    started_s = time.monotonic()
    with pytest.raises(ConnectionError, match=r"rank 0 has not come to 127\.0\.0\.1:\d+ in 2 s"):
        exchange(WatchedRank(SharedState(), Timeouts(meeting_s=2)), "")
    assert time.monotonic() - started_s < 30
    assert capfd.readouterr().out.count("in 0.5 s; the others wait 2 s") == 1
