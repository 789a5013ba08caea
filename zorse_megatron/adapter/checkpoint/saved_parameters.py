"""A rank's part of a parameter, or of its state, in Megatron's distributed checkpoints.

No parameter is unsharded for it. The tensors in the checkpoint are those that stock would write,
cut into other blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.compute_dtype import (
    in_fp32,
    keep_exact_part,
    original_entry,
    standing_for,
)
from zorse_megatron.errors import SeamError
from zorse_megatron.runtime.host_link import copied_to_host
from zorse_megatron.schedule.shards import Interval, intersection
from zorse_megatron.schedule.tensor_parallel_parts import (
    TensorBlock,
    interval_blocks,
    whole_blocks_of,
)


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
    parameters = {id(p) for p in chunk.parts if chunk.shards is None or not p.requires_grad}
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
            in_host = own or not parameter.requires_grad
            flat = (copied_to_host(flat) if in_host else flat).float()
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


# The blocks of what a rank has of a parameter, or of its state.
#
# A rank owns an interval of the flattened parameter. A checkpoint describes pieces of tensors by
# offset and shape, so the interval is cut into blocks (`schedule.tensor_parallel_parts`), each an
# ordinary `ShardedTensor` of the tensor that stock would write. No rank needs another rank's part,
# and who loads the checkpoint may cut it in any other way.


@dataclass(frozen=True, kw_only=True)
class ShardedPiece:
    """A contiguous part of a parameter that is one tensor (or a block of one) in checkpoints.

    Most parameters are one piece; a fused one, such as the gate and up projections of SwiGLU, has
    several. `span` is its interval in the flattened parameter, `sharding` its `ShardedTensor`.
    """

    span: Interval
    sharding: Any


def model_shardings(model_sharded_state_dict: Any) -> dict[int, Any]:
    """Map id(parameter) to its `ShardedTensor` or `ShardedTensorFactory`."""
    shardings, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    originals = map(original_entry, nested_values(shardings))
    return {id(sharding.data): sharding for sharding in originals}


def parameter_pieces(parameter: torch.Tensor, sharding: Any) -> tuple[ShardedPiece, ...]:
    """Find the pieces of a parameter from how the model saves it; its memory may be gone.

    A factory is built on a stand-in without memory, so where its products lie in the stand-in's
    storage tells which elements they are. Raises SeamError when it copies or reorders elements.
    """
    if not isinstance(sharding, ShardedTensorFactory):
        return (ShardedPiece(span=(0, parameter.numel()), sharding=sharding),)
    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    pieces = []
    for product in _products(stand_in, sharding):
        start = product.data.storage_offset()
        pieces.append(ShardedPiece(span=(start, start + product.data.numel()), sharding=product))
    pieces.sort(key=lambda piece: piece.span)
    position = 0
    for piece in pieces:
        made = piece.sharding.data
        in_place = made.untyped_storage()._cdata == stand_in.untyped_storage()._cdata
        if not in_place or not made.is_contiguous() or piece.span[0] != position:
            raise _unknown_factory(sharding.key, piece)
        position = piece.span[1]
    if position != parameter.numel():
        raise _unknown_factory(sharding.key, pieces[-1])
    return tuple(pieces)


def _products(stand_in: torch.Tensor, sharding: Any) -> list[Any]:
    built = sharding.build_fn(sharding.key, stand_in, sharding.replica_id, None)
    return [built] if isinstance(built, ShardedTensor) else list(nested_values(built))


def _unknown_factory(key: str, piece: ShardedPiece) -> SeamError:
    return SeamError.of(
        "A parameter and its optimizer state cannot be saved in shards",
        where=f"parameter {key}",
        found=f"a checkpoint transformation that copies or reorders elements (at elements "
        f"{piece.span}, shape {tuple(piece.sharding.data.shape)})",
        expected="one that splits the parameter along its first axis",
        remedy="Train without this layer, or save with --no-save-optim and resident parameters.",
    )


def saved_blocks(
    prefix: str, flat: torch.Tensor, chunk: Any, parameter: torch.nn.Parameter, sharding: Any
) -> Iterator[Any]:
    """Yield the blocks of `flat`, which is what this rank owns of a parameter or of its state.

    `prefix`: before the model's key, as in optimizer.state.exp_avg.<model key>; `chunk`: the
    wrapped chunk that has the parameter; `sharding`: how the model saves it.
    """
    mixed_tp = chunk.mixed_tp.get(parameter)
    if mixed_tp is None:
        places = _places(chunk, parameter, sharding, chunk.owned_part(parameter))
        return _block_tensors(prefix, flat, places, _owner_replica)
    blocks = mixed_tp.owned_by(dist.get_rank())
    places = _in_whole(_whole_sharding(parameter, sharding), blocks, mixed_tp.part.shape)
    return _block_tensors(prefix, flat, places, lambda found: (found.replica_id[0], 0, 0))


def held_blocks(chunk: Any, flat: torch.Tensor, parameter: Any, sharding: Any) -> Iterator[Any]:
    """Yield blocks of all that this rank holds of a parameter, of which others have copies."""
    places = _places(chunk, parameter, sharding, (0, len(flat)))
    return _block_tensors("", flat, places, lambda found: found.replica_id)


_Place = tuple[Any, TensorBlock, Sequence[int], Sequence[int]]
"""One of stock's tensors for the parameter, and a block; where that tensor, or the whole parameter,
begins in the one of the checkpoint, and the shape of this one."""


def _places(chunk: Any, parameter: Any, sharding: Any, interval: Interval) -> Iterator[_Place]:
    """Where elements `interval` of what a rank holds, flattened, are in checkpoints."""
    if chunk.has_uneven_tp_shards:
        part, whole = chunk.parts[parameter], _whole_sharding(parameter, sharding)
        return _in_whole(whole, whole_blocks_of(part, interval), part.shape)
    return _in_pieces(parameter, sharding, interval)


def _in_pieces(parameter: torch.Tensor, sharding: Any, interval: Interval) -> Iterator[_Place]:
    for piece in parameter_pieces(parameter, sharding):
        part = intersection(interval, piece.span)
        if part is not None:
            in_piece = (part[0] - piece.span[0], part[1] - piece.span[0])
            there = piece.sharding
            for block in interval_blocks(tuple(there.local_shape), in_piece):
                yield there, block, there.global_offset, there.global_shape


def _in_whole(
    sharding: Any, blocks: Iterable[TensorBlock], shape: tuple[int, ...]
) -> Iterator[_Place]:
    """`blocks`: of the whole parameter, which has `shape`; `sharding`: tells its layer."""
    lead = sharding.prepend_axis_num
    origin = (*sharding.global_offset[:lead], *(0 for _ in shape))
    for block in blocks:
        yield sharding, block, origin, (*sharding.global_shape[:lead], *shape)


def _block_tensors(
    prefix: str,
    flat: torch.Tensor,
    places: Iterable[_Place],
    replica_of: Callable[[Any], tuple[int, int, int]],
) -> Iterator[Any]:
    """Yield one `ShardedTensor` per place, in the order of the elements of `flat`.

    The tensors' data are views of it.
    """
    position = 0
    for sharding, block, origin, whole in places:
        # torch_dist takes irregular shards only without prepended axes, so they become ordinary
        # axes of length 1.
        lead = sharding.prepend_axis_num
        shape, offset = (1,) * lead + block.size, (0,) * lead + block.offset
        yield ShardedTensor(
            key=f"{prefix}{sharding.key}",
            data=flat[position : position + block.numel].view(shape),
            dtype=flat.dtype,
            local_shape=shape,
            global_shape=tuple(whole),
            global_offset=tuple(map(sum, zip(origin, offset, strict=True))),
            axis_fragmentations=None,  # an irregular grid
            replica_id=replica_of(sharding),
            allow_shape_mismatch=sharding.allow_shape_mismatch,
        )
        position += block.numel
    assert position == flat.numel(), f"{prefix}: {position} of {flat.numel()} elements in blocks"


def _whole_sharding(parameter: torch.nn.Parameter, sharding: Any) -> Any:
    """One sharded tensor of the model that tells where the whole parameter is in checkpoints."""
    if isinstance(sharding, ShardedTensorFactory):
        stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        products = _products(stand_in, sharding)
    else:
        products = [sharding]
    if len({each.key for each in products}) > 1:
        raise SeamError.of(
            "A parameter and its optimizer state cannot be saved in blocks of the whole",
            where=f"parameter {sharding.key}",
            found=f"{len(products)} tensors in checkpoints",
            expected="one",
            remedy="Use replicas of equal tensor parallelism, and equal parts, in each "
            "group of the plan.",
        )
    return products[0]


def joined(blocks: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The elements of loaded blocks, which are numbered in the order of `saved_blocks`."""
    flat = [blocks[str(number)].reshape(-1) for number in range(len(blocks))]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _owner_replica(sharding: Any) -> tuple[int, int, int]:
    """The model's replica id (pipeline, tensor, data), for the one data-parallel owner.

    The second copy of a tied embedding keeps its pipeline entry of 1, so only the first is saved.
    """
    pipeline, tensor, _ = sharding.replica_id
    return (pipeline, tensor, 0)
