"""Something that a rank does beside its training, and is waited for before the next of it."""

import threading
from collections.abc import Callable


class Beside:
    """Runs one thing at a time, in a thread of its own.

    The thread does not keep a rank alive whose training ends in an error, as what it waits for may
    never come then.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin it; what was begun before must have been waited for."""
        assert self._thread is None, "found work that has not been waited for"

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="beside", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is under way. Raises what the work has raised."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
