"""A rank's chunks of the model: built, initialised, and run."""
