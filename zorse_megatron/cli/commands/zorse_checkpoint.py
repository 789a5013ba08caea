"""`zorse checkpoint`: which checkpoints are complete, and which one training resumes from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zorse_megatron.checkpoints.check import Look, State
from zorse_megatron.checkpoints.choice import bad_tracker
from zorse_megatron.checkpoints.folder import Tracker
from zorse_megatron.checkpoints.verify import verify
from zorse_megatron.cli.console import (
    CommandError,
    plain_problems,
    print_json,
    print_plain,
    print_table,
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
            raise CommandError("There is nothing to verify", [_no_folder(folder)])

        def reads(looks: Sequence[Look], look: Look) -> bool:
            return read_all or not (sizes or any(each.is_usable for each in looks))

        try:
            tracker, looks = verify(folder, reads=reads)
        except OSError as error:
            raise CommandError("The checkpoints cannot be read", [_unreadable(error)]) from error
    problems = _problems(folder, tracker, looks)
    newest = next((look for look in looks if look.is_usable), None)
    if as_json:
        print_json(_as_json(tracker, looks, newest, problems))
    else:
        _print(folder, tracker, looks, newest, problems)
    if problems:
        raise typer.Exit(1)


def _problems(folder: Path, tracker: Tracker, looks: Sequence[Look]) -> list[Problem]:
    """What keeps training from resuming from the latest checkpoint."""
    if tracker.names is None:
        if tracker.exists or any(look.is_usable for look in looks):
            return [bad_tracker(tracker)]
        return [_no_checkpoint(folder)]
    latest = next(look for look in looks if look.checkpoint == tracker.names)
    return list(latest.problems)


def _print(
    folder: Path,
    tracker: Tracker,
    looks: Sequence[Look],
    newest: Look | None,
    problems: Sequence[Problem],
) -> None:
    table = Table()
    for name in ("checkpoint", "files", "GB", "state"):
        table.add_column(name, justify="right" if name in ("files", "GB") else "left")
    for look in looks:
        is_latest = look.checkpoint == tracker.names
        table.add_row(
            f"{look.checkpoint.folder.name}{' (latest)' if is_latest else ''}",
            str(len(look.sizes)),
            f"{look.num_bytes / 1e9:.3f}",
            _state(look),
        )
    if looks:
        print_table(table)
    for problem in problems:
        print_plain(str(problem))
    if newest is None:
        print_plain(f"{folder}: no checkpoint to resume from")
    elif problems:
        print_plain(f"{folder}: the newest to resume from is {newest.checkpoint}")


def _state(look: Look) -> str:
    if look.state is State.WHOLE:
        return "whole" if look.is_read else "sizes are right; not read"
    if look.state is State.UNVERIFIED:
        return "sizes suffice; no manifest"
    return look.state.value


def _as_json(
    tracker: Tracker, looks: Sequence[Look], newest: Look | None, problems: Sequence[Problem]
) -> dict[str, Any]:
    return {
        "ok": not problems,
        "problems": plain_problems(problems),
        "latest": None if tracker.names is None else tracker.names.iteration,
        "newest_usable": None if newest is None else newest.checkpoint.iteration,
        "checkpoints": [
            {
                "iteration": look.checkpoint.iteration,
                "folder": str(look.checkpoint.folder),
                "files": len(look.sizes),
                "bytes": look.num_bytes,
                "state": look.state.value,
                "read": look.is_read,
                "problems": plain_problems(look.problems),
            }
            for look in looks
        ],
    }


def _no_folder(folder: Path) -> Problem:
    return Problem(
        where=str(folder),
        found="no such folder",
        expected="the directory given to --save",
        remedy="Correct the path.",
    )


def _no_checkpoint(folder: Path) -> Problem:
    return Problem(
        where=str(folder),
        found="no completely saved checkpoint",
        expected="at least one",
        remedy="Give the --save directory, not that of a single iteration.",
    )


def _unreadable(error: OSError) -> Problem:
    return Problem(
        where=str(error.filename),
        found=str(error.strerror),
        expected="a file that can be read",
        remedy="Try it again where the file can be read.",
    )
