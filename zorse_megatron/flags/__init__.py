"""Megatron's flags: the list, how to parse a command line, and what a plan does with each."""
