"""A run under a plan, as the command line asks for it; how its script is left for another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.lora import Lora
from zorse_megatron.inputs.status import Move
from zorse_megatron.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from zorse_megatron.adapter.moving.state import SetAside
    from zorse_megatron.runtime.host_link import HostLink
    from zorse_megatron.trace import Clock


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the command line asks of a run beside its plan; all but `metrics` need one."""

    trace: Path | None
    """Directory of a file for each rank."""
    memory: Path | None
    """Directory of a file for each rank."""
    metrics: Path | None
    """File of the job's last rank."""
    status: Path | None
    """Directory of the run's status."""
    memory_limit_bytes: int | None
    host_memory_limit_bytes: int | None
    update: Literal["auto", "stock", "fused"]
    """See `adapter.optimizer.shard_update`."""
    skips_damaged: bool
    """Resume from an older checkpoint if the latest is damaged."""
    rebalances: bool
    """Whether counts of micro-batches follow what ranks take."""
    lora: Lora | None
    """The adapters, where these alone are trained."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank that stands for another one, such as an emulated one, brings itself."""

    init_process_group: Callable[[], None]
    """Called once this process is the rank; Megatron trains on the default group that it finds."""
    make_host_link: "Callable[[torch.device], HostLink] | None" = None
    """Gets the rank's device, returns its link to host memory; None: `HostLink` itself."""
    clock: "Clock | None" = None
    """By which the rank knows what its actions take; None: its device's."""


@dataclass(frozen=True, kw_only=True)
class PlanRun:
    """A plan, and what the run under it has to know."""

    plan: Plan
    options: RunOptions
    node: str
    """Name of the node that this rank is on."""
    cluster: Cluster | None
    """Says which node each rank is to be on; None: any."""
    enter: Callable[[str], None]
    """Told in which phase this rank is from now on."""
    setup: RankSetup | None
    check_next: Callable[[Plan], Sequence[ComputeDtype]] | None
    """Compares another plan with the command; returns what each rank computes in. Raises
    ZorseError. None: the run stays under its plan, as an emulated one does."""
    moved: "SetAside | None" = None
    """State from the plan before; None: from the script, or from a checkpoint."""
    moves: tuple[Move, ...] = ()
    """What has been asked for before this plan."""
    elastic_run: str = ""
    """Name of an elastic job, whose processes have met anew before each start; "": of no such."""

    @property
    def may_move(self) -> bool:
        """Whether another plan may be asked for, in the directory of the status."""
        return self.check_next is not None and self.options.status is not None


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
