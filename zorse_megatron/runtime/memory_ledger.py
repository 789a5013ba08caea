"""A rank's memory by category, sampled after every action.

Counted are the bytes of what the runtime knows: unsharded parameters and gradients, shards,
optimizer state, what forwards keep, messages. On a GPU the allocator's own figure stands beside
them. The categories are those of the simulator, so that the two can be compared.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zorse_megatron.errors import ZorseError
from zorse_megatron.files.read_write import write_text
from zorse_megatron.runtime.host_budget import HOST_REMEDIES
from zorse_megatron.runtime.host_link import HostMemoryFull
from zorse_megatron.schedule.actions import Action

# What helps where a category is too large, as keys of the plan file.
_REMEDIES = {
    "parameters": "give the group more chunks under breadth_first, or offload.parameters",
    "gradients": "give the group more chunks under breadth_first, or offload.gradients",
    "optimizer state": "give the rank a smaller shard_weight, or offload.optimizer_state",
    "activations": "use recompute, a smaller micro_batch_size, or offload.activations",
    "buffers": "use a smaller micro_batch_size",
}


LAYERS = "parameters and gradients"
"""The sum that ministages make smaller; its highest value is not the sum of the two highest."""


class MemoryLimitError(ZorseError):
    """A rank holds more than it may."""

    is_of_one_rank = True


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A highest value, and the first action after which it was seen."""

    num_bytes: int
    step: int
    action: str


class MemoryLedger:
    """Samples `probes` after every action; keeps the peaks, and stops the rank at a limit."""

    def __init__(
        self,
        probes: Mapping[str, Callable[[], int]],
        *,
        rank: int,
        samples: bool = True,
        limit_bytes: int | None = None,
        allocated: Callable[[], int] | None = None,
        in_host: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`probes`: category -> its bytes on the device now; `allocated`: the allocator's figure.

        `in_host`: what waits in the host now, by category.

        `samples`: whether to sample after every action, or only when the device has no more.

        The limit counts for the allocator's figure, or without one for the sum of the categories.
        """
        self.probes = dict(probes)
        self.rank = rank
        self.samples = samples
        self.limit_bytes = limit_bytes
        self.allocated = allocated
        self.in_host = in_host
        self.peaks: dict[str, Peak] = {}
        self.at_peak: dict[str, int] = {}
        """The categories when their sum was highest."""

    def sample(self, step: int, action: Action) -> None:
        """Look at everything once. Raises MemoryLimitError beyond the limit."""
        now = {category: probe() for category, probe in self.probes.items()}
        total = sum(now.values())
        if total > self._peak_bytes("total"):
            self.at_peak = now
        seen = {**now, LAYERS: now["parameters"] + now["gradients"], "total": total}
        if self.allocated is not None:
            seen["allocated"] = self.allocated()
        waiting = {f"{category} in the host": count for category, count in self.in_host().items()}
        for category, num_bytes in (seen | waiting).items():
            if num_bytes > self._peak_bytes(category):
                self.peaks[category] = Peak(num_bytes=num_bytes, step=step, action=str(action))
        held = seen.get("allocated", total)
        if self.limit_bytes is not None and held > self.limit_bytes:
            raise self.too_much(action, now, f"{held:,} bytes", f"{self.limit_bytes:,} bytes")

    def out_of_memory(self, action: Action) -> MemoryLimitError:
        """What to raise when the device itself has no more."""
        now = {category: probe() for category, probe in self.probes.items()}
        return self.too_much(action, now, "no memory left on the device", "enough for the action")

    def too_much(
        self, action: Action, now: Mapping[str, int], found: str, expected: str
    ) -> MemoryLimitError:
        """Name the largest category, the chunk at work, and the setting that would help."""
        largest = max(now, key=lambda category: now[category])
        listed = ", ".join(f"{category} {num_bytes:,}" for category, num_bytes in now.items())
        return MemoryLimitError.of(
            "A rank needs more memory than it has",
            where=f"rank {self.rank} {_place(action)}",
            found=f"{found}: {listed} bytes",
            expected=expected,
            remedy=f"Most of it is {largest}: {_REMEDIES.get(largest, 'make a new plan')}; "
            "or let `zorse plan` find a plan with a larger --margin.",
        )

    def out_of_host_memory(self, full: HostMemoryFull, action: Action) -> MemoryLimitError:
        """What to raise when the host has no more."""
        return out_of_host_memory(full, rank=self.rank, waiting=self.in_host(), action=action)

    def save(self, directory: Path) -> Path:
        """Write `memory-rank<rank>.json` and return its path."""
        path = directory / memory_name(self.rank)
        peaks = {category: asdict(peak) for category, peak in self.peaks.items()}
        content = {"rank": self.rank, "peaks": peaks, "at_peak_bytes": self.at_peak}
        return write_text(path, json.dumps(content, indent=2) + "\n", parents=True)

    def _peak_bytes(self, category: str) -> int:
        return self.peaks[category].num_bytes if category in self.peaks else -1


def memory_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"memory-rank{rank}.json"


def out_of_host_memory(
    full: HostMemoryFull,
    *,
    rank: int,
    waiting: Mapping[str, int],
    action: Action | None = None,
) -> MemoryLimitError:
    """What to raise when the host has no more; `action` is None before the first step.

    `waiting`: what waits there now, by category.
    """
    listed = ", ".join(f"{category} {count:,}" for category, count in waiting.items())
    return MemoryLimitError.of(
        "A rank needs more host memory than it has",
        where=f"rank {rank} {_place(action)}",
        found=f"{full.found} with {full.asked_bytes:,} more for {full.category}; there "
        f"now: {listed or 'nothing'}",
        expected=full.expected,
        remedy=f"This would help: {HOST_REMEDIES[full.category]}; or a larger "
        "--zorse-host-memory-limit where there is more.",
    )


def _place(action: Action | None) -> str:
    if action is None:
        return "before the first step"
    return f"at {action}" + ("" if action.chunk is None else f" (chunk {action.chunk})")
