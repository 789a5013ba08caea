"""`zorse doctor`: check on the machine at hand that plans run there as stock Megatron does."""

import json
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
from zorse_megatron.files.write import write_text

if TYPE_CHECKING:
    from zorse_megatron.doctor.checks import Check
    from zorse_megatron.doctor.report import Finding, Report

_TIME_LIMIT_S = 600.0
_FILE = "doctor.json"


def doctor(
    output: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Write doctor.json here.")
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
        written = output / _FILE
        write_text(written, json.dumps(report.as_json(), indent=1) + "\n", parents=True)
    if as_json:
        print_json(report.as_json())
    else:
        print_plain(f"{report.summary}; written: {written}")
    if report.has_failed:
        raise typer.Exit(1)


def _checks(names: list[str], output: Path) -> "tuple[Check, ...]":
    """Those that are asked for. Raises CommandError if there are none such, or no report is."""
    from zorse_megatron.doctor.checks import CHECKS, NAMES

    problems = list(folder_problems("--out", output, [_FILE]))
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
    from zorse_megatron.doctor.checks import examine
    from zorse_megatron.doctor.doctor_run import DoctorRun, machine_here
    from zorse_megatron.doctor.report import Report
    from zorse_megatron.emulate.forks.rank_jobs import exits_on_signals, run_spawned, runner_here

    def tell(finding: "Finding") -> None:
        if not quiet:
            print_plain(str(finding))

    with exits_on_signals(), tempfile.TemporaryDirectory(prefix="zorse-doctor-") as scratch:
        directory = Path(scratch)
        machine = machine_here(run_spawned, directory)
        with runner_here(has_gpu=bool(machine.gpus)) as run_job:
            run = DoctorRun(machine=machine, run_job=run_job, directory=directory, ends_s=ends_s)
            findings = tuple(examine(run, checks, tell))
    return Report(machine=machine, findings=findings, version=metadata.version(PACKAGE))
