"""Attention on a rank that holds no KV group.

The rank has nothing to attend with, but it takes part in what the others of its set sum: forward
the output of the projection, to which it adds zeros, and backward the gradient of the input, or
with sequence parallelism their gathers and reduce-scatters. Megatron's two linear layers do all of
that with no rows and no columns, so the class is those two and nothing between them.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec

from zorse_megatron.adapter.parameters.parameter_parts import mark_unit
from zorse_megatron.errors import PlanError, Problem


class SelfAttentionWithoutHeads(SelfAttention):
    """`SelfAttention` whose projections have no rows and no columns; core attention is not run.

    The config says one KV group for each rank of the set, which tells how large one would be.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            config,
            replace(
                submodules,
                linear_qkv=partial(_without_rows, submodules.linear_qkv),
                linear_proj=partial(_without_columns, submodules.linear_proj),
            ),
            *args,
            **kwargs,
        )

    def forward(self, hidden_states: Any, *_args: Any, **_kwargs: Any) -> Any:
        """[sequence, samples, hidden], and the bias that is added after the sum."""
        nothing, _ = self.linear_qkv(hidden_states)
        return self.linear_proj(nothing)


def _without_rows(
    build: Callable[..., Any], input_size: int, output_size: int, **kwargs: Any
) -> Any:
    linear = build(input_size, 0, **kwargs)
    mark_unit(linear, output_size // kwargs["tp_group"].size())
    return linear


def _without_columns(
    build: Callable[..., Any], input_size: int, output_size: int, **kwargs: Any
) -> Any:
    linear = build(0, output_size, **kwargs)
    mark_unit(linear, input_size // kwargs["tp_group"].size())
    return linear


def layer_spec_without_heads(given: Any) -> Callable[..., Any]:
    """What takes the place of a model config's `transformer_layer_spec`, which is `given`."""

    def transformer_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
        if given is None:
            spec = default_layer_spec(model_config, vp_stage)
        elif isinstance(given, ModuleSpec) or not callable(given):
            spec = copy.deepcopy(given)
        elif "vp_stage" in inspect.signature(given).parameters:  # as `GPTModelBuilder` asks
            spec = given(model_config, vp_stage=vp_stage)
        else:
            spec = given(model_config)
        for layer in getattr(spec, "layer_specs", [spec]):
            _leave_out_heads(layer)
        return spec

    return transformer_layer_spec


def _leave_out_heads(layer: Any) -> None:
    attention = layer.submodules.self_attention
    if attention.module is not SelfAttention:
        raise PlanError(
            "The plan has a rank without KV groups",
            [
                Problem(
                    where="the layers of the model",
                    found=f"attention of class {attention.module}",
                    expected="Megatron's SelfAttention",
                    remedy="Give each rank of a set at least one KV group.",
                )
            ],
        )
    attention.module = SelfAttentionWithoutHeads
