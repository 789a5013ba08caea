"""A plan for people: as a table, simulated, and drawn; and whether it fits."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import refusal, refuse
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.wording import memory, number_of, part_of
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import Group, Plan, Replica
from zorse_megatron.plan.plan_file import fingerprint
from zorse_megatron.plan.spans import spans_of, spell

if TYPE_CHECKING:
    from zorse_megatron.simulate.assumptions import Framework, Perturbation
    from zorse_megatron.simulate.result import SimulationResult


# Beyond these a simulation takes hours or more memory than a workstation has.
MAX_MICRO_BATCHES = 2_000_000
# Up to this many ranks every one is simulated, so that pictures show all of them.
_ALL_RANKS_UP_TO = 64


def simulated(
    plan: Plan,
    costs: WorkloadCosts,
    *,
    source: str,
    perturbation: "Perturbation | None" = None,
    framework: "Framework | None" = None,
) -> "SimulationResult":
    """Simulate one iteration. Raises PlanError or CommandError where that cannot be done.

    `framework`: what trains; None: our runtime.
    """
    from zorse_megatron.planner.simulate_plan import simulate_plan
    from zorse_megatron.simulate.assumptions import NO_PERTURBATION, RUNTIME, SimulationError

    refuse_too_many_micro_batches(plan, source)
    try:
        return simulate_plan(
            costs.inputs,
            plan,
            perturbation=perturbation or NO_PERTURBATION,
            framework=framework or RUNTIME,
            merge_equal_ranks=plan.world_size > _ALL_RANKS_UP_TO,
        )
    except SimulationError as error:
        raise refusal(
            source,
            str(error),
            "a plan that can be simulated",
            "Check the plan with zorse check.",
            what=f"{source} cannot be simulated",
        ) from error


def refuse_too_many_micro_batches(plan: Plan, source: str) -> None:
    """Stop where every micro-batch of every chunk would be more than can be listed."""
    count = sum(
        replica.num_microbatches
        for chunk in plan.chunks
        for replica in plan.groups[chunk.group].replicas
    )
    if count <= MAX_MICRO_BATCHES:
        return
    raise refusal(
        f"{source}: groups",
        f"{count} micro-batches in all chunks together",
        f"at most {MAX_MICRO_BATCHES}",
        "Use larger micro-batches, or a smaller global batch.",
        what=f"{source} is too large to simulate",
    )


def capacities_bytes(cluster: Cluster, margin: float = 0.0) -> tuple[int, ...]:
    """What each rank's GPU has, but for a share of it."""
    return tuple(int((1 - margin) * cluster.kinds[k].memory_bytes) for k in cluster.gpu_kinds)


def memory_problems(
    plan: Plan, result: "SimulationResult", cluster: Cluster, source: str, *, margin: float = 0.0
) -> Iterator[Problem]:
    """Yield which ranks need more memory than their GPUs have; equal ranks together.

    `margin`: share of each GPU's memory that is to stay free.
    """
    too_much: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    capacities = capacities_bytes(cluster, margin)
    for rank, peak_bytes in enumerate(result.peak_memory_bytes):
        if peak_bytes > capacities[rank]:
            key = plan.group_of_rank(rank), cluster.gpu_kinds[rank], peak_bytes
            too_much[key].append(rank)
    for (group, kind, peak_bytes), ranks in too_much.items():
        capacity = capacities[ranks[0]]
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell(spans_of(ranks))}"
        yield Problem(
            where=f"{source}: groups[{group}], {named}",
            found=f"{memory(peak_bytes)} at the peak",
            expected=f"at most {memory(capacity)}, the memory of {kind}"
            + f" without {100 * margin:g} %" * (margin > 0),
            remedy=f"{memory(peak_bytes - capacity)} too much: give the group fewer layers, "
            "these ranks smaller micro-batches or a smaller shard.",
        )


def types_of(plan: Plan, costs: WorkloadCosts) -> str:
    """What groups compute in, in words."""
    types = (group.compute_dtype or costs.dtype for group in plan.groups)
    return " and ".join(dict.fromkeys(types))


def fullest_rank(result: "SimulationResult", cluster: Cluster) -> tuple[int, float]:
    """The rank whose GPU is filled the most, and the share that is filled."""
    capacities = capacities_bytes(cluster)
    shares = [peak / capacities[rank] for rank, peak in enumerate(result.peak_memory_bytes)]
    rank = max(range(len(shares)), key=shares.__getitem__)
    return rank, shares[rank]


_PARTS = ("busy", "communication", "wait", "idle")
# A group with more kinds of rows than this shows the busiest and the least busy of its ranks.
_MAX_ROWS_PER_GROUP = 8


def rank_table(plan: Plan, result: "SimulationResult", cluster: Cluster) -> Table:
    """One row for the ranks of a group that show the same numbers."""
    headings = ("Group", "Ranks", "GPU", "Busy", "Communication", "Waiting", "Idle", "Peak memory")
    table = Table(*headings)
    capacities = capacities_bytes(cluster)
    groups = dict.fromkeys(chunk.group for chunk in plan.chunks)
    by_group = {number: _rows(plan, number, result, cluster) for number in groups}
    has_long_groups = any(len(rows) > 1 for rows in by_group.values())
    for number, rows in by_group.items():
        head = f"{number} {plan.groups[number].name or ''}".strip()
        for ranks in rows[:_MAX_ROWS_PER_GROUP]:
            peak, capacity = result.peak_memory_bytes[ranks[0]], capacities[ranks[0]]
            cells = [head, spell(spans_of(ranks)), cluster.gpu_kinds[ranks[0]]]
            cells += [f"{percent} %" for percent in _percents(result, ranks[0])]
            table.add_row(*map(Text, [*cells, part_of(peak, capacity)]))
            head = ""
        if len(rows) > _MAX_ROWS_PER_GROUP:
            table.add_row("", f"and {len(rows) - _MAX_ROWS_PER_GROUP} more rows")
        if has_long_groups:
            table.add_section()
    return table


def ranks_as_json(plan: Plan, result: "SimulationResult", cluster: Cluster) -> list[dict[str, Any]]:
    """Every rank's numbers as plain values."""
    capacities = capacities_bytes(cluster)
    return [
        {
            "rank": rank,
            "group": plan.group_of_rank(rank),
            "gpu_kind": cluster.gpu_kinds[rank],
            **{f"{part}_s": getattr(usage, f"{part}_s") for part in _PARTS},
            "peak_memory_bytes": result.peak_memory_bytes[rank],
            "gpu_memory_bytes": capacities[rank],
            "at_peak_bytes": {
                category.label: num_bytes
                for category, num_bytes in result.memory[rank].at_peak_bytes.items()
            },
        }
        for rank, usage in enumerate(result.usage)
    ]


def _rows(plan: Plan, number: int, result: "SimulationResult", cluster: Cluster) -> list[list[int]]:
    """Ranks of one group that show the same, busiest first."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in plan.groups[number].ranks:
        peak = memory(result.peak_memory_bytes[rank])
        alike[cluster.gpu_kinds[rank], *_percents(result, rank), peak].append(rank)
    return sorted(alike.values(), key=lambda ranks: -result.usage[ranks[0]].busy_s)


def _percents(result: "SimulationResult", rank: int) -> tuple[int, ...]:
    """Whole percents of the iteration for each part of it."""
    whole_s = result.iteration_s or 1.0
    usage = result.usage[rank]
    return tuple(round(100 * getattr(usage, f"{part}_s") / whole_s) for part in _PARTS)


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Where to write what; None: do not."""

    timeline: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw each rank's timeline.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write a trace for ui.perfetto.dev.")
    ] = None

    def refuse(self, inputs: Sequence[Path | str | None]) -> None:
        """Stop before the work at what could not be drawn or written, or has another format."""
        given = {"--timeline": self.timeline, "--trace": self.trace}
        endings = {"--timeline": ".png", "--trace": ".json"}
        problems = [
            Problem(
                where=option,
                found=f"{path}",
                expected=f"a name that ends in {endings[option]}",
                remedy="Pictures are PNG files, the trace is JSON.",
            )
            for option, path in given.items()
            if path is not None and path.suffix.lower() != endings[option]
        ]
        refuse(problems, "the results could not be written")
        if self.timeline is not None:
            refuse_without("plots", what="--timeline")
        refuse_unwritable(given, inputs=inputs)

    def save(self, plan: Plan, result: "SimulationResult", *, title: str) -> Sequence[Path]:
        """Write what was asked for, and return the paths."""
        written = []
        if self.timeline is not None:
            from zorse_megatron.plots.gantt import draw_timeline

            written.append(draw_timeline(self.timeline, plan=plan, result=result, title=title))
        if self.trace is not None:
            from zorse_megatron.simulate.chrome_trace import save_chrome_trace

            written.append(save_chrome_trace(self.trace, result))
        return written


# A plan in one line, and as a table.


def plan_line(plan: Plan) -> str:
    """The plan in one line."""
    return (
        f"plan {fingerprint(plan)}: {number_of(plan.world_size, 'rank')}, "
        f"{number_of(len(plan.groups), 'group')}, {number_of(len(plan.chunks), 'chunk')}, "
        f"{number_of(plan.model.num_layers, 'layer')}, "
        f"{number_of(plan.global_batch_size, 'sample')} per iteration, "
        f"schedule {plan.schedule.name}"
    )


def plan_table(plan: Plan) -> Table:
    """One row for each run of equal replicas, so that a group of 100 equal ranks is one row."""
    kinds = plan.cluster.gpu_kinds if plan.cluster else None
    has_settings = any(memory_saved_by(g, r) for g in plan.groups for r in g.replicas)
    headings = ["Group", "Layers", "Ranks", "Micro-batches", "Shard"]
    headings[2:2] = ["GPU"] * (kinds is not None)
    has_types = any(group.compute_dtype for group in plan.groups)
    headings += ["Computes in"] * has_types
    table = Table(*headings, *["Memory saved by"] * has_settings)
    runs = [
        [list(run) for _, run in groupby(group.replicas, key=partial(_look, group, kinds=kinds))]
        for group in plan.groups
    ]
    has_long_groups = any(len(of_group) > 1 for of_group in runs)
    for index, group in enumerate(plan.groups):
        layers = [plan.chunks[chunk].layers for chunk in plan.chunks_of_group(index)]
        head = [f"{index} {group.name or ''}".strip(), ", ".join(spell([span]) for span in layers)]
        dtype: list[str] = [group.compute_dtype or "as told"] * has_types
        saved = _saved_by_runs(group, runs[index]) if has_settings else [[]] * len(runs[index])
        for run, settings in zip(runs[index], saved, strict=True):
            gpu = [_kinds_of(run[0], kinds)] if kinds is not None else []
            cells = [*head, *gpu, *_cells(group, run), *dtype, *settings]
            table.add_row(*map(Text, cells))
            head, dtype = ["", ""], [""] * len(dtype)
        if has_long_groups:
            table.add_section()
    return table


def _look(group: Group, replica: Replica, kinds: Sequence[str] | None) -> tuple[Hashable, ...]:
    """What replicas of one row have in common."""
    work = (replica.work, replica.shard_weight)
    return *work, settings_in(group, replica), _kinds_of(replica, kinds)


def _saved_by_runs(group: Group, runs: Sequence[Sequence[Replica]]) -> list[list[str]]:
    """The last cell of each row: said once where all replicas of the group do the same."""
    said = [memory_saved_by(group, run[0]) for run in runs]
    if len(set(said)) == 1:
        return [[said[0]], *[[""]] * (len(said) - 1)]
    return [[each or "nothing"] for each in said]


def _kinds_of(replica: Replica, kinds: Sequence[str] | None) -> str:
    return ", ".join(dict.fromkeys(kinds[rank] for rank in replica.ranks)) if kinds else ""


def memory_saved_by(group: Group, replica: Replica) -> str:
    """Recomputation and offload of a replica of the group; empty where there is none."""
    settings, said = settings_in(group, replica), []
    recompute = settings.recompute
    if recompute is not None and recompute.mode != "none":
        some = f" of {number_of(recompute.num_layers, 'layer')}" if recompute.num_layers else ""
        said.append(f"{recompute.mode} recompute{some}")
    said += [f"{each} on host" for each in settings.offload.said]
    return ", ".join(said)


def _cells(group: Group, replicas: list[Replica]) -> list[str]:
    """Say ranks, micro-batches and shard of some equal replicas."""
    ranks = spell(spans_of(rank for replica in replicas for rank in replica.ranks))
    each = " each" if len(replicas) > 1 else ""
    one = replicas[0]
    halves = f", {one.halved.num_whole} in halves" if one.halved else ""
    work = f"{one.num_microbatches} x {number_of(one.micro_batch_size, 'sample')}{each}{halves}"
    shared, how = one.expert_parallel, "per replica"
    if shared is not None:
        experts, samples = ("|".join(map(str, each)) for each in (shared.experts, shared.samples))
        overlapped = ", overlapped" if shared.overlap else ""
        how = f"share experts {experts}, samples {samples}{overlapped}"
    together = f" ({len(one.ranks)} {how})" if len(one.ranks) > 1 else ""
    share = one.shard_weight / sum(other.shard_weight for other in group.replicas)
    return [ranks + together, work, f"{100 * share:.1f} %{each}"]
