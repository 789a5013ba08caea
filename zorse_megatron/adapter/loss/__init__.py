"""The loss: its scale, who knows it, and who prints it."""
