"""What things cost: time of computations and transfers, bytes of memory."""
