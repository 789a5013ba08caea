"""Communicators and memory beside tensors of the paper's clusters, before and after.

    python scripts/memory_beside_tensors.py [--clusters a b c]

For each cluster the planner's plan; for its ranks the communicators of NCCL, and what they take by
`costs.process_memory`. *Before*: as many communicators, each with the channels that NCCL takes by
itself, connected by a sum: NVIDIA/nccl issue 964 has 544 MB for two GPUs on NVLink and 688 MB for
more; over PCIe and networks `OWN_CHANNELS` channels. Also what a layer keeps with and without
flash attention on four kinds. Nothing here was measured on a GPU.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from zorse_megatron.costs.process_memory import (
    RECEIVE_CHANNEL_BYTES,
    SEND_CHANNEL_BYTES,
    communicator_bytes,
    planned_channels,
    process_items,
)
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.inputs.model import MODELS, USUAL, Computing
from zorse_megatron.inputs.profile import Profile, Source
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.communicators import Communicator
from zorse_megatron.simulate.memory_ledger import Category

EXAMPLES = Path(__file__).parents[1] / "examples"
MIB, GIB = 2**20, 2**30
# One million tokens per step, in samples as long as the paper's.
CLUSTERS = {
    "a": ("llama-33b", 4096, 256),
    "b": ("llama-13b", 1024, 1024),
    "c": ("llama-7b", 512, 2048),
}
FOUR_KINDS = ("V100-16", "T4", "A100-40", "H100-80")
OWN_CHANNELS = 4
NVLINK_PAIR_BYTES, NVLINK_GROUP_BYTES = 544_000_000, 688_000_000
NOTHING = Profile(schema_version=1, sources=(Source(name="none", kind="analytic"),))


def before_bytes(communicator: Communicator, cluster: Cluster) -> int:
    """Return what one took on each of its ranks when NCCL chose, connected by a sum."""
    nodes = {id(_node_of(cluster, rank)) for rank in communicator.ranks}
    link = _node_of(cluster, communicator.ranks[0]).link.type
    if len(nodes) == 1 and link != "pcie":
        return NVLINK_PAIR_BYTES if len(communicator.ranks) == 2 else NVLINK_GROUP_BYTES
    ring = RECEIVE_CHANNEL_BYTES + SEND_CHANNEL_BYTES
    message = RECEIVE_CHANNEL_BYTES if communicator.use == "link" else 0
    return OWN_CHANNELS * (ring + message)


def _node_of(cluster: Cluster, rank: int):  # type: ignore[no-untyped-def]
    return next(node for node in cluster.nodes if rank in node.ranks)


def rows(name: str, cluster: Cluster, inputs: Inputs) -> Iterator[tuple[object, ...]]:
    """Yield one row for each kind of GPU: its rank with most communicators."""
    plan = find_plan(inputs).plan
    gpus = [cluster.kinds[kind] for kind in cluster.gpu_kinds]
    channels = planned_channels(plan, [gpu.multiprocessors or 0 for gpu in gpus])
    result = simulate_plan(inputs, plan, merge_equal_ranks=True)
    for kind in dict.fromkeys(cluster.gpu_kinds):
        ranks = [rank for rank, each in enumerate(cluster.gpu_kinds) if each == kind]
        own = {r: [c for c in channels if r in c.ranks] for r in ranks}
        rank = max(ranks, key=lambda each: len(own[each]))
        made = [each for each in own[rank] if each.use != "world"]
        before = sum(before_bytes(each, cluster) for each in made)
        after = sum(communicator_bytes(each, rank, channels[each]) for each in made)
        process = sum(item.num_bytes for item in process_items(cluster.kinds[kind]))
        fullest = max(ranks, key=lambda each: result.peak_memory_bytes[each])
        peak = result.peak_memory_bytes[fullest]
        fixed = result.memory[fullest].at_peak_bytes[Category.FIXED]
        memory = cluster.kinds[kind].memory_bytes
        yield (
            *(name.upper(), kind, len(made), f"{before / MIB:,.0f}", f"{after / MIB:,.0f}"),
            *(f"{process / MIB:,.0f}", f"{memory / GIB:.2f}", f"{(peak - fixed) / GIB:.2f}"),
            *(f"{fixed / GIB:.2f}", f"{(memory - peak) / GIB:.2f}"),
        )


def attention_rows() -> Iterator[tuple[object, ...]]:
    """Yield what one layer keeps of a sample, by model, on four kinds."""
    kinds = FOUR_KINDS
    gpus = ", ".join(f"1 x {kind}" for kind in kinds)
    cluster = parse_cluster(f"nodes: [{{gpus: [{gpus}]}}]".encode())
    for model, tokens in (("llama-3b", 2048), ("llama3-8b", 8192)):
        for said, computing in (
            ("no dropout", USUAL),
            ("attention dropout", Computing(attention="flash", attention_dropout=True)),
        ):
            shape = dataclasses.replace(MODELS[model], seq_length=tokens)
            memory, _ = CostModels(
                cluster=cluster, model=shape, profile=NOTHING, dtype="float16", computing=computing
            ).memory
            kept = (memory.activation_bytes(1, "none", kind) / GIB for kind in kinds)
            yield f"{model}, {tokens} tokens, {said}", *(f"{each:.2f}" for each in kept)


def _show(head: tuple[str, ...], body: Iterator[tuple[object, ...]]) -> None:
    print("|", " | ".join(head), "|")
    print("|", "---|" * len(head), sep="")
    for row in body:
        print("|", " | ".join(map(str, row)), "|", flush=True)


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), choices=list(CLUSTERS))
    wanted = parser.parse_args().clusters
    _show(("GiB kept by a layer, per sample", *FOUR_KINDS), attention_rows())
    print()
    head = (
        *(
            "Cluster",
            "GPU",
            "Communicators",
            "MiB before",
            "MiB after",
            "Context, workspaces (MiB)",
        ),
        *("Memory (GiB)", "Tensors", "Beside tensors", "Left"),
    )
    all_rows = (
        row
        for name in wanted
        for model, tokens, batch in [CLUSTERS[name]]
        for cluster in [load_cluster(EXAMPLES / f"zorse-paper-cluster-{name}.yaml")]
        for row in rows(
            name,
            cluster,
            make_inputs(
                cluster,
                dataclasses.replace(MODELS[model], seq_length=tokens),
                None,
                global_batch_size=batch,
                dtype="float16",
            ),
        )
    )
    _show(head, all_rows)


if __name__ == "__main__":
    main()
