"""Megatron's command line and configuration under a plan."""
