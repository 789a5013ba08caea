"""Made-up clusters as ranks would report them: a recorded stand-in for drivers and machines."""

from collections.abc import Sequence

from hypothesis import strategies as st

from zorse_megatron.gpus.gpu import LinkType
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.profile import Transfers
from zorse_megatron.measure.machine import SeenDevice, SeenNic, SeenRank
from zorse_megatron.measure.measured_cluster import MeasuredKind
from zorse_megatron.measure.tasks import LinkTask

MEASURED = MeasuredKind(
    memory_bytes=24_000_000_000,
    memory_bytes_per_s=50e9,
    flops_per_s={"float32": 2e12, "bfloat16": 4e12, "float16": 4e12},
    host_link_bytes_per_s=12e9,
    is_well_known=False,
)


def ranks_of(
    nodes: Sequence[Sequence[str]], *, link: LinkType = "pcie", nics: int = 1
) -> list[SeenRank]:
    """Nodes as lists of device names."""
    seen: list[SeenRank] = []
    for number, names in enumerate(nodes):
        for local_rank, name in enumerate(names):
            memory = GPU_KINDS[name].memory_bytes if name in GPU_KINDS else 10**10
            device = SeenDevice(name=name, memory_bytes=memory, link_type=link, is_gpu=True)
            seen.append(
                SeenRank(
                    rank=len(seen),
                    node=f"host{number}",
                    local_rank=local_rank,
                    device=device,
                    host_memory_bytes=10**11,
                    nics=(SeenNic(name="ib", bytes_per_s=12.5e9),) * nics,
                )
            )
    return seen


def timed(task: LinkTask, *, latency_s: float = 1e-5, bytes_per_s: float = 1e10) -> Transfers:
    """What a perfect link would answer."""
    sizes = tuple(1024 * 8**power for power in range(6))
    return Transfers(
        operation=task.operation,
        nodes=task.nodes,
        gpu_kinds=task.gpu_kinds,
        source="zorse discover",
        num_bytes=sizes,
        time_s=tuple(latency_s + size / bytes_per_s for size in sizes),
    )


clusters = st.lists(
    st.lists(st.sampled_from(["T4", "L4", "A100-40"]), min_size=1, max_size=4).map(sorted),
    min_size=1,
    max_size=6,
)
