"""What the commands print, how they fail, and the progress that they show."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.files.json_text import layout
from zorse_megatron.log import Progress

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
    return CommandError.of(what, where=where, found=found, expected=expected, remedy=remedy)


def refuse(problems: Iterable[Problem], what: str = "the command cannot be run") -> None:
    """Raise CommandError if there are any problems."""
    if listed := list(problems):
        raise CommandError(what, listed)


def conflicts(
    options: Iterable[str], other: str, *, why: str = "", remedy: str = ""
) -> Iterator[Problem]:
    """Yield a problem for each of these options, which are given and do not go with another."""
    expected = f"one of the two: {why}" if why else "one of the two"
    for option in options:
        do = remedy or f"Leave {option} or {other} out."
        yield Problem(where=option, found=f"it with {other}", expected=expected, remedy=do)


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
        refuse(problems)


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


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a command found: values for programs, lines and tables for people."""

    values: Mapping[str, Any]
    shown: Iterable[str | Table]
    notes: Sequence[str] | None = None
    """None where the command never has any."""
    written: Sequence[Path] | None = None
    """None where the command never writes any."""
    ok: bool = True
    """If not, the exit status is 1."""
    error: ZorseError | None = None
    """What went wrong after all that was found; the exit status is 1 then, too."""

    def print(self, *, as_json: bool) -> None:
        """Print it, and end with exit status 1 where something is wrong."""
        if as_json:
            more = {} if self.notes is None else {"notes": list(self.notes)}
            files = {} if self.written is None else {"written": list(map(str, self.written))}
            values = {"ok": self.ok, **self.values, **more, **files}
            print_json(values | failure_as_json(self.error))
        else:
            for each in (*self.shown, *(f"note: {note}" for note in self.notes or ())):
                if isinstance(each, Table):
                    print_table(each)
                else:
                    print_plain(each)
            if self.written:
                print_plain(f"written: {', '.join(map(str, self.written))}")
            if self.error is not None:
                print_plain(str(self.error), to_stderr=True)
        if self.error is not None or not self.ok:
            raise typer.Exit(1)


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
        yield
    except ZorseError as error:
        if as_json:
            print_json(failure_as_json(error))
        else:
            print_plain(str(error), to_stderr=to_stderr)
        raise typer.Exit(status) from error


QUIET_S = 10.0
"""How long a command may say nothing where stderr is not a terminal."""

Tell = Callable[[str | Progress], None]
"""Takes what is being done, and how far it is if that can be counted."""


@contextmanager
def progress_shown(phase: str, *, wanted: bool, title: str = "") -> Iterator[Tell]:
    """Show on stderr what is being done and for how long, while the block runs.

    Yields what changes the phase. `title`: in front of each.
    """
    console, start = Console(stderr=True), f"{title}: " if title else ""
    if not wanted:
        yield lambda _now: None
    elif console.is_terminal:
        with _bar(console, start + phase) as update:
            yield lambda now: update(start, now)
    else:
        with _sparse_lines(console, start + phase) as print_now:
            yield lambda now: print_now(start + _said(now))


@contextmanager
def _bar(console: Console, phase: str) -> Iterator[Callable[[str, str | Progress], None]]:
    """Show a bar that runs back and forth until something is counted."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(phase, total=None)

        def update(start: str, now: str | Progress) -> None:
            bar.update(task, description=start + _said(now))
            if not isinstance(now, str):
                bar.update(task, completed=now.done, total=now.total or None)

        yield update


def _said(now: str | Progress) -> str:
    if isinstance(now, str):
        return now
    return f"{now.phase} {now.done}" + (f" of {now.total}" if now.total else "")


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
