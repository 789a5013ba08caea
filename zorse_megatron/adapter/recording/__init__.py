"""What a run writes for programs to read."""
