"""Trains in attempts: after a failure, with the nodes that answer, from the newest checkpoint."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from zorse_megatron.errors import ZorseError
from zorse_megatron.files.write import NotWritten, append_line
from zorse_megatron.launch.elastic.attempt import Ended, Machines, run_attempt
from zorse_megatron.launch.elastic.replan import JobFiles, Replanner
from zorse_megatron.launch.elastic.saved import latest_named, newest_saved
from zorse_megatron.log import say

BAD_INPUT = 2
_NO_PLAN = 1
_NOT_STARTED = 1


class Wish(Enum):
    """Why ranks are asked to save and end."""

    STOP = "stop"
    """The time limit is near."""
    GROW = "grow"
    """Nodes are there that could take part."""


@dataclass(kw_only=True)
class Wishes:
    """What others ask of the attempt that runs."""

    must_stop: bool = False
    """The time limit is near: a signal may say so at any time, whatever else is wished."""
    should_grow: bool = False
    looks_for_nodes: Callable[[JobFiles], bool] = lambda files: False
    """Whether nodes that are not in these files could take part now."""
    look_every_s: float = 60.0
    only_after_save: bool = False
    """Whether to ask for more nodes only once something was saved in this attempt."""

    @property
    def wish(self) -> Wish | None:
        """What comes first."""
        if self.must_stop:
            return Wish.STOP
        return Wish.GROW if self.should_grow else None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to give up."""

    max_failures: int = 20
    """Failures in a row without a new checkpoint."""
    grace_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How training under supervision ended."""

    status: int
    wish: Wish | None = None
    """Why it is not done although nothing failed."""
    has_saved: bool = False
    """Whether it has saved since it was started."""
    needs_nodes: bool = False
    """Whether there is nothing to go on with on the nodes that answer."""


@dataclass(kw_only=True)
class Supervisor:
    """Runs attempts until training is done, has to stop, or cannot go on."""

    machines: Machines
    replanner: Replanner
    limits: Limits = field(default_factory=Limits)
    wishes: Wishes = field(default_factory=Wishes)
    log: Path | None = None
    """Gets a line of JSON for each attempt."""

    def run(self) -> Outcome:
        """Return how it ended; has said why."""
        failures, number = 0, 0
        started = latest_named(self.replanner.save)
        while True:
            asked_s = time.time()
            try:
                present = self.machines.answering()
                seen_s = time.time()
                files = self.replanner.files_for(present)
            except ZorseError as error:
                say(f"error: {error}")
                return Outcome(status=_NO_PLAN, needs_nodes=True)
            planned_s = time.time()
            if self.wishes.wish is not None:  # ranks would only be started to be ended
                has_saved = latest_named(self.replanner.save) != started
                return Outcome(status=_NO_PLAN, wish=self.wishes.wish, has_saved=has_saved)
            self._tell_start(files, seen_s - asked_s, planned_s - seen_s)
            before = latest_named(self.replanner.save)
            ended = self._attempt(files, number)
            times = {"asked": asked_s, "seen": seen_s, "planned": planned_s}
            self._note(number, files, ended, times)
            number += 1
            has_saved = latest_named(self.replanner.save) != before
            if self.wishes.wish is not None:
                saved_at_all = latest_named(self.replanner.save) != started
                return Outcome(status=ended.status, wish=self.wishes.wish, has_saved=saved_at_all)
            if ended.status == 0:
                return Outcome(status=0)
            failures = 1 if has_saved else failures + 1
            self._tell_failure(ended, failures)
            if self._is_final(ended, present, failures):
                return Outcome(status=ended.status)

    def _attempt(self, files: JobFiles, number: int) -> Ended:
        before, looked_s = latest_named(self.replanner.save), time.monotonic()

        def should_stop() -> bool:
            nonlocal looked_s
            wishes = self.wishes
            if wishes.wish is None and time.monotonic() - looked_s > wishes.look_every_s:
                looked_s = time.monotonic()
                may = not wishes.only_after_save or latest_named(self.replanner.save) != before
                if may and wishes.looks_for_nodes(files):
                    wishes.should_grow = True
                    say("more nodes are there: the ranks save, and start again with them")
            return wishes.wish is not None

        try:
            return run_attempt(
                self.machines,
                files,
                number,
                grace_s=self.limits.grace_s,
                should_stop=should_stop,
            )
        except ZorseError as error:  # a node may have gone since it answered: one failure more
            say(f"error: {error}")
            return Ended(status=_NOT_STARTED, first_end=time.time(), silent=())

    def _is_final(self, ended: Ended, present: frozenset[str], failures: int) -> bool:
        if failures > self.limits.max_failures:
            say(f"error: {failures} failures in a row without a new checkpoint: the job ends")
            return True
        # A node that lost a GPU refuses its plan, too: then another start helps, without it.
        return ended.status == BAD_INPUT and self.machines.answering() == present

    def _tell_start(self, files: JobFiles, seen_s: float, plan_s: float) -> None:
        left = files.left
        without = f", without {', '.join(left.lost)}" if left.lost else ""
        cut_off = f", {', '.join(left.cut_off)} cut off" if left.cut_off else ""
        planned = f"planned in {plan_s:.1f} s" if files.is_new else f"plan {files.plan}"
        say(
            f"{len(left.ranks)} GPUs on {', '.join(left.names)}{without}{cut_off} "
            f"(asked for {seen_s:.1f} s; {planned})"
        )

    def _tell_failure(self, ended: Ended, failures: int) -> None:
        saved = newest_saved(self.replanner.save)
        goes_on = "from the beginning" if saved is None else f"from iteration {saved}"
        silent = f", {', '.join(ended.silent)} did not end" if ended.silent else ""
        again = f"failure {failures} since the last save" if failures > 1 else "failed"
        say(f"{again} (status {ended.status}{silent}): looking for nodes, to go on {goes_on}")

    def _note(self, number: int, files: JobFiles, ended: Ended, times: dict[str, float]) -> None:
        if self.log is None:
            return
        entry = {
            "attempt": number,
            "nodes": files.left.names,
            "plan": str(files.plan),
            "is_new_plan": files.is_new,
            "status": ended.status,
            "silent": ended.silent,
            **{f"{name}_s": round(value, 3) for name, value in times.items()},
            "first_end_s": round(ended.first_end, 3),
            "ended_s": round(time.time(), 3),
        }
        try:
            append_line(self.log, json.dumps(entry))
        except NotWritten as error:
            say(f"note: {error}")
