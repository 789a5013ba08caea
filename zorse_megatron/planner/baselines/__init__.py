"""What plans are compared with: other planners, stock Megatron, a lower bound."""
