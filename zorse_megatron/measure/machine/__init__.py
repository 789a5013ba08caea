"""What a node has: GPUs, drivers, host memory."""
