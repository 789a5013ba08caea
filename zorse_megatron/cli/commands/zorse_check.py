"""`zorse check`: validate files, alone and together."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zorse_megatron.cli.check_files import (
    Checked,
    CheckedFile,
    CheckOptions,
    check_file,
    check_model,
    checks_of,
)
from zorse_megatron.cli.console import (
    plain_problems,
    print_answer,
    refusal,
    reported_errors,
)
from zorse_megatron.cli.options import (
    AsJson,
    Margin,
    WorkloadOptions,
    checked_share,
    with_bundles,
)
from zorse_megatron.cli.plan_table import plan_table
from zorse_megatron.cli.workload import dtype_named, model_or_flags
from zorse_megatron.errors import ZorseError
from zorse_megatron.schema.plan.plan import Plan

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE]...", help="Plans, clusters, models, profiles, in any order."),
]


@with_bundles
def check(
    *,
    paths: Files = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="YAML", help="A cluster file, as FILE.")
    ] = None,
    given: WorkloadOptions,
    margin: Margin = 0.0,
    as_json: AsJson = False,
) -> None:
    """Validate files, alone and together: summarize them, or list every problem (exit code 1).

    Flags after -- are compared with the plan. With a plan, a cluster and a model (or flags), memory
    is checked too.
    """
    with reported_errors(to_stderr=False, as_json=as_json):
        options = CheckOptions(
            dtype=dtype_named(given.dtype),
            global_batch_size=given.global_batch_size,
            seq_length=given.seq_length,
            margin=checked_share(margin, "--margin"),
        )
        name, flags = model_or_flags(given.model, given.flags)
        named = [*(paths or ()), *([cluster] if cluster else ()), *given.profiles]
        files = [*map(check_file, named), *map(check_model, [name] if name else ())]
        if not files:
            raise refusal(
                "FILE",
                "no file",
                "a plan, cluster, model or profile, or --model",
                "Such as: zorse check plan.json cluster.yaml --model llama-7b",
            )
        together = checks_of(files, flags, options)
    errors = [file.error for file in files] + [each.error for each in together]
    found = [error for error in errors if error is not None]
    print_answer(_as_json(files, together, found), _shown(files, together), as_json=as_json)
    if found:
        raise typer.Exit(1)


def _shown(files: Sequence[CheckedFile], together: Sequence[Checked]) -> Iterator[str | Table]:
    for file in files:
        yield str(file.error) if file.error else file.line
        if isinstance(file.content, Plan):
            yield plan_table(file.content)
    for each in together:
        yield str(each.error) if each.error else f"{each.what}: OK, {each.found}"


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
