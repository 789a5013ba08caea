"""Show progress on stderr while a command runs long: a bar or a clock on a terminal.

Elsewhere, in a job's log for instance, one plain line every `QUIET_S` seconds.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console


class ProgressDisplay(Protocol):
    """How far something is: a search, or a measurement."""

    @property
    def phase(self) -> str:
        """The current phase."""
        ...

    @property
    def done(self) -> int:
        """Number of finished items."""
        ...

    @property
    def total(self) -> int | None:
        """How many there are; 0 or None if unknown."""
        ...


QUIET_S = 10.0
"""How long a command may say nothing where stderr is not a terminal."""

OnProgress = Callable[[ProgressDisplay], None]


@contextmanager
def progress_bar(*, wanted: bool, title: str = "") -> Iterator[OnProgress | None]:
    """Show how far it is, while the block runs."""
    console = Console(stderr=True)
    if not wanted:
        yield None
        return
    if not console.is_terminal:
        with _sparse_lines(console, title or "searching") as tell:
            yield lambda progress: tell(_described(progress, title))
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title or "searching", total=None)

        def show(progress: ProgressDisplay) -> None:
            phase = f"{title}: {progress.phase}" if title else progress.phase
            bar.update(
                task, description=phase, completed=progress.done, total=progress.total or None
            )

        yield show


@contextmanager
def waiting(phase: str, *, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Say what is being done and for how long, while the block runs.

    Yields what changes the phase: for work that cannot be counted.
    """
    console = Console(stderr=True)
    if not wanted:
        yield lambda _phase: None
        return
    if not console.is_terminal:
        with _sparse_lines(console, phase) as tell:
            yield tell
        return
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(phase, total=None)
        yield lambda now: bar.update(task, description=now)


def _described(progress: ProgressDisplay, title: str) -> str:
    counted = f" {progress.done}" + (f" of {progress.total}" if progress.total else "")
    return f"{title}: {progress.phase}{counted}" if title else progress.phase + counted


@contextmanager
def _sparse_lines(console: Console, phase: str) -> Iterator[Callable[[str], None]]:
    """Print the phase every `QUIET_S` seconds, so that a fast command prints nothing."""
    started_s, ended, now = time.monotonic(), threading.Event(), [phase]

    def print_until_ended() -> None:
        while not ended.wait(QUIET_S):
            elapsed_s = time.monotonic() - started_s
            line = f"zorse: {now[0]} ({elapsed_s:.0f} s)"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=print_until_ended, daemon=True)
    thread.start()
    try:
        yield lambda phase: now.__setitem__(0, phase)
    finally:
        ended.set()
        thread.join()
