"""What ranks tell each other of their speed, and what comes of it."""
