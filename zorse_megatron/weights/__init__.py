"""Weights of Hugging Face models to and from Megatron's distributed checkpoints."""
