"""What ranks see of their machine, and the nodes that they make up.

What joins GPUs is asked through NVML (package nvidia-ml-py; names are those of its API reference),
the rest of them through torch, the host through proc(5), and sysfs for /sys/class/net and
/sys/class/infiniband. Nodes of one kind are measured once.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from zorse_megatron.errors import MeasureError, Problem
from zorse_megatron.files.quantities import spell_bandwidth
from zorse_megatron.gpus.gpu import LinkType
from zorse_megatron.gpus.known_gpus import GPU_KIND, kind_of_device


@dataclass(frozen=True, kw_only=True)
class SeenNic:
    """A network adapter that is up."""

    name: str
    bytes_per_s: float | None
    """What the driver says that it is; None where it does not say."""


@dataclass(frozen=True, kw_only=True)
class SeenDevice:
    """The device of one rank, as its driver describes it."""

    name: str
    memory_bytes: int
    link_type: LinkType
    """What joins it to the other devices of its node."""
    is_gpu: bool

    @property
    def kind(self) -> str:
        """The well-known kind of GPU that it is, or its own name."""
        return kind_of_device(self.name, self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class SeenRank:
    """What one rank reports."""

    rank: int
    node: str
    local_rank: int
    device: SeenDevice
    host_memory_bytes: int
    nics: tuple[SeenNic, ...]


_MEGABIT_BYTES = 1e6 / 8


def seen_cpu(ranks_on_node: int) -> SeenDevice:
    """Return the CPU as the device of a rank, with its part of the memory."""
    return SeenDevice(
        name=os.environ.get(GPU_KIND) or processor_name(),
        memory_bytes=host_memory_bytes() // ranks_on_node,
        link_type="pcie",
        is_gpu=False,
    )


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself; "CPU" where it does not."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"CPU {' '.join(match[1].split())}" if match else "CPU"


def nics(system: Path = Path("/sys")) -> tuple[SeenNic, ...]:
    """Return the InfiniBand ports, or where there are none the network cards, that are up."""
    return tuple(_infiniband(system)) or tuple(_ethernet(system))


def _infiniband(system: Path) -> Iterator[SeenNic]:
    for port in sorted(system.glob("class/infiniband/*/ports/*")):
        if "ACTIVE" in _line(port / "state"):
            match = re.match(r"([\d.]+) Gb/sec", _line(port / "rate"))
            yield SeenNic(
                name=f"{port.parents[1].name}:{port.name}",
                bytes_per_s=float(match[1]) * 1e3 * _MEGABIT_BYTES if match else None,
            )


def _ethernet(system: Path) -> Iterator[SeenNic]:
    for card in sorted(system.glob("class/net/*")):
        # Bridges, tunnels and the loopback have no device behind them.
        if (card / "device").exists() and _line(card / "operstate") == "up":
            speed = _line(card / "speed")  # megabits; -1 or unreadable on virtual cards
            known = speed.isdecimal() and int(speed) > 0
            yield SeenNic(
                name=card.name, bytes_per_s=int(speed) * _MEGABIT_BYTES if known else None
            )


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # some drivers refuse to say
        return ""


def load_nvml() -> Any:
    """Import and start NVML. Raises MeasureError where it is not installed or has no driver."""
    try:
        import pynvml
    except ImportError as error:
        raise _error("no package nvidia-ml-py", "Run: pip install nvidia-ml-py.") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _error(f"a driver that does not answer ({error})", "Try nvidia-smi.") from error
    return pynvml


def seen_gpu(nvml: Any, gpus: Sequence[Any], local_rank: int) -> SeenDevice:
    """Return the GPU of a rank. Raises MeasureError where there is none.

    `nvml`: the module pynvml; `gpus`: `torch.cuda.get_device_properties` of those that this process
    may use. A launcher may show each rank only its own GPU.
    """
    number = 0 if len(gpus) == 1 else local_rank
    if number >= len(gpus):
        raise _error(
            f"local rank {local_rank} and {len(gpus)} GPUs", "Start one rank for each GPU."
        )
    gpu = gpus[number]
    # CUDA numbers GPUs as CUDA_VISIBLE_DEVICES says and NVML does not, so they go by uuid.
    uuid = f"GPU-{gpu.uuid}"
    try:
        link_type = _link_type(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        found = f"no answer about {uuid} ({error})"
        raise _error(found, "Try nvidia-smi -L: it lists what the driver knows.") from error
    return SeenDevice(
        name=gpu.name, memory_bytes=gpu.total_memory, link_type=link_type, is_gpu=True
    )


def _link_type(nvml: Any, handle: Any) -> LinkType:
    """Where the NVLink lines that are on lead: to a switch or a GPU; without any: PCIe."""
    found: LinkType = "pcie"
    for line in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, line):
                continue
            remote = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, line)
        except nvml.NVMLError:  # not supported, or beyond the last line
            continue
        if remote == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "nvswitch"
        if remote == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            found = "nvlink"
    return found


def _error(found: str, remedy: str) -> MeasureError:
    problem = Problem(
        where="NVML", found=found, expected="NVIDIA's management library", remedy=remedy
    )
    return MeasureError("the GPUs cannot be asked what they are", [problem])


# From the slowest: what joins all devices of a node is what joins the worst of them.
_LINK_TYPES: tuple[LinkType, ...] = ("pcie", "nvlink", "nvswitch")


@dataclass(frozen=True, kw_only=True)
class SeenNode:
    """One machine with consecutive ranks."""

    name: str
    ranks: tuple[int, ...]
    gpu_kinds: tuple[str, ...]
    """By rank of the node."""
    link_type: LinkType
    host_memory_bytes: int
    nics: tuple[SeenNic, ...]

    @property
    def kind(self) -> str:
        """What nodes that need be measured only once have in common, for people to read too."""
        parts = [f"{len(list(same))} x {kind}" for kind, same in groupby(self.gpu_kinds)]
        parts.append(self.link_type)
        rates = Counter(nic.bytes_per_s for nic in self.nics)
        for rate, count in sorted(rates.items(), key=lambda pair: pair[0] or 0.0):
            parts.append(f"{count} x {spell_bandwidth(rate) if rate else 'NIC'}")
        return ", ".join(parts)

    @property
    def is_mixed(self) -> bool:
        """Whether it has GPUs of several kinds."""
        return len(set(self.gpu_kinds)) > 1


def nodes_of(ranks: Sequence[SeenRank]) -> tuple[SeenNode, ...]:
    """Return the nodes in the order of their ranks. Raises MeasureError with every problem.

    The cluster file numbers ranks node by node, so each node needs consecutive ranks.
    """
    ordered = sorted(ranks, key=lambda seen: seen.rank)
    nodes = tuple(_node(list(same)) for _, same in groupby(ordered, key=lambda seen: seen.node))
    problems = [*_scattered(nodes), *_shared(ordered)]
    if problems:
        raise MeasureError("the ranks cannot be described as a cluster", problems)
    return nodes


def kinds_of_gpu(nodes: Sequence[SeenNode]) -> dict[str, int]:
    """Return each kind of GPU with the first rank that has it, which measures for all of them."""
    first: dict[str, int] = {}
    for node in nodes:
        for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True):
            first.setdefault(kind, rank)
    return first


def _node(ranks: list[SeenRank]) -> SeenNode:
    return SeenNode(
        name=ranks[0].node,
        ranks=tuple(seen.rank for seen in ranks),
        gpu_kinds=tuple(seen.device.kind for seen in ranks),
        link_type=min((seen.device.link_type for seen in ranks), key=_LINK_TYPES.index),
        host_memory_bytes=min(seen.host_memory_bytes for seen in ranks),
        nics=ranks[0].nics,
    )


def _scattered(nodes: Sequence[SeenNode]) -> Iterator[Problem]:
    for name, count in Counter(node.name for node in nodes).items():
        if count > 1:
            found = [rank for node in nodes if node.name == name for rank in node.ranks]
            yield Problem(
                where=f"node {name}",
                found=f"ranks {', '.join(map(str, found))}",
                expected="ranks that follow each other",
                remedy="Start the ranks node by node: srun --distribution=block.",
            )


def _shared(ranks: Sequence[SeenRank]) -> Iterator[Problem]:
    counts = Counter((seen.node, seen.local_rank) for seen in ranks)
    for (node, local_rank), count in counts.items():
        if count > 1:
            yield Problem(
                where=f"node {node}",
                found=f"{count} ranks with the local number {local_rank}",
                expected="one rank for each GPU",
                remedy="Two machines with one name? ZORSE_NODE_NAME gives each its own.",
            )
