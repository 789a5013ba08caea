"""`recording_entry`, asked three times: for what it cannot run, and twice for what it can.

The second time a rank fails as it sets its state aside. `$ZORSE_TEST_MOVES` is the status directory
with the first request in `first.json`, and that of the others in `then.json`. `owned-rank<R>.json`
says what a rank owned `before` and `after`: names with offsets and sizes of blocks. A run ends with
an assertion where anything of the old plan is still there when the new one is about to be built.
"""

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.errors import ZorseError
from zorse_megatron.live.move import REQUEST_NAME

DIRECTORY = Path(os.environ["ZORSE_TEST_MOVES"])
FAILS = 1
"""A rank."""


def ask_again() -> None:
    make_request_of("then.json")


def make_request_of(name: str) -> None:
    (DIRECTORY / REQUEST_NAME).write_text((DIRECTORY / name).read_text())


def asking_first(begin: Callable[..., Any]) -> Callable[..., Any]:
    def begin_iteration(watch: Any, number: int) -> Any:
        if watch.rank == 0 and number == 0 and not watch.reporter.status.moves:
            make_request_of("first.json")
        return begin(watch, number)

    return begin_iteration


def asking_for_another(checked_plan: Callable[..., Any], old: list[Any]) -> Callable[..., Any]:
    def check(run: Any, at: Any, optimizer: Any, data: bytes) -> Any:
        old.append(weakref.ref(at))  # which the session holds
        try:
            return checked_plan(run, at, optimizer, data)
        except ZorseError:
            if at.rank == 0:
                ask_again()
            raise

    return check


def failing_once(set_aside: Callable[..., Any], old: list[Any]) -> Callable[..., Any]:
    attempts: list[int] = []

    def set_state_aside(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        made, rank = set_aside(optimizer, *args, **kwargs), dist.get_rank()
        attempts.append(rank)
        if len(attempts) == 1:
            if rank == 0:
                ask_again()
            if rank == FAILS:
                raise MemoryError("no room for it")
        old.extend(map(weakref.ref, (optimizer, *optimizer.model_chunks)))
        return made

    return set_state_aside


def noting(move: Callable[..., Any]) -> Callable[..., Any]:
    def move_and_note(rank: int, aside: Any, parts: Any, told: Any, group: Any) -> None:
        both = {"before": told[rank].before, "after": told[rank].after}
        found = {
            when: [
                [name, list(block.offset), list(block.size)]
                for name, blocks in owned.items()
                for block in blocks
            ]
            for when, owned in both.items()
        }
        (DIRECTORY / f"owned-rank{rank}.json").write_text(json.dumps(found))
        move(rank, aside, parts, told, group)

    return move_and_note


def checking(forget: Callable[..., None], old: list[Any]) -> Callable[..., None]:
    def forget_and_check(groups: Any) -> None:
        forget(groups)
        assert old and not [each() for each in old if each() is not None]

    return forget_and_check


if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    from zorse_megatron.adapter import start
    from zorse_megatron.adapter.moving import leave_plan, state
    from zorse_megatron.adapter.watching import RunWatch

    left: list[Any] = []
    RunWatch.begin = asking_first(RunWatch.begin)  # type: ignore[method-assign]
    leave_plan.checked_plan = asking_for_another(leave_plan.checked_plan, left)
    leave_plan.set_aside = failing_once(leave_plan.set_aside, left)
    state._move = noting(state._move)
    start._forget_all = checking(start._forget_all, left)
    record()
