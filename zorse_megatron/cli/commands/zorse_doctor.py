"""`zorse doctor`: check on the machine at hand that plans run there as stock Megatron does."""

import os
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zorse_megatron.cli.console import CommandError, print_json, print_plain, reported_errors
from zorse_megatron.cli.options import AsJson
from zorse_megatron.errors import Problem
from zorse_megatron.extras import PACKAGE, refuse_without
from zorse_megatron.files.writable import folder_problems

if TYPE_CHECKING:
    from zorse_megatron.doctor.check_list import Check
    from zorse_megatron.doctor.finding import CheckResult
    from zorse_megatron.doctor.report import Report

_TIME_LIMIT_S = 600.0


def doctor(
    output: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Write doctor.json and doctor.html here.")
    ] = Path("doctor"),
    check: Annotated[
        list[str] | None,
        typer.Option(help="Make only these checks; repeat it for several."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave the GPUs alone: a dry run.")] = False,
    time_limit: Annotated[
        float, typer.Option(min=10, help="End what has not ended after so many seconds.")
    ] = _TIME_LIMIT_S,
    as_json: AsJson = False,
) -> None:
    """Check on this machine's GPUs that plans train as stock Megatron does. No network.

    Without a GPU, all that needs none is checked on the CPU. Exit status 1 if a check fails.
    """
    with reported_errors(as_json=as_json):
        refuse_without("train", what="zorse doctor")
        checks = _checks(check or [], output)
        if cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        ends_s = time.monotonic() + time_limit
        report = _report(checks, ends_s, quiet=as_json)
        written = report.save(output)
    if as_json:
        print_json(report.as_json())
    else:
        print_plain(f"{report.summary}; written: {', '.join(map(str, written))}")
    if report.has_failed:
        raise typer.Exit(1)


def _checks(names: list[str], output: Path) -> "tuple[Check, ...]":
    """Those that are asked for. Raises CommandError if there are none such, or no report is."""
    from zorse_megatron.doctor.check_list import CHECKS, NAMES
    from zorse_megatron.doctor.report import FILES

    problems = list(folder_problems("--out", output, FILES))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        problem = Problem(
            where="--check",
            found=" and ".join(unknown),
            expected=f"one of {', '.join(NAMES)}",
            remedy="Leave it out to make all checks.",
        )
        problems.append(problem)
    if problems:
        raise CommandError("the checks cannot be made", problems)
    return tuple(check for check in CHECKS if not names or check.name in names)


def _report(checks: "tuple[Check, ...]", ends_s: float, *, quiet: bool) -> "Report":
    from zorse_megatron.doctor.end_on_signal import exits_on_signals
    from zorse_megatron.doctor.examine import examine
    from zorse_megatron.doctor.machine import machine_here
    from zorse_megatron.doctor.rank_jobs import SpawnedRanks, runner_here
    from zorse_megatron.doctor.report import Report
    from zorse_megatron.doctor.workshop import Workshop

    def tell(result: "CheckResult") -> None:
        if not quiet:
            print_plain(f"{result.finding.status}: {result.title}: {result.finding.said}")

    with exits_on_signals(), tempfile.TemporaryDirectory(prefix="zorse-doctor-") as scratch:
        machine = machine_here(SpawnedRanks(), Path(scratch))
        with runner_here(has_gpu=machine.has_gpu) as runner:
            workshop = Workshop(
                machine=machine, runner=runner, directory=Path(scratch), ends_s=ends_s
            )
            results = examine(workshop, checks, tell)
    return Report(machine=machine, results=tuple(results), version=metadata.version(PACKAGE))
