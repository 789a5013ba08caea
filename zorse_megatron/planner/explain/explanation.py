"""What limits a plan, and what would help: the data."""

from dataclasses import dataclass
from typing import Literal

from zorse_megatron.planner.evaluate.node_host_memory import (
    NodeHostMemory,
)
from zorse_megatron.planner.explain.critical_shares import CriticalShares
from zorse_megatron.planner.explain.replan import Replans
from zorse_megatron.planner.outcome import LinkBound

Limit = Literal["compute", "imbalance and bubbles", "communication"]


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """One rank's memory."""

    rank: int
    kind: str
    capacity_bytes: int
    """What may be filled: the margin is taken off."""
    peak_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left; below 0 where the plan does not fit."""
        return self.capacity_bytes - self.peak_bytes


@dataclass(frozen=True, kw_only=True)
class GroupLoad:
    """What one group did with its time; shares of the iteration, means over its ranks."""

    group: int
    kinds: tuple[tuple[str, int], ...]
    """(kind, number of GPUs)."""
    num_layers: int
    busy: float
    communication: float
    waiting: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A change of the plan, and what it would do."""

    what: str
    iteration_s: float | None
    """None where it does not fit."""
    why_not: str


@dataclass(frozen=True, kw_only=True)
class AgainstStock:
    """What stock Megatron takes on the same GPUs, or the best of them."""

    even_s: float | None
    """In its best even layout; None: none fits."""
    best_s: float | None
    """In its best layout of all."""
    layout: str | None
    """That one, for people."""
    reason: str
    """Why none fits; empty where one does."""
    lacks: tuple[str, ...]
    """What the plan may do, and no layout of stock."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What limits a plan, and what would help."""

    iteration_s: float
    tokens_per_s: float
    bound_s: float
    """No plan that fits can be faster than this."""
    recomputing_bound_s: float
    """No plan that recomputes every layer can be faster than this."""
    link_bound: LinkBound
    """The same as `bound_s`, counting what must cross the busiest link."""
    efficiency: float
    """bound_s / iteration_s."""
    limited_by: Limit
    bottleneck_group: int
    """The group that is busy for the largest share of the iteration."""
    critical_path: CriticalShares
    loads: tuple[GroupLoad, ...]
    headroom: tuple[Headroom, ...]
    """By rank."""
    host: tuple[NodeHostMemory, ...]
    """Nodes in whose host memory something waits."""
    alternatives: tuple[Alternative, ...]
    replans: Replans | None
    """None: no other search was made."""
    stock: AgainstStock | None = None
    """None: its layouts were not searched."""
    sentences: tuple[str, ...]
    """All of it in plain words."""
