"""What a run records: full-precision numbers of every iteration, and whether files can be written.

Stock prints a loss with seven digits and averages it over the logging interval, the second line of
a run over one iteration more. The recorder sits where stock logs, on the rank that prints (the
job's last), with or without a plan, and appends one line of JSON per iteration. Nothing is rounded:
a float32 loss is written as the exact value that it has as a Python float.
"""

import inspect
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.adapter.plan_run import RunOptions
from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.read_write import append_line
from zorse_megatron.files.writable import folder_problems, unwritable_problems
from zorse_megatron.log import complain
from zorse_megatron.plan.spans import spans_of, spell
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.memory_ledger import memory_name
from zorse_megatron.trace import trace_name


class MetricsFile:
    """Appends one record per iteration to a file; complete lines only, so it can be followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_s: float | None = None
        self.complained = False

    def append(self, losses: dict[str, Any], **numbers: Any) -> None:
        """Write `losses` by their own names ("lm loss"), and `numbers`; NaN and Inf become null."""
        now_s = time.perf_counter()
        record = {
            "iteration": numbers.pop("iteration"),
            **{name: _number(value) for name, value in losses.items()},
            **{name: _number(value) for name, value in numbers.items()},
            # Since the line before; an evaluation or a save in between is in it.
            "elapsed_s": None if self.last_s is None else now_s - self.last_s,
        }
        self.last_s = now_s
        try:
            append_line(self.path, json.dumps(record, allow_nan=False))
        except OutputError as error:
            # No reason to lose the training: it goes on, and the file lacks this iteration.
            if not self.complained:
                complain(str(error), everywhere=True)
            self.complained = True


def _number(value: Any) -> float | int | bool | None:
    """A plain number; stock has tensors and floats, and None for what a rank does not know."""
    if value is None or isinstance(value, bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def recording_hooks(options: RunOptions, *, under_plan: bool) -> Replacements:
    """Return what writes the metrics, if asked for; apply it once, before training starts.

    Under a plan it is asked before groups are made whether they can be written.
    """
    path = options.metrics
    if path is None:
        return {}
    ask = {} if under_plan else {"setup_when_recording": partial(_asking, options)}
    return {"log_step": lambda stock: _recording(stock, MetricsFile(path)), **ask}


def _asking(options: RunOptions, stock: Callable[..., Any]) -> Callable[..., Any]:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        check_record_files(options)
        return stock(*args, **kwargs)

    return setup_model_and_optimizer


def _recording(stock: Callable[..., Any], metrics: MetricsFile) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            given = signature.bind(*args, **kwargs).arguments
            metrics.append(
                given["loss_dict"],
                iteration=given["iteration"],
                grad_norm=given["grad_norm"],
                learning_rate=given["learning_rate"],
                loss_scale=given["loss_scale"],
                skipped=bool(given["skipped_iter"]),
                consumed_samples=get_args().consumed_train_samples,
            )
        return stock(*args, **kwargs)

    return training_log


# Whether what a run records can be written: asked before training, on the ranks that write it.


def check_record_files(options: RunOptions) -> None:
    """Ask every rank whether it could write its files; a collective call.

    Raises OutputError on every rank, with the problems of all, so that no rank waits for one that
    is gone.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = list(_problems(options, rank, is_last=rank == world_size - 1))
    ranks_with: dict[Problem, list[int]] = defaultdict(list)
    for each, problems in enumerate(gathered(mine)):
        for problem in problems:
            ranks_with[problem].append(each)
    if ranks_with:
        told = [_of_ranks(problem, ranks) for problem, ranks in ranks_with.items()]
        raise OutputError("What the run records could not be written", told)


def _problems(options: RunOptions, rank: int, *, is_last: bool) -> Iterator[Problem]:
    if options.trace is not None:
        yield from folder_problems("--zorse-trace", options.trace, [trace_name(rank)])
    if options.memory is not None:
        yield from folder_problems("--zorse-memory", options.memory, [memory_name(rank)])
    if options.metrics is not None and is_last:
        yield from unwritable_problems({"--zorse-metrics": options.metrics}, parents=True)


def _of_ranks(problem: Problem, ranks: list[int]) -> Problem:
    several = "ranks" if len(ranks) > 1 else "rank"
    return replace(problem, where=f"{several} {spell(spans_of(ranks))}: {problem.where}")
