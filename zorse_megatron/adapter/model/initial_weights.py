"""Initial weights that do not depend on the plan.

Stock Megatron seeds each pipeline stage differently, so its layouts start from different weights.
Here every rank draws the random numbers of the whole model in the order of a stock single-process
run: it builds that model with stock's own builder, copies of each layer that it holds what it keeps
of it into its chunk, and drops it as soon as it is built. The same seed so gives the same weights
under any plan, for every layer implementation. The cost is one initialisation of the whole model
per rank, and memory for the embedding, the head and one layer more than the chunks keep then: of
those whose parameters are released, their shards, and no gradients.

From one seed, unlike GPUs draw unlike numbers (see `OneSource`): there, rank 0 sends what it has
drawn, so the weights are those of a stock run on a GPU of rank 0's kind.
"""

import copy
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.compute_dtype import TORCH_DTYPES, keep_exact
from zorse_megatron.adapter.groups.global_groups import one_rank_alone
from zorse_megatron.adapter.groups.process_groups import PipelinePosition
from zorse_megatron.adapter.parameter_parts import taken
from zorse_megatron.adapter.patches.rebind import REGISTRY
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.log import say

Targets = Mapping[int, tuple[torch.nn.Module, Callable[[torch.nn.Parameter, torch.Tensor], None]]]
"""Number of a layer -> the layer of a chunk, and how a parameter of it gets a value."""


def copy_single_process_weights(
    chunks: Mapping[tuple[int, int], Any],
    *,
    model_config: Any,
    dtype: ComputeDtype,
    collection: ProcessGroupCollection,
    seed_everything: Callable[[], None],
    keep_exactly: bool,
    must_be_alike: bool,
) -> None:
    """Overwrite the parameters of the chunks with those of a stock single-process run.

    `chunks`: [first, stop) of the layers -> the wrapped chunk that holds them; `model_config`: the
    script's model config (`cfg_container.model`); `dtype`: in which the single process computes;
    `seed_everything`: seeds as stock does on the first pipeline stage; `keep_exactly`: remember
    values that a chunk's own type cannot hold (see `compute_dtype`); `must_be_alike`: whether ranks
    need the same values, as nothing takes their place; then a collective call.
    """
    set_in = partial(set_value, dtype=dtype, keep_exactly=keep_exactly)
    targets = {
        first + number: (layer, partial(set_in, chunk))
        for (first, _), chunk in chunks.items()
        for number, layer in enumerate(unwrap_model(chunk).decoder.layers)
    }

    def build(source: OneSource) -> torch.nn.Module:
        with _random_state_kept(), one_rank_alone(collection.cp):
            seed_everything()
            return _build_whole(model_config, dtype, collection, targets=targets, source=source)

    whole = _built_alike(build) if must_be_alike else build(OneSource(sends=False))
    values = dict(whole.named_parameters())
    for chunk in chunks.values():
        for name, parameter in unwrap_model(chunk).named_parameters():
            if name.startswith("decoder.layers."):
                continue
            source = values.get(name)
            if source is None and name == "output_layer.weight":
                # Tied: the single process has no weight of its own in the head.
                source = values["embedding.word_embeddings.weight"]
            assert source is not None and not source.is_meta, f"no initial value for {name}"
            set_in(chunk, parameter, source)


@dataclass(kw_only=True)
class OneSource:
    """Lets all ranks have the same numbers, and knows whether they do.

    CUDA's generator gives each thread a stream of its own, and how many threads share a tensor
    depends on the number of multiprocessors (ATen's `calc_execution_policy`), for more than 40,960
    elements on a T4 and 270,336 on an H100. So unlike GPUs draw unlike weights from one seed.
    """

    sends: bool
    """Whether rank 0 sends its numbers to all others."""
    digest: list[torch.Tensor] = field(default_factory=list)
    """Of each piece of a parameter two sums of its bits."""

    @torch.no_grad()
    def take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give the parameters rank 0's values, if it sends them; a collective call."""
        for parameter in parameters:
            if parameter.is_meta:
                continue
            # Stock builds position embeddings and torch's norms in host memory, even on a GPU.
            value = parameter.detach().cuda().contiguous()
            if self.sends:
                dist.broadcast(value, src=0)
                parameter.copy_(value)
            # Eight bytes at a time: sums of 16-bit numbers take as long on a CPU as drawing them.
            raw = value.view(-1).view(torch.uint8)
            words, rest = raw.tensor_split([len(raw) // 8 * 8])
            for piece in (*words.view(torch.int64).split(_PIECE), rest.long()):
                if len(piece):
                    self.digest.append(torch.stack([piece.sum(), piece[::2].sum()]))

    def is_alike(self) -> bool:
        """Whether all ranks have the same; a collective call."""
        return _is_everywhere(torch.stack(self.digest).flatten())


_PIECE = 1 << 20
"""Words of 8 bytes: a change cancels out in one of so many pieces only."""


def _built_alike(build: Callable[[OneSource], torch.nn.Module]) -> torch.nn.Module:
    """Build the model with the same numbers on all ranks; a collective call."""
    if _is_everywhere(_kind_of_gpu()):
        source = OneSource(sends=False)
        whole = build(source)
        if source.is_alike():
            return whole
        del whole  # or the next one would be beside it
    say("the ranks' GPUs draw different random numbers: initial weights are sent by rank 0")
    return build(OneSource(sends=True))


def _kind_of_gpu() -> torch.Tensor:
    """What draws depend on, in numbers."""
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    numbers = zlib.crc32(seen.name.encode()), seen.multi_processor_count
    return torch.tensor(numbers, dtype=torch.int64, device="cuda")


def _is_everywhere(mine: torch.Tensor) -> bool:
    """Whether all ranks have the same numbers; a collective call."""
    if dist.get_world_size() == 1:
        return True
    extremes = torch.cat([mine, -mine])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, negated = extremes.chunk(2)
    return torch.equal(largest, -negated)


def set_value(
    chunk: Any,
    parameter: torch.nn.Parameter,
    value: torch.Tensor,
    *,
    dtype: ComputeDtype,
    keep_exactly: bool,
) -> None:
    """Give a parameter of a wrapped chunk its part of the whole value, as of a job in `dtype`.

    `keep_exactly`: see `copy_single_process_weights`.
    """
    value = taken(value.detach(), chunk.parts[parameter])
    value = value.to(TORCH_DTYPES[dtype])  # as stock's wrapper for 16 bits makes it
    chunk.set_parameter(parameter, value)
    if keep_exactly:
        keep_exact(chunk, parameter, value)


def _build_whole(
    model_config: Any,
    dtype: ComputeDtype,
    collection: ProcessGroupCollection,
    *,
    targets: Targets,
    source: OneSource,
) -> torch.nn.Module:
    """Build the single-process model, without the memory of its layers; fills `targets`."""
    # Shallow copies: a config holds hooks and process groups that must not be duplicated.
    transformer = copy.copy(model_config.transformer)
    transformer.pipeline_model_parallel_size = 1
    transformer.pipeline_model_parallel_layout = None
    transformer.tensor_model_parallel_size, transformer.sequence_parallel = 1, False
    transformer.params_dtype = TORCH_DTYPES[dtype]
    transformer.fp16, transformer.bf16 = dtype == "fp16", dtype == "bf16"
    config = copy.copy(model_config)
    object.__setattr__(config, "transformer", transformer)
    alone = copy.copy(collection)
    alone.pp = PipelinePosition(0, 1)
    alone.tp = alone.tp_cp = alone.expt_tp = alone.tp_ep = alone.ep = collection.cp
    with REGISTRY.applied({"build_module": partial(_dropping_layers, targets, source)}):
        builder = config.get_builder_cls()(config)
        whole: torch.nn.Module = builder.build_model(alone, pre_process=True, post_process=True)
    source.take(whole.parameters())
    return whole


def _dropping_layers(
    targets: Targets, source: OneSource, build_module: Callable[..., Any]
) -> Callable[..., Any]:
    def build_and_drop(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
        module = build_module(spec_or_module, *args, **kwargs)
        if isinstance(module, BaseTransformerLayer):
            source.take(module.parameters())
            target = targets.get(kwargs["layer_number"] - 1)
            if target is not None:
                values = dict(module.named_parameters())
                layer, set_in = target
                for name, parameter in layer.named_parameters():
                    if name in values:  # adapters are none of a stock run's parameters
                        set_in(parameter, values[name])
            module.to_empty(device="meta")
        return module

    return build_and_drop


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Put every random generator back to where it was."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    device_state = torch.cuda.get_rng_state()
    host_state, numpy_state, python_state = (
        torch.get_rng_state(),
        np.random.get_state(),
        random.getstate(),
    )
    tracker_states = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(tracker_states)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(host_state)
        torch.cuda.set_rng_state(device_state)
