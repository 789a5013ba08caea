"""Puts a plan into effect: hooks before the script runs, groups when it calls `pretrain`."""

import gc
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zorse_megatron.adapter.patches.rebind import (
    REGISTRY,
    Replacements,
    megatron_directory,
)
from zorse_megatron.adapter.plan_run import PlanLeft, PlanRun
from zorse_megatron.adapter.preload import warned_once_per_node
from zorse_megatron.errors import FlagError
from zorse_megatron.log import say
from zorse_megatron.plan.plan_file import fingerprint

if TYPE_CHECKING:
    import torch.distributed as dist


def activate(run: PlanRun | None) -> Callable[[], None]:
    """Apply all hooks that must be in place before the user's script is imported; returns the undo.

    Without a plan, stock Megatron stays as it is but for `stock_fixes`. Imports Megatron: enable
    CPU mode first where it is needed. Raises SeamError when Megatron is not as we know it.
    """
    undo_fixes = REGISTRY.apply(stock_fixes())
    if run is None:
        return undo_fixes
    from zorse_megatron.adapter.arguments import argument_hooks
    from zorse_megatron.adapter.samples import with_middle_chunks

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    kinds = None if run.cluster is None else run.cluster.kinds
    undo_plan = REGISTRY.apply(
        {
            **argument_hooks(run.plan, world_size=world_size, kinds=kinds, lora=run.options.lora),
            "pretrain": partial(_pretrain_under_plan, run),
            "is_first_or_last_stage": with_middle_chunks,
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
            raise FlagError.of(
                "This script cannot run under a plan",
                where="the script's call of pretrain()",
                found="a config container without a model config",
                expected="one with cfg_container.model, as in upstream's pretrain_gpt.py",
                remedy="Use pretrain_gpt.py of Megatron-LM core_v0.19 as the pattern.",
            )
        run.enter("while the ranks meet")
        _initialize_distributed()
        return train_under_plan(run, partial(stock, cfg_container, *args, **kwargs), cfg_container)

    return pretrain


def _initialize_distributed() -> None:
    """What stock's `_initialize_distributed` does, earlier: groups are made before it runs."""
    import torch.distributed as dist
    from megatron.training import get_args

    from zorse_megatron.adapter.start_checks import take_gpu
    from zorse_megatron.runtime.transport import world_options

    if dist.is_initialized():
        return
    args = get_args()
    take_gpu()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group(
        backend=args.distributed_backend,
        world_size=args.world_size,
        rank=args.rank,
        timeout=timeout,
        pg_options=world_options(args.distributed_backend, timeout),
    )


# Runs the training script: the user's own, or ours when none is given.


class SiblingModules(MetaPathFinder):
    """Finds single-file modules next to the script (`gpt_builders`, `model_provider`).

    Python would put the script's directory on `sys.path`. In a Megatron-LM checkout that directory
    also holds a package `megatron`, which would take the place of the installed one half-way.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find `fullname` if it is a top-level module in a file of its own."""
        file = self.directory / f"{fullname}.py"
        if path is not None or not file.is_file():
            return None
        return importlib.util.spec_from_file_location(fullname, file)


def run_entry(script: Path | None, megatron_flags: Sequence[str]) -> None:
    """Run `script`, or our GPT entry, as `__main__` with Megatron's flags."""
    if script is None:
        sys.argv = ["zorse_megatron.pretrain", *megatron_flags]
        from zorse_megatron.adapter import gpt_entry

        gpt_entry.main()
        return
    sys.argv = [str(script), *megatron_flags]
    own, used = script.resolve().parent / "megatron", megatron_directory()
    if own.is_dir() and own != used:
        say(f"{script} runs on the megatron in {used}, not on its checkout's own")
    # At the end: an installed module wins over one next to the script.
    sys.meta_path.append(SiblingModules(script.resolve().parent))
    # In the namespace of the real __main__, so that what the script defines can be pickled, while
    # processes that are spawned (torch_dist saving) import our guarded module and not the script.
    main = vars(sys.modules["__main__"])
    main["__file__"] = str(script)
    exec(compile(script.read_text(), str(script), "exec"), main)


# One plan after the other in this process, each run as a job of its own would, from its start.
#
# Imports Megatron only where `activate` has: it may be another version than it should be.


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
    torch.cuda.empty_cache()  # nothing where CUDA has not been started


# Bugs of stock Megatron that stop every user of the pip wheel, with or without a GPU.


def _skip_when_built(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Return a `compile_helpers` that runs make only when the extension is missing."""

    def compile_helpers_if_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_helpers_if_missing


def stock_fixes() -> Replacements:
    """For every run, with a plan or without one."""
    return {"compile_helpers": _skip_when_built}
