"""Puts a plan into effect: hooks before the script runs, groups when it calls `pretrain`."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from zorse_megatron.adapter.patches import under_plan
from zorse_megatron.adapter.patches.registry import REGISTRY
from zorse_megatron.adapter.patches.versions import check_megatron, installed_megatron
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.stock_fixes import stock_fixes
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.log import say
from zorse_megatron.schema.plan.plan_json import fingerprint


def activate(run: PlanRun | None) -> Callable[[], None]:
    """Apply all hooks that must be in place before the user's script is imported; returns the undo.

    Without a plan, stock Megatron stays as it is but for `stock_fixes`. Imports Megatron: enable
    CPU mode first where it is needed. Raises SeamError when Megatron is not as we know it.
    """
    check_megatron(installed_megatron())
    undo_fixes = REGISTRY.apply(stock_fixes())
    if run is None:
        return undo_fixes
    from zorse_megatron.adapter.arguments.argument_hooks import argument_hooks
    from zorse_megatron.adapter.data.sample_readers import with_middle_chunks

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    kinds = None if run.cluster is None else run.cluster.kinds
    undo_plan = REGISTRY.apply(
        {
            **argument_hooks(run.plan, world_size=world_size, kinds=kinds),
            under_plan.PRETRAIN: partial(_pretrain_under_plan, run),
            under_plan.IS_FIRST_OR_LAST_STAGE: with_middle_chunks,
        }
    )
    say(
        f"plan {fingerprint(run.plan)}: {run.plan.world_size} ranks in groups of "
        + "|".join(str(len(run.plan.groups[c.group].ranks)) for c in run.plan.chunks)
    )

    def undo() -> None:
        undo_plan()
        undo_fixes()

    return undo


def _pretrain_under_plan(run: PlanRun, stock: Callable[..., Any]) -> Callable[..., Any]:
    def pretrain(cfg_container: Any, *args: Any, **kwargs: Any) -> Any:
        from zorse_megatron.adapter.training import train_under_plan

        if getattr(cfg_container, "model", None) is None:
            raise FlagError(
                "This script cannot run under a plan",
                [
                    Problem(
                        where="the script's call of pretrain()",
                        found="a config container without a model config",
                        expected="one with cfg_container.model, as in upstream's pretrain_gpt.py",
                        remedy="Use pretrain_gpt.py of Megatron-LM core_v0.19 as the pattern.",
                    )
                ],
            )
        run.enter("while the ranks meet")
        _initialize_distributed()
        return train_under_plan(run, partial(stock, cfg_container, *args, **kwargs), cfg_container)

    return pretrain


def _initialize_distributed() -> None:
    """What stock's `_initialize_distributed` does, earlier: groups are made before it runs."""
    import torch
    import torch.distributed as dist
    from megatron.training import get_args

    from zorse_megatron.adapter.found_software import gpu_of
    from zorse_megatron.runtime.communicator_groups import world_options

    if dist.is_initialized():
        return
    args = get_args()
    if torch.cuda.device_count() > 0:
        torch.cuda.set_device(gpu_of(args.local_rank))
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group(
        backend=args.distributed_backend,
        world_size=args.world_size,
        rank=args.rank,
        timeout=timeout,
        pg_options=world_options(args.distributed_backend, timeout),
    )
