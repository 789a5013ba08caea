"""Whether what a run records can be written: asked before training, on the ranks that write it."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zorse_megatron.adapter.patches import without_plan
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.writable import folder_problems, unwritable_problems
from zorse_megatron.plan.spans import spans_of, spell
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.memory_ledger import memory_name
from zorse_megatron.trace import trace_name


@dataclass(frozen=True, kw_only=True)
class RecordFiles:
    """What the command line asks for."""

    trace: Path | None = None
    """Directory of a file for each rank."""
    memory: Path | None = None
    """Directory of a file for each rank."""
    metrics: Path | None = None
    """File of the job's last rank."""


def check_record_files(files: RecordFiles) -> None:
    """Ask every rank whether it could write its files; a collective call.

    Raises OutputError on every rank, with the problems of all, so that no rank waits for one that
    is gone.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = list(_problems(files, rank, is_last=rank == world_size - 1))
    ranks_with: dict[Problem, list[int]] = defaultdict(list)
    for each, problems in enumerate(gathered(mine)):
        for problem in problems:
            ranks_with[problem].append(each)
    if ranks_with:
        told = [_of_ranks(problem, ranks) for problem, ranks in ranks_with.items()]
        raise OutputError("What the run records could not be written", told)


def check_hooks(files: RecordFiles) -> Replacements:
    """Return the hook that asks in a stock run; under a plan it is asked before groups are made."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            check_record_files(files)
            return stock(*args, **kwargs)

        return setup_model_and_optimizer

    return {without_plan.SETUP_WHEN_RECORDING: make}


def _problems(files: RecordFiles, rank: int, *, is_last: bool) -> Iterator[Problem]:
    if files.trace is not None:
        yield from folder_problems("--zorse-trace", files.trace, [trace_name(rank)])
    if files.memory is not None:
        yield from folder_problems("--zorse-memory", files.memory, [memory_name(rank)])
    if files.metrics is not None and is_last:
        yield from unwritable_problems({"--zorse-metrics": files.metrics}, parents=True)


def _of_ranks(problem: Problem, ranks: list[int]) -> Problem:
    several = "ranks" if len(ranks) > 1 else "rank"
    return replace(problem, where=f"{several} {spell(spans_of(ranks))}: {problem.where}")
