"""A progress bar on stderr for what takes long; none where nobody would see it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console


class Progress(Protocol):
    """How far something is: a search, or a measurement."""

    @property
    def phase(self) -> str:
        """What is done now."""
        ...

    @property
    def done(self) -> int:
        """How many are done."""
        ...

    @property
    def total(self) -> int | None:
        """Of so many; 0 or None where nobody knows."""
        ...


OnProgress = Callable[[Progress], None]


@contextmanager
def progress_bar(*, wanted: bool, title: str = "") -> Iterator[OnProgress | None]:
    """Show how far it is, while the block runs; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title or "searching", total=None)

        def show(progress: Progress) -> None:
            phase = f"{title}: {progress.phase}" if title else progress.phase
            bar.update(
                task, description=phase, completed=progress.done, total=progress.total or None
            )

        yield show
