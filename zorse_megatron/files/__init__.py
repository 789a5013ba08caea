"""Files, read and written strictly: outputs are complete or absent, inputs are bounded."""
