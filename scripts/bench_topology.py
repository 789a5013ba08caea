"""Time the topology's parts on made-up clusters of 128, 1,024 and 10,000 GPUs.

    python scripts/bench_topology.py [--gpus 128 1024] [--json]

Nodes have 8 GPUs of four kinds, hang on leaf switches by 16, and are in two regions.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import MeasuredNode, Topology, node_graph
from zorse_megatron.gpus.gpu import LinkType
from zorse_megatron.inputs.cluster import Link, Nics, NodeLink, RegionLink, Switch
from zorse_megatron.planner.baselines.published_planners import paper_groupings
from zorse_megatron.planner.groupings.graph_cuts import split_groupings
from zorse_megatron.planner.groupings.proposals import neighbours, propose_groupings

MAX_GROUPS = 64
# Kind of GPU, link inside, its GB/s, Gb/s of the NICs together.
KINDS: tuple[tuple[str, LinkType, float, float], ...] = (
    ("H100", "nvswitch", 360, 400),
    ("A100", "nvswitch", 243, 100),
    ("V100", "nvlink", 68, 25),
    ("T4", "pcie", 6, 50),
)
# What is timed, by name of its column.
Run = Callable[[Topology], Any]


def cluster(num_gpus: int) -> Topology:
    """Make a cluster of about `num_gpus` GPUs."""
    num_nodes = max(1, num_gpus // 8)
    nodes = []
    for index in range(num_nodes):
        kind, link_type, inside_gb_per_s, nics_gb_per_s = KINDS[index * 4 // num_nodes]
        nodes.append(
            MeasuredNode(
                name=f"n{index}",
                first_rank=8 * index,
                gpu_kinds=(kind,) * 8,
                link=NodeLink(
                    type=link_type, bandwidth_bytes_per_s=inside_gb_per_s * 1e9, latency_s=5e-6
                ),
                nics=Nics(count=1, bandwidth_bytes_per_s=nics_gb_per_s / 8 * 1e9, latency_s=20e-6),
                host_link_bytes_per_s=24e9,
                host_memory_bytes=None,
                region="west" if index < num_nodes // 2 else "east",
                switch=f"leaf{index // 16}-{'west' if index < num_nodes // 2 else 'east'}",
            )
        )
    leaves = {node.switch: node.region for node in nodes}
    uplink = Link(bandwidth_bytes_per_s=100e9, latency_s=0.0)
    return Topology.of(
        nodes,
        [
            Switch(name=str(name), region=region, uplink_to=None, uplink=uplink)
            for name, region in leaves.items()
        ],
        [RegionLink(regions=("west", "east"), bandwidth_bytes_per_s=5e9, latency_s=0.03)],
    )


def gather_everywhere(spec: Topology) -> float:
    """Price one all-gather over all ranks and one over each node."""
    comm = GraphComm(spec)
    groups = [range(spec.num_gpus), *(spec.ranks_of(node) for node in range(len(spec.nodes)))]
    return sum(comm.all_gather_s(tuple(ranks), (2**20,) * len(ranks)) for ranks in groups)


def thousand_transfers(spec: Topology) -> float:
    """Price 1,000 transfers between ranks all over the cluster."""
    comm = GraphComm(spec)
    pairs = ((7 * i % spec.num_gpus, 13 * i % spec.num_gpus) for i in range(1000))
    return sum(comm.transfer_s(*pair, 2**20) for pair in pairs)


def hundred_neighbours(spec: Topology) -> list[Any]:
    """Find 100 groupings near SPLIT's with 16 groups."""
    *_, last = islice(split_groupings(spec, 16), 16)
    return list(neighbours(spec, last.grouping, limit=100))


RUNS: dict[str, Run] = {
    "graph_s": node_graph,
    "split_s": lambda spec: list(split_groupings(spec, MAX_GROUPS)),
    "paper_s": lambda spec: list(paper_groupings(spec, MAX_GROUPS)),
    "candidates_200_s": lambda spec: list(
        propose_groupings(spec, max_groups=MAX_GROUPS, limit=200)
    ),
    "candidates_1000_s": lambda spec: list(
        propose_groupings(spec, max_groups=MAX_GROUPS, limit=1000)
    ),
    "neighbours_100_s": hundred_neighbours,
    "all_gathers_s": gather_everywhere,
    "transfers_1000_s": thousand_transfers,
}


def measure(num_gpus: int) -> dict[str, float]:
    """One row: seconds of every run."""
    spec = cluster(num_gpus)
    row: dict[str, float] = {"gpus": spec.num_gpus, "nodes": len(spec.nodes)}
    for name, run in RUNS.items():
        start = time.perf_counter()
        run(spec)
        row[name] = round(time.perf_counter() - start, 4)
    return row


def main() -> int:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[128, 1024, 10000])
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = [measure(num_gpus) for num_gpus in arguments.gpus]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    for name in rows[0]:
        print(f"{name:20}" + "".join(f"{row[name]:>12g}" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
