"""The shape of the model, and how a training command computes it."""
