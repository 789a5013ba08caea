"""Measures what a cluster is made of: devices, links inside nodes and between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from zorse_megatron.files.write import write_bytes, write_text
from zorse_megatron.launch.rank_environment import LaunchedRank
from zorse_megatron.measure.machine.nodes import SeenNode, kinds_of_gpu, nodes_of
from zorse_megatron.measure.on_ranks.device_probe import measured_kind
from zorse_megatron.measure.on_ranks.device_ranks import seen_ranks
from zorse_megatron.measure.on_ranks.measuring_job import from_rank, on_first_rank
from zorse_megatron.measure.on_ranks.message_timing import timed_messages
from zorse_megatron.measure.results.cluster_text import MeasuredKind, cluster_text, kinds_in
from zorse_megatron.measure.results.link_fits import link_curve
from zorse_megatron.measure.results.profile_parts import (
    loaded_or_empty,
    with_links,
    with_transfers,
    with_unequal_shards,
    without_transfers,
)
from zorse_megatron.measure.results.unequal_shards import unequal_factors
from zorse_megatron.measure.tasks.link_tasks import LinkTask, link_tasks, missing_tasks
from zorse_megatron.measure.tasks.progress import OnProgress, Progress
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.profile.profile import Profile, Source, Transfers
from zorse_megatron.schema.profile.profile_json import save_profile

SOURCE = "zorse discover"


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What to measure."""

    cluster: Path
    """The cluster file to write."""
    profile: Path
    """Where the times of messages go, and those of an earlier run come from."""
    again: bool
    """Measure once more what was measured already."""
    largest_bytes: int
    """Size of the largest message."""
    time_limit_s: float
    """No larger messages after one that took longer."""
    name: str | None = None
    """Name of the cluster."""


@dataclass(frozen=True, kw_only=True)
class Discovered:
    """What was measured."""

    nodes: tuple[SeenNode, ...]
    num_measured: int
    """Measurements of this run."""
    num_known: int
    """Measurements of earlier ones."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What earlier runs have left."""

    profile: Profile
    kinds: dict[str, MeasuredKind]
    same_nodes: bool
    """Whether the cluster file has these nodes."""


def discover(launched: LaunchedRank, wanted: Discovery, show: OnProgress) -> Discovered:
    """Measure what is missing and write both files on rank 0. Collective.

    The profile is written after each measurement, so that a run that is cut short loses nothing.
    Raises a ZorseError on every rank for files or ranks that cannot be used.
    """
    ranks = seen_ranks(launched)
    nodes = nodes_of(ranks)
    tasks = link_tasks(nodes)
    known: _Known = on_first_rank(lambda: _known(wanted, nodes, tasks))
    missing = missing_tasks(tasks, known.profile.transfers)
    new = {kind: rank for kind, rank in kinds_of_gpu(nodes).items() if kind not in known.kinds}
    total = len(new) + len(missing)
    kinds, profile = dict(known.kinds), known.profile
    for number, (kind, rank) in enumerate(new.items()):
        show(Progress(phase=kind, done=number, total=total))
        mine = measured_kind(ranks[rank].device) if launched.rank == rank else None
        kinds[kind] = from_rank(mine, rank)
    for number, task in enumerate(missing, start=len(new)):
        show(Progress(phase=str(task), done=number, total=total))
        profile = with_transfers(profile, _timed(launched, wanted, task))
        if launched.rank == 0:
            save_profile(profile, wanted.profile)
    notes: list[str] = []
    if total or not known.same_nodes:
        profile = _with_curves(profile, notes)
        on_first_rank(lambda: _write(wanted, nodes, kinds, profile, notes))
    return Discovered(
        nodes=nodes,
        num_measured=total,
        num_known=len(tasks) - len(missing),
        notes=tuple(notes),
    )


def _known(wanted: Discovery, nodes: Sequence[SeenNode], tasks: Sequence[LinkTask]) -> _Known:
    backend = "NCCL" if torch.cuda.is_available() else "gloo"
    source = Source(name=SOURCE, kind="measured", origin=f"messages over {backend}")
    profile = loaded_or_empty(wanted.profile, source)
    if wanted.again:
        profile = without_transfers(profile, (task.key for task in tasks))
    if wanted.again or not wanted.cluster.exists():
        return _Known(profile=profile, kinds={}, same_nodes=False)
    cluster = load_cluster(wanted.cluster)
    found = [(node.name, node.gpu_kinds) for node in cluster.nodes]
    return _Known(
        profile=profile,
        kinds=kinds_in(cluster),
        same_nodes=found == [(node.name, node.gpu_kinds) for node in nodes],
    )


def _timed(launched: LaunchedRank, wanted: Discovery, task: LinkTask) -> Transfers:
    """Run a task on its ranks and give the result to all. Collective."""
    found = None
    group = dist.new_group(list(task.ranks))  # by all ranks: its name counts the calls
    if launched.rank in task.ranks:
        found = timed_messages(
            task, group, largest_bytes=wanted.largest_bytes, time_limit_s=wanted.time_limit_s
        )
        dist.destroy_process_group(group)
    sizes, times = from_rank(found, task.ranks[0])
    return Transfers(
        operation=task.operation,
        nodes=task.nodes,
        gpu_kinds=task.gpu_kinds,
        source=SOURCE,
        num_bytes=sizes,
        time_s=times,
    )


def _with_curves(profile: Profile, notes: list[str]) -> Profile:
    """Fit all links anew; a note says how many series a parabola fits."""
    ours = [transfers for transfers in profile.transfers if transfers.source == SOURCE]
    curves = [curve for transfers in ours if (curve := link_curve(transfers)) is not None]
    notes.append(
        f"{len(curves)} of {len(ours)} series of messages fit a curve by message size, which is in "
        "the profile; the cluster file has latency and bandwidth"
    )
    factors = unequal_factors(ours)
    for each in factors:
        notes.append(
            f"{each.operation} over unequal shards, {each.link}, {' and '.join(each.gpu_kinds)}: "
            f"{each.factor:.2f} times what their bytes tell"
        )
    return with_unequal_shards(with_links(profile, SOURCE, curves), SOURCE, factors)


def _write(
    wanted: Discovery,
    nodes: Sequence[SeenNode],
    kinds: dict[str, MeasuredKind],
    profile: Profile,
    notes: list[str],
) -> None:
    """Write both files; a cluster file that may have been edited is kept beside the new one."""
    here = {kind for node in nodes for kind in node.gpu_kinds}
    text = cluster_text(
        nodes,
        {kind: found for kind, found in kinds.items() if kind in here},
        profile.transfers,
        name=wanted.name,
    )
    save_profile(profile, wanted.profile)
    if wanted.cluster.exists():
        old = wanted.cluster.with_name(f"{wanted.cluster.name}.old")
        write_bytes(old, wanted.cluster.read_bytes())
        notes.append(f"the cluster file that was there is now {old}")
    write_text(wanted.cluster, text)
