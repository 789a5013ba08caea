"""A large search in two halves at once: what starts from groupings, and what from cuts of lines.

The halves know nothing of each other and share the effort evenly, so what is found does not depend
on how many processors there are: with one they run one after the other. The second one has a fresh
interpreter (`half_process`), because a fork of a process with threads, such as a progress bar's,
may never end, and `multiprocessing` would import the caller's main module again.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from zorse_megatron.planner.effort import Effort
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.judge import Verdict, best_first
from zorse_megatron.planner.outcome import Considered, Progress
from zorse_megatron.planner.sources import Source
from zorse_megatron.planner.zorse import ZorseSearch
from zorse_megatron.processors import num_processors

_TOGETHER_UP_TO = 32  # GPUs; a search of so few is done sooner than a process has started


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search, or a half of it, found."""

    verdicts: list[Verdict]
    """Those that fit, fastest first."""
    considered: Considered


@dataclass(frozen=True, kw_only=True)
class Task:
    """A search, or a half of it."""

    inputs: Inputs
    effort: Effort
    sources: tuple[Source, ...]

    def run(self, on_progress: Callable[[Progress], None]) -> Found:
        """Search in this process."""
        search = ZorseSearch(self.inputs, self.effort, on_progress)
        verdicts = search.run(self.sources)
        considered = Considered(
            groupings=len(search.groupings.seen),
            estimated=search.estimator.num_estimated,
            simulated=search.judge.num_simulated,
        )
        return Found(verdicts=verdicts, considered=considered)


def search(inputs: Inputs, on_progress: Callable[[Progress], None]) -> Found:
    """Search from both sources. Raises RuntimeError if the second process fails."""
    effort = Effort.of(inputs)
    if inputs.world_size <= _TOGETHER_UP_TO:
        return Task(inputs=inputs, effort=effort, sources=("groupings", "lines")).run(on_progress)
    # The best plan nearly always comes from a line, so the simulator looks at more of these.
    most = effort.computations
    halves: dict[Source, Effort] = {
        "lines": effort.halved(computations=most),
        "groupings": effort.halved(computations=most // 2),
    }
    mine, other = (
        Task(inputs=inputs, effort=each, sources=(source,)) for source, each in halves.items()
    )
    if num_processors() < 2:
        return _joined([mine.run(on_progress), other.run(on_progress)])
    with _started(other) as process:
        found = mine.run(on_progress)
        on_progress(Progress(phase="waiting for the other half", done=0, total=1))
        return _joined([found, _result(process)])


@contextmanager
def _started(task: Task) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "zorse_megatron.planner.half_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it ended at once: its status is looked at later
                process.stdin.write(pickle.dumps(task))
                process.stdin.close()
            yield process
        finally:
            process.kill()  # it has ended, unless this process is being stopped


def _result(process: subprocess.Popen[bytes]) -> Found:
    assert process.stdout is not None
    answer = process.stdout.read()
    if process.wait():
        raise RuntimeError(
            f"the planner's second process ended with status {process.returncode}; its error is "
            "above. If it was killed, memory is likely short"
        )
    found = pickle.loads(answer)
    assert isinstance(found, Found), type(found)
    return found


def _joined(halves: Sequence[Found]) -> Found:
    """All verdicts, each plan once; the first half's where both are as fast."""
    once: dict[object, Verdict] = {}
    for verdict in best_first([verdict for half in halves for verdict in half.verdicts]):
        plan = verdict.plan
        once.setdefault((plan.groups, plan.chunks, plan.schedule), verdict)
    return Found(
        verdicts=list(once.values()),
        considered=Considered(
            groupings=sum(half.considered.groupings for half in halves),
            estimated=sum(half.considered.estimated for half in halves),
            simulated=sum(half.considered.simulated for half in halves),
        ),
    )
