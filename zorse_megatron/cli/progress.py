"""A progress bar on stderr for long searches; none where nobody would see it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Progress

OnProgress = Callable[["Progress"], None]


@contextmanager
def progress_bar(*, wanted: bool, title: str = "") -> Iterator[OnProgress | None]:
    """Show how far a search is, while it runs; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title or "searching", total=None)

        def show(progress: "Progress") -> None:
            phase = f"{title}: {progress.phase}" if title else progress.phase
            bar.update(
                task, description=phase, completed=progress.done, total=progress.total or None
            )

        yield show
