"""Ranks of many jobs on this machine, most of them forked from one process with Megatron."""
