"""What is installed on ranks, which GPUs it runs on, and what Megatron's command lacks for it.

Without torch: `adapter.found_software` asks, everything here decides.
"""
