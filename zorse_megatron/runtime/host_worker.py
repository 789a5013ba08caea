"""A thread that does things for the host one after the other, while the host goes on."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class HostTask:
    """Something that the thread does; whoever waits for it gets its error."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, on the thread; what it has worked on is let go with it."""
        act, self._act = self._act, None
        assert act is not None, "found a task that has been done; expected each once"
        try:
            act()
        except BaseException as error:  # it is the waiter's
            self._error = error
        finally:
            del act
            self._done.set()

    def wait(self) -> None:
        """Block the host until it is done. Raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it is done, without waiting."""
        return self._done.is_set()


class HostWorker:
    """The thread; it starts with the first task, so that a process can be forked before."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[HostTask] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], None]) -> HostTask:
        """Have `act` done when all tasks before it are."""
        task = HostTask(act)
        self._tasks.put(task)
        if self._thread is None:
            # A daemon: a peer that died may leave it in a call that never ends.
            self._thread = threading.Thread(target=self._run, name="zorse-host", daemon=True)
            self._thread.start()
        return task

    def _run(self) -> None:
        while True:
            self._tasks.get().run()
