"""A run without torch: how ranks do and die, which checkpoint is whole, when a move pays."""
