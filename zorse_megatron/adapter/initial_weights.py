"""Initial weights that do not depend on the plan.

Stock Megatron seeds each pipeline stage differently, so its layouts start from different weights.
Here every rank draws the random numbers of the whole model in the order of a stock single-process
run: it builds that model with stock's own builder, drops each layer that it does not hold as soon
as it is built, and copies the rest into its chunk. The same seed so gives the same weights under
any plan, for every layer implementation. The price is one initialisation of the whole model per
rank, and memory for the embedding, the head and one layer more than the chunk, before gradients
and optimizer state exist.
"""

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from zorse_megatron.adapter.process_groups import PipelinePosition
from zorse_megatron.adapter.rebind import Rebinding, applied
from zorse_megatron.adapter.versions import MEGATRON_VERSIONS

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")


def copy_single_process_weights(
    chunk: torch.nn.Module,
    *,
    model_config: Any,
    collection: ProcessGroupCollection,
    layers: tuple[int, int],
    seed_everything: Callable[[], None],
) -> None:
    """Overwrite the parameters of `chunk` with those of a stock single-process run.

    `model_config`: the script's model config (`cfg_container.model`); `layers`: [first, stop) of
    the chunk; `seed_everything`: seeds as stock does on the first pipeline stage.
    """
    with _random_state_kept():
        seed_everything()
        whole = _build_whole(model_config, collection, keep=layers)
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            source = values.get(_whole_name(name, layers[0]))
            if source is None and name == "output_layer.weight":
                # Tied: the single process has no weight of its own in the head.
                source = values["embedding.word_embeddings.weight"]
            assert source is not None and not source.is_meta, f"no initial value for {name}"
            parameter.copy_(source)


def _whole_name(name: str, first_layer: int) -> str:
    """The name of a chunk's parameter in the whole model."""
    match = _LAYER.match(name)
    if match is None:
        return name
    return f"{match[1]}{int(match[2]) + first_layer}{match[3]}"


def _build_whole(
    model_config: Any, collection: ProcessGroupCollection, *, keep: tuple[int, int]
) -> torch.nn.Module:
    """Build the single-process model, without the memory of the layers that are not kept."""
    # Shallow copies: a config holds hooks and process groups that must not be duplicated.
    transformer = copy.copy(model_config.transformer)
    transformer.pipeline_model_parallel_size = 1
    transformer.pipeline_model_parallel_layout = None
    config = copy.copy(model_config)
    object.__setattr__(config, "transformer", transformer)
    alone = copy.copy(collection)
    alone.pp = PipelinePosition(0, 1)
    with applied([_dropping_layers(keep)]):
        builder = config.get_builder_cls()(config)
        return builder.build_model(alone, pre_process=True, post_process=True)


def _dropping_layers(keep: tuple[int, int]) -> Rebinding:
    def make(build_module: Callable[..., Any]) -> Callable[..., Any]:
        def build_and_drop(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
            module = build_module(spec_or_module, *args, **kwargs)
            if isinstance(module, BaseTransformerLayer):
                index = kwargs["layer_number"] - 1
                if not keep[0] <= index < keep[1]:
                    module.to_empty(device="meta")
            return module

        return build_and_drop

    return Rebinding(
        target="megatron.core.transformer.transformer_block:build_module",
        make=make,
        parameters=("spec_or_module", "args", "kwargs"),
        why="the whole model is built for its random numbers; a layer of another chunk must not "
        "keep its memory",
        versions=MEGATRON_VERSIONS,
        test="tests/megatron/test_exactness.py::test_initial_weights_do_not_depend_on_the_plan",
        delete_when="Megatron can initialise a stage as part of the whole model",
    )


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
