"""A sharded chunk's parameters in a checkpoint: each rank saves and loads what it owns of them.

No parameter is unsharded for it. The tensors in the checkpoint are those that stock would write,
cut into other blocks (see `sharded_tensors`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.checkpoint.sharded_tensors import (
    held_blocks,
    joined,
    saved_blocks,
)
from zorse_megatron.adapter.parameters.exact_values import in_fp32, keep_exact_part, standing_for
from zorse_megatron.runtime.host_link import copied_to_host


def saved_entries(
    chunk: Any, entries: Mapping[str, Any], *, is_mixed: bool, in_blocks: bool
) -> dict[str, Any]:
    """A chunk's sharded state dict with blocks of what this rank owns in place of unsharded
    parameters.

    Name -> number of the block -> `ShardedTensor`; nothing for parameters of which it owns nothing.
    The blocks' data are those of the shard, wherever it is, so that a checkpoint is loaded into it.
    `is_mixed`: 16-bit parameters are saved and loaded in fp32, of shards with a copy in the host.
    `in_blocks`: an unsharded chunk's parameters are in blocks, too, as other chunks of the job are:
    a tensor of a checkpoint is described by all ranks as a regular grid of parts, or by none.
    """
    found: dict[str, Any] = {}
    parameters = {id(parameter) for parameter in chunk.parts} if chunk.shards is None else set()
    for name, entry in entries.items():
        parameter: Any = getattr(entry, "data", None)
        own = is_sharded(chunk, parameter)
        if not own and not (in_blocks and id(parameter) in parameters):
            found[name] = in_fp32(entry) if is_mixed else entry
            continue
        flat = parameter.detach().view(-1)
        if own:
            flat = chunk.shards.read(parameter, *chunk.owned_part(parameter))
        if not len(flat):  # an empty entry would end up in the checkpoint's common part
            continue
        if is_mixed and flat.dtype != torch.float32:
            flat = (copied_to_host(flat) if own else flat).float()
        blocks = (
            saved_blocks("", flat, chunk, parameter, entry)
            if own
            else held_blocks(chunk, flat, parameter, entry)
        )
        found[name] = {str(n): standing_for(entry, block) for n, block in enumerate(blocks)}
    return found


def joined_loaded(chunk: Any, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """What has been loaded of an unsharded chunk's `saved_entries`, as tensors."""
    shapes = {name: p.shape for name, p in unwrap_model(chunk).named_parameters()}
    found = {
        name: joined(value).view(shapes[name]) if isinstance(value, Mapping) else value
        for name, value in loaded.items()
    }
    # Of what a rank holds nothing there is nothing to load.
    empty = {name: torch.empty(shape) for name, shape in shapes.items() if not shape.numel()}
    return {**empty, **found}


def saved_as_nothing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `apply_swiglu_sharded_factory`, which divides by the columns of this rank.

    What is returned for no columns at all is left out by `saved_entries`.
    """

    def apply_swiglu_sharded_factory(original_sh_ten: Any, *args: Any, **kwargs: Any) -> Any:
        if not original_sh_ten.data.numel():
            return original_sh_ten
        return stock(original_sh_ten, *args, **kwargs)

    return apply_swiglu_sharded_factory


def take_loaded(
    chunk: Any, loaded: Mapping[str, Any], *, strict: bool, is_mixed: bool
) -> dict[str, Any]:
    """Write what has been loaded of `saved_entries` to the shards; returns all other entries.

    Full tensors will do, too. Raises KeyError if `strict` and a parameter is missing.
    """
    others = dict(loaded)
    missing = []
    for name, parameter in unwrap_model(chunk).named_parameters():
        if not is_sharded(chunk, parameter):
            continue
        start, stop = chunk.owned_part(parameter)
        value = others.pop(name, None)
        if start == stop:
            continue
        if value is None:
            missing.append(name)
            continue
        is_full = isinstance(value, torch.Tensor)
        flat = chunk.owned_of(parameter, value) if is_full else joined(value)
        chunk.shards.write(parameter, start, stop, flat)
        if is_mixed and parameter.dtype not in (flat.dtype, torch.float32):
            keep_exact_part(parameter, flat)
    if missing and strict:
        raise KeyError(f"the checkpoint has no values for {missing}")
    return others


def is_sharded(chunk: Any, tensor: Any) -> bool:
    """Whether this is a parameter of which ranks keep shards."""
    return (
        chunk.shards is not None
        and isinstance(tensor, torch.nn.Parameter)
        and tensor in chunk.param_to_bucket_group
    )
