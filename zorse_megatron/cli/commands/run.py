"""`zorse status`, `move` and `checkpoint`: follow a run, move it, check what it saved."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import CommandError, Output, plain_problems, refusal
from zorse_megatron.cli.options import PlanFile, StatusDirectory, answers
from zorse_megatron.errors import Problem
from zorse_megatron.files.strict import plain
from zorse_megatron.inputs.status import LinkStatus, RankStatus, Status, load_status
from zorse_megatron.live.checkpoint_check import Look, State, verify
from zorse_megatron.live.checkpoint_choice import bad_tracker
from zorse_megatron.live.checkpoint_files import Tracker
from zorse_megatron.live.move import make_request
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import fingerprint, load_plan

# A run writes its status every few seconds, or with every iteration if that takes longer.
_OLD_S = 60.0
# The slowest ones; --json has all.
_MOST_LINKS = 8


@answers
def status(directory: StatusDirectory) -> Output:
    """Show who is slow in a run, by how much and since when, and where its time goes."""
    found = load_status(directory)
    return Output(values=plain(found), shown=_shown_status(found))


def _shown_status(found: Status) -> Iterator[str | Table]:
    age_s = time.time() - found.written_s
    old = f", written {age_s:.0f} s ago" if age_s > _OLD_S else ""
    ended = ", the training has ended" if found.ended else old
    yield f"iteration {found.iteration}{ended}: {_speed(found)}"
    grid = Table(
        *("Rank", "GPU", "Group", "Micro-batches", "One takes", "Of planned", "Since"),
        *("Computes", "Waits", "Updates"),
    )
    has_plan = any(each.planned_micro_batch_s for each in found.ranks)
    for each in found.ranks:
        grid.add_row(*map(Text, _row(each)))
    yield grid
    if not has_plan:
        yield (
            "The plan does not say how long micro-batches take: they are compared with the first "
            "iterations of the run."
        )
    for link in sorted(found.links, key=_rate)[:_MOST_LINKS]:
        low, high = link.ranks
        yield (
            f"ranks {low} and {high}: a message of {link.num_bytes:,} bytes takes "
            f"{1e3 * link.seconds:.4g} ms, mean of both ways ({link.messages} each way)"
        )
    for change in found.changes:
        counts = "|".join(",".join(map(str, row)) for row in change.counts)
        yield (
            f"micro-batches of each group's replicas since iteration {change.iteration}: {counts}"
        )
    for move in found.moves:
        became = "the run went on under it" if move.refused is None else f"refused: {move.refused}"
        yield (
            f"plan {move.plan or 'that could not be read'} was asked for after iteration "
            f"{move.iteration}: {became}"
        )


def _rate(link: LinkStatus) -> float:
    return link.num_bytes / link.seconds


def _speed(found: Status) -> str:
    if found.tokens_per_s is None or found.iteration_s is None:
        return "nothing is known yet"
    planned = ""
    if found.planned_iteration_s is not None:
        share = 100 * found.planned_iteration_s / found.iteration_s
        planned = f", {share:.0f} % of the plan's speed"
    return f"{found.iteration_s:.4g} s, {found.tokens_per_s:,.0f} tokens/s{planned}"


def _row(each: RankStatus) -> tuple[str, ...]:
    return (
        str(each.rank),
        each.kind or "",
        str(each.group),
        f"{each.num_microbatches} x {each.micro_batch_size}",
        "" if each.micro_batch_s is None else f"{1e3 * each.micro_batch_s:.4g} ms",
        "" if each.slowdown is None else f"{each.slowdown:.2f} x",
        "" if each.since is None else str(each.since),
        *map(_percent, (each.shares.compute, each.shares.waited, each.shares.update)),
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


@answers
def move(directory: StatusDirectory, path: PlanFile) -> Output:
    """Ask a run to go on under another plan of the same ranks, without a file or a restart."""
    plan = load_plan(path)
    refuse_other_run(load_status(directory), plan, str(path))
    made = make_request(directory, plan)
    asked = (
        f"Asked for plan {fingerprint(plan)}. The run's log says, two iterations from now, whether "
        "it goes on under it."
    )
    return Output(values={"plan": fingerprint(plan), "request": str(made)}, shown=[asked])


def refuse_other_run(status: Status, plan: Plan, path: str) -> None:
    """Raise CommandError where a run cannot go on under a plan, as far as its status tells."""
    if len(status.ranks) != plan.world_size:
        problem = Problem(
            where=path,
            found=f"a plan of {plan.world_size} ranks",
            expected=f"{len(status.ranks)}, as the run has",
            remedy="Save a checkpoint, and start a job with as many ranks from it.",
        )
    elif status.plan == fingerprint(plan):
        problem = Problem(
            where=path,
            found=f"plan {status.plan}, under which the run is",
            expected="another one",
            remedy="Make one, for instance with zorse plan --from-status.",
        )
    else:
        return
    raise CommandError("The run cannot go on under this plan", [problem])


# `zorse checkpoint`: which checkpoints are complete, and which one training resumes from.


checkpoint = typer.Typer(no_args_is_help=True, help="Verify checkpoints.")


@checkpoint.callback()
def _group() -> None:
    """Checkpoints: are they whole?"""


@checkpoint.command("verify")
@answers
def verify_checkpoints(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The directory given to --save.")
    ],
    read_all: Annotated[bool, typer.Option("--all", help="Read every checkpoint.")] = False,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Compare file sizes only; read nothing.")
    ] = False,
) -> Output:
    """Verify which checkpoints are complete; exit code 1 if the latest is not.

    Reads the latest checkpoint, then older ones until one is complete. The rest are compared with
    their manifests by name and size.
    """

    def reads(found: Sequence[Look], each: Look) -> bool:
        return read_all or not (sizes or any(each.is_usable for each in found))

    tracker, found = _looked_at(folder, reads)
    problems = _problems(folder, tracker, found)
    newest = next((each for each in found if each.is_usable), None)
    return Output(
        values=_as_json(tracker, found, newest, problems),
        shown=_shown_checkpoints(folder, tracker, found, newest, problems),
        ok=not problems,
    )


def _looked_at(
    folder: Path, reads: Callable[[Sequence[Look], Look], bool]
) -> tuple[Tracker, Sequence[Look]]:
    if not folder.is_dir():
        raise refusal(
            str(folder),
            "no such folder",
            "the directory given to --save",
            "Correct the path.",
            what="There is nothing to verify",
        )
    try:
        return verify(folder, reads=reads)
    except OSError as error:
        raise refusal(
            str(error.filename),
            str(error.strerror),
            "a file that can be read",
            "Try it again where the file can be read.",
            what="The checkpoints cannot be read",
        ) from error


def _problems(folder: Path, tracker: Tracker, found: Sequence[Look]) -> list[Problem]:
    """What keeps training from resuming from the latest checkpoint."""
    if tracker.names is None:
        if tracker.exists or any(each.is_usable for each in found):
            return [bad_tracker(tracker)]
        return [_no_checkpoint(folder)]
    latest = next(each for each in found if each.checkpoint == tracker.names)
    return list(latest.problems)


def _shown_checkpoints(
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
