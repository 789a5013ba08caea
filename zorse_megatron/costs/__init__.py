"""Cost models: time of computations and transfers, bytes of memory."""
