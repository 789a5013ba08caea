"""Has the checkpoint the command's schedules of learning rate and weight decay?

Stock stops at the first value that differs, with an assertion on every rank.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from zorse_megatron.adapter.patches.checkpoints import CHECK_SCHEDULE
from zorse_megatron.adapter.patches.registry import REGISTRY
from zorse_megatron.checkpoints.choice import TITLE
from zorse_megatron.errors import CheckpointError, Problem

_REMEDY = (
    "Add --override-opt-param-scheduler to go on with the command's schedule, as with more "
    "--train-iters, or --use-checkpoint-opt-param-scheduler to keep the checkpoint's."
)


@contextmanager
def same_schedule() -> Iterator[None]:
    """While a checkpoint is loaded. Raises CheckpointError with all values that differ."""
    ours: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    with REGISTRY.applied({CHECK_SCHEDULE: partial(_noting, ours, saved)}):
        yield
    if saved:
        from megatron.training import get_args  # where a checkpoint is loaded it has been imported

        args = get_args()
        problem = Problem(
            where=f"--load {args.load}",
            found=f"{_listed(saved, args)} in the checkpoint",
            expected=f"{_listed(ours, args)}, as in the command",
            remedy=_REMEDY,
        )
        raise CheckpointError(TITLE, [problem])


def _noting(
    ours: dict[str, Any], saved: dict[str, Any], stock: Callable[..., Any]
) -> Callable[..., Any]:
    def _check_and_set(self: Any, cls_value: Any, sd_value: Any, name: str) -> Any:
        is_chosen = self.override_opt_param_scheduler or self.use_checkpoint_opt_param_scheduler
        if is_chosen or cls_value == sd_value:
            return stock(self, cls_value, sd_value, name)
        ours[name], saved[name] = cls_value, sd_value
        return cls_value

    return _check_and_set


def _listed(values: Mapping[str, Any], args: Any) -> str:
    # What stock calls iterations are samples.
    samples = args.global_batch_size if args.train_iters else 1
    scaled = {
        name: value / samples if name.endswith("iterations") else value
        for name, value in values.items()
    }
    return ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.12g')}"
        for name, value in scaled.items()
    )
