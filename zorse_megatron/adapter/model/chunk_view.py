"""A wrapped Megatron model chunk as an emulation sees it: modules that take time, and buffers.

Its hooks are applied before training starts, with a plan or without one, and only look on: what
stock and this package compute stays the same.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from zorse_megatron.adapter.memory import num_recomputed
from zorse_megatron.adapter.parameter_parts import cut_axis, kind_of
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.runtime.mixed_tp_exchange import MixedTpTensor
from zorse_megatron.schedule.tensor_parallel_parts import UnitKind

Section = Literal["embedding", "head"] | int
"""A layer by its number in the model."""
CountedSection = Section | Literal["tied table"]
"""A table that embedding and output layer share is counted apart: two chunks may have a copy."""


@dataclass(frozen=True, kw_only=True)
class BufferSection:
    """Elements [start, stop) of a flat buffer that hold parameters of one section of the model."""

    section: CountedSection
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class FlatBuffer:
    """Parameters (None: they have storages of their own) and gradients, laid out alike."""

    parameters: torch.Tensor | None
    gradients: torch.Tensor
    sections: tuple[BufferSection, ...]
    """Ascending; what is in none of them is padding."""


@dataclass(frozen=True, kw_only=True)
class ChunkView:
    """One chunk."""

    wrapped: Any
    """Stock's DDP wrapper, or ours."""
    model: torch.nn.Module
    layers: tuple[torch.nn.Module, ...]
    embedding: torch.nn.Module | None
    output_layer: torch.nn.Module | None
    buffers: tuple[FlatBuffer, ...]
    num_parameters: dict[CountedSection, int]
    """By section; of those that are trained."""
    has_own_output_table: bool
    """Whether the head has a table of its own, or a copy of the tied one."""
    num_whole: int
    """Trained parameters of one layer that TP groups do not cut."""
    recompute: Literal["none", "selective"]
    """How layers that are not fully recomputed are run."""
    num_recomputed: int
    """How many of the first layers keep their input only."""
    delayed_weights: tuple[torch.nn.Parameter, ...]
    """One of each layer, if gradients of weights are computed apart from backwards."""


def chunk_view_of(wrapped: Any) -> ChunkView:
    """Take a chunk apart after its wrapper has been made."""
    model = get_attr_wrapped_model(wrapped, "decoder", return_model_obj=True)
    config = get_model_config(wrapped)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = {id(parameter): name for name, parameter in trained.items()}
    section_of = partial(_counted_section_of, model)
    counts: dict[CountedSection, int] = {}
    for name, parameter in trained.items():
        counts[section_of(name)] = counts.get(section_of(name), 0) + parameter.numel()
    first = model.decoder.layers[0].parameters() if model.decoder.layers else ()
    return ChunkView(
        wrapped=wrapped,
        model=model,
        layers=tuple(model.decoder.layers),
        embedding=model.embedding if model.pre_process else None,
        output_layer=model.output_layer if model.post_process else None,
        buffers=tuple(
            _flat(buffer, {each: section_of(name) for each, name in names.items()})
            for buffer in wrapped.buffers
        ),
        num_parameters=counts,
        has_own_output_table="output_layer.weight" in dict(model.named_parameters()),
        num_whole=sum(p.numel() for p in first if p.requires_grad and cut_axis(p) is None),
        recompute="selective" if config.recompute_granularity == "selective" else "none",
        num_recomputed=num_recomputed(config, len(model.decoder.layers)),
        delayed_weights=tuple(map(_a_matrix, model.decoder.layers))
        if getattr(wrapped, "delays_weights", False)
        else (),
    )


@dataclass(frozen=True, kw_only=True)
class MixedTpParameter:
    """A parameter of a group whose replicas cut their layers differently."""

    section: Section
    kind: UnitKind | None
    """What it is cut by; None: every rank has the whole."""
    tensor: MixedTpTensor
    num_owned: int
    """Elements that this rank owns."""


def mixed_tp_parameters(chunk: ChunkView) -> Iterator[MixedTpParameter]:
    """Yield them, known once the wrapper has been made; none where replicas are alike."""
    mixed_tp = getattr(chunk.wrapped, "mixed_tp", {})
    for name, parameter in chunk.model.named_parameters():
        if parameter in mixed_tp:
            yield MixedTpParameter(
                section=_section_of(chunk.model, name),
                kind=None if cut_axis(parameter) is None else kind_of(name),
                tensor=mixed_tp[parameter],
                num_owned=chunk.wrapped.shards.num_owned(parameter),
            )


@dataclass(frozen=True, kw_only=True)
class OwnedShare:
    """What this rank's optimizer steps of one bucket."""

    buffer: int
    """Number of the buffer."""
    bucket: tuple[int, int]
    """[start, stop) in the buffer."""
    share: float


def owned_shares(chunk: ChunkView) -> Iterator[OwnedShare]:
    """Yield this rank's share of every bucket, known once the wrapper has been made."""
    for number, buffer in enumerate(chunk.wrapped.buffers):
        group_rank, count = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel()
            bounds = getattr(bucket, "shard_bounds", None)
            if bounds is not None:
                share = (bounds[group_rank][1] - bounds[group_rank][0]) / max(1, size)
            else:
                split = chunk.wrapped.ddp_config.use_distributed_optimizer
                share = 1 / count if split else 1.0
            place_in_buffer = bucket.offset, bucket.offset + size
            yield OwnedShare(buffer=number, bucket=place_in_buffer, share=share)


def _a_matrix(layer: torch.nn.Module) -> torch.nn.Parameter:
    linear = ColumnParallelLinear | RowParallelLinear
    return next(m.weight for m in layer.modules() if isinstance(m, linear))


def _flat(buffer: Any, sections_by_id: dict[int, CountedSection]) -> FlatBuffer:
    sections = [
        BufferSection(section=sections_by_id[id(parameter)], start=start, stop=stop)
        for parameter, (start, stop, _) in buffer.param_index_map.items()
    ]
    return FlatBuffer(
        parameters=buffer.param_data,
        gradients=buffer.grad_data,
        sections=tuple(sorted(sections, key=lambda each: each.start)),
    )


def _counted_section_of(model: Any, name: str) -> CountedSection:
    is_table = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    if is_table and model.share_embeddings_and_output_weights:
        return "tied table"
    return _section_of(model, name)


def number_of_layer(layer: Any) -> int:
    """Its number in the model, from 0 on."""
    return int(layer.layer_number) - 1


def _section_of(model: Any, name: str) -> Section:
    if name.startswith("decoder.layers."):
        return number_of_layer(model.decoder.layers[int(name.split(".")[2])])
    return "embedding" if name.startswith("embedding.") else "head"


# The hooks of an emulated run.


def emulation_hooks(
    *,
    watch: Callable[[ChunkView], None],
    around_step: Callable[[], AbstractContextManager[None]],
) -> Replacements:
    """`watch` gets every chunk of the model when it is wrapped, `around_step` surrounds a step."""
    return {
        "wrap_model": partial(_watching, watch),
        "pace_step": partial(_surrounded, around_step),
    }


def _watching(watch: Callable[[ChunkView], None], stock: Callable[..., None]) -> Any:
    @wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        watch(chunk_view_of(self))

    return __init__


def _surrounded(
    around_step: Callable[[], AbstractContextManager[None]], stock: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(stock)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with around_step():
            return stock(*args, **kwargs)

    return train_step
