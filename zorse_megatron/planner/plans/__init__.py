"""From a candidate to a plan: exact micro-batches, shard weights, transfers."""
