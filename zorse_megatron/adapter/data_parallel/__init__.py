"""Gradients and parameters in shards of unequal size, within a group."""
