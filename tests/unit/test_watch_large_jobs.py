"""The watch of jobs with more ranks than tests start, and of jobs that are started again."""

import os
import resource
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from zorse_megatron.live import hub_address as exchange
from zorse_megatron.live import start_watch, watcher
from zorse_megatron.live.hub import Hub, LineSocket, Member
from zorse_megatron.live.root_cause import FailureKind, Limits, Report
from zorse_megatron.live.watched_rank import RankPage

RANKS_PER_NODE = 8


@pytest.fixture
def file_limit() -> Iterator[int]:
    """How many files this process may have if it asks for more."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_a_rank_that_joins_costs_the_hub_the_same_however_many_have_joined() -> None:
    """With all told of each join, 2,000 ranks took the hub 39 s: its own rank took it for dead."""
    num_ranks = 12 * RANKS_PER_NODE
    hub = Hub(num_ranks, limits=Limits(), describe=str, host="node 0")
    port = hub.listener.getsockname()[1]
    lines = {}
    for rank in reversed(range(1, num_ranks)):  # each takes the word from the one before
        lines[rank] = LineSocket(socket.create_connection(("127.0.0.1", port), timeout=5))
        host = f"node {rank // RANKS_PER_NODE}"
        lines[rank].send({"token": hub.token, "rank": rank, "host": host})
    while len(hub.hosts) < num_ranks:
        hub.work("", -1.0)
    told = {
        rank: [message["speaks"] for message in line.receive() if "speaks" in message]
        for rank, line in lines.items()
    }
    speakers = {rank for rank, words in told.items() if words[-1]}
    assert speakers == {1, *range(RANKS_PER_NODE, num_ranks, RANKS_PER_NODE)}
    assert max(map(len, told.values())) <= 3
    for line in [*lines.values(), hub.listener]:
        line.close()


def test_a_watcher_waits_for_more_files_than_select_knows(
    file_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not wait, and kept a core busy for as long as the job ran."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(file_limit, 4096), file_limit))
    ours, theirs = socket.socketpair()
    beyond = socket.socket(fileno=os.dup2(ours.fileno(), 2000))
    rank = os.posix_spawnp("sleep", ["sleep", "0.5"], os.environ)
    page, looks = RankPage(), 0

    class Post(Member):
        @property
        def is_joined(self) -> bool:
            return True

        def report(self, report: Report, now_s: float, *, ended: bool) -> None:
            self.is_over = ended

        @property
        def sockets(self) -> list[Any]:
            return [beyond]

        def work(self, address: str, now_s: float) -> None:
            nonlocal looks
            looks += 1

    page.word.write(f"{FailureKind.DONE.name}:")
    monkeypatch.setattr(watcher, "end_as", lambda status: None)
    watcher.Watcher(
        rank=1,
        process=rank,
        page=page,
        post=Post(1, limits=Limits(), host="here"),
        limits=Limits(),
        describe=str,
        find_hub=None,
    ).run()
    assert 1 <= looks <= 20
    for each in (ours, theirs, beyond):
        each.close()


def test_a_watcher_may_have_as_many_files_as_the_system_lets_it(file_limit: int) -> None:
    """With 1,024, the hub of a larger job left ranks waiting, and they took it for silent."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(file_limit, 1024), file_limit))
    start_watch._allow_many_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (file_limit, file_limit)


def test_ranks_that_are_started_again_wait_for_the_hub_of_this_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun keeps its store: ranks found the hub of before there, and ended the new job."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setenv("MASTER_ADDR", "node")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert exchange._exchanged(store, "1 a") == exchange._exchanged(store, "") == "node 1 a"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(dist.DistError):
        exchange._exchanged(store, "")
    assert exchange._exchanged(store, "2 b") == exchange._exchanged(store, "") == "node 2 b"
