"""A run that follows its cluster: when what its GPUs take has changed, to which plan it moves."""
