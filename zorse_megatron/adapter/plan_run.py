"""A run under a plan, as the command line asks for it; how its script is left for another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.status import Move
from zorse_megatron.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from zorse_megatron.adapter.moving.state import SetAside
    from zorse_megatron.runtime.host_link import HostLink
    from zorse_megatron.trace import Clock


def _unheard(_phase: str) -> None:
    """For a rank without a watcher."""


@dataclass(frozen=True, kw_only=True)
class PlanRun:
    """What the command line says about the plan."""

    plan: Plan
    node: str = ""
    """Name of the node that this rank is on."""
    cluster: Cluster | None = None
    """Says which node each rank is to be on; None: any."""
    update: Literal["auto", "stock", "fused"] = "auto"
    """See `adapter.optimizer.shard_update`."""
    trace_directory: Path | None = None
    memory_directory: Path | None = None
    metrics: Path | None = None
    memory_limit_bytes: int | None = None
    host_memory_limit_bytes: int | None = None
    skips_damaged: bool = False
    """Resume from an older checkpoint if the latest is damaged."""
    enter: Callable[[str], None] = _unheard
    """Told in which phase this rank is from now on."""
    make_host_link: "Callable[[torch.device], HostLink] | None" = None
    """Gets the device, returns its link to host memory; None: `HostLink` itself."""
    clock: "Clock | None" = None
    """By which a rank knows what its actions take; None: its device's."""
    rebalances: bool = False
    """Whether counts of micro-batches follow what ranks take."""
    status_directory: Path | None = None
    check_next: Callable[[Plan], Sequence[ComputeDtype]] | None = None
    """Compares another plan with the command; returns what each rank computes in. Raises
    ZorseError. None: the run stays under its plan, as an emulated one does."""
    moved: "SetAside | None" = None
    """State from the plan before; None: from the script, or from a checkpoint."""
    moves: tuple[Move, ...] = ()
    """What has been asked for before this plan."""

    @property
    def may_move(self) -> bool:
        """Whether another plan may be asked for, in the directory of the status."""
        return self.check_next is not None and self.status_directory is not None


# How a script is left, from wherever it is, to go on under another plan.


class PlanLeft(BaseException):
    """The training has been left between two iterations, to go on under another plan.

    No Exception, so that no script takes it for one.
    """

    def __init__(self, run: PlanRun, groups: "Sequence[dist.ProcessGroup]") -> None:
        super().__init__("the training goes on under another plan")
        self.run = run
        """That goes on."""
        self.groups = tuple(groups)
        """Process groups of the plan that is left, in one order on all ranks."""
