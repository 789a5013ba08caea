"""A Megatron-LM plugin that trains one model across unequal GPUs."""

__version__ = "0.1.0"
