"""Megatron's flags, and builds of torch: what a plan does with each, and what ranks need."""
