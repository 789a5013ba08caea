"""`zorse checkpoint`: which checkpoints are complete, and which one training resumes from."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zorse_megatron.checkpoints.check import Look, State
from zorse_megatron.checkpoints.choice import bad_tracker
from zorse_megatron.checkpoints.folder import Tracker
from zorse_megatron.checkpoints.verify import verify
from zorse_megatron.cli.console import (
    plain_problems,
    print_answer,
    refusal,
    reported_errors,
)
from zorse_megatron.cli.options import AsJson
from zorse_megatron.errors import Problem

checkpoint = typer.Typer(no_args_is_help=True, help="Verify checkpoints.")


@checkpoint.callback()
def _group() -> None:
    """Checkpoints: are they whole?"""


@checkpoint.command("verify")
def verify_checkpoints(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The directory given to --save.")
    ],
    read_all: Annotated[bool, typer.Option("--all", help="Read every checkpoint.")] = False,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Compare file sizes only; read nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify which checkpoints are complete; exit code 1 if the latest is not.

    Reads the latest checkpoint, then older ones until one is complete. The rest are compared with
    their manifests by name and size.
    """
    with reported_errors(as_json=as_json):
        if not folder.is_dir():
            raise refusal(
                str(folder),
                "no such folder",
                "the directory given to --save",
                "Correct the path.",
                what="There is nothing to verify",
            )

        def reads(found: Sequence[Look], each: Look) -> bool:
            return read_all or not (sizes or any(each.is_usable for each in found))

        try:
            tracker, found = verify(folder, reads=reads)
        except OSError as error:
            raise refusal(
                str(error.filename),
                str(error.strerror),
                "a file that can be read",
                "Try it again where the file can be read.",
                what="The checkpoints cannot be read",
            ) from error
    problems = _problems(folder, tracker, found)
    newest = next((each for each in found if each.is_usable), None)
    print_answer(
        _as_json(tracker, found, newest, problems),
        _shown(folder, tracker, found, newest, problems),
        as_json=as_json,
    )
    if problems:
        raise typer.Exit(1)


def _problems(folder: Path, tracker: Tracker, found: Sequence[Look]) -> list[Problem]:
    """What keeps training from resuming from the latest checkpoint."""
    if tracker.names is None:
        if tracker.exists or any(each.is_usable for each in found):
            return [bad_tracker(tracker)]
        return [_no_checkpoint(folder)]
    latest = next(each for each in found if each.checkpoint == tracker.names)
    return list(latest.problems)


def _shown(
    folder: Path,
    tracker: Tracker,
    found: Sequence[Look],
    newest: Look | None,
    problems: Sequence[Problem],
) -> Iterator[str | Table]:
    table = Table()
    for name in ("checkpoint", "files", "GB", "state"):
        table.add_column(name, justify="right" if name in ("files", "GB") else "left")
    for each in found:
        is_latest = each.checkpoint == tracker.names
        table.add_row(
            f"{each.checkpoint.folder.name}{' (latest)' if is_latest else ''}",
            str(len(each.sizes)),
            f"{each.num_bytes / 1e9:.3f}",
            _state(each),
        )
    if found:
        yield table
    yield from map(str, problems)
    if newest is None:
        yield f"{folder}: no checkpoint to resume from"
    elif problems:
        yield f"{folder}: the newest to resume from is {newest.checkpoint}"


def _state(each: Look) -> str:
    if each.state is State.WHOLE:
        return "whole" if each.is_read else "sizes are right; not read"
    if each.state is State.UNVERIFIED:
        return "sizes suffice; no manifest"
    return each.state.value


def _as_json(
    tracker: Tracker, found: Sequence[Look], newest: Look | None, problems: Sequence[Problem]
) -> dict[str, Any]:
    return {
        "ok": not problems,
        "problems": plain_problems(problems),
        "latest": None if tracker.names is None else tracker.names.iteration,
        "newest_usable": None if newest is None else newest.checkpoint.iteration,
        "checkpoints": [
            {
                "iteration": each.checkpoint.iteration,
                "folder": str(each.checkpoint.folder),
                "files": len(each.sizes),
                "bytes": each.num_bytes,
                "state": each.state.value,
                "read": each.is_read,
                "problems": plain_problems(each.problems),
            }
            for each in found
        ],
    }


def _no_checkpoint(folder: Path) -> Problem:
    return Problem(
        where=str(folder),
        found="no completely saved checkpoint",
        expected="at least one",
        remedy="Give the --save directory, not that of a single iteration.",
    )
