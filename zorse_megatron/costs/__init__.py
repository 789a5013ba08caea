"""Cost models: seconds of computations and transfers, bytes of memory, over the topology graph."""
