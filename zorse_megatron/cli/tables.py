"""A plan in one line, and as a table."""

from collections.abc import Hashable, Sequence
from functools import partial
from itertools import groupby

from rich.table import Table
from rich.text import Text

from zorse_megatron.files.wording import number_of
from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import Group, Plan, Replica
from zorse_megatron.plan.plan_file import fingerprint
from zorse_megatron.plan.spans import spans_of, spell


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
    work = (replica.micro_batch_size, replica.num_microbatches, replica.shard_weight)
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
    said += [
        f"{name.replace('_', ' ')} on host"
        for name in ("parameters", "gradients", "optimizer_state", "activations")
        if getattr(settings.offload, name)
    ]
    return ", ".join(said)


def _cells(group: Group, replicas: list[Replica]) -> list[str]:
    """Say ranks, micro-batches and shard of some equal replicas."""
    ranks = spell(spans_of(rank for replica in replicas for rank in replica.ranks))
    each = " each" if len(replicas) > 1 else ""
    one = replicas[0]
    work = f"{one.num_microbatches} x {number_of(one.micro_batch_size, 'sample')}{each}"
    tensor_parallel = f" ({len(one.ranks)} per replica)" if len(one.ranks) > 1 else ""
    return [ranks + tensor_parallel, work, f"{_shard_percent(group, one):.1f} %{each}"]


def _shard_percent(group: Group, replica: Replica) -> float:
    return 100 * replica.shard_weight / sum(other.shard_weight for other in group.replicas)
