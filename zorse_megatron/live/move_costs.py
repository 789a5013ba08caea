"""How long a move takes: what changes hands, over the links between nodes, and the rest.

Who owns what is known to the byte only where the model is built (`adapter.moving`). Here a shard is
a part of its chunk's layers in their order, which differs in the order of parameters within a
layer, and a TP group's ranks own equal parts of what their replica owns.
"""

from collections.abc import Iterator, Sequence

from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.lora import parse_lora
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.live.move import (
    Owners,
    Transfer,
    elements,
    moved_bytes,
    plan_transfers,
)
from zorse_megatron.plan.plan import Chunk, Plan
from zorse_megatron.schedule.shards import shard_bounds
from zorse_megatron.schedule.tensor_parallel_parts import TensorBlock

# Of an element: main parameter and two moments, in fp32.
_STATE_BYTES = (4, 4, 4)


def move_s(
    before: Plan, after: Plan, model: ModelShape, cluster: Cluster, *, rebuild_s: float
) -> float:
    """Seconds that a move takes at the rates of the cluster file.

    State goes down to the host and up again, and between nodes through their adapters. Inside a
    node it is taken to cost nothing more. `rebuild_s`: building processes' groups, model and data.
    """
    old, new = owners(before, model), owners(after, model)
    between = [
        each
        for each in plan_transfers(old, new)
        if cluster.node_of_rank(each.source) != cluster.node_of_rank(each.destination)
    ]
    between_nodes = moved_bytes(between, _STATE_BYTES)
    busiest_s = [
        sum(way[rank] for rank in node.ranks) / node.nics.total_bytes_per_s
        for node in cluster.nodes
        if node.nics is not None
        for way in between_nodes
    ]
    return (
        rebuild_s
        + max(*busiest_s, _between_regions_s(between, cluster), 0.0)
        + _host_s(old, cluster)
        + _host_s(new, cluster)
    )


def owners(plan: Plan, model: ModelShape) -> Owners:
    """Who owns what of each layer, of the embedding and of the output layer, in flat intervals."""
    found: dict[int, dict[str, list[TensorBlock]]] = {rank: {} for rank in range(plan.world_size)}
    for number, chunk in enumerate(plan.chunks):
        parts = _parts(number, chunk, plan, model)
        replicas = plan.groups[chunk.group].replicas
        bounds = shard_bounds(sum(parts.values()), [each.shard_weight for each in replicas])
        for replica, (first, stop) in zip(replicas, bounds, strict=True):
            of_tp_group = shard_bounds(stop - first, [1.0] * len(replica.ranks))
            for rank, (start, end) in zip(replica.ranks, of_tp_group, strict=True):
                for name, block in _blocks(parts, first + start, first + end):
                    found[rank].setdefault(name, []).append(block)
    return found


def _parts(number: int, chunk: Chunk, plan: Plan, model: ModelShape) -> dict[str, int]:
    """Part of the chunk -> elements that are trained."""
    first, stop = chunk.layers
    lora = None if plan.model.lora is None else parse_lora(plan.model.lora, [])
    if lora is not None:
        return {f"layer {layer}": lora.layer_parameters(model) for layer in range(first, stop)}
    parts = {f"layer {layer}": model.layer_parameters() for layer in range(first, stop)}
    if number == 0:
        parts = {"embedding": model.embedding_parameters(), **parts}
    if number == len(plan.chunks) - 1:
        parts["head"] = model.head_parameters()
    return parts


def _blocks(parts: dict[str, int], start: int, stop: int) -> Iterator[tuple[str, TensorBlock]]:
    """What elements [start, stop) of a chunk are of each of its parts."""
    first = 0
    for name, size in parts.items():
        low, high = max(start, first) - first, min(stop, first + size) - first
        if low < high:
            yield name, TensorBlock(offset=(low,), size=(high - low,))
        first += size


def _between_regions_s(between: Sequence[Transfer], cluster: Cluster) -> float:
    """All that goes from one region to another, over the slowest link of regions."""
    region = [cluster.node_of_rank(rank).region for rank in range(cluster.world_size)]
    far = [each for each in between if region[each.source] != region[each.destination]]
    if not far:
        return 0.0
    slowest = min(link.bandwidth_bytes_per_s for link in cluster.region_links)
    sent, _ = moved_bytes(far, _STATE_BYTES)
    return sent.total() / slowest


def _host_s(owners: Owners, cluster: Cluster) -> float:
    """All that a rank owns, between its GPU and the host; all ranks at once."""
    return max(
        elements(owned) * sum(_STATE_BYTES) / cluster.node_of_rank(rank).host_link_bytes_per_s
        for rank, owned in owners.items()
    )
