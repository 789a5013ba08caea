"""Megatron's flags: which there are, how a command line is read, and what a plan does with each."""
