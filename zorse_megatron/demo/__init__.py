"""The demo: plan a small mixed cluster, and train under that plan next to stock Megatron."""
