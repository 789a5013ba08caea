"""CPU mode: stock Megatron on a machine without a GPU."""
