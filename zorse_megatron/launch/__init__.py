"""Starts a plan's ranks on the GPUs that it means: batch scripts, torchrun's lines, ranks."""
