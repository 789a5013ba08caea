"""A group's recompute setting as Megatron's transformer config has it."""

from typing import Any

from zorse_megatron.schema.plan.plan import Recompute

_ALL_LAYERS = 1_000_000


def set_recompute(transformer_config: Any, recompute: Recompute) -> None:
    """Set what `--recompute-granularity` and its companions set, for the layers of one group.

    "full" is Megatron's method "block": the first layers of each chunk are recomputed, one at a
    time, and keep their input only. Source: `TransformerConfig.__post_init__` and
    `megatron.core.recompute.checkpointed_forward`.
    """
    transformer_config.recompute_granularity = None if recompute.mode == "none" else recompute.mode
    transformer_config.recompute_method = None
    transformer_config.recompute_num_layers = None
    if recompute.mode == "selective":
        transformer_config.recompute_modules = ["core_attn"]
    elif recompute.mode == "full":
        transformer_config.recompute_method = "block"
        transformer_config.recompute_num_layers = recompute.num_layers or _ALL_LAYERS
