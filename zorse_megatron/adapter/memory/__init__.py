"""What a run holds on its device and in host memory."""
