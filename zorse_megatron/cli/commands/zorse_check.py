"""`zorse check`: validate files, alone and together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.check_files import CheckedFile, check_file
from zorse_megatron.cli.check_together import Checked, checks_of
from zorse_megatron.cli.console import (
    plain_problems,
    print_json,
    print_plain,
    reported_errors,
)
from zorse_megatron.cli.options import AsJson, DtypeName
from zorse_megatron.cli.plan_table import print_plan
from zorse_megatron.cli.workload import dtype_named
from zorse_megatron.errors import ZorseError
from zorse_megatron.schema.plan.plan import Plan


def check(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Plans, clusters, models, profiles, in any order."),
    ],
    dtype: DtypeName = None,
    as_json: AsJson = False,
) -> None:
    """Validate files, alone and together: summarize them, or list every problem (exit code 1).

    Flags after -- are compared with the plan. With a plan, a cluster and a model (or flags), memory
    is checked too.
    """
    with reported_errors(to_stderr=False, as_json=as_json):
        wanted = dtype_named(dtype)
        files = [check_file(path) for path in paths]
        together = checks_of(files, training_flags(context), wanted)
    errors = [file.error for file in files] + [each.error for each in together]
    found = [error for error in errors if error is not None]
    if as_json:
        print_json(_as_json(files, together, found))
    else:
        _print(files, together)
    if found:
        raise typer.Exit(1)


def _print(files: Sequence[CheckedFile], together: Sequence[Checked]) -> None:
    for file in files:
        print_plain(str(file.error) if file.error else file.line)
        if isinstance(file.content, Plan):
            print_plan(file.content)
    for each in together:
        print_plain(str(each.error) if each.error else f"{each.what}: OK, {each.found}")


def _as_json(
    files: Sequence[CheckedFile], together: Sequence[Checked], errors: Sequence[ZorseError]
) -> dict[str, Any]:
    return {
        "ok": not errors,
        "problems": plain_problems([problem for error in errors for problem in error.problems]),
        "files": [
            {"path": str(file.path), "kind": file.kind, "ok": file.error is None, **file.summary}
            for file in files
        ],
        "together": [
            {"what": each.what, "ok": each.error is None, "found": each.found} for each in together
        ],
    }
