"""`zorse_megatron.pretrain`, but one rank is killed at some instant within one of its phases.

`ZORSE_TEST_KILL` is JSON: `rank`; `phase`, a regular expression of what a rank says that it does;
`occurrence`, from 1 on; `after_s`, or at the phase's end if that comes first; and `report`, the
file that gets the instant and the phase. `ZORSE_TEST_REQUEST`: a plan to move to, asked for at the
start, and the directory of the run's status.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zorse_megatron.live.move import REQUEST_NAME
from zorse_megatron.live.watched_rank import WatchedRank
from zorse_megatron.pretrain import main

RANK = int(os.environ["RANK"])


class Killer:
    """Ends this process within a phase."""

    def __init__(
        self, *, rank: int, phase: str, occurrence: int, after_s: float, report: str
    ) -> None:
        self.phase, self.left = re.compile(phase), occurrence
        self.after_s, self.report = after_s, Path(report)
        self.armed = ""

    def enter(self, phase: str) -> None:
        if self.armed:
            self.kill()
        self.left -= bool(self.phase.search(phase))
        if not self.left:
            self.armed = phase
            threading.Timer(self.after_s, self.kill).start()

    def kill(self) -> None:
        found = {"killed_s": time.time(), "phase": self.armed}
        self.report.write_text(json.dumps(found))
        os.kill(os.getpid(), signal.SIGKILL)


def killing(enter: Callable[..., None], killer: Killer) -> Callable[..., None]:
    def enter_phase(watched: Any, phase: str) -> None:
        killer.enter(phase)
        enter(watched, phase)

    return enter_phase


def asking(begin: Callable[..., Any], status: str, plan: str) -> Callable[..., Any]:
    def begin_iteration(watch: Any, number: int) -> Any:
        if watch.rank == 0 and number == 0 and not watch.reporter.status.moves:
            Path(status, REQUEST_NAME).write_bytes(Path(plan).read_bytes())
        return begin(watch, number)

    return begin_iteration


if __name__ == "__main__":
    told = json.loads(os.environ.get("ZORSE_TEST_KILL", "{}"))
    if told.get("rank") == RANK:
        WatchedRank.enter = killing(WatchedRank.enter, Killer(**told))  # type: ignore[method-assign]
    if "ZORSE_TEST_REQUEST" in os.environ:
        from zorse_megatron.adapter.watching import RunWatch

        RunWatch.begin = asking(  # type: ignore[method-assign]
            RunWatch.begin, *os.environ["ZORSE_TEST_REQUEST"].split(os.pathsep)
        )
    main()
