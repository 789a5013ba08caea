"""How a script is left, from wherever it is, to go on under another plan."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zorse_megatron.adapter.plan_run import PlanRun

if TYPE_CHECKING:
    import torch.distributed as dist


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
