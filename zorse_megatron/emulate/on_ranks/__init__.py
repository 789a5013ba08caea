"""What runs in the process of an emulated rank: its backend, and its GPU's time and memory."""
