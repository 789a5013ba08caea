"""The model file: the shape of the model, and how a training command computes it."""
