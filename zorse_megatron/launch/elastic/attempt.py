"""One start of the ranks: runs on every node, from the first one's end to the last one's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zorse_megatron.launch.elastic.replan import JobFiles

_POLL_S = 0.2
_KILL_WAIT_S = 30.0
"""How long what was killed may take to be gone, before it is left alone."""


class NodeRun(Protocol):
    """The ranks of one node."""

    node: str

    def poll(self) -> int | None:
        """Their exit status, the highest one; None: not all have ended."""

    def abandon(self) -> None:
        """Wait for them no longer."""


class Machines(Protocol):
    """Nodes on which ranks can be started."""

    def answering(self) -> frozenset[str]:
        """Names, as in the cluster file, of nodes that could start ranks now."""

    def start(self, files: JobFiles, number: int) -> Sequence[NodeRun]:
        """Start all ranks; `number`: of this attempt, from 0.

        Raises ZorseError where not all can be started: then none is left.
        """

    def ask_to_save(self) -> None:
        """Tell all ranks to save and end."""

    def kill(self) -> None:
        """End all ranks that are left."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How an attempt ended."""

    status: int
    """0 if that of all nodes is; 2 if a node's is; else the highest one."""
    first_end: float
    """When the first node's ranks ended, by `time.time`."""
    silent: tuple[str, ...]
    """Nodes whose ranks had to be ended."""


def run_attempt(
    machines: Machines,
    files: JobFiles,
    number: int,
    *,
    grace_s: float,
    should_stop: Callable[[], bool],
) -> Ended:
    """Start the ranks and wait for their end; `should_stop` is asked all the time, until it is so.

    `grace_s`: how long after the first node's end the others' are waited for.
    """
    runs = machines.start(files, number)
    first_end: float | None = None
    is_asked, is_killed = False, False
    deadline_s = float("inf")
    while any(run.poll() is None for run in runs):
        if not is_asked and should_stop():
            is_asked = True
            machines.ask_to_save()
        if first_end is None and any(run.poll() is not None for run in runs):
            first_end, deadline_s = time.time(), time.monotonic() + grace_s
        if time.monotonic() > deadline_s:
            if is_killed:
                break
            is_killed, deadline_s = True, time.monotonic() + _KILL_WAIT_S
            silent = [run for run in runs if run.poll() is None]
            machines.kill()
        time.sleep(_POLL_S)
    late = [run for run in runs if run.poll() is None]
    for run in late:
        run.abandon()
    return Ended(
        status=_status([run.poll() for run in runs]),
        first_end=time.time() if first_end is None else first_end,
        silent=tuple(run.node for run in (silent if is_killed else [])),
    )


def _status(statuses: Sequence[int | None]) -> int:
    known = [137 if status is None else abs(status) for status in statuses]
    return 2 if 2 in known else max(known)
