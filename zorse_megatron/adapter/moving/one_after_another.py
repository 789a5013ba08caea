"""One plan after the other in this process, each run as a job of its own would, from its start.

Imports Megatron only where `activate` has: it may be another version than it should be.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from zorse_megatron.adapter.activate import activate
from zorse_megatron.adapter.moving.plan_left import PlanLeft
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.repeated_lines import warned_once_per_node

if TYPE_CHECKING:
    import torch.distributed as dist


def run_plans(run: PlanRun | None, enter_script: Callable[[], None]) -> None:
    """Run the script under the plan (None: stock), and again under each that is moved to."""
    while True:
        with nullcontext() if run is None else warned_once_per_node():
            undo = activate(run)
        try:
            enter_script()
        except PlanLeft as left:
            run, groups = left.run, left.groups
        else:
            return
        undo()
        _forget_all(groups)


def _forget_all(groups: "Sequence[dist.ProcessGroup]") -> None:
    """Let go of what there was for the plan before; over the group of all, ranks stay connected."""
    import torch
    import torch.distributed as dist
    from megatron.training import training

    for group in groups:
        dist.destroy_process_group(group)
    training.destroy_global_state()
    gc.collect()  # of chunks, which refer to themselves
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
