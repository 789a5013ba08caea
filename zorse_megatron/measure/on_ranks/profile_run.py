"""Measures the layers of a model on each kind of GPU of a cluster, and writes the profile."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zorse_megatron.adapter.start_checks import gpu_of
from zorse_megatron.errors import MeasureError, Problem
from zorse_megatron.gpus.gpu import Dtype
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.inputs.profile import Profile, Source, save_profile
from zorse_megatron.launch.rank_environment import LaunchedRank
from zorse_megatron.log import OnProgress, Progress
from zorse_megatron.measure.machine import SeenDevice, SeenNode, kinds_of_gpu, nodes_of
from zorse_megatron.measure.measured_cluster import MeasuredKind
from zorse_megatron.measure.measured_profile import (
    MeasuredSeries,
    first_sizes,
    is_complete,
    loaded_or_empty,
    profiled_model,
    with_model,
    with_pass,
    with_source,
    with_step,
    without_series,
)
from zorse_megatron.measure.on_ranks.ranks import measured_kind, seen_ranks
from zorse_megatron.measure.tasks import (
    Answer,
    LayerRequest,
    MeasuredPass,
    measured_layers,
    single_layer_flags,
)
from zorse_megatron.runtime.collectives import from_rank, on_rank_0


@dataclass(frozen=True, kw_only=True)
class ProfileRun:
    """What to measure."""

    cluster: Path | None
    """None: the GPUs of the ranks, whatever they are."""
    output: Path
    script: Path | None
    """The user's own, which builds the layers; None: ours."""
    flags: tuple[str, ...]
    """Megatron's, of the training command."""
    shape: ModelShape
    dtype: Dtype
    again: bool
    """Measure once more what was measured already."""
    largest_size: int
    """No larger micro-batches."""
    time_limit_s: float
    """No larger micro-batches after one that took longer."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What was measured."""

    measured_kinds: tuple[str, ...]
    known_kinds: tuple[str, ...]
    num_measured: int
    """Micro-batches and steps of this run."""
    rates: Mapping[str, MeasuredKind]
    """Of kinds that are not well known, where no cluster file says what they can do."""


def measure_profile(launched: LaunchedRank, wanted: ProfileRun, show: OnProgress) -> Profiled:
    """Measure what is missing, each kind of GPU on its first rank, one kind after the other.

    Collective. Rank 0 writes the profile after each micro-batch, so that a run that is cut short
    loses nothing. Raises a ZorseError for files, ranks or flags that cannot be used.
    """
    ranks = seen_ranks(launched)
    nodes = nodes_of(ranks)
    profile: Profile = on_rank_0(lambda: _start(wanted, nodes))
    representatives = kinds_of_gpu(nodes)
    all_series = [each for kind in representatives for each in _series(wanted, kind)]
    missing = [each for each in all_series if not is_complete(profile, each)]
    count = 0
    rates: dict[str, MeasuredKind] = {}
    device = ranks[launched.rank].device
    for kind, source in representatives.items():
        if wanted.cluster is None and kind not in GPU_KINDS:
            show(Progress(phase=f"{kind}: its rates", done=count, total=None))
            found = measured_kind(device) if launched.rank == source else None
            rates[kind] = from_rank(found, source)
    for series in missing:
        kind = series.gpu_kind
        source = representatives[kind]
        mine = (
            _measured(launched, wanted, profile, series, device)
            if launched.rank == source
            else iter(())
        )
        show(Progress(phase=f"{kind}: starting", done=count, total=None))
        while (answer := from_rank(next(mine, None), source)) is not None:
            count += 1
            show(Progress(phase=f"{kind}: {_described(answer)}", done=count, total=None))
            add = with_pass if isinstance(answer, MeasuredPass) else with_step
            profile = add(profile, series, answer)
            if launched.rank == 0:
                save_profile(profile, wanted.output)
    measured = dict.fromkeys(each.gpu_kind for each in missing)
    return Profiled(
        measured_kinds=tuple(measured),
        known_kinds=tuple(kind for kind in representatives if kind not in measured),
        num_measured=count,
        rates=rates,
    )


def _series(wanted: ProfileRun, kind: str) -> list[MeasuredSeries]:
    """Of the model's layers; where it has two kinds of them, of those with experts first."""
    shapes = [wanted.shape, *[wanted.shape.dense] * bool(wanted.shape.moe_layer_freq)]
    return [
        MeasuredSeries(model=profiled_model(each), gpu_kind=kind, dtype=wanted.dtype)
        for each in shapes
    ]


def _start(wanted: ProfileRun, nodes: Sequence[SeenNode]) -> Profile:
    """Return the profile to go on with, once it is clear that this is the cluster of the file."""
    if wanted.cluster is not None:
        _check_cluster(wanted, load_cluster(wanted.cluster), nodes)
    all_series = [each for kind in kinds_of_gpu(nodes) for each in _series(wanted, kind)]
    origin = f"one layer of Megatron's, torch {torch.__version__}"
    sources = [Source(name=each.source, kind="measured", origin=origin) for each in all_series]
    profile = loaded_or_empty(wanted.output, sources[0])
    for series, source in zip(all_series, sources, strict=True):
        profile = with_model(with_source(profile, source), series.model)
        if wanted.again:
            profile = without_series(profile, series)
    return profile


def _check_cluster(wanted: ProfileRun, cluster: Cluster, nodes: Sequence[SeenNode]) -> None:
    """The profile's names of kinds must be those of the cluster file, or no plan finds them."""
    found = [kind for node in nodes for kind in node.gpu_kinds]
    if found == list(cluster.gpu_kinds):
        return
    problems = [
        Problem(
            where=f"rank {rank}",
            found=f"{here}",
            expected=f"{there}, as {wanted.cluster} says",
            remedy="Start the ranks on the nodes of the file, in its order, or run zorse discover.",
        )
        for rank, (here, there) in enumerate(zip(found, cluster.gpu_kinds, strict=False))
        if here != there
    ]
    if len(found) != cluster.world_size:
        problems.append(
            Problem(
                where=str(wanted.cluster),
                found=f"{len(found)} ranks",
                expected=f"{cluster.world_size}, one for each GPU of the file",
                remedy="Start one rank for each GPU, or run zorse discover.",
            )
        )
    raise MeasureError("the ranks are not the cluster of the file", problems)


def _measured(
    launched: LaunchedRank,
    wanted: ProfileRun,
    profile: Profile,
    series: MeasuredSeries,
    device: SeenDevice,
) -> Iterator[Answer]:
    on_gpu = torch.cuda.is_available()
    memory_bytes = device.memory_bytes
    if wanted.cluster is not None:
        memory_bytes = load_cluster(wanted.cluster).gpu_of_rank(launched.rank).memory_bytes
    local_rank, used_bytes = 0, None
    if on_gpu:
        local_rank = gpu_of(launched.local_rank)
        free_bytes, total_bytes = torch.cuda.mem_get_info(local_rank)
        used_bytes = total_bytes - free_bytes
    request = LayerRequest(
        first_sizes=first_sizes(profile, series),
        largest_size=wanted.largest_size,
        time_limit_s=wanted.time_limit_s,
        memory_limit_bytes=None if on_gpu else memory_bytes,
        used_bytes=used_bytes,
    )
    flags = single_layer_flags(wanted.flags, series.model)
    return measured_layers(wanted.script, flags, request, local_rank)


def _described(answer: Answer) -> str:
    if isinstance(answer, MeasuredPass):
        return f"{answer.part}, micro-batch {answer.micro_batch_size}"
    return "optimizer step"
