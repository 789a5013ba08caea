"""fp32 values behind 16-bit parameters, where groups compute in different types.

Every group keeps fp32 main parameters, and those must not depend on the type that a group computes
in: two copies of a tied embedding stay equal, and a checkpoint is the same for any plan. So where a
parameter gets a value of another type (when the model is initialised or loaded), the value is kept
beside it until main parameters are made of it. Checkpoints of such jobs hold all parameters in
fp32.
"""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from zorse_megatron.runtime.collectives import all_gather_uneven

_EXACT = "zorse_exact"
_STANDS_FOR = "zorse_stands_for"


def keep_exact(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Remember a value that the parameter's own type cannot hold."""
    if parameter.dtype not in (value.dtype, torch.float32):
        setattr(parameter, _EXACT, value.detach().float())


@torch.no_grad()
def take_exact(optimizer: Any) -> None:
    """Make main parameters of the values that are kept, where there are any."""
    for _, parameter, (start, stop), shard in optimizer.owned_shards():
        exact = getattr(parameter, _EXACT, None)
        if exact is not None:
            shard.data.copy_(exact.view(-1)[start:stop])


@torch.no_grad()
def start_from_main(models: Iterable[Any], optimizers: Iterable[Any]) -> None:
    """Make whole parameters of main parameters and forget what is kept; a collective call.

    So the first step computes with main parameters rounded once, wherever they come from.
    """
    for optimizer in optimizers:
        for chunk in optimizer.model_chunks:
            optimizer.copy_main_to_model(chunk)
    for model in models:
        for group in reversed(model.bucket_groups):
            for bucket in group.buckets:
                all_gather_uneven(bucket.param_data, bucket.shard_bounds, group.group)
        for parameter in model.parameters():
            parameter.__dict__.pop(_EXACT, None)


def keep_loaded(model: torch.nn.Module) -> None:
    """From now on keep what is loaded into the model, where its parameters cannot hold it."""
    model.register_load_state_dict_pre_hook(_keep_loaded)


def _keep_loaded(module: Any, state: dict[str, Any], prefix: str, *_unused: Any) -> None:
    for name, parameter in module.named_parameters():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor):
            keep_exact(parameter, value)


# Checkpoints.


def in_fp32(entries: dict[str, Any]) -> dict[str, Any]:
    """A model's sharded state dict with fp32 tensors in place of 16-bit parameters."""
    return {name: _in_fp32(entry) for name, entry in entries.items()}


def _in_fp32(entry: Any) -> Any:
    data = getattr(entry, "data", None)
    if not isinstance(data, torch.Tensor) or data.dtype not in (torch.float16, torch.bfloat16):
        return entry
    stand_in = data.detach().float()
    setattr(stand_in, _STANDS_FOR, data)
    return _with_data(entry, stand_in)


def original_of(tensor: Any) -> Any:
    """The parameter that a tensor of `in_fp32` stands for, or the tensor itself."""
    return getattr(tensor, _STANDS_FOR, tensor)


def original_entry(entry: Any) -> Any:
    """An entry of `in_fp32` as it was before."""
    original = original_of(entry.data)
    return entry if original is entry.data else _with_data(entry, original)


def _with_data(entry: Any, data: torch.Tensor) -> Any:
    """A copy of a ShardedTensor, or of a factory of some, with other data."""
    changed = copy.copy(entry)
    changed.data = data
    if "dtype" in {field.name for field in dataclasses.fields(entry)}:
        changed.dtype = data.dtype
    return changed
