"""The same search on other GPUs: a subset of the cluster's, or one more of a kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.costs.comm import GraphComm
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.plan.plan import ClusterFingerprint
from zorse_megatron.topology.cluster_topology import Topology

# Machines rarely hold more; where each of a kind's has as many, the new GPU gets a node of its own.
_MOST_GPUS_OF_A_NODE = 8


@dataclass(frozen=True, kw_only=True)
class NodeLike:
    """A node of the new cluster."""

    node: int
    """The node of `inputs` whose links, NICs and host memory it has."""
    ranks: tuple[int, ...]
    """Ranks of that node that its GPUs are like, in the order of local ranks."""
    name: str | None = None
    """None: that of the other one."""


def on_nodes(inputs: Inputs, nodes: Sequence[NodeLike]) -> Inputs:
    """Return the inputs on a cluster of these nodes; ranks are counted anew."""
    spec = inputs.spec
    made = tuple(
        replace(
            spec.nodes[each.node],
            name=each.name or spec.nodes[each.node].name,
            gpu_kinds=tuple(inputs.kinds[rank] for rank in each.ranks),
        )
        for each in nodes
    )
    above = {s.name for node in made for s in spec.switches_above(node.switch)}
    switches = tuple(switch for switch in spec.switches if switch.name in above)
    new = Topology.of(made, switches, spec.region_links, spec.unequal_shards)
    origin = [rank for each in nodes for rank in each.ranks]
    kinds = tuple(inputs.kinds[rank] for rank in origin)
    return replace(
        inputs,
        spec=new,
        comm=GraphComm(new),
        kinds=kinds,
        capacities_bytes=tuple(inputs.capacities_bytes[rank] for rank in origin),
        host_bytes=tuple(_host_bytes(inputs, nodes)),
        cluster=ClusterFingerprint(name=inputs.cluster.name, gpu_kinds=kinds),
    )


def on_ranks(inputs: Inputs, ranks: Sequence[int]) -> Inputs:
    """Return the inputs on these GPUs of the cluster alone."""
    wanted = set(ranks)
    parts = [
        NodeLike(node=node, ranks=part)
        for node in range(len(inputs.spec.nodes))
        if (part := tuple(rank for rank in inputs.spec.ranks_of(node) if rank in wanted))
    ]
    return on_nodes(inputs, parts)


def with_one_more(inputs: Inputs, kind: str) -> tuple[Inputs, str]:
    """Return the inputs with one more GPU of a kind, and the name of the node that it is in.

    It goes into the smallest node that has the kind, or into a new one like that where all are
    full.
    """
    spec = inputs.spec
    homes = [at for at, node in enumerate(spec.nodes) if kind in node.gpu_kinds]
    home = min(homes, key=lambda at: (spec.nodes[at].num_gpus, len(set(spec.nodes[at].gpu_kinds))))
    like = next(rank for rank in spec.ranks_of(home) if inputs.kinds[rank] == kind)
    nodes = [NodeLike(node=at, ranks=tuple(spec.ranks_of(at))) for at in range(len(spec.nodes))]
    if spec.nodes[home].num_gpus < _MOST_GPUS_OF_A_NODE:
        nodes[home] = replace(nodes[home], ranks=(*nodes[home].ranks, like))
        return on_nodes(inputs, nodes), spec.nodes[home].name
    name = f"one more like {spec.nodes[home].name}"
    nodes.append(NodeLike(node=home, ranks=(like,), name=name))
    return on_nodes(inputs, nodes), name


def _host_bytes(inputs: Inputs, nodes: Sequence[NodeLike]) -> Iterator[int | None]:
    """What the node has is shared out anew."""
    for each in nodes:
        before = [inputs.host_bytes[rank] for rank in inputs.spec.ranks_of(each.node)]
        known = [part for part in before if part is not None]
        whole = sum(known) // len(each.ranks) if len(known) == len(before) else None
        yield from [whole] * len(each.ranks)
