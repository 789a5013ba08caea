"""What the commands print, how they fail, and the progress that they show."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.table import Table

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.extras import missing_extra
from zorse_megatron.files.json_text import layout
from zorse_megatron.files.wording import memory

_WIDTH_IN_FILES = 120


class CommandError(ZorseError):
    """The options of a command do not go together, or name what is not there."""


def refusal(
    where: str,
    found: str,
    expected: str,
    remedy: str,
    *,
    what: str = "the command cannot be run",
) -> CommandError:
    """Return an error of one problem."""
    return CommandError(what, [Problem(where=where, found=found, expected=expected, remedy=remedy)])


class Errors:
    """Errors of several checks, to be reported all at once."""

    def __init__(self) -> None:
        self.found: list[ZorseError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the error that ends the block; what the block assigns is unbound then."""
        try:
            yield
        except ZorseError as error:
            self.found.append(error)

    def raise_all(self) -> None:
        """Raise the error that was collected, or one for all of them."""
        if len(self.found) == 1:
            raise self.found[0]
        problems = [problem for error in self.found for problem in error.problems]
        if problems:
            raise CommandError("the command cannot be run", problems)


def gib(num_bytes: float) -> str:
    """Memory for people; see `figures.memory`."""
    return memory(num_bytes)


def part_of(num_bytes: float, capacity_bytes: float) -> str:
    """Memory for people, and how much that is of what there is.

    >>> part_of(24e9, 48e9), part_of(48e6, 48e9)
    ('22.4 GiB, 50 %', '45.8 MiB, 0.1 %')
    """
    percent = 100 * num_bytes / capacity_bytes
    return f"{gib(num_bytes)}, {percent:{'.0f' if percent >= 1 else '.1g'}} %"


def print_plain(text: str, *, to_stderr: bool = False) -> None:
    """Print text as it is: no wrapping, and brackets are not read as markup."""
    console = Console(stderr=to_stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(text)


def print_table(table: Table) -> None:
    """Print a table; into a file or a pipe with room for long rows, or as COLUMNS says."""
    is_said = Console().is_terminal or os.environ.get("COLUMNS", "").isdigit()
    Console(width=None if is_said else _WIDTH_IN_FILES).print(table)


def print_json(value: dict[str, Any]) -> None:
    """Print JSON for programs."""
    typer.echo(layout(value))


def print_answer(
    values: Mapping[str, Any],
    shown: Iterable[str | Table],
    *,
    notes: Sequence[str] | None = None,
    written: Sequence[Path] | None = None,
    as_json: bool,
) -> None:
    """Print what a command found: values for programs, or lines and tables for people.

    `notes`, `written`: None where the command never has any.
    """
    files = [str(path) for path in written or ()]
    if as_json:
        more = {} if notes is None else {"notes": list(notes)}
        print_json(
            {"ok": True, **values, **more, **({} if written is None else {"written": files})}
        )
        return
    for each in (*shown, *(f"note: {note}" for note in notes or ())):
        if isinstance(each, Table):
            print_table(each)
        else:
            print_plain(each)
    if files:
        print_plain(f"written: {', '.join(files)}")


def plain_problems(problems: Sequence[Problem]) -> list[dict[str, str]]:
    """Problems as JSON values."""
    return [dataclasses.asdict(problem) for problem in problems]


def failure_as_json(error: ZorseError | None) -> dict[str, Any]:
    """What a failure adds to the answer for programs; nothing if there was none."""
    if error is None:
        return {}
    return {"ok": False, "problems": plain_problems(error.problems), **error.facts}


@contextmanager
def reported_errors(
    *, to_stderr: bool = True, as_json: bool = False, status: int = 1
) -> Iterator[None]:
    """Turn a ZorseError into its list of problems and an exit status."""
    try:
        try:
            yield
        except ModuleNotFoundError as error:
            absent = missing_extra(error)
            raise absent or error from error
    except ZorseError as error:
        if as_json:
            print_json(failure_as_json(error))
        else:
            print_plain(str(error), to_stderr=to_stderr)
        raise typer.Exit(status) from error


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
