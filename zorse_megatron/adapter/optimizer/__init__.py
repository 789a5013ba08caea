"""Megatron's distributed optimizer on shards of unequal size, on the device or in host memory."""
