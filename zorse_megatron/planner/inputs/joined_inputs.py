"""The inputs of a search among units: some GPUs joined to tensor-parallel sets."""

import dataclasses
from collections.abc import Sequence

from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.inputs.unit_costs import UnitComm, UnitCompute, UnitMemory
from zorse_megatron.planner.inputs.units import (
    JoinedSet,
    Joining,
    SetKind,
    Units,
    costs_of_rank,
    in_rank_order,
    rank_parts,
)
from zorse_megatron.schema.plan.plan import ClusterFingerprint
from zorse_megatron.topology.cluster_topology import Topology


def joined(base: Inputs, joining: Joining) -> Inputs:
    """Return the inputs where each set is one unit; "rank" there means unit.

    A unit is in the node of its first rank. What fits in a unit fits in each of its GPUs, as far as
    closed forms know; plans are simulated rank by rank on `base`.
    """
    assert base.joined_units is None and base.sets is not None
    sets = in_rank_order(joining, base.world_size)
    names: dict[object, SetKind] = {}
    kinds = tuple(_kind(base, each, names) for each in sets)
    set_kinds = {kind.name: kind for kind in names.values()}
    # A kind's name goes with one kind of node alone, so that a node's links are in its costs.
    spec = _spec(base, sets, kinds)
    units = Units(base=base, sets=sets, kinds=kinds, set_kinds=set_kinds)
    compute = UnitCompute(base=base, set_kinds=set_kinds)
    return dataclasses.replace(
        base,
        spec=spec,
        compute=compute,
        memory=UnitMemory(base=base, set_kinds=set_kinds),
        comm=UnitComm(units=units),
        by_dtype={},
        kinds=kinds,
        capacities_bytes=tuple(_capacity(units, each.ranks) for each in sets),
        host_bytes=tuple(_host_bytes(units, each.ranks) for each in sets),
        cluster=ClusterFingerprint(name=base.cluster.name, gpu_kinds=kinds),
        best_sizes={},
        own_types=None,
        gpus=None,
        joined_units=units,
    )


def _kind(base: Inputs, each: JoinedSet, names: dict[object, SetKind]) -> str:
    """The kind of a unit, made where it is new."""
    gpu_kinds = tuple(base.kinds[rank] for rank in each.ranks)
    if len(each.ranks) == 1:
        return gpu_kinds[0]
    spec = base.spec
    nodes = sorted({spec.node_of(rank) for rank in each.ranks})
    # Sets over several nodes are of a kind of their own: their links may differ.
    node = spec.nodes[nodes[0]]
    place: object = (node.link, node.intra_curves) if len(nodes) == 1 else each.ranks
    key = (gpu_kinds, each.parts, place)
    if key not in names:
        parts = rank_parts(each)
        whole = base.memory.layer_parameters()
        counted = {kind: gpu_kinds.count(kind) for kind in gpu_kinds}
        said = " + ".join(f"{count} {kind}" for kind, count in counted.items())
        names[key] = SetKind(
            name=f"set {len(names)}: {said}",
            gpu_kinds=gpu_kinds,
            rank_parts=parts,
            shares=tuple(
                costs_of_rank(base, part).memory.layer_parameters() / whole for part in parts
            ),
            example=each.ranks,
        )
    return names[key].name


def _capacity(units: Units, ranks: Sequence[int]) -> int:
    """What tensors may fill: of the rank that is full first."""
    room = units.base.tensor_capacities_bytes
    if len(ranks) == 1:
        return room[ranks[0]]
    return int(min(room[rank] / units.share(rank) for rank in ranks))


def _host_bytes(units: Units, ranks: Sequence[int]) -> int | None:
    found = [units.base.host_bytes[rank] for rank in ranks]
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None


def _spec(base: Inputs, sets: Sequence[JoinedSet], kinds: Sequence[str]) -> Topology:
    """The nodes with units for GPUs; a node whose GPUs are all in sets of another one is gone."""
    spec = base.spec
    of_node: dict[int, list[str]] = {}
    for each, kind in zip(sets, kinds, strict=True):
        of_node.setdefault(spec.node_of(each.ranks[0]), []).append(kind)
    nodes = [
        dataclasses.replace(spec.nodes[node], gpu_kinds=tuple(found))
        for node, found in sorted(of_node.items())
    ]
    return Topology.of(nodes, spec.switches, spec.region_links, spec.unequal_shards)
