"""The workers of a search: one for few GPUs, two at once for many.

Which worker does what follows from the search alone, so what is found does not depend on how many
processors there are: with one, the second worker's tasks are done in this process too, one after
the other. Otherwise it has a fresh interpreter (`worker_process`), because a fork of a process with
threads, such as a progress bar's, may never end, and `multiprocessing` would import the caller's
main module again.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from zorse_megatron.planner.evaluate.gc_paused import gc_paused
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchProgress, SearchStats
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.worker import SearchWorker, Task
from zorse_megatron.processors import num_processors

_ALONE_UP_TO = 16  # GPUs; a search of so few is done sooner than a process has started

T = TypeVar("T")


class _WorkerHandle(Protocol):
    """Where a worker is."""

    spent: SearchStats

    def start(self, task: Task[Any]) -> None: ...

    def answer(self) -> Any: ...


class Workers:
    """Workers that do tasks at once."""

    def __init__(self, workers: Sequence[_WorkerHandle], first: SearchWorker) -> None:
        self._workers = tuple(workers)
        self.first = first
        """It is in this process."""

    @property
    def number(self) -> int:
        """How many tasks are done at once."""
        return len(self._workers)

    @property
    def spent(self) -> SearchStats:
        """Work done by all workers."""
        return sum((worker.spent for worker in self._workers), SearchStats())

    def do(self, tasks: Sequence[Task[T]]) -> list[T]:
        """The n-th worker does the n-th task. Raises RuntimeError if a process fails."""
        used = list(zip(self._workers, tasks, strict=False))
        assert len(used) == len(tasks), "more tasks than workers"
        for worker, task in reversed(used):  # the first one works in this process: it goes last
            worker.start(task)
        return [worker.answer() for worker, _ in used]

    def all_do(self, task: Task[T]) -> list[T]:
        """Each worker does the same task."""
        return self.do([task] * self.number)


@contextmanager
def workers_for(
    inputs: Inputs, effort: Effort, on_progress: Callable[[SearchProgress], None]
) -> Iterator[Workers]:
    """As many workers as the cluster is worth; their processes end with the context."""
    first = SearchWorker(inputs, effort, on_progress)
    if inputs.world_size <= _ALONE_UP_TO:
        yield Workers([_LocalWorker(first)], first)
    elif num_processors() < 2:
        second = SearchWorker(inputs, effort, on_progress)
        yield Workers([_LocalWorker(first), _LocalWorker(second)], first)
    else:
        with _process_for(inputs, effort) as process:
            yield Workers([_LocalWorker(first), _RemoteWorker(process)], first)


class _LocalWorker:
    """A worker in this process."""

    def __init__(self, worker: SearchWorker) -> None:
        self.worker = worker
        self.spent = worker.spent
        self._answers: deque[Any] = deque()

    def start(self, task: Task[Any]) -> None:
        self._answers.append(task.run(self.worker))
        self.spent = self.worker.spent

    def answer(self) -> Any:
        return self._answers.popleft()


class _RemoteWorker:
    """A worker in another process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.spent = SearchStats()

    def start(self, task: Task[Any]) -> None:
        _send(self.process, task)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        try:
            with gc_paused():
                answer, self.spent = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise RuntimeError(
                f"the planner's second process ended with status {self.process.wait()}; its error "
                "is above. If it was killed, memory is likely short"
            ) from error
        return answer


@contextmanager
def _process_for(inputs: Inputs, effort: Effort) -> Iterator[subprocess.Popen[bytes]]:
    # It imports what this process does: nothing from the directory that it happens to start in.
    command = [sys.executable, "-P", "-m", "zorse_megatron.planner.search.worker_process"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            _send(process, (inputs, effort))
            yield process
        finally:
            process.kill()  # it waits for more, unless this process is being stopped
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of what it has not read
                process.stdin.close()


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: that is told when its answer is missing
        process.stdin.write(pickle.dumps(message))
        process.stdin.flush()
