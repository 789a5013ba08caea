"""Ranks of many jobs, forked from one process that has Megatron imported."""
