"""Emulates a cluster on one machine: real training, on the clock of the emulated GPUs and links."""
