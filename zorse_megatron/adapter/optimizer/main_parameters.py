"""The parameters that an optimizer steps, made for one chunk after the other.

Stock reads what a rank owns out of unsharded parameters: of all chunks at once. Here a sharded
chunk has the memory of its unsharded parameters only while its own are made.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from zorse_megatron.runtime.host_link import copied_to_host

_MODEL_16_BIT, _MODEL_FP32, _SHARD_FP32, _MAIN = 0, 1, 3, 4
"""Places in what stock returns: parameters, shards of fp32 ones, fp32 copies of 16-bit ones."""


def by_chunk(
    stock: Callable[[list[dict]], tuple[list[list], ...]],
    opt_group_ranges: Sequence[dict],
    chunks: Sequence[Any],
    *,
    mains_in_host: bool,
) -> tuple[list[list], ...]:
    """Return what stock returns for all chunks: lists by kind, parameter group and parameter.

    `stock`: `DistributedOptimizer._build_model_and_main_param_groups` for these group ranges. Like
    it, sets the parameters of the groups' `orig_group`, which are in the order of the chunks.
    `mains_in_host`: fp32 copies of 16-bit parameters leave the device as soon as they are made.
    """
    parts = []
    for chunk in chunks:
        parts.append(_of_chunk(stock, opt_group_ranges, chunk))
        for main in chain(*parts[-1][_MAIN]) if mains_in_host else ():
            main.data = copied_to_host(main)
    found = tuple(
        [list(chain(*of_group)) for of_group in zip(*kind, strict=True)]
        for kind in zip(*parts, strict=True)
    )
    for group, shards, mains in zip(
        opt_group_ranges, found[_SHARD_FP32], found[_MAIN], strict=True
    ):
        group["orig_group"]["params"] = [*shards, *mains]
    return found


def _of_chunk(
    stock: Callable[[list[dict]], tuple[list[list], ...]],
    opt_group_ranges: Sequence[dict],
    chunk: Any,
) -> tuple[list[list], ...]:
    mine = set(chunk.params_with_grad)
    groups = [
        {**group, "params": [p for p in group["params"] if p in mine]} for group in opt_group_ranges
    ]
    if chunk.shards is None:
        return stock(groups)
    with chunk.shards.on_device():
        with chunk.shards.owned_in_place():
            parts = stock(groups)
        # Stock steps views of the unsharded fp32 parameters; what this rank keeps are the shards.
        for parameters, shards in zip(parts[_MODEL_FP32], parts[_SHARD_FP32], strict=True):
            for parameter, shard in zip(parameters, shards, strict=True):
                shard.data = chunk.parameter_piece(parameter, *chunk.owned_part(parameter))
        # What is packed is not in the order that stock has read.
        for parameters, mains in zip(parts[_MODEL_16_BIT], parts[_MAIN], strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                if parameter in chunk.parted:
                    main.data.copy_(chunk.parameter_piece(parameter, *chunk.owned_part(parameter)))
    return parts
