"""Values of parameters: those behind 16-bit ones, and those that two chunks share."""
