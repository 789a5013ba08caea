"""Copies of a run's state in the memory of other nodes: who keeps them, in which files, and which
of them are whole after nodes died. Needs neither torch nor Megatron."""
