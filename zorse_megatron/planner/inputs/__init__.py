"""What a search starts from: cluster, model and profile, joined and checked."""
