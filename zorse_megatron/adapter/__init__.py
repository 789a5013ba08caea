"""The only sub-package that imports Megatron."""
