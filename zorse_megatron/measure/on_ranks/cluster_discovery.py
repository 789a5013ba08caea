"""Measures what a cluster is made of: devices, links inside nodes and between them.

Messages are those of NCCL on GPUs, of gloo on CPUs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from zorse_megatron.files.read_write import write_bytes, write_text
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.profile import Profile, Source, Transfers, save_profile, unequal_parts
from zorse_megatron.launch.rank_environment import LaunchedRank
from zorse_megatron.log import OnProgress, Progress
from zorse_megatron.measure.machine import SeenNode, kinds_of_gpu, nodes_of
from zorse_megatron.measure.measured_cluster import MeasuredKind, cluster_text, kinds_in, link_curve
from zorse_megatron.measure.measured_profile import (
    loaded_or_empty,
    unequal_factors,
    with_links,
    with_transfers,
    with_unequal_shards,
    without_transfers,
)
from zorse_megatron.measure.on_ranks.ranks import measured_kind, seen_ranks
from zorse_megatron.measure.tasks import LinkTask, link_tasks, missing_tasks
from zorse_megatron.runtime.collectives import (
    all_gather_uneven,
    from_rank,
    on_rank_0,
    reduce_scatter_uneven,
)
from zorse_megatron.schedule.shards import shard_bounds

_UNEQUAL = ("all_gather_unequal", "reduce_scatter_unequal")
_GATHERS = ("all_gather", "all_gather_unequal")
_WARM_UP = 2
_REPEATS = 7


def message_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Return the sizes that are timed: powers of 8 from 1 KiB on, up to the largest.

    >>> message_sizes(600_000)
    (1024, 8192, 65536, 524288)
    """
    sizes = [1024]
    while 8 * sizes[-1] <= largest_bytes:
        sizes.append(8 * sizes[-1])
    return tuple(sizes)


def timed_messages(
    task: LinkTask, group: dist.ProcessGroup, *, largest_bytes: int, time_limit_s: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Run a task on this rank, one of `task.ranks`; return sizes and seconds, equal on all of them.

    `group`: of these ranks. The time of a message is that of the slowest rank, the median of
    several messages after warm-up. Stops after a size that took longer than `time_limit_s`.
    Gathers and reductions over shards are those of the runtime.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, times = [], []
    for num_bytes in message_sizes(largest_bytes):
        message = _Message(task, group, num_bytes, device)
        seconds = [message.once_s() for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
        slowest = torch.tensor([median(seconds)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        sizes.append(message.num_bytes)
        times.append(float(slowest))
        if times[-1] > time_limit_s:
            break
    return tuple(sizes), tuple(times)


class _Message:
    """One message of a task, again and again."""

    def __init__(
        self, task: LinkTask, group: dist.ProcessGroup, num_bytes: int, device: torch.device
    ) -> None:
        count = len(task.ranks)
        elements = -(-num_bytes // 4 // count) * count  # the same for each rank of a collective
        self.task, self.group = task, group
        self.num_bytes = 4 * elements
        self.tensor = torch.zeros(elements, device=device)
        weights = unequal_parts(count) if task.operation in _UNEQUAL else (1,) * count
        self.bounds = shard_bounds(elements, weights)
        self.index = task.ranks.index(dist.get_rank())

    def once_s(self) -> float:
        """Start together and return this rank's seconds; of a send half of the way there and back.

        There and back, because the clocks of two nodes do not agree.
        """
        dist.barrier(group=self.group)
        self._wait_for_device()
        start_s = time.perf_counter()
        if self.task.operation == "send":
            self._there_and_back()
        elif self.task.operation == "all_reduce":
            dist.all_reduce(self.tensor, group=self.group)
        elif self.task.operation in _GATHERS:
            all_gather_uneven(self.tensor, self.bounds, self.group).wait()
        else:
            reduce_scatter_uneven(self.tensor, self.bounds, self.group).wait()
        self._wait_for_device()
        took_s = time.perf_counter() - start_s
        return took_s / 2 if self.task.operation == "send" else took_s

    def _there_and_back(self) -> None:
        half = len(self.task.ranks) // 2
        is_sender = self.index < half
        partner = self.task.ranks[(self.index + half) % len(self.task.ranks)]
        if is_sender:
            dist.send(self.tensor, partner, group=self.group)
            dist.recv(self.tensor, partner, group=self.group)
        else:
            dist.recv(self.tensor, partner, group=self.group)
            dist.send(self.tensor, partner, group=self.group)

    def _wait_for_device(self) -> None:
        if self.tensor.is_cuda:
            torch.cuda.synchronize()


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
    known: _Known = on_rank_0(lambda: _known(wanted, nodes, tasks))
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
        on_rank_0(lambda: _write(wanted, nodes, kinds, profile, notes))
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
