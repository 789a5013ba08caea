"""Executes action lists over torch.distributed; imports neither Megatron nor a planner."""
