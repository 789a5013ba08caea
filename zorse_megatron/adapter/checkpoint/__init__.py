"""Megatron's distributed checkpoints: saved in shards, checked, and loaded by all ranks alike."""
