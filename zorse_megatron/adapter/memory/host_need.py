"""What a plan's offload settings put into host memory, asked of Megatron's objects."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zorse_megatron.runtime.host_budget import most_away
from zorse_megatron.runtime.host_link import host_bytes_of
from zorse_megatron.schedules.actions import Action
from zorse_megatron.schedules.gradient_offloads import offloaded_gradients
from zorse_megatron.schema.plan.plan import Offload

# Adam's; main parameters are float32, too.
_NUM_MOMENTS = 2
_FLOAT32_BYTES = 4


def host_need(
    offload: Offload,
    models: Mapping[int, Any],
    optimizers: Sequence[Any],
    *,
    actions: Sequence[Action],
    kept_bytes: Callable[[], Mapping[int, int]],
    pinned: bool,
) -> dict[str, int]:
    """Category -> bytes that wait in the host at most, of one rank; before the first step.

    `models`: chunk -> wrapped model; `kept_bytes`: makes chunk -> what a micro-batch of it keeps
    there; `pinned`: whether the host's memory is pinned, as for a GPU.
    """
    need = dict.fromkeys(("parameters", "optimizer state", "gradients", "activations"), 0)
    if offload.parameters:
        need["parameters"] = sum(
            host_bytes_of(buffer.num_owned * buffer.full.element_size(), pinned=pinned)
            for model in models.values()
            if model.shards is not None
            for buffer in model.shards.parameters
        )
    if offload.gradients:
        away = offloaded_gradients(actions)
        need["gradients"] = sum(
            host_bytes_of(buffer.num_owned * buffer.full.element_size(), pinned=pinned)
            for chunk, model in models.items()
            for buffer in (model.shards.gradients if chunk in away else ())
        )
    if offload.optimizer_state:
        need["optimizer state"] = _state_bytes(models, optimizers, pinned=pinned)
    if offload.activations:
        need["activations"] = most_away(actions, kept_bytes())
    return need


def main_bytes(optimizers: Sequence[Any]) -> int:
    """Main parameters, which are in the host from when they are made if optimizer state waits."""
    owned = [each for optimizer in optimizers for each in optimizer.owned_shards()]
    return sum(main.nbytes for _, parameter, _, main in owned if parameter.dtype != torch.float32)


def _state_bytes(models: Mapping[int, Any], optimizers: Sequence[Any], *, pinned: bool) -> int:
    """Moments and main parameters: a flat block of each, by chunk (see `HostState`)."""
    total = 0
    for optimizer in optimizers:
        for model in models.values():
            owned = [(p, s) for c, p, _, s in optimizer.owned_shards() if c is model]
            elements = sum(shard.numel() for _, shard in owned)
            main = sum(s.numel() for p, s in owned if p.dtype != torch.float32)
            blocks = [elements] * _NUM_MOMENTS + [main]
            total += sum(host_bytes_of(_FLOAT32_BYTES * block, pinned=pinned) for block in blocks)
    return total
