"""The emulated clock: one for all ranks and links. Without torch."""
