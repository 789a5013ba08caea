"""Checks before the start, node by node, that host memory holds what the plan offloads.

All ranks of a node share its memory, so they are checked together. What a rank may then take is
what it needs and an equal part of the rest.
"""

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.errors import Problem, ZorseError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# What helps where a category is too large, as keys of the plan file.
HOST_REMEDIES = {
    "parameters": "turn offload.parameters off for ranks of this node",
    "optimizer state": "turn offload.optimizer_state off for ranks of this node, or give its "
    "ranks a smaller shard_weight",
    "gradients": "turn offload.gradients off for ranks of this node, or give its ranks a smaller "
    "shard_weight",
    "activations": "turn offload.activations off for ranks of this node, or use fewer or smaller "
    "micro-batches",
}


class HostMemoryError(ZorseError):
    """What is to wait in the host does not fit there."""


@dataclass(frozen=True, kw_only=True)
class HostMemoryNeed:
    """What one rank's plan asks of the host that it runs on."""

    rank: int
    node: str
    by_category_bytes: Mapping[str, int]
    """Category, as in `HOST_REMEDIES` -> bytes that wait in the host at most."""
    available_bytes: int
    """What the rank has seen free on its node."""
    held_bytes: int = 0
    """What of the categories was in the host already, and so was not seen free."""

    @property
    def num_bytes(self) -> int:
        """All categories."""
        return sum(self.by_category_bytes.values())


def node_name() -> str:
    """The name that the ranks of one machine have in common."""
    return socket.gethostname()


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that new allocations can have: the machine's, or less where a container has a limit.

    Source: `MemAvailable` of proc(5), and `memory.max` less `memory.current` of cgroups (v2).
    """
    lines = (line.split() for line in meminfo.read_text().splitlines())
    (free,) = (int(fields[1]) * 1024 for fields in lines if fields[0] == "MemAvailable:")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:  # no container, or the first version of cgroups
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def check_host_memory(
    needs: Iterable[HostMemoryNeed], *, limit_bytes: int | None
) -> dict[int, int]:
    """Return what each rank may take, for all ranks of the job.

    `limit_bytes`: for each node, instead of what it has if that is more. Raises HostMemoryError
    with every node that has too little.
    """
    by_node: dict[str, list[HostMemoryNeed]] = {}
    for need in needs:
        by_node.setdefault(need.node, []).append(need)
    problems, budgets = [], {}
    for node, here in by_node.items():
        available = min(need.available_bytes for need in here)
        available += sum(need.held_bytes for need in here)
        budget = available if limit_bytes is None else min(available, limit_bytes)
        spare = budget - sum(need.num_bytes for need in here)
        if spare < 0:
            problems.append(_problem(node, here, budget, is_limit=budget < available))
        for need in here:
            budgets[need.rank] = need.num_bytes + spare // len(here)
    if problems:
        raise HostMemoryError("The offloaded data does not fit in host memory", problems)
    return budgets


def _problem(node: str, here: Sequence[HostMemoryNeed], budget: int, *, is_limit: bool) -> Problem:
    needed = sum(need.num_bytes for need in here)
    totals = {c: sum(need.by_category_bytes.get(c, 0) for need in here) for c in HOST_REMEDIES}
    largest = max(totals, key=lambda category: totals[category])
    ranks = "; ".join(
        f"rank {need.rank}: "
        + ", ".join(f"{c} {count:,}" for c, count in need.by_category_bytes.items() if count)
        for need in here
        if need.num_bytes
    )
    source = "--zorse-host-memory-limit" if is_limit else "what it has available"
    return Problem(
        where=f"node {node}",
        found=f"{needed:,} bytes to offload to its memory ({ranks})",
        expected=f"at most {budget:,} bytes, {source}",
        remedy=f"{needed - budget:,} bytes are missing and most of it is {largest}: "
        f"{HOST_REMEDIES[largest]}; or put less on this node.",
    )
