"""The optimizer's part of a checkpoint: what stock would have written without a plan.

The state tensors are saved by their owners, without a gather (see `sharded_tensors`), under
stock's keys; the rest (parameter groups, step, loss scaler) has stock's structure, so a checkpoint
goes from a plan to stock, from stock to a plan and from plan to plan. Sources of the two layouts:
`FP32Optimizer` and `Float16OptimizerWithFloat16Params` in `megatron.core.optimizer.optimizer`;
`DistributedOptimizer.sharded_param_state_fully_reshardable`.
"""

import logging
from collections.abc import Iterator
from copy import deepcopy
from enum import Enum
from functools import partial
from typing import Any

import torch

from zorse_megatron.adapter.checkpoint.saved_groups import (
    allocate_state,
    counts_steps_per_parameter,
    restore_groups,
    restore_step,
    saved_step,
)
from zorse_megatron.adapter.checkpoint.sharded_tensors import (
    joined,
    model_shardings,
    saved_blocks,
)
from zorse_megatron.adapter.parameters.tied_embeddings import is_second_copy
from zorse_megatron.errors import FlagError, Problem

logger = logging.getLogger(__name__)

_SHARDING_TYPE = "distrib_optim_sharding_type"
_FULLY_RESHARDABLE = "fully_reshardable"
_SHARDS = "shards"


class CheckpointLayout(Enum):
    """Which of stock's optimizers a checkpoint looks like."""

    REPLICATED = "replicated"
    """Without --use-distributed-optimizer: states exp_avg, exp_avg_sq and fp32_param."""
    DISTRIBUTED = "distributed"
    """--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable: param instead of
    fp32_param, for fp32 parameters too."""


def sharded_state_dict(
    optimizer: Any, model_sharded_state_dict: Any, *, is_loading: bool, metadata: dict
) -> dict:
    """Build the state dict to save, or the request to load.

    `metadata` is that of the checkpoint (its `content_metadata`), which tells the layout to read.
    Allocates the optimizer's state if there is none yet. Raises FlagError for a layout to read that
    unequal shards cannot have; to write it has been refused as a flag.
    """
    layout = _layout_to_read(metadata) if is_loading else optimizer.checkpoint_layout
    allocate_state(optimizer)
    state = {} if is_loading else common_state(optimizer, layout)
    shardings = model_shardings(model_sharded_state_dict)
    shards = {
        str(index): _parameter_state(optimizer, parameter, shardings, layout)
        for index, parameter in enumerate(owned_parameters(optimizer))
        if is_loading or not is_second_copy(parameter)
    }
    if shards:  # an empty entry would end up in the checkpoint's common part
        state[_SHARDS] = shards
    return state


def load_state_dict(optimizer: Any, state_dict: dict) -> None:
    """Take over a loaded state dict of either layout."""
    layout = (
        CheckpointLayout.DISTRIBUTED
        if "param_state_sharding_type" in state_dict
        else CheckpointLayout.REPLICATED
    )
    allocate_state(optimizer)
    _restore_shards(optimizer, state_dict.get(_SHARDS, {}), layout)
    restore_common_state(optimizer, state_dict)


def restore_common_state(optimizer: Any, state_dict: dict) -> None:
    """Take over what is not sharded: parameter groups, step, loss scaler."""
    inner = state_dict if "param_groups" in state_dict else state_dict["optimizer"]
    restore_groups(optimizer, inner["param_groups"])
    restore_step(optimizer, saved_step(inner))
    if "grad_scaler" in state_dict and optimizer.grad_scaler:
        optimizer.grad_scaler.load_state_dict(state_dict["grad_scaler"])
    elif ("grad_scaler" in state_dict) != bool(optimizer.grad_scaler):
        logger.warning(
            "the checkpoint has %s loss scaler and this run has %s: the run starts with its own",
            *(("a", "none") if "grad_scaler" in state_dict else ("no", "one")),
        )


# Layouts.


def _layout_to_read(metadata: dict) -> CheckpointLayout:
    found = metadata.get(_SHARDING_TYPE, _FULLY_RESHARDABLE)
    if found != _FULLY_RESHARDABLE:
        raise FlagError(
            "The checkpoint cannot be loaded",
            [
                Problem(
                    where="the optimizer state's sharding",
                    found=repr(found),
                    expected=repr(_FULLY_RESHARDABLE),
                    remedy="Save with --ckpt-fully-parallel-save "
                    "--dist-ckpt-optim-fully-reshardable: the default sharding of "
                    "--use-distributed-optimizer is only readable with the data-parallel layout "
                    "that wrote it.",
                )
            ],
        )
    layouts = CheckpointLayout
    return layouts.DISTRIBUTED if _SHARDING_TYPE in metadata else layouts.REPLICATED


def common_state(optimizer: Any, layout: CheckpointLayout) -> dict:
    """What is not sharded, the same on all ranks."""
    per_parameter = counts_steps_per_parameter(optimizer.optimizer)
    step = optimizer.step_count
    groups = [
        deepcopy({key: value for key, value in group.items() if key not in ("params", "step")})
        for group in optimizer.optimizer.param_groups
    ]
    inner: dict[str, Any] = {"param_groups": groups}
    if per_parameter and layout is CheckpointLayout.REPLICATED:
        if step:
            inner["state"] = {"common_step": torch.tensor(float(step))}
    elif per_parameter or step:
        for group in groups:
            group["step"] = float(step) if per_parameter else step
    if layout is CheckpointLayout.REPLICATED and not _is_mixed_precision(optimizer.config):
        return inner
    common: dict[str, Any] = {"optimizer": inner}
    if optimizer.grad_scaler:
        common["grad_scaler"] = optimizer.grad_scaler.state_dict()
    if layout is CheckpointLayout.DISTRIBUTED:
        common["param_state_sharding_type"] = _FULLY_RESHARDABLE
    return common


def _is_mixed_precision(config: Any) -> bool:
    return bool(config.fp16 or config.bf16)


# State tensors.


def owned_parameters(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """The model parameters of which this rank owns elements."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                yield from bucket["param_map"]


def _parameter_state(
    optimizer: Any,
    parameter: torch.nn.Parameter,
    shardings: dict[int, Any],
    layout: CheckpointLayout,
) -> dict[str, dict[str, Any]]:
    """The blocks of one parameter's states: state name in the checkpoint -> number -> block."""
    if id(parameter) not in shardings:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is not in the model's sharded state "
            "dict; expected the model's own parameters there (keep_vars=True)"
        )
    sharding = shardings[id(parameter)]
    chunk = next(each for each in optimizer.model_chunks if parameter in each.parts)
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    name_of = partial(_name_in_checkpoint, is_mixed=optimizer.is_mixed)
    found = {}
    for key, tensor in tensors.items():
        name = name_of(key, parameter, layout)
        if name is None:
            continue
        flat = optimizer.read(tensor)
        if key == "param" and optimizer.is_mixed and parameter.dtype == torch.float32:
            # Both are read into their memory: the model's part may be rounded, this one is not.
            flat = flat.clone()
        blocks = saved_blocks(f"optimizer.state.{name}.", flat, chunk, parameter, sharding)
        found[name] = {str(number): block for number, block in enumerate(blocks)}
    return found


def _name_in_checkpoint(
    key: str, parameter: torch.nn.Parameter, layout: CheckpointLayout, *, is_mixed: bool
) -> str | None:
    """Stock's name of a state, None for what stock does not save as a tensor."""
    if key == "step":
        return None
    if key != "param" or layout is CheckpointLayout.DISTRIBUTED:
        return key
    # Where groups compute in different types, all have it, so that any may load it.
    is_main = is_mixed or parameter.dtype in (torch.float16, torch.bfloat16)
    return "fp32_param" if is_main else None


@torch.no_grad()
def _restore_shards(optimizer: Any, shards: dict, layout: CheckpointLayout) -> None:
    for index, parameter in enumerate(owned_parameters(optimizer)):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for key, tensor in tensors.items():
            name = _name_in_checkpoint(key, parameter, layout, is_mixed=optimizer.is_mixed)
            if name is not None:
                optimizer.write(tensor, joined(shards[str(index)][name]))
