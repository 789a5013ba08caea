"""Which GPUs of a cluster to train on: all of them, or fewer where that is faster."""
