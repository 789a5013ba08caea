"""The demo: real text, an uneven plan, stock Megatron next to it."""
