"""fp32 copies that an optimizer step makes of gradients in 16 bits.

Source: `DistributedOptimizer._copy_model_grads_to_main_grads` in
megatron/core/optimizer/distrib_optimizer.py.
"""

from zorse_megatron.costs.interface import MemoryCost

_FLOAT32_BYTES = 4


def widened_bytes(memory: MemoryCost, num_parameters: int) -> int:
    """Bytes of the copies for so many parameters; 0 where gradients are accumulated in fp32."""
    wide_bytes = _FLOAT32_BYTES * num_parameters
    return wide_bytes if memory.gradient_bytes(num_parameters) < wide_bytes else 0
