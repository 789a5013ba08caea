"""Stages on a GPU's streams: each behind what it needs, and behind nothing else."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zorse_megatron.runtime import collectives
from zorse_megatron.runtime.collectives import Stage, StagedWork, start_stages
from zorse_megatron.runtime.host_link import HostWorker


class Stream:
    """Knows what is done before what is launched on it next."""

    def __init__(self) -> None:
        self.before: set[str] = set()

    def record_event(self) -> frozenset[str]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event


class Device:
    """Streams in the place of torch.cuda's, and what was done behind what."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream()
        self.behind: dict[str, frozenset[str]] = {}
        sides = {True: Stream(), False: Stream()}
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(collectives, "_side_stream", lambda _, exchanges: sides[exchanges])

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def do(self, name: str) -> None:
        """Launch something, behind all that the current stream has waited for."""
        self.behind[name] = frozenset(self.current.before)
        self.current.before.add(name)

    def start(self, name: str) -> Callable[[], list[Any]]:
        """Of a collective: on a stream of NCCL's own, which the current one waits for."""

        def launch() -> list[Any]:
            self.behind[name] = frozenset(self.current.before)
            return [SimpleNamespace(wait=lambda: self.current.before.add(name))]

        return launch

    def stage(self, name: str, kind: Any, after: int | None = None) -> Stage:
        return Stage(
            group=None,  # type: ignore[arg-type]
            kind=kind,
            sizes=(),
            start=self.start(name),
            after=after,
            then=lambda: self.do(f"after {name}"),
        )


def test_each_stage_waits_for_its_own_and_the_caller_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    device.do("backward")
    stages = [
        device.stage("foreign sums", "reduce_scatter"),
        device.stage("exchange", "exchange", after=0),
        device.stage("own sums", "reduce_scatter"),
    ]
    whole: Any = SimpleNamespace(is_cuda=True, device=None)
    work = start_stages(stages, whole, lambda: device.do("finish"), (), HostWorker())
    foreign = {"backward", "foreign sums", "after foreign sums"}
    assert device.behind["foreign sums"] == {"backward"}
    assert device.behind["exchange"] == foreign
    assert device.behind["own sums"] == foreign  # the same communicator; not the messages
    each = {f"{a}{name}" for a in ("", "after ") for name in ("exchange", "own sums")}
    assert device.behind["finish"] == foreign | each
    assert device.main.before == {"backward"}  # goes on beside it
    work.wait()
    assert device.main.before == foreign | each | {"finish"}


def test_errors_of_the_host_s_thread_are_the_waiter_s() -> None:
    worker = HostWorker()

    def fail() -> None:
        raise OSError("a peer is gone")

    failing, next_one = worker.submit(fail), worker.submit(lambda: None)
    with pytest.raises(OSError, match="a peer is gone"):
        failing.result()
    next_one.result()


def test_what_a_task_has_worked_on_is_let_go_with_it() -> None:
    """A copy of all state would stay in the host's memory until somebody waits."""
    held = torch.zeros(3)
    there = weakref.ref(held)
    task = HostWorker().submit(partial(held.__setitem__, 0, 1.0))
    del held
    task.result()
    assert there() is None


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


def test_work_is_not_done_before_the_host_s_thread_is() -> None:
    may_go = threading.Event()
    work = StagedWork((), HostWorker().submit(lambda: assert_set(may_go)).result, ())
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    may_go.set()
    waiter.join(10)
    assert not waiter.is_alive()
