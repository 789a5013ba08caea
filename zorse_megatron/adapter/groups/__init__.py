"""Process groups and pipeline stages of a plan, as Megatron knows them."""
