"""Start a plan's ranks on its GPUs: batch scripts, torchrun commands, rank assignment."""
