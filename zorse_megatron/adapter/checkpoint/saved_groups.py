"""Parameter groups, step counts and memory of an optimizer's state: what is the same on all ranks.

They go through checkpoints (`saved_optimizer`), and from plan to plan in memory.
"""

from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from zorse_megatron.errors import FlagError, Problem


def allocate_state(optimizer: Any, device: torch.device | None = None) -> None:
    """Give every owned shard its state, zero at step 0, where it has none yet.

    `device`: on which shards are stepped, if that is another one than they are on now.
    """
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    if counts_steps_per_parameter(inner):
        for group in inner.param_groups:
            for shard in group["params"]:
                if "step" not in inner.state[shard]:
                    inner.state[shard]["step"] = _step_tensor(0, device or shard.device, group)


def restore_groups(optimizer: Any, saved_groups: list[dict]) -> None:
    """Take over the hyper-parameters of each group from the saved group of the same kind."""
    saved_by_kind = {_kind(group): group for group in saved_groups}
    for group in optimizer.optimizer.param_groups:
        saved = saved_by_kind.get(_kind(group))
        if saved is None:
            raise FlagError(
                "The checkpoint's optimizer does not fit the command",
                [
                    Problem(
                        where="parameter groups",
                        found=f"groups {sorted(map(str, saved_by_kind))} in the checkpoint",
                        expected=f"a group {_kind(group)} of {param_group_identifier_keys}",
                        remedy="Use the learning-rate and weight-decay flags with which it was "
                        "saved, or --no-load-optim.",
                    )
                ],
            )
        group.update({k: v for k, v in saved.items() if k not in ("params", "step")})


def _kind(group: dict) -> tuple:
    """What stock tells parameter groups apart by (`_filter_and_reorder_param_groups`)."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


def counts_steps_per_parameter(inner: Any) -> bool:
    """torch's Adam keeps a step per parameter, the fused ones per group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def saved_step(inner: dict) -> int:
    """The number of updates, from wherever stock's optimizers keep it."""
    steps = {int(group["step"]) for group in inner["param_groups"] if group.get("step")}
    if common := inner.get("state", {}).get("common_step"):
        steps.add(int(common))
    if len(steps) > 1:
        raise ValueError(f"found steps {sorted(steps)} in the checkpoint; expected one")
    return steps.pop() if steps else 0


def restore_step(optimizer: Any, step: int) -> None:
    optimizer.step_count = step
    inner = optimizer.optimizer
    for group in inner.param_groups:
        if not counts_steps_per_parameter(inner):
            group["step"] = step
            continue
        for shard in group["params"]:
            # One tensor each: torch counts in place, so a shared one would count too fast.
            inner.state[shard]["step"] = _step_tensor(step, shard.device, group)


def _step_tensor(step: int, device: torch.device, group: dict) -> torch.Tensor:
    """A step as torch's Adam would have made it (`torch.optim.adam.Adam._init_group`)."""
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(step), device=device if on_device else "cpu")
