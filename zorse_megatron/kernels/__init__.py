"""One-pass kernels that move or update whole shards, in Triton and in plain torch."""
