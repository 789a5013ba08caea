"""Full-precision numbers of every iteration, for programs: `--zorse-metrics FILE`.

Stock prints a loss with seven digits and averages it over the logging interval, the second line of
a run over one iteration more. The recorder sits where stock logs, on the rank that prints (the
job's last), with or without a plan, and appends one line of JSON per iteration. Nothing is rounded:
a float32 loss is written as the exact value that it has as a Python float.
"""

import inspect
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from zorse_megatron.adapter.patches import without_plan
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.errors import OutputError
from zorse_megatron.files.read_write import append_line
from zorse_megatron.log import complain


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


def metrics_hooks(path: Path) -> Replacements:
    """Return the hook that writes `path`; apply it once, before training starts."""
    return {without_plan.LOG_STEP: lambda stock: _recording(stock, MetricsFile(path))}


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
