"""Files on disk: outputs are written completely or not at all, inputs are bounded."""
