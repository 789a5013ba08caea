"""What forwards keep in host memory, from the sizes in Megatron's config.

With full recomputation that is known: the layers' inputs. Of other layers it is the memory model's
list (`costs.activations`), which the simulator has, too: kernels may keep a little more or less.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from zorse_megatron.costs.activations import LayerActivations
from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.runtime.host_link import host_bytes_of
from zorse_megatron.schema.gpus.compute_capability import FLASH_FROM
from zorse_megatron.schema.gpus.gpu import Attention
from zorse_megatron.schema.model.model_shape import ModelShape

_FLOAT32_BYTES = 4


def kept_bytes_by_chunk(
    models: Mapping[int, Any],
    *,
    samples: int,
    seq_length: int,
    element_bytes: int,
    logits: int,
    last_chunk: int,
    pinned: bool,
) -> dict[int, int]:
    """Chunk -> bytes of host blocks that one micro-batch of it takes.

    `samples`: of a micro-batch; `logits`: of a token, on this rank; `pinned`: whether the host's
    memory is pinned, as for a GPU.
    """

    def blocks(sizes: tuple[int, ...]) -> int:
        return sum(host_bytes_of(samples * size, pinned=pinned) for size in sizes)

    found = {}
    for chunk, model in models.items():
        layers = [each for each in model.modules() if isinstance(each, BaseTransformerLayer)]
        found[chunk] = 0
        if layers:
            config = layers[0].config
            layer = _layer(config, seq_length=seq_length, element_bytes=element_bytes)
            split = {
                "tensor_parallel": config.tensor_model_parallel_size,
                "sequence_parallel": config.sequence_parallel,
            }
            again = num_recomputed(config, len(layers))
            is_selective = config.recompute_granularity == "selective"
            rest: RecomputeMode = "selective" if is_selective else "none"
            boundary = blocks(layer.tensor_bytes("full", **split))
            found[chunk] = again * boundary
            found[chunk] += (len(layers) - again) * blocks(layer.tensor_bytes(rest, **split))
            if chunk == 0 and config.hidden_dropout:  # the embedding's
                found[chunk] += boundary
            if chunk == last_chunk:
                # The final norm keeps its input, the head that of its matrix, the loss a softmax.
                found[chunk] += 2 * boundary + blocks((_FLOAT32_BYTES * seq_length * logits,))
    return found


def num_recomputed(config: Any, num_layers: int) -> int:
    """Layers that keep their input only, as in `megatron.core.recompute.checkpointed_forward`.

    "uniform" is all of them.
    """
    if config.recompute_granularity != "full":
        return 0
    if config.recompute_method != "block":
        return num_layers
    return min(num_layers, config.recompute_num_layers)


def _layer(config: Any, *, seq_length: int, element_bytes: int) -> LayerActivations:
    attention = _attention(config, element_bytes)
    return LayerActivations(
        model=_shape(config, seq_length),
        element_bytes=element_bytes,
        attention=attention,
        hidden_dropout=bool(config.hidden_dropout),
        attention_dropout=bool(config.attention_dropout),
        softmax_in_fp32=bool(config.attention_softmax_in_fp32),
        modules=tuple(config.recompute_modules or ("core_attn",)),
    )


def _shape(config: Any, seq_length: int) -> ModelShape:
    """A layer's sizes; the rest does not matter to what it keeps."""
    is_relu = config.activation_func is torch.nn.functional.relu
    return ModelShape(
        name="config",
        num_layers=1,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=1,
        seq_length=seq_length,
        activation="swiglu" if config.gated_linear_unit else "relu" if is_relu else "gelu",
    )


def _attention(config: Any, element_bytes: int) -> Attention:
    """As `costs.attention_kinds.attention_on` says it of a kind of GPU."""
    is_asked = config.attention_backend not in (AttnBackend.unfused, AttnBackend.local)
    has_te = config.transformer_impl == "transformer_engine"
    runs = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLASH_FROM
    return "flash" if runs and has_te and is_asked and element_bytes < _FLOAT32_BYTES else "unfused"
