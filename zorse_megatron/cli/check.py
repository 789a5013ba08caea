"""`zorse check`: is a plan file valid, and what does it say?"""

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import print_plain, reported_errors
from zorse_megatron.errors import PlanError
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.json_text import layout
from zorse_megatron.schema.load import fingerprint, load_plan
from zorse_megatron.schema.plan import Group, Plan, Replica
from zorse_megatron.schema.spans import spans_of, spell


def check(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check a plan file: print what it says, or all of its problems (exit code 1)."""
    if as_json:
        _check_as_json(path)
        return
    with reported_errors(to_stderr=False):
        plan = _load(path)
    print_plain(
        f"{path}: OK, plan {fingerprint(plan)}: {plan.world_size} ranks, "
        f"{len(plan.groups)} groups, {len(plan.chunks)} chunks, {plan.model.num_layers} layers, "
        f"{plan.global_batch_size} samples per iteration, schedule {plan.schedule.name}"
    )
    Console().print(_table(plan))


def _load(path: Path) -> Plan:
    """Load a plan that this version can execute."""
    plan = load_plan(path)
    refuse_unsupported(plan, str(path))
    return plan


def _check_as_json(path: Path) -> None:
    try:
        plan = _load(path)
    except PlanError as error:
        problems = [dataclasses.asdict(problem) for problem in error.problems]
        typer.echo(layout({"ok": False, "problems": problems}))
        raise typer.Exit(1) from error
    summary = {
        "ok": True,
        "problems": [],
        "fingerprint": fingerprint(plan),
        "world_size": plan.world_size,
        "global_batch_size": plan.global_batch_size,
        "schedule": plan.schedule.name,
        "groups": [_summary(plan, index) for index in range(len(plan.groups))],
    }
    typer.echo(layout(summary))


def _summary(plan: Plan, index: int) -> dict[str, Any]:
    group = plan.groups[index]
    return {
        "name": group.name,
        "layers": [list(plan.chunks[chunk].layers) for chunk in plan.chunks_of_group(index)],
        "replicas": [
            {
                "ranks": list(replica.ranks),
                "micro_batch_size": replica.micro_batch_size,
                "num_microbatches": replica.num_microbatches,
                "shard_percent": _shard_percent(group, replica),
            }
            for replica in group.replicas
        ],
    }


def _table(plan: Plan) -> Table:
    """One row for each run of equal replicas, so that a group of 100 equal ranks is one row."""
    table = Table("Group", "Layers", "Ranks", "Micro-batches", "Shard")
    for index, group in enumerate(plan.groups):
        layers = [plan.chunks[chunk].layers for chunk in plan.chunks_of_group(index)]
        head = [f"{index} {group.name or ''}".strip(), ", ".join(spell([span]) for span in layers)]
        for _, run in groupby(group.replicas, key=_work):
            replicas = list(run)
            table.add_row(*map(Text, [*head, *_cells(group, replicas)]))
            head = ["", ""]
        table.add_section()
    return table


def _work(replica: Replica) -> tuple[int, int, float, int]:
    work = (replica.micro_batch_size, replica.num_microbatches, replica.shard_weight)
    return *work, len(replica.ranks)


def _cells(group: Group, replicas: list[Replica]) -> list[str]:
    """Say ranks, micro-batches and shard of some equal replicas."""
    ranks = spell(spans_of(rank for replica in replicas for rank in replica.ranks))
    each = " each" if len(replicas) > 1 else ""
    one = replicas[0]
    work = f"{one.num_microbatches} x {_samples(one.micro_batch_size)}{each}"
    tensor_parallel = f" ({len(one.ranks)} per replica)" if len(one.ranks) > 1 else ""
    return [ranks + tensor_parallel, work, f"{_shard_percent(group, one):.1f} %{each}"]


def _samples(count: int) -> str:
    return f"{count} sample" + "s" * (count != 1)


def _shard_percent(group: Group, replica: Replica) -> float:
    return 100 * replica.shard_weight / sum(other.shard_weight for other in group.replicas)
