"""Files on disk: outputs that are written whole or not at all, and inputs that have an end."""
